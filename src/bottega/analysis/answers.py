"""What a classifier answered, example by example: measures of each class, a line for each answer, and two pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, final

import numpy as np

from bottega.analysis.answer_pictures import draw_calibration, draw_confusion
from bottega.core.types import Rows
from bottega.data.order.spread import Spread
from bottega.data.present import writing
from bottega.data.sources.source import Source
from bottega.storage.durable import replacing_file
from bottega.tasks.measures import classification as measures

PREDICTIONS, CONFUSION, CALIBRATION = "predictions.jsonl", "confusion.png", "calibration.png"


@final
class Answers:
    """`rows` are those of a `Classification`, in the order of the source."""

    def __init__(self, rows: Rows, source: Source, classes: tuple[str, ...]) -> None:
        self.source, self.classes = source, classes
        self.chances = rows["probability"]
        self.is_several = "labels" in rows
        self.labels = rows["labels" if self.is_several else "label"]
        self.decided = measures.decisions(self.chances, multi_label=self.is_several)

    def __len__(self) -> int:
        return len(self.chances)

    @property
    def confusion(self) -> np.ndarray:
        """[K, K] counts, or [K, 2, 2] where an example may be of several classes."""
        if self.is_several:
            return measures.confusion_matrices(self.labels, self.decided)
        return measures.confusion_matrix(self.labels, self.decided, len(self.classes))

    def per_class(self) -> dict[str, dict[str, float]]:
        """Class -> precision, recall, f1, and how many examples are of it."""
        found = measures.per_class(self.confusion)
        columns = {"precision": found.precision, "recall": found.recall, "f1": found.f1, "support": found.support}
        return {
            name: {key: float(values[i]) if key != "support" else int(values[i]) for key, values in columns.items()}
            for i, name in enumerate(self.classes)
        }

    def lines(self) -> list[dict[str, Any]]:
        """{"key", "label", "predicted", "probability"} of each example; the last is that of what was predicted."""
        return [self._line(i) for i in range(len(self))]

    def _line(self, i: int) -> dict[str, Any]:
        key, chances = _key(self.source, i), self.chances[i]
        if self.is_several:
            named = [
                [name for name, is_one in zip(self.classes, row, strict=True) if is_one]
                for row in (self.labels[i] > 0, self.decided[i])
            ]
            probability: Any = {name: round(float(p), 6) for name, p in zip(self.classes, chances, strict=True)}
            return {"key": key, "label": named[0], "predicted": named[1], "probability": probability}
        label, decided = self.classes[int(self.labels[i])], int(self.decided[i])
        probability = round(float(chances[decided]), 6)
        return {"key": key, "label": label, "predicted": self.classes[decided], "probability": probability}

    def write(self, folder: Path) -> list[Path]:
        """The lines and the pictures; a matrix of several labels has no picture."""
        file = folder / PREDICTIONS
        with writing(file), replacing_file(file) as temporary:
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self.lines())
            temporary.write_text(text, encoding="utf-8")
        found = measures.reliability(*measures.confidences(self.chances, self.labels))
        drawn = [folder / CALIBRATION]
        with writing(drawn[0]):
            draw_calibration(found, drawn[0])
        if not self.is_several:
            drawn.append(folder / CONFUSION)
            with writing(drawn[1]):
                draw_confusion(self.confusion, self.classes, drawn[1])
        return [file, *drawn]


def _key(source: Any, number: int) -> str:
    """The name of a record, however its source is wrapped."""
    while not hasattr(source, "table"):
        number = source.place(number) if isinstance(source, Spread) else number
        source = source.source
    return str(source.table.row("key", number))
