"""Preview of prepared images: image files and a contact sheet."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from bottega.data.prepare.preview import (
    Preview,
    choose_evenly_spaced_rows,
    get_row_annotations,
    get_row_caption,
    make_image_path,
    read_rows,
)
from bottega.data.sources.samples import decode_image
from bottega.data.tables.shards import Table


class ImagePreview(Preview):
    """Exports rows of images as files, and draws a contact sheet."""

    column = "image"

    def public_fields(self, row: dict[str, Any]) -> dict[str, Any]:
        from PIL import Image

        if self.prepared.metadata["encoder"]["store"] == "encoded":
            return {_detect_suffix(row["image"]): row["image"], **get_row_annotations(row)}
        pixels, out = decode_image(self.prepared, row), io.BytesIO()
        Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(out, "PNG")
        return {"png": out.getvalue(), **get_row_annotations(row)}

    def draw(self, table: Table, count: int, folder: Path) -> list[Path]:
        from bottega.data.image.contact_sheet import write_contact_sheet

        rows, path = read_rows(table, choose_evenly_spaced_rows(table, count)), make_image_path(folder, "images.png")
        write_contact_sheet(
            [decode_image(self.prepared, row) for row in rows], path, captions=[get_row_caption(row) for row in rows]
        )
        return [path]


def _detect_suffix(data: bytes) -> str:
    return "jpg" if data.startswith(b"\xff\xd8") else "webp" if data[8:12] == b"WEBP" else "png"
