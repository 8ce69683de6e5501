"""Image files decode to pixels: every colour mode, EXIF orientation, size limits before decoding, no truncated images."""

from __future__ import annotations

import io
import os
import struct
import tarfile
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image, ImageOps

from bottega.data.image.decode import MAX_PIXELS, decode_image, detect_image_format, read_image_shape
from bottega.data.records.record import Unreadable

DATA = os.environ.get("BOTTEGA_DATA")
needs_data = pytest.mark.skipif(DATA is None, reason="BOTTEGA_DATA is not set")
LOSSLESS = ("PNG", "BMP", "TIFF", "PPM", "WEBP")
ALL = (*LOSSLESS, "JPEG", "GIF")


def encode_image(image: Image.Image, form: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format=form, **({"lossless": True} if form == "WEBP" else {}), **options)
    return out.getvalue()


def build_photo(height: int = 48, width: int = 64) -> np.ndarray:
    """Return a smooth image, which JPEG approximates well, without any symmetry."""
    down, right = np.mgrid[0:height, 0:width]
    return np.stack([down * 255 // height, right * 255 // width, (down + 2 * right) % 256], axis=-1).astype(np.uint8)


images = arrays(np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9), st.just(3)))


@given(images, st.sampled_from(LOSSLESS))
def test_lossless_formats_round_trip(pixels: np.ndarray, form: str) -> None:
    data = encode_image(Image.fromarray(pixels), form)
    np.testing.assert_array_equal(decode_image(data, channels=3), pixels)
    assert read_image_shape(data) == pixels.shape
    assert detect_image_format(data) == form


@given(
    arrays(np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9))), st.sampled_from(("PNG", "BMP", "TIFF", "PPM"))
)
def test_grey_stays_grey_or_becomes_three_equal_channels(pixels: np.ndarray, form: str) -> None:
    data = encode_image(Image.fromarray(pixels), form)
    np.testing.assert_array_equal(decode_image(data, channels=None), pixels[..., None])
    np.testing.assert_array_equal(decode_image(data, channels=3), np.repeat(pixels[..., None], 3, axis=2))
    assert read_image_shape(data) == (*pixels.shape, 1)


@given(arrays(np.uint8, (4, 5, 4)))
def test_transparency_is_composited_on_white(pixels: np.ndarray) -> None:
    alpha = pixels[..., 3:] / 255
    expected = pixels[..., :3] * alpha + 255 * (1 - alpha)
    for data in (encode_image(Image.fromarray(pixels, "RGBA"), "PNG"), pixels):
        assert np.abs(decode_image(data, channels=3) - expected).max() <= 1


def test_palette_deep_bilevel_and_cmyk_modes_are_converted() -> None:
    pixels = build_photo()
    colour = Image.fromarray(pixels)
    palette = colour.quantize(8)
    np.testing.assert_array_equal(
        decode_image(encode_image(palette, "PNG"), channels=3), np.asarray(palette.convert("RGB"))
    )
    transparent = palette.copy()
    transparent.info["transparency"] = 0
    composited = decode_image(encode_image(transparent, "PNG"), channels=3)
    assert (composited[np.asarray(palette) == 0] == 255).all()
    partial = palette.copy()
    partial.info["transparency"] = bytes([0, 255])  # one alpha value per palette colour
    assert (decode_image(encode_image(partial, "PNG"), channels=3)[np.asarray(palette) == 0] == 255).all()

    deep = (pixels[..., 0].astype(np.uint16)) * 257
    for form in ("PNG", "TIFF"):
        np.testing.assert_array_equal(
            decode_image(encode_image(Image.fromarray(deep), form), channels=1)[..., 0], pixels[..., 0]
        )
    np.testing.assert_array_equal(
        decode_image(encode_image(Image.fromarray(pixels[..., 0] > 99), "PNG"), channels=1)[..., 0],
        (pixels[..., 0] > 99) * 255,
    )
    cmyk = decode_image(encode_image(colour.convert("CMYK"), "JPEG", quality=100), channels=3)
    assert np.abs(cmyk.astype(int) - pixels).mean() < 3
    grey_alpha = Image.merge("LA", (Image.new("L", (5, 4), 0), Image.new("L", (5, 4), 0)))
    assert decode_image(encode_image(grey_alpha, "PNG"), channels=None).shape == (4, 5, 1)
    assert (decode_image(encode_image(grey_alpha, "PNG"), channels=1) == 255).all()


def test_pixels_of_unspecified_range_are_refused() -> None:
    for array in (np.ones((3, 3), np.float32), np.ones((3, 3), np.int32)):
        with pytest.raises(Unreadable, match="save it with 8 or 16"):
            decode_image(encode_image(Image.fromarray(array), "TIFF"), channels=None)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(form: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode_image(Image.fromarray(build_photo()), form, exif=exif.tobytes() if form != "TIFF" else exif)
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    np.testing.assert_array_equal(decode_image(data, channels=3), expected)
    assert read_image_shape(data)[:2] == expected.shape[:2] == ((64, 48) if orientation > 4 else (48, 64))


@given(st.binary(max_size=60))
def test_damaged_exif_is_ignored(noise: bytes) -> None:
    data = encode_image(Image.fromarray(build_photo()), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0" + noise)
    assert sorted(decode_image(data, channels=3).shape) == [3, 48, 64]


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("fraction", [0.0, 0.02, 0.5, 0.9])
def test_truncated_file_is_refused(form: str, fraction: float) -> None:
    data = encode_image(Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)), form)
    with pytest.raises(Unreadable) as caught:
        decode_image(data[: int(len(data) * fraction)], channels=3)
    assert "\n" not in str(caught.value)
    assert str(caught.value)


