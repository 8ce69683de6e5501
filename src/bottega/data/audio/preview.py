"""Preview of prepared audio: durations, FLAC files and spectrograms."""

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


class AudioPreview(Preview):
    """Describes, exports and plots rows of audio."""

    column, unit = "audio", "seconds"

    @property
    def rate(self) -> int:
        """The sample rate of all rows."""
        return int(self.prepared.metadata["sample_rate"])

    @property
    def entries_per_unit(self) -> float:
        return self.rate

    def describe_array(self, content: np.ndarray) -> str:
        return f"{len(content) / self.rate:.2f} s at {self.rate:,} Hz"

    def public_fields(self, row: dict[str, Any]) -> dict[str, Any]:
        from bottega.data.audio.decode import encode_flac

        return {"flac": encode_flac(np.asarray(row["audio"]), self.rate), **get_row_annotations(row)}

    def draw(self, table: Table, count: int, folder: Path) -> list[Path]:
        from functools import partial

        from bottega.data.audio.spectrogram_plot import plot_spectrograms
        from bottega.plots.figure import try_plot

        rows, path = read_rows(table, choose_evenly_spaced_rows(table, 4)), make_image_path(folder, "spectrograms.png")
        waveforms = [(get_row_caption(row), np.asarray(row["audio"]), self.rate) for row in rows]
        return [path] if try_plot(partial(plot_spectrograms, waveforms), path) else []
