"""Video files decode to all their frames, at the right times, within limits, and never from truncated files."""

from __future__ import annotations

import io
import os
import re
import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.data.records.record import Unreadable
from bottega.data.video import decode as decoding
from bottega.data.video.container import count_missing_bytes
from bottega.data.video.decode import Limits, decode_frames

av = pytest.importorskip("av", reason="av is not installed")
Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

DATA = os.environ.get("BOTTEGA_DATA")
CLIPS = sorted(path for path in Path(DATA, "video-clips").iterdir() if path.suffix != ".txt") if DATA else []
needs_data = pytest.mark.skipif(not CLIPS, reason="BOTTEGA_DATA is not set")
LEVEL = 5
"""Frame n of a test video is grey of value LEVEL * n, which identifies it."""


def encode_video(
    count: int, *, times: list[int] | None = None, form: str = "matroska", size: tuple[int, int] = (16, 24)
) -> bytes:
    """Encode frames at `times` (in tenths of a second; 0, 1, 2, ... by default) without loss."""
    out = io.BytesIO()
    with av.open(out, "w", format=form) as container:
        stream = container.add_stream("ffv1", rate=10)
        stream.height, stream.width = size
        stream.pix_fmt = "bgr0"
        stream.codec_context.time_base = Fraction(1, 10)
        for number, time in enumerate(times or range(count)):
            frame = av.VideoFrame.from_ndarray(np.full((*size, 3), LEVEL * number, np.uint8), format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 10)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


