"""Write images as one contact sheet, or as single files with a contact sheet beside them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bottega.data.image.contact_sheet import write_contact_sheet
from bottega.data.image.decode import decode_image, import_pillow
from bottega.data.output_files import build_numbered_paths, is_folder, require_suffix
from bottega.storage.durable import replacing_file

FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
# Quality of lossy formats; above it, files grow without a visible gain.
QUALITY = 92


def write_images(
    images: np.ndarray, path: Path, *, captions: Sequence[str] | None = None, columns: int | None = None
) -> list[Path]:
    """Write images, uint8 `(images, height, width, channels)`, and return the paths of the files.

    A `path` with a suffix gets one contact sheet, or the image itself if it is the only one and has no caption. A `path`
    without a suffix is a folder and gets 00.png, ... at original size, and sheet.png.
    """
    assert images.ndim == 4, f"{images.shape} is not a batch of images"
    assert images.dtype == np.uint8, f"images of {images.dtype}"
    import_pillow()  # fail before the first file is written
    if not is_folder(path):
        require_suffix(path, FORMATS)
        if len(images) == 1 and captions is None:
            _write_image(images[0], path)
        else:
            _write_sheet(images, path, captions, columns)
        return [path]
    paths = build_numbered_paths(path, len(images), ".png")
    for image, image_path in zip(images, paths, strict=True):
        _write_image(image, image_path)
    _write_sheet(images, path / "sheet.png", captions, columns)
    return [*paths, path / "sheet.png"]


def render_contact_sheet(
    images: Sequence[np.ndarray], *, captions: Sequence[str] | None, columns: int | None
) -> np.ndarray:
    """Return a contact sheet as pixels, uint8 `(height, width, 3)`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.png"
        write_contact_sheet(images, path, captions=captions, columns=columns)
        return decode_image(path, channels=3)


def _write_sheet(images: np.ndarray, path: Path, captions: Sequence[str] | None, columns: int | None) -> None:
    if path.suffix.lower() != ".png":  # contact sheets are rendered as PNG
        _write_image(render_contact_sheet(list(images), captions=captions, columns=columns), path)
        return
    with replacing_file(path) as temporary:
        write_contact_sheet(list(images), temporary, captions=captions, columns=columns)


def _write_image(image: np.ndarray, path: Path) -> None:
    pillow_image = import_pillow().fromarray(np.ascontiguousarray(image[:, :, 0] if image.shape[2] == 1 else image))
    with replacing_file(path) as temporary:
        pillow_image.save(temporary, format=FORMATS[require_suffix(path, FORMATS)], quality=QUALITY)
