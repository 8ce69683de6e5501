"""Rows of video, for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bottega.data.prepare.preview import Preview, annotations_of, caption_of, picture_file, rows_of, spread
from bottega.data.tables.shards import Table

FRAMES = 6
"""Of each video, from its first to its last."""


class VideoPreview(Preview):
    column, unit = "video", "frames"

    def public(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"video": np.asarray(row["video"]), "fps": float(np.ravel(row["fps"])[0]), **annotations_of(row)}

    def draw(self, table: Table, count: int, folder: Path) -> list[Path]:
        from bottega.data.image.sheet import sheet

        rows, path = rows_of(table, spread(table, 4)), picture_file(folder, "frames.png")
        frames = [row["video"][i] for row in rows for i in np.linspace(0, len(row["video"]) - 1, FRAMES).astype(int)]
        sheet(frames, path, captions=[caption_of(row) for row in rows for _ in range(FRAMES)], columns=FRAMES)
        return [path]