def decode_numbers(data: bytes, **options: object) -> list[int]:
    return [int(frame[0, 0, 0]) // LEVEL for frame in decode_frames(data, **options).frames]  # type: ignore[arg-type]


def read_clip_index() -> dict[str, tuple[int, int, int, float]]:
    """Return name -> (height, width, frames, rate) from SOURCE.txt."""
    text = Path(str(DATA), "video-clips", "SOURCE.txt").read_text()
    clips = {}
    for name, width, height, count, rate in re.findall(r"^(\S+\.\w+) \w+\S* (\d+)x(\d+) (\d+) ([\d.]+)$", text, re.M):
        clips[name] = (int(height), int(width), int(count), float(rate))
    clips["nasa_13013.mp4"] = (180, 320, 325, 25.0)  # two streams; the first is decoded
    return clips


@needs_data
@pytest.mark.parametrize("clip", CLIPS, ids=lambda path: path.name)
def test_real_clips_have_the_listed_frames(clip: Path) -> None:
    height, width, count, rate = read_clip_index()[clip.name]
    decoded_rate, frames = decode_frames(clip)
    shapes = [frame.shape for frame in frames]
    assert set(shapes) == {(height, width, 3)}
    assert len(shapes) == count
    assert decoded_rate == pytest.approx(rate, abs=0.001)


@needs_data
def test_all_listed_clips_exist() -> None:
    assert {path.name for path in CLIPS} == set(read_clip_index())


@needs_data
@pytest.mark.parametrize("clip", CLIPS, ids=lambda path: path.name)
@pytest.mark.parametrize("stated", [True, False])
def test_truncated_clip_is_refused(clip: Path, stated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Truncation is detected from the stated length, and without one from the decoded frames."""
    if not stated:
        monkeypatch.setattr(decoding, "count_missing_bytes", lambda stream: 0)
    data = clip.read_bytes()
    for fraction in (0.0, 0.01, 0.5, 0.9, *([0.98] if stated else [])):
        path = tmp_path / f"cut{clip.suffix}"
        path.write_bytes(data[: int(len(data) * fraction)])
        for cut in (path, path.read_bytes()):
            with pytest.raises(Unreadable, match="bytes are missing" if stated and fraction else r".") as caught:
                list(decode_frames(cut).frames)
            assert "\n" not in str(caught.value)


@needs_data
def test_bytes_and_files_decode_to_the_same_frames() -> None:
    clip = next(path for path in CLIPS if path.name == "h265_video.mp4")
    for from_file, from_bytes in zip(decode_frames(clip).frames, decode_frames(clip.read_bytes()).frames, strict=True):
        np.testing.assert_array_equal(from_file, from_bytes)


@pytest.mark.parametrize("name", ["photo.mp4", "photo.avi"])
def test_image_with_a_video_suffix_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    Image.new("RGB", (64, 64)).save(path, format="PNG")
    with pytest.raises(Unreadable, match="not a video of a known format"):
        decode_frames(path)


@pytest.mark.parametrize(
    "text", ["#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "ffconcat version 1.0\nfile x.mp4\n", "hello"]
)
def test_playlist_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "list.mp4"
    path.write_text(text)
    with pytest.raises(Unreadable, match="not a video of a known format"):
        decode_frames(path)


def test_audio_without_video_is_refused(tmp_path: Path) -> None:
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
    with pytest.raises(Unreadable, match="no video stream"):
        decode_frames(out.getvalue())


def test_a_missing_file_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="cannot be read"):
        decode_frames(tmp_path / "no.mp4")


def test_damage_in_the_middle_is_refused() -> None:
    data = bytearray(encode_video(20))
    data[len(data) // 2 : len(data) // 2 + 200] = bytes(200)
    with pytest.raises(Unreadable):
        list(decode_frames(bytes(data)).frames)


class TestTimes:
    def test_frames_keep_the_native_rate(self) -> None:
        assert decode_numbers(encode_video(7)) == list(range(7))
        assert decode_frames(encode_video(7)).rate == 10

    def test_resampling_to_half_and_double_the_rate(self) -> None:
        # Times 0, 0.2, 0.4, ... and 0, 0.05, 0.1, ...; a time halfway between two frames takes the later one.
        assert decode_numbers(encode_video(7), fps=5) == [0, 2, 4, 6]
        assert decode_numbers(encode_video(4), fps=20) == [0, 1, 1, 2, 2, 3, 3, 3]

    def test_stride_is_applied_after_resampling(self) -> None:
        assert decode_numbers(encode_video(8), stride=3) == [0, 3, 6]
        assert decode_numbers(encode_video(9), fps=5, stride=2) == [0, 4, 8]
        assert decode_frames(encode_video(9), fps=5, stride=2).rate == 2.5

    @given(
        st.lists(st.integers(1, 6), min_size=1, max_size=12),
        st.sampled_from([1, 2, 3, 5, 7.5, 10, 24, 29.97]),
    )
    def test_variable_frame_rate_is_resampled_by_timestamps(self, gaps: list[int], fps: float) -> None:
        times = [0, *np.cumsum(gaps).tolist()]
        frame_numbers = decode_numbers(encode_video(len(times), times=times), fps=fps)
        for position, number in enumerate(frame_numbers):
            distance = [abs(time / 10 - position / fps) for time in times]
            assert distance[number] <= min(distance) + 1e-6
        # The last frame lasts one period of the stated rate, which the container derives from the times.
        assert (len(frame_numbers) - 1) / fps <= times[-1] / 10 + 6.1 / 10
        assert len(frame_numbers) / fps >= times[-1] / 10

    @given(st.sampled_from([1, 2, 4, 12.5, 25, 60]))
    def test_resampling_preserves_the_duration(self, fps: float) -> None:
        assert abs(len(decode_numbers(encode_video(30), fps=fps)) - 3 * fps) < 1


class TestLimits:
    def test_too_many_frames_are_refused_while_decoding(self) -> None:
        assert len(decode_numbers(encode_video(20), limit=Limits(frames=20))) == 20
        with pytest.raises(Unreadable, match="longer than 19 frames"):
            decode_numbers(encode_video(20), limit=Limits(frames=19))

    def test_too_long_or_too_large_is_refused_before_decoding(self) -> None:
        with pytest.raises(Unreadable, match="lasts 2 s"):
            decode_frames(encode_video(20), limit=Limits(seconds=1.5))
        with pytest.raises(Unreadable, match="has more than"):
            decode_frames(encode_video(2), limit=Limits(pixels=100))

    def test_frames_are_decoded_lazily(self) -> None:
        frames = decode_frames(encode_video(20), limit=Limits(frames=3)).frames
        assert [int(next(frames)[0, 0, 0]) // LEVEL for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("matrix", "rotate"),
    [
        ((0, 1, -1, 0), lambda pixels: np.rot90(pixels, -1)),  # as phones held upright write it: 90 degrees clockwise
        ((-1, 0, 0, -1), lambda pixels: np.rot90(pixels, 2)),
        ((0, -1, 1, 0), lambda pixels: np.rot90(pixels, 1)),
    ],
)
def test_video_is_rotated_as_its_header_states(matrix: tuple[int, ...], rotate: object) -> None:
    pixels = np.zeros((32, 48, 3), np.uint8)
    pixels[:16, :24] = 255
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
        for _ in range(2):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    data = bytearray(out.getvalue())
    offset = data.index(b"tkhd") + 4 + 40
    a, b, c, d = (value * 65536 for value in matrix)
    data[offset : offset + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    frame = next(decode_frames(bytes(data)).frames)
    expected = rotate(pixels)  # type: ignore[operator]
    assert frame.shape == expected.shape
    assert np.abs(frame.astype(int) - expected).mean() < 12


@pytest.mark.parametrize("form", ["mp4", "matroska", "avi", "webm", "mov"])
def test_containers_state_their_length(form: str) -> None:
    encoder = {"webm": "libvpx", "mp4": "mpeg4", "mov": "mpeg4"}.get(form, "mpeg4")
    out = io.BytesIO()
    with av.open(out, "w", format=form) as container:
        stream = container.add_stream(encoder, rate=10)
        stream.height, stream.width, stream.pix_fmt = 32, 32, "yuv420p"
        for level in range(5):
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), 40 * level, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    data = out.getvalue()
    assert count_missing_bytes(io.BytesIO(data)) == 0
    assert count_missing_bytes(io.BytesIO(data + b"\0" * 50)) == 0
    for cut in (1, 7, len(data) // 2):
        assert count_missing_bytes(io.BytesIO(data[:-cut])) > 0, cut


@given(
    st.binary(max_size=80), st.sampled_from([b"", b"RIFF", b"\x1a\x45\xdf\xa3", b"\0\0\0\x10ftyp", b"\0\0\0\x01mdat"])
)
def test_missing_bytes_of_arbitrary_data_are_never_negative(noise: bytes, magic: bytes) -> None:
    assert count_missing_bytes(io.BytesIO(magic + noise)) >= 0
