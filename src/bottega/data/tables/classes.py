"""Class names from the labels of the data, and what a generator is asked for: a class, a vector, or nothing."""

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

Kind = Literal["none", "class", "vector"]


@final
@dataclass(frozen=True)
class Classes:
    """Names in the order of their numbers."""

    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def ids(self, texts: Sequence[str], *, keys: Sequence[str] | None = None) -> np.ndarray:
        """Their numbers, int32 [n]. `keys` are the names of the records, for the message about a wrong one."""
        ids = np.fromiter((self._numbers.get(text, -1) for text in texts), dtype=np.int32, count=len(texts))
        wrong = np.flatnonzero(ids < 0)
        if len(wrong):
            first = int(wrong[0])
            raise DataError(self._problem(texts[first], f"record {first}" if keys is None else keys[first]))
        return ids

    def _problem(self, text: str, record: str) -> str:
        if not text:
            return f"{record}: has no label, but others have; give it one, remove it, or set model.condition=none"
        if self.names == _numbered(len(self)) and is_integer_label(text):
            return f"{record}: label {text} is out of range: num_classes is {len(self)}, so 0 to {len(self) - 1} are"
        more = ", ..." if len(self) > 5 else ""
        return f"{record}: label {text!r} is none of the {len(self)} classes ({', '.join(self.names[:5])}{more})"

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}


def find_classes(texts: Iterable[str], *, num_classes: int | None = None) -> Classes:
    """The classes of these labels: sorted, by value where all are whole numbers.

    With `num_classes`, whole numbers are the classes' own numbers, and one of them need not occur; names may be fewer.
    Empty labels are no class. A label that does not fit is found by `Classes.ids`, which knows whose it is.
    """
    names = set(texts) - {""}
    whole = bool(names) and all(map(is_integer_label, names))
    if num_classes is not None and whole:
        return Classes(_numbered(num_classes))
    if num_classes is not None and len(names) > num_classes:
        raise DataError(f"the data has {len(names)} classes, more than num_classes={num_classes}; raise it")
    return Classes(tuple(sorted(names, key=lambda name: (int(name), name) if whole else (0, name))))


def find_classes_if_labelled(texts: Iterable[str], *, num_classes: int | None = None, required: bool) -> Classes:
    """The classes of these labels; none where they are not `required` and some sample has no label.

    Who learns without classes need not name one for each sample, and half of them are of no use to a batch.
    """
    texts = list(texts)
    return Classes(()) if not required and "" in texts else find_classes(texts, num_classes=num_classes)


def is_integer_label(text: str) -> bool:
    """Whether a label is a number: -1, 0, 12; not 1.5, and no digits of other scripts."""
    return text.isascii() and text.removeprefix("-").isdigit()


def read_text_column(table: Table, column: str) -> list[str]:
    """All of a text column: 20 times as fast as row by row."""
    raw, ends = table.values(column).tobytes(), table.ends(column).tolist()
    return [raw[start:end].decode() for start, end in zip([0, *ends], ends, strict=False)]


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))


@final
class Conditions:
    """The part of a batch that says what each sample is: "condition" [b, d], and "label" [b] where there are classes.

    `vector` gives the column `condition`, `class` one place for each class (a 1 at the sample's own), `none` nothing:
    d is 0.
    """

    def __init__(self, table: Table, kind: Kind, *, classes: Classes | None) -> None:
        self.kind, self.classes = kind, classes
        self.labels: np.ndarray | None = None
        if classes is not None and len(classes):
            texts = read_text_column(table, "label")
            if kind == "class" or "" not in texts:  # else they are for looking at only, and all or none
                self.labels = classes.ids(texts, keys=_Keys(table))
        if kind == "class" and self.labels is None:
            key = str(table.row("key", 0))
            raise DataError(
                f"the samples have no labels (the first is {key}), and condition is class; name the field with "
                f"data.train.label, {_in_names(key)}sort the files into a folder for each class, or set "
                "model.condition=none"
            )
        self.size = {"none": 0, "class": len(classes or ())}.get(kind, 0)
        self.vectors = _vectors(table) if kind == "vector" else None
        if self.vectors is not None:
            self.size = self.vectors.shape[1]

    def rows(self, index: np.ndarray) -> dict[str, np.ndarray]:
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
        lines = []
        if self.classes is not None and self.labels is not None:
            label = int(self.labels[number])
            lines.append(f"class {label}: {self.classes.names[label]}")
        if self.vectors is not None:
            lines.append(f"condition: {np.array2string(self.vectors[number], threshold=16, precision=4)}")
        return lines


def _in_names(key: str) -> str:
    """A hint where the name of a file seems to say several things, such as 7_jackson_32.wav."""
    mark = re.search(r"[^\W_]([_=,-])[^\W_]", Path(key).stem)
    pattern = f"(?P<label>[^/{mark[1]}]+){mark[1]}" if mark is not None else ""
    return f'read it off their names with data.train.pattern, such as "{pattern}", ' if pattern else ""


@final
class _Keys(Sequence[str]):
    """The names of a table's records, each read when asked for."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, number):  # type: ignore[no-untyped-def]
        return self.table.row("key", number)


def _vectors(table: Table) -> np.ndarray:
    """[n, d]; in memory, because a worker process is sent it and a vector is small beside its sample."""
    if "condition" not in table.columns:
        raise DataError(
            f"{table.folder}: the samples have no condition, and condition is vector; name the field with "
            "data.condition_field"
        )
    lengths = table.lengths("condition")
    other = np.flatnonzero(lengths != lengths[0]) if len(lengths) else lengths
    if len(other):
        first, found = table.row("key", 0), table.row("key", int(other[0]))
        raise DataError(
            f"{found}: its condition has {lengths[other[0]]} numbers and that of {first} {lengths[0]}; make them equal"
        )
    return np.array(table.values("condition"), dtype=np.float32).reshape(len(table), -1)
