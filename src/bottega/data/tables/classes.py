"""Classes from the labels of the data, and the condition of each sample: a class, a vector, or none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, final

import numpy as np

from bottega.core.errors import DataError
from bottega.data.tables.shards import Table

ConditionKind = Literal["none", "class", "vector"]


@final
@dataclass(frozen=True)
class Classes:
    """Class names in the order of their ids."""

    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def ids(self, texts: Sequence[str], *, keys: Sequence[str] | None = None) -> np.ndarray:
        """Return the ids of labels, int32 (n,). `keys` are the record keys for messages. Raises DataError for an unknown label."""
        ids = np.fromiter((self._id_by_name.get(text, -1) for text in texts), dtype=np.int32, count=len(texts))
        unknown = np.flatnonzero(ids < 0)
        if len(unknown):
            position = int(unknown[0])
            raise DataError(
                self._describe_problem(texts[position], f"record {position}" if keys is None else keys[position])
            )
        return ids

    def _describe_problem(self, text: str, record: str) -> str:
        if not text:
            return (
                f"{record}: has no label, unlike other records; add one, remove the record, or set model.condition=none"
            )
        if self.names == _number_classes(len(self)) and is_integer_label(text):
            return f"{record}: label {text} is out of range: num_classes={len(self)} allows 0 to {len(self) - 1}"
        more = ", ..." if len(self) > 5 else ""
        return f"{record}: label {text!r} is not one of the {len(self)} classes ({', '.join(self.names[:5])}{more})"

    @cached_property
    def _id_by_name(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}


def find_classes(texts: Iterable[str], *, num_classes: int | None = None) -> Classes:
    """Return the classes of these labels, sorted; by value if all are integers.

    With `num_classes`, integer labels are class ids, and not all need to occur; there may be fewer class names. Empty
    labels are ignored. `Classes.ids` reports labels out of range, since it knows their records.
    """
    names = set(texts) - {""}
    are_integers = bool(names) and all(map(is_integer_label, names))
    if num_classes is not None and are_integers:
        return Classes(_number_classes(num_classes))
    if num_classes is not None and len(names) > num_classes:
        raise DataError(f"the data has {len(names)} classes, more than num_classes={num_classes}; raise num_classes")
    return Classes(tuple(sorted(names, key=lambda name: (int(name), name) if are_integers else (0, name))))


def find_classes_if_labelled(texts: Iterable[str], *, num_classes: int | None = None, required: bool) -> Classes:
    """Return the classes of these labels; none if they are not `required` and some sample has no label.

    A model without classes does not need labels, and a batch cannot hold labels for some of its samples only.
    """
    texts = list(texts)
    return Classes(()) if not required and "" in texts else find_classes(texts, num_classes=num_classes)


def is_integer_label(text: str) -> bool:
    """Return whether a label is an integer: -1, 0, 12; not 1.5, nor digits of other scripts."""
    return text.isascii() and text.removeprefix("-").isdigit()


def read_text_column(table: Table, column: str) -> list[str]:
    """Return all rows of a text column; 20 times as fast as row by row."""
    raw, ends = table.values(column).tobytes(), table.ends(column).tolist()
    return [raw[start:end].decode() for start, end in zip([0, *ends], ends, strict=False)]


def _number_classes(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))


@final
class Conditions:
    """Conditions of the samples of a table: "condition" (batch, d), and "label" (batch,) if there are classes.

    The kind `vector` reads the column `condition`, `class` is one-hot over the classes, and `none` has d = 0.
    """

    def __init__(self, table: Table, kind: ConditionKind, *, classes: Classes | None) -> None:
        self.kind, self.classes = kind, classes
        self.labels: np.ndarray | None = None
        if classes is not None and len(classes):
            texts = read_text_column(table, "label")
            # For other kinds, labels are informative only, and given for all samples or none.
            if kind == "class" or "" not in texts:
                self.labels = classes.ids(texts, keys=_Keys(table))
        if kind == "class" and self.labels is None:
            key = str(table.row("key", 0))
            raise DataError(
                f"model.condition=class needs labels, but the samples have none (the first is {key}); set "
                f"data.train.label to the field, {_make_pattern_hint(key)}sort the files into a folder for each class, or "
                "set model.condition=none"
            )
        self.size = {"none": 0, "class": len(classes or ())}.get(kind, 0)
        self.vectors = _read_vectors(table) if kind == "vector" else None
        if self.vectors is not None:
            self.size = self.vectors.shape[1]

    def rows(self, index: np.ndarray) -> dict[str, np.ndarray]:
        """Return the conditions of the samples `index` (n,)."""
        condition = np.zeros((len(index), self.size), dtype=np.float32)
        if self.vectors is not None:
            condition[...] = self.vectors[index]
        elif self.kind == "class" and self.labels is not None:
            condition[np.arange(len(index)), self.labels[index]] = 1
        rows = {"condition": condition}
        if self.labels is not None:
            rows["label"] = self.labels[index]
        return rows

    def describe(self, number: int) -> list[str]:
        """Return lines that describe the condition of one sample."""
        lines = []
        if self.classes is not None and self.labels is not None:
            label = int(self.labels[number])
            lines.append(f"class {label}: {self.classes.names[label]}")
        if self.vectors is not None:
            lines.append(f"condition: {np.array2string(self.vectors[number], threshold=16, precision=4)}")
        return lines


def _make_pattern_hint(key: str) -> str:
    """Return a hint for file names that seem to hold several values, such as 7_jackson_32.wav."""
    separator = re.search(r"[^\W_]([_=,-])[^\W_]", Path(key).stem)
    pattern = f"(?P<label>[^/{separator[1]}]+){separator[1]}" if separator is not None else ""
    return f'extract it from the file names with data.train.pattern, such as "{pattern}", ' if pattern else ""


@final
class _Keys(Sequence[str]):
    """The record keys of a table, read on access."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, number):  # type: ignore[no-untyped-def]
        return self.table.row("key", number)


def _read_vectors(table: Table) -> np.ndarray:
    """Return the condition vectors (n, d), in memory: they are sent to workers and small beside the samples."""
    if "condition" not in table.columns:
        raise DataError(
            f"{table.folder}: model.condition=vector needs vectors, but the samples have none; set "
            "data.condition_field to the field"
        )
    lengths = table.lengths("condition")
    differing_rows = np.flatnonzero(lengths != lengths[0]) if len(lengths) else lengths
    if len(differing_rows):
        first_key, differing_key = table.row("key", 0), table.row("key", int(differing_rows[0]))
        raise DataError(
            f"{differing_key}: its condition has {lengths[differing_rows[0]]} numbers, but that of {first_key} has {lengths[0]}; give all conditions the same length"
        )
    return np.array(table.values("condition"), dtype=np.float32).reshape(len(table), -1)
