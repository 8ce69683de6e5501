"""Rows of numbers as samples: found in a record, and given noise and holes while training.

Where the expert that is right for a sample is known, it is the `rule` of its row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np

from bottega.core.errors import DataError
from bottega.core.noise import Noise
from bottega.data.numbers.config import MAX_RULES, VectorAugmentation
from bottega.data.numbers.numeric_fields import (
    Layout,
    assign_field_roles,
    is_empty,
    read_all_numbers,
    read_inputs,
    to_float_vector,
)
from bottega.data.prepare.encoder import Encoder
from bottega.data.records.fields import read_label
from bottega.data.records.record import Record, Unreadable
from bottega.data.sources.source import Source
from bottega.data.tables.shards import TEXT, Column, Table

NO_RULE = -1
BAYES = "bayes"
"""The chance that the best possible answer is right, of samples that were made."""


@final
@dataclass(frozen=True)
class VectorEncoder(Encoder):
    """One row for each record: x float32 [d], from one field, or from all numbers of a table's row but label and rule."""

    field: str | None = None
    label_field: str | None = None
    is_made: bool = False
    """Whether the records are synthetic, and so know how well they can be told."""
    num_rules: int | None = None
    """Declared by the recipe; None counts them in the data."""
    layout: Layout | None = None
    """Of the columns of a table; None takes all that hold numbers."""
    tables: tuple[Path, ...] = ()
    """Where the rows go, for what only all of them together show."""

    @property
    def columns(self) -> dict[str, Column]:
        # d is not known before the first record; VectorRows sees to it that all rows are equally wide.
        always = {"x": Column("<f4", varying=True), "key": TEXT, "label": TEXT, "rule": Column("<i4")}
        return {**always, BAYES: Column("<f4")} if self.is_made else always

    @property
    def metadata(self) -> dict[str, Any]:
        there = [table for table in map(Table, self.tables) if len(table)]
        found: dict[str, Any] = {}
        if self.layout is not None:
            found |= {"input_columns": list(self.layout.inputs), "left_out_columns": list(self.layout.left_out)}
        if (rules := _counted_rules(there)) is not None:
            found["num_rules"] = self.num_rules or rules
        if self.is_made:
            found["bayes_accuracy"] = {t.folder.name: round(float(t.values(BAYES).mean(dtype=float)), 6) for t in there}
        return found

    def rows(self, record: Record) -> Iterator[dict[str, Any]]:
        fields = record.fields
        for name in (self.field, self.label_field):
            if name is not None and fields.get(name) is None:
                raise Unreadable(f"no field {name!r}; the record has {', '.join(fields) or 'none'}")
        field, label, rule = assign_field_roles(fields, field=self.field, label_field=self.label_field)
        if field is not None:
            numbers = to_float_vector(fields[field], f"field {field!r}")
            if numbers is None:
                raise Unreadable(f"field {field!r} holds no numbers but {type(fields[field]).__name__}")
        elif self.layout is not None:
            numbers = read_inputs(fields, self.layout, excluded=(label, rule))
        else:
            numbers = read_all_numbers(fields, excluded=(label, rule))
        row = {"x": numbers, "key": record.key, "label": read_label(record, self.label_field, exclude=self.field)}
        yield {
            **row,
            "rule": NO_RULE if rule is None else _rule(fields[rule], rule),
            **({BAYES: fields[BAYES]} if self.is_made else {}),
        }


def _rule(value: Any, name: str) -> int:
    """The number of the right expert. An empty one is no rule, and all rows have one or none has."""
    if is_empty(value):
        return NO_RULE
    numbers = [value] if type(value) is int else to_float_vector(value, f"column {name!r}")
    number = float(numbers[0]) if numbers is not None and len(numbers) == 1 else None
    if number is None or not number.is_integer() or not 0 <= number < MAX_RULES:
        raise Unreadable(
            f"{name!r} is {value}, and it is the number of the right expert, from 0 to {MAX_RULES - 1}; number them so, or "
            "rename the column where it is an input"
        )
    return int(number)


def _counted_rules(tables: list[Table]) -> int | None:
    """How many there are, by the largest; None where no row has one."""
    most, missing = NO_RULE, None
    for table in tables:
        rules = table.values("rule")
        most = max(most, int(rules.max()))
        if missing is None and (rules == NO_RULE).any():
            missing = table.row("key", int(np.flatnonzero(rules == NO_RULE)[0]))
    if most == NO_RULE:
        return None
    if missing is not None:
        raise DataError(f"{missing}: has no rule, and other rows have one; give each its rule, or leave the column out")
    return most + 1


