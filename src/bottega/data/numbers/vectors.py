"""Encode records as vectors, and read vectors as samples, with noise and masking for training.

If the correct expert of a sample is known, its index is the `rule` of the row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
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
"""Rule of a row whose correct expert is unknown."""
BAYES = "bayes"
"""Column of synthetic samples: the probability that the Bayes-optimal prediction is correct."""


@final
@dataclass(frozen=True)
class VectorEncoder(Encoder):
    """Encode each record as `x`, float32 `(d,)`: one field, or all numbers of a table row except label and rule."""

    field: str | None = None
    label_field: str | None = None
    is_made: bool = False
    """Whether the records are synthetic, and so have the field `bayes`."""
    num_rules: int | None = None
    """Number of rules set by the recipe; None counts them in the data."""
    layout: Layout | None = None
    """Which columns of a table are inputs; None uses all numeric columns."""
    tables: tuple[Path, ...] = ()
    """Folders of the tables that are written, for metadata that needs all rows."""

    @property
    def columns(self) -> dict[str, Column]:
        # d is unknown before the first record; VectorRows checks that all rows have the same width.
        columns = {"x": Column("<f4", varying=True), "key": TEXT, "label": TEXT, "rule": Column("<i4")}
        return {**columns, BAYES: Column("<f4")} if self.is_made else columns

    @property
    def metadata(self) -> dict[str, Any]:
        tables = [table for table in map(Table, self.tables) if len(table)]
        metadata: dict[str, Any] = {}
        if self.layout is not None:
            metadata |= {"input_columns": list(self.layout.inputs), "left_out_columns": list(self.layout.left_out)}
        if (num_rules := _count_rules(tables)) is not None:
            metadata["num_rules"] = self.num_rules or num_rules
        if self.is_made:
            metadata["bayes_accuracy"] = {
                table.folder.name: round(float(table.values(BAYES).mean(dtype=float)), 6) for table in tables
            }
        return metadata

    def rows(self, record: Record) -> Iterator[dict[str, Any]]:
        fields = record.fields
        for name in (self.field, self.label_field):
            if name is not None and fields.get(name) is None:
                raise Unreadable(f"has no field {name!r}; it has {', '.join(fields) or 'none'}")
        field, label, rule = assign_field_roles(fields, field=self.field, label_field=self.label_field)
        if field is not None:
            numbers = to_float_vector(fields[field], f"field {field!r}")
            if numbers is None:
                raise Unreadable(
                    f"field {field!r} contains no numbers but {type(fields[field]).__name__}; set data.train.field to "
                    "one that does"
                )
        elif self.layout is not None:
            numbers = read_inputs(fields, self.layout, excluded=(label, rule))
        else:
            numbers = read_all_numbers(fields, excluded=(label, rule))
        row = {"x": numbers, "key": record.key, "label": read_label(record, self.label_field, exclude=self.field)}
        yield {
            **row,
            "rule": NO_RULE if rule is None else _parse_rule(fields[rule], rule),
            **({BAYES: fields[BAYES]} if self.is_made else {}),
        }


def _parse_rule(value: Any, name: str) -> int:
    """Return the index of the correct expert, or NO_RULE if the cell is empty."""
    if is_empty(value):
        return NO_RULE
    numbers = [value] if type(value) is int else to_float_vector(value, f"column {name!r}")
    number = float(numbers[0]) if numbers is not None and len(numbers) == 1 else None
    if number is None or not number.is_integer() or not 0 <= number < MAX_RULES:
        raise Unreadable(
            f"column {name!r} is {value}; expected the index of the correct expert, from 0 to {MAX_RULES - 1}; "
            "correct it, or "
            "rename the column if it is an input"
        )
    return int(number)


def _count_rules(tables: list[Table]) -> int | None:
    """Return the number of rules, by the largest index; None if no row has one."""
    largest, missing_key = NO_RULE, None
    for table in tables:
        rules = table.values("rule")
        largest = max(largest, int(rules.max()))
        if missing_key is None and (rules == NO_RULE).any():
            missing_key = table.row("key", int(np.flatnonzero(rules == NO_RULE)[0]))
    if largest == NO_RULE:
        return None
    if missing_key is not None:
        raise DataError(f"{missing_key}: has no rule, but other rows have one; fill in all rows, or remove the column")
    return largest + 1


@final
class VectorRows(Source):
    """Samples with `x`, float32 `(batch, d)`, and optionally `label` and `rule`, int32 `(batch,)`, and `bayes`, float32.

    `rule` is the index of the correct expert, `bayes` the probability that the Bayes-optimal prediction is correct.
    """

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
        """`data` is an array `(samples, d)` or the table of a VectorEncoder; `augmentation` is for training only.

        `content` is the hash of the files that the data was made from; None hashes the data.
        """
        self.data = data if isinstance(data, Table) else np.ascontiguousarray(data, dtype=np.float32)
        self.table = data if isinstance(data, Table) else None
        self.labels = None if labels is None else np.asarray(labels, dtype=np.int32)
        self.rules = None if rules is None else np.asarray(rules, dtype=np.int32)
        self.bayes = bayes
        self.augmentation = augmentation if augmentation is not None and augmentation.enabled else None
        self.content, self.seed = content, seed
        if len(self) == 0:
            raise DataError("the data has no rows; check data.train.path")
        if self._x.ndim != 2:
            raise DataError(f"rows of numbers must have shape (samples, d), got {self._x.shape}")
        for name, values in (("labels", self.labels), ("rules", self.rules)):
            if values is not None and len(values) != len(self):
                raise DataError(f"the data has {len(self)} rows, but there are {len(values)} {name}")

    def __len__(self) -> int:
        return len(self.data)

    @property
    def num_inputs(self) -> int:
        """The width of a row."""
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
        augmentation = self.augmentation.model_dump_json() if self.augmentation is not None else None
        parts: tuple[Any, ...] = (content, self._x.shape, labels, augmentation, self.seed if augmentation else None)
        if self.rules is not None:
            parts = (*parts, hashlib.sha256(self.rules.tobytes()).hexdigest())
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        rows = self.rows(np.array([index]), np.array([epoch]))
        key = f": {self.data.row('key', index)}" if isinstance(self.data, Table) else ""
        lines = [f"row {index} of {len(self)}{key}", f"x: {np.array2string(rows['x'][0], threshold=16, precision=4)}"]
        names = {"class": "label", "rule": "rule"}
        return "\n".join([*lines, *(f"{word} {rows[name][0]}" for word, name in names.items() if name in rows)])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_x"}

    @cached_property
    def _x(self) -> np.ndarray:
        if not isinstance(self.data, Table):
            return self.data
        lengths = self.data.lengths("x")
        different = np.flatnonzero(lengths != lengths[:1])
        if len(different):
            first_key, other_key = self.data.row("key", 0), self.data.row("key", int(different[0]))
            raise DataError(
                f"{other_key}: has {lengths[different[0]]} numbers, but {first_key} has {lengths[0]}; make all rows equally long"
            )
        return self.data.values("x").reshape(len(self.data), -1)


def read_rules(table: Table) -> np.ndarray | None:
    """Return the rule of each row; None if a row has no rule, or an earlier version wrote the table."""
    rules = table.values("rule") if "rule" in table.columns else None
    return None if rules is None or (len(rules) and int(rules.min()) == NO_RULE) else rules


def augment_vectors(
    x: np.ndarray, options: VectorAugmentation, *, seed: int, epoch: np.ndarray, index: np.ndarray
) -> np.ndarray:
    """Return `(batch, d)` with added noise and then masked inputs; each row is a function of (seed, epoch, index)."""
    x = x.copy()
    # A batch may have rows of two epochs.
    for epoch_number in np.unique(epoch):
        in_epoch = epoch == epoch_number
        noise = Noise(seed, int(epoch_number), index[in_epoch].astype(np.int64))
        if options.noise_level:
            x[in_epoch] += np.float32(options.noise_level) * noise.normal("vector noise", x.shape[1:])
        if options.mask_probability:
            # Draws are never 0 or 1, so that a probability of 0 masks nothing and 1 everything.
            x[in_epoch] *= noise.uniform("vector mask", x.shape[1:]) >= options.mask_probability
    return x


def fit_standardization(sources: Sequence[VectorRows]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and reciprocal standard deviation of each input over `sources`; the reciprocal is 1 for a constant input."""
    count = sum(len(source) for source in sources)
    mean = np.sum([_sum_inputs(source, lambda x: x) for source in sources], axis=0) / count
    variance = np.sum([_sum_inputs(source, lambda x: (x - mean) ** 2) for source in sources], axis=0) / count
    deviation = np.sqrt(variance)
    scale = np.where(deviation > 1e-12, 1 / np.maximum(deviation, 1e-12), 1.0)
    return tuple(mean.tolist()), tuple(scale.tolist())


def _sum_inputs(source: VectorRows, compute: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return the sum of `compute(inputs)` over all rows, (inputs,) in float64, computed 65,536 rows at a time."""
    total = np.zeros(source.num_inputs)
    for start in range(0, len(source), 65_536):
        index = np.arange(start, min(start + 65_536, len(source)))
        total += compute(source.rows(index, np.zeros_like(index))["x"].astype(np.float64)).sum(0)
    return total
