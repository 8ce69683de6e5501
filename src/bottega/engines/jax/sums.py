"""Sums and means of metrics in JAX, fetched from the device together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from bottega.core.types import Rows

Array = Any
SAMPLE_INDEX = "index"
"""Field of an evaluation batch: the number of each sample in its data set."""


@dataclass(frozen=True)
class Mean:
    """A sum and its count on the device; `fetch_metrics` leaves out a mean over nothing."""

    value: Array
    count: Array


@dataclass(frozen=True)
class DeviceSum:
    """Numbers on the device that are to be added. Adding them there would round to float32, and wait in each step on the host."""

    values: tuple[Array, ...]

    def __add__(self, other: DeviceSum | float) -> DeviceSum:
        return DeviceSum((*self.values, *(other.values if isinstance(other, DeviceSum) else (other,))))

    __radd__ = __add__

    def __float__(self) -> float:
        """Return the sum, waiting for the device."""
        return float(np.sum(np.asarray(jax.device_get(self.values), np.float64)))


def fetch_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return all metrics as floats, waiting for the device once. Means over nothing are left out."""
    on_device = {
        name: (value.value, value.count)
        if isinstance(value, Mean)
        else value.values
        if isinstance(value, DeviceSum)
        else value
        for name, value in metrics.items()
    }
    fetched = jax.device_get(on_device)
    result: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mean):
            total, count = (float(x) for x in fetched[name])
            if count:
                result[name] = total / count
        elif isinstance(value, DeviceSum):
            result[name] = float(np.sum(np.asarray(fetched[name], np.float64)))
        else:
            result[name] = float(fetched[name])
    return result


def sort_rows(rows: Rows) -> Rows:
    """Return the rows in the order of the data set, whatever order it was read in, without padding examples."""
    rows = dict(rows)
    weights = rows.pop("weight", None)
    if weights is not None:
        rows = {name: values[weights > 0] for name, values in rows.items()}
    indices = rows.pop(SAMPLE_INDEX, None)
    return rows if indices is None else {name: values[np.argsort(indices)] for name, values in rows.items()}
