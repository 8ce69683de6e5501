"""Length and slices of a batch of host or device arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bottega.core.types import Batch


def batch_length(batch: Batch) -> int:
    """Return the number of examples. Scalars, such as a sample rate, belong to the whole batch and are not counted."""
    return next(batch_length(v) if isinstance(v, Mapping) else len(v) for v in batch.values() if _is_sliced(v))


def slice_batch(batch: Batch, start: int, stop: int) -> dict[str, Any]:
    """Return the examples `start` to `stop` of a (nested) batch; scalars are kept as they are."""

    def cut(value: Any) -> Any:
        if isinstance(value, Mapping):
            return slice_batch(value, start, stop)
        return value[start:stop] if _is_sliced(value) else value

    return {name: cut(value) for name, value in batch.items()}


def _is_sliced(value: Any) -> bool:
    return isinstance(value, Mapping) or value.ndim > 0