@final
class VectorRows(Source):
    """x float32 [b, d] and, where given, label int32 [b] and rule int32 [b], the number of the right expert; and bayes
    float32 [b], the chance that the best possible answer is right."""

    def __init__(
        self,
        data: np.ndarray | Table,
        *,
        labels: np.ndarray | None = None,
        rules: np.ndarray | None = None,
        bayes: np.ndarray | None = None,
        content: str | None = None,
        augmentation: VectorAugmentation | None = None,
        seed: int = 0,
    ) -> None:
        """`data` is [n, d] or the table of a VectorEncoder; `augmentation` is None where nothing is learned.

        `content` is the hash of what the data were made from; None reads them to make one.
        """
        self.data = data if isinstance(data, Table) else np.ascontiguousarray(data, dtype=np.float32)
        self.table = data if isinstance(data, Table) else None
        self.labels = None if labels is None else np.asarray(labels, dtype=np.int32)
        self.rules = None if rules is None else np.asarray(rules, dtype=np.int32)
        self.bayes = bayes
        self.augmentation = augmentation if augmentation is not None and augmentation.enabled else None
        self.content, self.seed = content, seed
        if len(self) == 0:
            raise DataError("there are no rows in the data")
        if self._x.ndim != 2:
            raise DataError(f"rows of numbers must be [n, d], got {list(self._x.shape)}")
        for name, given in (("labels", self.labels), ("rules", self.rules)):
            if given is not None and len(given) != len(self):
                raise DataError(f"{len(self)} rows and {len(given)} {name}")

    def __len__(self) -> int:
        return len(self.data)

    @property
    def num_inputs(self) -> int:
        return int(self._x.shape[1])

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        rows = {"x": self._x[index]}
        if self.augmentation is not None:
            rows["x"] = augment_vectors(rows["x"], self.augmentation, seed=self.seed, epoch=epoch, index=index)
        if self.labels is not None:
            rows["label"] = self.labels[index]
        if self.rules is not None:
            rows["rule"] = self.rules[index]
        if self.bayes is not None:
            rows[BAYES] = self.bayes[index]
        return rows

    @cached_property
    def fingerprint(self) -> str:
        content = self.content or hashlib.sha256(self._x.view(np.uint8).data).hexdigest()
        labels = None if self.labels is None else hashlib.sha256(self.labels.tobytes()).hexdigest()
        changes = self.augmentation.model_dump_json() if self.augmentation is not None else None
        parts: tuple[Any, ...] = (content, self._x.shape, labels, changes, self.seed if changes else None)
        if self.rules is not None:
            parts = (*parts, hashlib.sha256(self.rules.tobytes()).hexdigest())
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        rows = self.rows(np.array([index]), np.array([epoch]))
        key = f": {self.data.row('key', index)}" if isinstance(self.data, Table) else ""
        lines = [f"row {index} of {len(self)}{key}", f"x: {np.array2string(rows['x'][0], threshold=16, precision=4)}"]
        told = {"class": "label", "rule": "rule"}
        return "\n".join([*lines, *(f"{word} {rows[name][0]}" for word, name in told.items() if name in rows)])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_x"}

    @cached_property
    def _x(self) -> np.ndarray:
        if not isinstance(self.data, Table):
            return self.data
        lengths = self.data.lengths("x")
        other = np.flatnonzero(lengths != lengths[:1])
        if len(other):
            first, found = self.data.row("key", 0), self.data.row("key", int(other[0]))
            raise DataError(
                f"{found}: has {lengths[other[0]]} numbers and {first} has {lengths[0]}; all rows must be equally wide"
            )
        return self.data.values("x").reshape(len(self.data), -1)


def read_rules(table: Table) -> np.ndarray | None:
    """The rule of each row, where they have one; tables of an earlier version have none."""
    rules = table.values("rule") if "rule" in table.columns else None
    return None if rules is None or (len(rules) and int(rules.min()) == NO_RULE) else rules


def augment_vectors(
    x: np.ndarray, options: VectorAugmentation, *, seed: int, epoch: np.ndarray, index: np.ndarray
) -> np.ndarray:
    """[b, d] with noise added and then inputs set to 0; each row is f(seed, epoch, index), whatever batch it is in."""
    x = x.copy()
    # A batch across the border of two epochs has rows of both.
    for number in np.unique(epoch):
        rows = epoch == number
        noise = Noise(seed, int(number), index[rows].astype(np.int64))
        if options.noise_level:
            x[rows] += np.float32(options.noise_level) * noise.normal("vector noise", x.shape[1:])
        if options.mask_probability:
            # A draw is never 0 nor 1, so that a share of 0 masks nothing and a share of 1 everything.
            x[rows] *= noise.uniform("vector mask", x.shape[1:]) >= options.mask_probability
    return x
