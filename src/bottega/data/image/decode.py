"""Decode image files to pixels: known formats only, size limits checked before decoding, truncated files refused.

Pillow warns about images above 89.5 million pixels and refuses images above 179 million. The limit here is lower, so the
warning and the error are both reported as an image that is too large. Pillow's other warnings, such as invalid EXIF, are ignored.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bottega.core.errors import EnvironmentProblem
from bottega.data.records.record import Unreadable

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
# The resolution of the largest cameras; 192 MiB in colour.
MAX_PIXELS = 64 * 2**20
GREY_MODES = frozenset(("1", "L", "LA", "La", "I", "I;16", "I;16L", "I;16B", "I;16N"))
SIXTEEN_BIT_MODES = frozenset(("I;16", "I;16L", "I;16B", "I;16N"))
ORIENTATION_TAG = 0x0112

Encoded = bytes | Path
ImageInput = Encoded | np.ndarray


def decode_image(data: ImageInput, *, channels: int | None) -> np.ndarray:
    """Return the pixels, uint8 `(height, width, channels)`; with `channels` None, 1 for grey images and 3 for others.

    Transparent pixels become white. GIF and TIFF files give their first frame. Colour profiles are not applied.
    """
    if isinstance(data, np.ndarray):
        return _convert_channels(_convert_array(data), channels)
    return _ignore_warnings(_decode_file, data, channels)


def read_image_shape(data: ImageInput) -> tuple[int, int, int]:
    """Return height, width and channels that `decode_image` would give, from the header alone."""
    if isinstance(data, np.ndarray):
        height, width, channels = _convert_array(data).shape
        return height, width, 1 if channels < 3 else 3
    return _ignore_warnings(_read_header, data)[0]


def detect_image_format(data: Encoded) -> str:
    """Return the format by the content of the file, such as JPEG."""
    return _ignore_warnings(_read_header, data)[1]


def import_pillow() -> Any:
    """Return the module PIL.Image; raise `EnvironmentProblem` with the install command if it is missing."""
    try:
        from PIL import Image
    except ImportError as error:
        raise EnvironmentProblem("images need Pillow; pip install 'bottega[data]'") from error
    # Pillow also logs some errors; without a handler Python would write them to standard error.
    logger = logging.getLogger("PIL")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
    return Image


def _ignore_warnings(read: Callable[..., Any], *arguments: object) -> Any:
    """Call `read`, and call it again with warnings ignored if they are raised as errors.

    Warning filters are changed only then, because they belong to the whole process, and decoding also runs in threads.
    """
    try:
        return read(*arguments)
    except Warning:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return read(*arguments)


def _decode_file(data: Encoded, channels: int | None) -> np.ndarray:
    image, orientation = _open_image(data)
    target_channels = channels or (1 if image.mode in GREY_MODES else 3)
    try:
        with image:
            pixels = _decode_pixels(image, target_channels)
    except (Unreadable, Warning):
        raise
    except Exception as error:  # damaged data can raise any exception in Pillow
        raise Unreadable(f"{image.format} image: {_format_error(error)}") from error
    return np.ascontiguousarray(_rotate_upright(pixels, orientation))


def _read_header(data: Encoded) -> tuple[tuple[int, int, int], str]:
    """Return the shape (height, width, channels) of the upright image, and its format."""
    image, orientation = _open_image(data)
    with image:
        width, height = image.size
        channels = 1 if image.mode in GREY_MODES else 3
        shape = (width, height, channels) if orientation > 4 else (height, width, channels)
        return shape, str(image.format)


def _open_image(data: Encoded) -> tuple[PillowImage, int]:
    """Open an image, reading its header only, and return it with its EXIF orientation."""
    Image = import_pillow()
    size = len(data) if isinstance(data, bytes) else _read_file_size(data)
    if size == 0:
        raise Unreadable("the file is empty")
    try:
        image: PillowImage = Image.open(io.BytesIO(data) if isinstance(data, bytes) else data, formats=FORMATS)
        orientation = _read_orientation(image)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise Unreadable(f"has more than {MAX_PIXELS:,} pixels; make it smaller") from error
    except Image.UnidentifiedImageError as error:
        raise Unreadable(f"is not an image of a known format ({', '.join(FORMATS)})") from error
    except Warning:
        raise
    except Exception as error:
        raise Unreadable(f"the header cannot be read: {_format_error(error)}") from error
    if image.width * image.height > MAX_PIXELS:
        image.close()
        raise Unreadable(f"{image.width} x {image.height} is more than {MAX_PIXELS:,} pixels; make it smaller")
    return image, orientation


def _read_file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise Unreadable(f"the file cannot be read: {error.strerror}") from error


def _decode_pixels(image: PillowImage, channels: int) -> np.ndarray:
    """Decode with our own conversions: those of Pillow clip 16-bit values and drop transparency."""
    if image.mode in SIXTEEN_BIT_MODES or image.mode == "I":
        values = np.asarray(image).astype(np.int64)
        # Grey PNG and PPM use mode I for 16 bits; the range of a 32-bit TIFF is unknown.
        if image.mode == "I" and image.format not in ("PNG", "PPM"):
            raise Unreadable("has 32 bits per pixel; save it with 8 or 16")
        return _convert_channels(_to_eight_bits(values)[..., None], channels)
    if image.mode == "F":
        raise Unreadable("has floating-point pixels; save it with 8 or 16 bits")
    mode = "L" if channels == 1 else "RGB"
    if image.has_transparency_data or image.mode in ("La", "RGBa"):
        Image = import_pillow()
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, rgba)
    pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    return pixels[..., None] if channels == 1 else pixels


def _to_eight_bits(values: np.ndarray) -> np.ndarray:
    """Round 16 bits to 8, so that 8-bit images stored as 16-bit (times 257) come back exactly."""
    return ((np.clip(values, 0, 65535) + 128) // 257).astype(np.uint8)


def _convert_array(array: np.ndarray) -> np.ndarray:
    """Return uint8 `(height, width, channels)` of an array; channels may come first if the shape is unambiguous.

    Floats are read as 0 to 1 if none is above 1, else as 0 to 255.
    """
    pixels = array[..., None] if array.ndim == 2 else array
    if pixels.ndim == 3 and pixels.shape[2] not in (1, 2, 3, 4) and pixels.shape[0] in (1, 3):
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 2, 3, 4) or 0 in pixels.shape:
        raise Unreadable(
            f"an array of shape {array.shape} is not an image; expected (height, width) or (height, width, 1 to 4)"
        )
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype == np.bool_:
        return pixels.astype(np.uint8) * np.uint8(255)
    if pixels.dtype == np.uint16:
        return _to_eight_bits(pixels.astype(np.int64))
    if pixels.dtype.kind not in "iuf":
        raise Unreadable(f"an array of {pixels.dtype} is not an image; expected integers or floats")
    if pixels.dtype.kind == "f" and not np.isfinite(pixels).all():
        raise Unreadable(f"{int((~np.isfinite(pixels)).sum()):,} pixel values are not finite")
    smallest, largest = pixels.min(), pixels.max()
    if not (smallest >= 0 and largest <= 255):
        raise Unreadable(f"pixel values from {smallest} to {largest}; expected 0 to 255, or floats from 0 to 1")
    scale = 255 if pixels.dtype.kind == "f" and largest <= 1 else 1
    return np.rint(pixels * scale).astype(np.uint8)


def _convert_channels(pixels: np.ndarray, channels: int | None) -> np.ndarray:
    """Convert 1 (grey), 2 (grey, alpha), 3 (colour) or 4 (colour, alpha) channels to `channels`."""
    current = pixels.shape[2]
    target = channels or (1 if current < 3 else 3)
    if current in (2, 4):
        alpha = pixels[..., -1:].astype(np.uint16)
        blended = pixels[..., :-1] * alpha + np.uint16(255) * (255 - alpha)
        pixels, current = ((blended + 127) // 255).astype(np.uint8), current - 1
    if current == target:
        return pixels
    if target == 3:
        return np.repeat(pixels, 3, axis=2)
    return np.asarray(import_pillow().fromarray(np.ascontiguousarray(pixels)).convert("L"))[..., None]


def _read_orientation(image: PillowImage) -> int:
    """Return the EXIF orientation, 1 to 8; 1 by default. EXIF is parsed here, because Pillow warns about every flaw in it.

    Pillow applies the orientation of TIFF files itself.
    """
    exif = image.info.get("exif", b"")
    if image.format == "TIFF" or not isinstance(exif, bytes):
        return 1
    exif = exif.removeprefix(b"Exif\0\0")
    byte_order = {b"II": "little", b"MM": "big"}.get(exif[:2])
    if byte_order is None:
        return 1

    def read_integer(at: int, length: int) -> int:
        return int.from_bytes(exif[at : at + length], byte_order)  # type: ignore[arg-type]

    directory = read_integer(4, 4)
    first_entry, num_entries = directory + 2, read_integer(directory, 2)
    for entry in range(first_entry, min(first_entry + 12 * num_entries, len(exif) - 11), 12):
        if read_integer(entry, 2) == ORIENTATION_TAG:
            value = read_integer(entry + 8, 2)
            return value if 1 <= value <= 8 else 1
    return 1


def _rotate_upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    if orientation > 4:
        pixels = pixels.swapaxes(0, 1)
    rows = slice(None, None, -1) if orientation in (3, 4, 7, 8) else slice(None)
    columns = slice(None, None, -1) if orientation in (2, 3, 6, 7) else slice(None)
    return pixels[rows, columns]


def _format_error(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
