"""Length and slices of a batch of host or device arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bottega.core.types import Batch


def batch_length(batch: Batch) -> int:
    """Return the number of examples. Scalars, such as a sample rate, belong to the whole batch and are not counted."""
    return next(batch_length(v) if isinstance(v, Mapping) else len(v) for v in batch.values() if _has_example_axis(v))


def slice_batch(batch: Batch, start: int, stop: int) -> dict[str, Any]:
    """Return the examples `start` to `stop` of a (nested) batch; scalars are kept as they are."""

    def slice_value(value: Any) -> Any:
        if isinstance(value, Mapping):
            return slice_batch(value, start, stop)
        return value[start:stop] if _has_example_axis(value) else value

    return {name: slice_value(value) for name, value in batch.items()}


def _has_example_axis(value: Any) -> bool:
    return isinstance(value, Mapping) or value.ndim > 0
