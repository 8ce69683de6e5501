"""Rows of numbers as samples: found in a record, and given noise and holes while training."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np

from bottega.core.errors import DataError
from bottega.core.noise import Noise
from bottega.data.encoder import Encoder
from bottega.data.fields import label_name, label_of, own_names
from bottega.data.record import Record, Unreadable
from bottega.data.shards import TEXT, Column, Table
from bottega.data.source import Source
from bottega.schema.routing import VectorAugmentation

VECTORS = ("x", "inputs", "features", "vector", "array")


@final
@dataclass(frozen=True)
class VectorEncoder(Encoder):
    """One row for each record: x float32 [d], from one field, or from all numbers of a table's row but the label."""

    field: str | None = None
    label_field: str | None = None

    @property
    def columns(self) -> dict[str, Column]:
        # d is not known before the first record; VectorRows sees to it that all rows are equally wide.
        return {"x": Column("<f4", varying=True), "key": TEXT, "label": TEXT}

    def rows(self, record: Record) -> Iterator[dict[str, Any]]:
        fields = record.fields
        for name in (self.field, self.label_field):
            if name is not None and fields.get(name) is None:
                raise Unreadable(f"no field {name!r}; the record has {', '.join(fields) or 'none'}")
        label = label_name(fields, self.label_field, besides=self.field)
        field = self.field or next((name for name in VECTORS if fields.get(name) is not None and name != label), None)
        if field is not None:
            numbers = _numbers(fields[field], field)
            if numbers is None:
                raise Unreadable(f"field {field!r} holds no numbers but {type(fields[field]).__name__}")
        else:
            numbers = _all_numbers(fields, without={label, *own_names(fields)})
        yield {"x": numbers, "key": record.key, "label": label_of(record, self.label_field, besides=self.field)}


def _all_numbers(fields: Mapping[str, Any], *, without: Collection[str | None]) -> np.ndarray:
    found = []
    # By name, because some formats (TFRecord) keep no order: feature 3 of one row would be feature 5 of the next.
    for name in sorted(fields):
        if name in without:
            continue
        if fields[name] is None or (isinstance(fields[name], str) and not fields[name]):
            raise Unreadable(f"column {name!r} has no value; fill it, leave it out, or name one field of numbers")
        numbers = _numbers(fields[name], name)
        if numbers is not None:
            found.append(numbers)
    if not found:
        raise Unreadable(f"no numbers among its fields ({', '.join(fields) or 'none'})")
    return np.concatenate(found)


def _numbers(value: Any, name: str) -> np.ndarray | None:
    """float32 [d], or None where it is no number, no array and no list of numbers. A number written out counts."""
    try:
        array = np.asarray(float(value) if isinstance(value, str) else value).reshape(-1)
    except ValueError:
        return None
    if array.dtype.kind not in "biuf" or not len(array):
        return None
    with np.errstate(over="ignore"):
        array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise Unreadable(f"{name!r}: its number {int(np.flatnonzero(~np.isfinite(array))[0]) + 1} is not finite")
    return array


@final
class VectorRows(Source):
    """x float32 [b, d] and, where given, label int32 [b]."""

    def __init__(
        self,
        data: np.ndarray | Table,
        *,
        labels: np.ndarray | None = None,
        content: str | None = None,
        augmentation: VectorAugmentation | None = None,
        seed: int = 0,
    ) -> None:
        """`data` is [n, d] or the table of a VectorEncoder; `augmentation` is None where nothing is learned.

        `content` is the hash of what the data were made from; None reads them to make one.
        """
        self.data = data if isinstance(data, Table) else np.ascontiguousarray(data, dtype=np.float32)
        self.labels = None if labels is None else np.asarray(labels, dtype=np.int32)
        self.augmentation = augmentation if augmentation is not None and augmentation.enabled else None
        self.content, self.seed = content, seed
        if len(self) == 0:
            raise DataError("there are no rows in the data")
        if self._x.ndim != 2:
            raise DataError(f"rows of numbers must be [n, d], got {list(self._x.shape)}")
        if self.labels is not None and len(self.labels) != len(self):
            raise DataError(f"{len(self)} rows and {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.data)

    @property
    def num_inputs(self) -> int:
        return int(self._x.shape[1])

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        rows = {"x": self._x[index]}
        if self.augmentation is not None:
            rows["x"] = vary(rows["x"], self.augmentation, seed=self.seed, epoch=epoch, index=index)
        if self.labels is not None:
            rows["label"] = self.labels[index]
        return rows

    @cached_property
    def fingerprint(self) -> str:
        content = self.content or hashlib.sha256(self._x.view(np.uint8).data).hexdigest()
        labels = None if self.labels is None else hashlib.sha256(self.labels.tobytes()).hexdigest()
        changes = self.augmentation.model_dump_json() if self.augmentation is not None else None
        parts = (content, self._x.shape, labels, changes, self.seed if changes else None)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        rows = self.rows(np.array([index]), np.array([epoch]))
        key = f": {self.data.row('key', index)}" if isinstance(self.data, Table) else ""
        lines = [f"row {index} of {len(self)}{key}", f"x: {np.array2string(rows['x'][0], threshold=16, precision=4)}"]
        return "\n".join([*lines, *([f"class {rows['label'][0]}"] if "label" in rows else [])])

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


def vary(x: np.ndarray, options: VectorAugmentation, *, seed: int, epoch: np.ndarray, index: np.ndarray) -> np.ndarray:
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