@needs_data
def test_truncated_real_photographs_are_refused(tmp_path: Path) -> None:
    archives = sorted(Path(str(DATA), "readers-webdataset").glob("*cc12m*"))
    assert archives, "the shared data has cc12m archives"
    count = 0
    with tarfile.open(archives[0]) as archive:
        for member in archive:
            if not member.name.endswith((".jpg", ".jpeg", ".png")) or count == 12:
                continue
            data = archive.extractfile(member).read()  # type: ignore[union-attr]
            assert decode_image(data, channels=3).shape == (*read_image_shape(data)[:2], 3)
            path = tmp_path / "cut.jpg"
            path.write_bytes(data[: len(data) // 2])
            with pytest.raises(Unreadable, match=r"truncated|cut|broken"):
                decode_image(path, channels=3)
            count += 1
    assert count


def encode_bomb(side: int) -> bytes:
    """Encode a PNG of side^2 black one-bit pixels without Pillow, which would allocate them."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    packer = zlib.compressobj(9)
    row = bytes(1 + (side + 7) // 8)
    body = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [8200, 10_000, 20_000])
def test_decompression_bomb_is_refused_from_its_header(side: int) -> None:
    """8,200^2 exceeds only our limit; Pillow warns at 10,000^2 and refuses 20,000^2 (47 KB)."""
    data = encode_bomb(side)
    assert len(data) < 60_000
    tracemalloc.start()
    for read in (lambda: decode_image(data, channels=3), lambda: read_image_shape(data)):
        with pytest.raises(Unreadable, match=r"more than .* pixels"):
            read()
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_image_below_the_pixel_limit_is_decoded() -> None:
    assert MAX_PIXELS == 67_108_864
    assert decode_image(encode_bomb(4096), channels=1).shape == (4096, 4096, 1)


@pytest.mark.parametrize("form", ["EPS", "PDF", "ICO"])
def test_other_formats_are_refused(form: str) -> None:
    with pytest.raises(Unreadable, match="not an image of a known format"):
        decode_image(encode_image(Image.fromarray(build_photo()), form), channels=3)


@given(st.binary(max_size=200), st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"\xff\xd8\xff\xe0", b"II*\0"]))
def test_arbitrary_bytes_are_an_image_or_unreadable(noise: bytes, magic: bytes) -> None:
    try:
        channels = decode_image(magic + noise, channels=3).shape[2]
    except Unreadable:
        channels = 3
    assert channels == 3


def test_missing_file_is_unreadable(tmp_path: Path) -> None:
    for read in (lambda: decode_image(tmp_path / "no.png", channels=3), lambda: read_image_shape(tmp_path / "no.png")):
        with pytest.raises(Unreadable, match="cannot be read"):
            read()


def test_gif_decodes_to_its_first_frame() -> None:
    first, second = Image.new("L", (6, 4), 10), Image.new("L", (6, 4), 200)
    out = io.BytesIO()
    first.save(out, format="GIF", save_all=True, append_images=[second])
    assert (decode_image(out.getvalue(), channels=1) == 10).all()


@given(arrays(np.uint16, (3, 4)))
def test_16_bits_are_rounded_to_the_nearest_of_8(pixels: np.ndarray) -> None:
    for data in (encode_image(Image.fromarray(pixels), "PNG"), encode_image(Image.fromarray(pixels), "TIFF"), pixels):
        assert np.abs(decode_image(data, channels=1)[..., 0].astype(int) * 257 - pixels).max() <= 128


class TestArrays:
    @given(images)
    def test_pixels_pass_through(self, pixels: np.ndarray) -> None:
        np.testing.assert_array_equal(decode_image(pixels, channels=3), pixels)
        np.testing.assert_array_equal(decode_image(pixels[..., 0], channels=None), pixels[..., :1])
        np.testing.assert_array_equal(decode_image(pixels.astype(np.int64), channels=3), pixels)
        assert read_image_shape(pixels) == pixels.shape

    @given(images)
    def test_float_and_16_bit_pixels_convert_to_8_bits(self, pixels: np.ndarray) -> None:
        np.testing.assert_array_equal(decode_image((pixels / 255).astype(np.float32), channels=3), pixels)
        np.testing.assert_array_equal(decode_image(pixels.astype(np.uint16) * 257, channels=3), pixels)

    def test_channels_first_is_accepted_if_unambiguous(self) -> None:
        np.testing.assert_array_equal(decode_image(build_photo().transpose(2, 0, 1), channels=3), build_photo())

    def test_grey_conversion_uses_the_rec_601_weights(self) -> None:
        pure = np.eye(3, dtype=np.uint8)[None] * np.uint8(255)
        np.testing.assert_array_equal(
            decode_image(pure, channels=1)[0, :, 0], [76, 150, 29]
        )  # 255 times 0.299 0.587 0.114

    @pytest.mark.parametrize(
        "array",
        [
            np.zeros((4, 4, 7), np.uint8),
            np.zeros(5, np.uint8),
            np.zeros((0, 4), np.uint8),
            np.full((4, 4), -1.0),
            np.full((4, 4), np.nan),
            np.full((4, 4), 300),
            np.full((4, 4), "a"),
        ],
    )
    def test_invalid_arrays_are_refused(self, array: np.ndarray) -> None:
        with pytest.raises(Unreadable):
            decode_image(array, channels=3)
