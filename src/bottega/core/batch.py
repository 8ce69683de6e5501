"""Examples of a batch: how many there are, and some of them, whichever side of the engine it is on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bottega.core.types import Batch


def batch_length(batch: Batch) -> int:
    """Examples in a batch. A single number, such as a sample rate, is of the whole batch."""
    return next(batch_length(v) if isinstance(v, Mapping) else len(v) for v in batch.values() if _is_sliced(v))


def slice_batch(batch: Batch, start: int, stop: int) -> dict[str, Any]:
    def cut(value: Any) -> Any:
        if isinstance(value, Mapping):
            return slice_batch(value, start, stop)
        return value[start:stop] if _is_sliced(value) else value

    return {name: cut(value) for name, value in batch.items()}


def _is_sliced(value: Any) -> bool:
    return isinstance(value, Mapping) or value.ndim > 0
