"""Rows of images, for people."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from bottega.data.prepare.preview import Preview, annotations_of, caption_of, picture_file, rows_of, spread
from bottega.data.sources.samples import picture
from bottega.data.tables.shards import Table


class ImagePreview(Preview):
    column = "image"

    def public(self, row: dict[str, Any]) -> dict[str, Any]:
        from PIL import Image

        if self.prepared.meta["encoder"]["store"] == "encoded":
            return {_suffix(row["image"]): row["image"], **annotations_of(row)}
        pixels, out = picture(self.prepared, row), io.BytesIO()
        Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(out, "PNG")
        return {"png": out.getvalue(), **annotations_of(row)}

    def draw(self, table: Table, count: int, folder: Path) -> list[Path]:
        from bottega.data.image.sheet import sheet

        rows, path = rows_of(table, spread(table, count)), picture_file(folder, "images.png")
        sheet([picture(self.prepared, row) for row in rows], path, captions=[caption_of(row) for row in rows])
        return [path]


def _suffix(data: bytes) -> str:
    return "jpg" if data.startswith(b"\xff\xd8") else "webp" if data[8:12] == b"WEBP" else "png"
