"""Preview of prepared video: frames as a contact sheet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bottega.data.prepare.preview import (
    Preview,
    choose_evenly_spaced_rows,
    get_row_annotations,
    get_row_caption,
    make_image_path,
    read_rows,
)
from bottega.data.tables.shards import Table

NUM_FRAMES = 6
"""Frames shown of each video, evenly spaced."""


class VideoPreview(Preview):
    """Exports rows of video as arrays, and draws frames as a contact sheet."""

    column, unit = "video", "frames"

    def public_fields(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"video": np.asarray(row["video"]), "fps": float(np.ravel(row["fps"])[0]), **get_row_annotations(row)}

    def draw(self, table: Table, count: int, folder: Path) -> list[Path]:
        from bottega.data.image.contact_sheet import write_contact_sheet

        rows, path = read_rows(table, choose_evenly_spaced_rows(table, 4)), make_image_path(folder, "frames.png")
        frames = [
            row["video"][i] for row in rows for i in np.linspace(0, len(row["video"]) - 1, NUM_FRAMES).astype(int)
        ]
        write_contact_sheet(
            frames, path, captions=[get_row_caption(row) for row in rows for _ in range(NUM_FRAMES)], columns=NUM_FRAMES
        )
        return [path]
