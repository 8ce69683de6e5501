"""Predictions of a classifier, sample by sample: metrics of each class, predictions.jsonl, and two plots."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np

from bottega.core.types import Rows
from bottega.data.order.interleaved import Interleaved
from bottega.data.output_files import explain_write_errors
from bottega.data.sources.source import Source
from bottega.plots.classification import plot_calibration, plot_confusion_matrix
from bottega.plots.figure import try_plot
from bottega.storage.durable import replacing_file
from bottega.tasks.metrics import classification

PREDICTIONS_FILE, CONFUSION_FILE, CALIBRATION_FILE = "predictions.jsonl", "confusion.png", "calibration.png"
"""Files that an evaluation writes."""


@final
class ClassifierPredictions:
    """Predictions from the evaluation `rows` of a `Classification` task, in the order of `source`."""

    def __init__(self, rows: Rows, source: Source, classes: tuple[str, ...]) -> None:
        self.source, self.classes = source, classes
        self.probabilities = rows["probability"]
        self.is_multi_label = "labels" in rows
        self.labels = rows["labels" if self.is_multi_label else "label"]
        self.predicted = classification.decide_labels(self.probabilities, multi_label=self.is_multi_label)

    def __len__(self) -> int:
        return len(self.probabilities)

    @property
    def confusion_matrix(self) -> np.ndarray:
        """Counts (classes, classes), or (classes, 2, 2) for multi-label data."""
        if self.is_multi_label:
            return classification.confusion_matrices(self.labels, self.predicted)
        return classification.confusion_matrix(self.labels, self.predicted, len(self.classes))

    def to_rows(self) -> list[dict[str, Any]]:
        """Return {"key", "label", "predicted", "probability"} of each sample; the probability is that of the predicted class."""
        return [self._build_row(i) for i in range(len(self))]

    def _build_row(self, i: int) -> dict[str, Any]:
        key, probabilities = _find_record_key(self.source, i), self.probabilities[i]
        if self.is_multi_label:
            class_names = [
                [name for name, is_set in zip(self.classes, row, strict=True) if is_set]
                for row in (self.labels[i] > 0, self.predicted[i])
            ]
            probability: Any = {name: round(float(p), 6) for name, p in zip(self.classes, probabilities, strict=True)}
            return {"key": key, "label": class_names[0], "predicted": class_names[1], "probability": probability}
        label, predicted = self.classes[int(self.labels[i])], int(self.predicted[i])
        probability = round(float(probabilities[predicted]), 6)
        return {"key": key, "label": label, "predicted": self.classes[predicted], "probability": probability}

    def write_files(self, folder: Path, *, warn: Callable[[str], None]) -> list[Path]:
        """Write predictions.jsonl and its plots to `folder`, and return the files; multi-label data has no confusion plot.

        `warn` is called with the reason if a plot cannot be written.
        """
        file = folder / PREDICTIONS_FILE
        with explain_write_errors(file), replacing_file(file) as temporary:
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self.to_rows())
            temporary.write_text(text, encoding="utf-8")
        bins = classification.reliability_bins(*classification.compute_confidences(self.probabilities, self.labels))
        plots: dict[str, Callable[[Path], None]] = {CALIBRATION_FILE: partial(plot_calibration, *bins)}
        if not self.is_multi_label:
            plots[CONFUSION_FILE] = partial(plot_confusion_matrix, self.confusion_matrix, self.classes)
        return [file, *(folder / name for name, plot in plots.items() if try_plot(plot, folder / name, warn=warn))]


def _find_record_key(source: Any, number: int) -> str:
    """Return the key of a record, through all wrappers of its source."""
    while not hasattr(source, "table"):
        number = source.inner_index(number) if isinstance(source, Interleaved) else number
        source = source.source
    return str(source.table.row("key", number))
