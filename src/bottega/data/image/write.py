"""Images as files for people: one sheet of all, or a folder of single ones with the sheet beside them."""

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
# Of the formats that lose something: above it files grow and nothing more is seen.
QUALITY = 92


def write_images(
    images: np.ndarray, path: Path, *, captions: Sequence[str] | None = None, columns: int | None = None
) -> list[Path]:
    """uint8 [n, h, w, c] as one sheet, or with a `path` without an ending as 00.png, ... and sheet.png. Returns the files.

    Single files have the pixels as they are; so has one image without a caption, which needs no sheet around it.
    """
    assert images.ndim == 4, f"{images.shape} are no images"
    assert images.dtype == np.uint8, f"images of {images.dtype}"
    import_pillow()  # or how to get it, before the first file is written
    if not is_folder(path):
        require_suffix(path, FORMATS)
        if len(images) == 1 and captions is None:
            _save(images[0], path)
        else:
            _sheet(images, path, captions, columns)
        return [path]
    singles = build_numbered_paths(path, len(images), ".png")
    for image, single in zip(images, singles, strict=True):
        _save(image, single)
    _sheet(images, path / "sheet.png", captions, columns)
    return [*singles, path / "sheet.png"]


def render_contact_sheet(
    images: Sequence[np.ndarray], *, captions: Sequence[str] | None, columns: int | None
) -> np.ndarray:
    """A sheet as pixels, uint8 [h, w, 3]."""
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder) / "page.png"
        write_contact_sheet(images, drawn, captions=captions, columns=columns)
        return decode_image(drawn, channels=3)


def _sheet(images: np.ndarray, path: Path, captions: Sequence[str] | None, columns: int | None) -> None:
    if path.suffix.lower() != ".png":  # a sheet is drawn as PNG
        _save(render_contact_sheet(list(images), captions=captions, columns=columns), path)
        return
    with replacing_file(path) as temporary:
        write_contact_sheet(list(images), temporary, captions=captions, columns=columns)


def _save(image: np.ndarray, path: Path) -> None:
    picture = import_pillow().fromarray(np.ascontiguousarray(image[:, :, 0] if image.shape[2] == 1 else image))
    with replacing_file(path) as temporary:
        picture.save(temporary, format=FORMATS[require_suffix(path, FORMATS)], quality=QUALITY)
