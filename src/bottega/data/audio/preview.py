"""Rows of sound, for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bottega.data.prepare.preview import Preview, annotations_of, caption_of, picture_file, rows_of, spread
from bottega.data.tables.shards import Table


class AudioPreview(Preview):
    column, unit = "audio", "seconds"

    @property
    def rate(self) -> int:
        return int(self.prepared.meta["sample_rate"])

    @property
    def per_unit(self) -> float:
        return self.rate

    def describe_array(self, content: np.ndarray) -> str:
        return f"{len(content) / self.rate:.2f} s at {self.rate:,} Hz"

    def public(self, row: dict[str, Any]) -> dict[str, Any]:
        from bottega.data.audio.decode import encode_flac

        return {"flac": encode_flac(np.asarray(row["audio"]), self.rate), **annotations_of(row)}

    def draw(self, table: Table, count: int, folder: Path) -> list[Path]:
        from bottega.data.audio.picture import spectrogram_sheet

        rows, path = rows_of(table, spread(table, 4)), picture_file(folder, "spectrograms.png")
        spectrogram_sheet([(caption_of(row), np.asarray(row["audio"]), self.rate) for row in rows], path)
        return [path]
