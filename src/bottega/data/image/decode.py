"""From an image file to its pixels: known formats only, limits before any pixel is unpacked, and nothing half read.

Pillow warns of large images from 89.5 million pixels on and refuses them from 179 million on. Our limit is lower, so
both mean the same here. What else it warns of, such as flaws in EXIF, decides nothing.
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
    from PIL.Image import Image as Picture

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
# A frame of the largest cameras; as colour it is 192 MiB unpacked.
MAX_PIXELS = 64 * 2**20
GREY = frozenset(("1", "L", "LA", "La", "I", "I;16", "I;16L", "I;16B", "I;16N"))
SIXTEEN_BITS = frozenset(("I;16", "I;16L", "I;16B", "I;16N"))
ORIENTATION = 0x0112

Encoded = bytes | Path
ImageInput = Encoded | np.ndarray


def decode_image(data: ImageInput, *, channels: int | None) -> np.ndarray:
    """Pixels as uint8 [h, w, c]. `channels` None keeps grey images at one channel and all others at three.

    What is transparent becomes white. GIF and TIFF give their first picture. Colour profiles are not applied.
    """
    if isinstance(data, np.ndarray):
        return _with_channels(_from_array(data), channels)
    return _steadily(_decoded, data, channels)


def read_image_shape(data: ImageInput) -> tuple[int, int, int]:
    """Height, width and channels as `decode` would give them, from the header alone."""
    if isinstance(data, np.ndarray):
        height, width, channels = _from_array(data).shape
        return height, width, 1 if channels < 3 else 3
    return _steadily(_header, data)[0]


def detect_image_format(data: Encoded) -> str:
    """The format as its content tells, such as JPEG."""
    return _steadily(_header, data)[1]


def import_pillow() -> Any:
    """PIL.Image, or how to get it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise EnvironmentProblem("images need Pillow, which is not installed: pip install 'bottega[data]'") from error
    # It logs some flaws besides raising them; without a handler Python would write them to standard error.
    logger = logging.getLogger("PIL")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
    return Image


def _steadily(read: Callable[..., Any], *of: object) -> Any:
    """The same where warnings are errors as where they are not.

    Only there are they caught: filters belong to the whole process, and decoding also runs in threads beside others.
    """
    try:
        return read(*of)
    except Warning:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return read(*of)


def _decoded(data: Encoded, channels: int | None) -> np.ndarray:
    image, orientation = _opened(data)
    wanted = channels or (1 if image.mode in GREY else 3)
    try:
        with image:
            pixels = _pixels(image, wanted)
    except (Unreadable, Warning):
        raise
    except Exception as error:  # damaged bytes reach most of Pillow's code, which raises whatever happens there
        raise Unreadable(f"{image.format} image: {_one_line(error)}") from error
    return np.ascontiguousarray(_upright(pixels, orientation))


def _header(data: Encoded) -> tuple[tuple[int, int, int], str]:
    image, orientation = _opened(data)
    with image:
        width, height = image.size
        channels = 1 if image.mode in GREY else 3
        shape = (width, height, channels) if orientation > 4 else (height, width, channels)
        return shape, str(image.format)


def _opened(data: Encoded) -> tuple[Picture, int]:
    """The image with only its header read, and its EXIF orientation."""
    Image = import_pillow()
    size = len(data) if isinstance(data, bytes) else _file_size(data)
    if size == 0:
        raise Unreadable("the file is empty")
    try:
        image: Picture = Image.open(io.BytesIO(data) if isinstance(data, bytes) else data, formats=FORMATS)
        orientation = _orientation(image)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise Unreadable(f"has more pixels than an image may have ({MAX_PIXELS:,})") from error
    except Image.UnidentifiedImageError as error:
        raise Unreadable(f"is no image of a known format ({', '.join(FORMATS)})") from error
    except Warning:
        raise
    except Exception as error:
        raise Unreadable(f"the header cannot be read: {_one_line(error)}") from error
    if image.width * image.height > MAX_PIXELS:
        image.close()
        raise Unreadable(
            f"{image.width} x {image.height} are more pixels than an image may have ({MAX_PIXELS:,}); make it smaller"
        )
    return image, orientation


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise Unreadable(f"the file cannot be read: {error.strerror}") from error


def _pixels(image: Picture, channels: int) -> np.ndarray:
    """Decodes. Each mode is converted on purpose: Pillow's own ways clip 16 bits and drop transparency."""
    if image.mode in SIXTEEN_BITS or image.mode == "I":
        deep = np.asarray(image).astype(np.int64)
        # Only grey PNG and PPM come as I with 16 bits in it; a TIFF of 32 bits has no range that could be known.
        if image.mode == "I" and image.format not in ("PNG", "PPM"):
            raise Unreadable("has 32 bits a pixel; save it with 8 or 16")
        return _with_channels(_eight_bits(deep)[..., None], channels)
    if image.mode == "F":
        raise Unreadable("has floating point pixels; save it with 8 or 16 bits")
    mode = "L" if channels == 1 else "RGB"
    if image.has_transparency_data or image.mode in ("La", "RGBa"):
        Image = import_pillow()
        clear = image.convert("RGBA")
        white = Image.new("RGBA", clear.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, clear)
    pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    return pixels[..., None] if channels == 1 else pixels


def _eight_bits(deep: np.ndarray) -> np.ndarray:
    """Rounded, so that the 8-bit images which became 16-bit ones (times 257) come back exactly."""
    return ((np.clip(deep, 0, 65535) + 128) // 257).astype(np.uint8)


def _from_array(array: np.ndarray) -> np.ndarray:
    """uint8 [h, w, c] from [h, w] or [h, w, c]; with the channels first where the shape leaves no doubt.

    Fractions are taken as 0 to 1 where none is above 1, and as 0 to 255 otherwise.
    """
    pixels = array[..., None] if array.ndim == 2 else array
    if pixels.ndim == 3 and pixels.shape[2] not in (1, 2, 3, 4) and pixels.shape[0] in (1, 3):
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 2, 3, 4) or 0 in pixels.shape:
        raise Unreadable(f"an array of shape {array.shape} is no image: expected [height, width] or [..., 1 to 4]")
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype == np.bool_:
        return pixels.astype(np.uint8) * np.uint8(255)
    if pixels.dtype == np.uint16:
        return _eight_bits(pixels.astype(np.int64))
    if pixels.dtype.kind not in "iuf":
        raise Unreadable(f"an array of {pixels.dtype} is no image: expected whole numbers or fractions")
    if pixels.dtype.kind == "f" and not np.isfinite(pixels).all():
        raise Unreadable(f"{int((~np.isfinite(pixels)).sum()):,} of its pixels are not finite")
    least, most = pixels.min(), pixels.max()
    if not (least >= 0 and most <= 255):
        raise Unreadable(f"pixels from {least} to {most}: expected 0 to 255, or fractions from 0 to 1")
    scale = 255 if pixels.dtype.kind == "f" and most <= 1 else 1
    return np.rint(pixels * scale).astype(np.uint8)


def _with_channels(pixels: np.ndarray, channels: int | None) -> np.ndarray:
    """From 1 (grey), 2 (grey, alpha), 3 (colour) or 4 (colour, alpha) channels to those wanted."""
    have = pixels.shape[2]
    wanted = channels or (1 if have < 3 else 3)
    if have in (2, 4):
        alpha = pixels[..., -1:].astype(np.uint16)
        over = pixels[..., :-1] * alpha + np.uint16(255) * (255 - alpha)
        pixels, have = ((over + 127) // 255).astype(np.uint8), have - 1
    if have == wanted:
        return pixels
    if wanted == 3:
        return np.repeat(pixels, 3, axis=2)
    return np.asarray(import_pillow().fromarray(np.ascontiguousarray(pixels)).convert("L"))[..., None]


def _orientation(image: Picture) -> int:
    """1 to 8 as EXIF numbers them, 1 where nothing is said; read here, because Pillow warns of every flaw in EXIF.

    TIFF is upright already: there Pillow turns it by itself.
    """
    exif = image.info.get("exif", b"")
    if image.format == "TIFF" or not isinstance(exif, bytes):
        return 1
    exif = exif.removeprefix(b"Exif\0\0")
    order = {b"II": "little", b"MM": "big"}.get(exif[:2])
    if order is None:
        return 1

    def number(at: int, length: int) -> int:
        return int.from_bytes(exif[at : at + length], order)  # type: ignore[arg-type]

    table = number(4, 4)
    for entry in range(table + 2, min(table + 2 + 12 * number(table, 2), len(exif) - 11), 12):
        if number(entry, 2) == ORIENTATION:
            value = number(entry + 8, 2)
            return value if 1 <= value <= 8 else 1
    return 1


def _upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    if orientation > 4:
        pixels = pixels.swapaxes(0, 1)
    down = slice(None, None, -1) if orientation in (3, 4, 7, 8) else slice(None)
    right = slice(None, None, -1) if orientation in (2, 3, 6, 7) else slice(None)
    return pixels[down, right]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
