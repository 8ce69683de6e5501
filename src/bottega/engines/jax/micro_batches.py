"""`training.micro_batch_size: auto` in JAX: the largest micro-batch whose compiled step fits, known before it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bottega.core.batch import batch_length
from bottega.core.types import Batch

if TYPE_CHECKING:
    from bottega.engines.jax.engine import JaxEngine

MAX_SHARE = 0.95
"""Share of the device's memory that a step may take; the rest is for evaluations and fragmentation."""


def fit_micro_batch(engine: JaxEngine, batch: Batch) -> int | None:
    """Return the largest micro-batch, the batch halved as often as necessary, whose step fits; None for the whole batch.

    Compiling tells the memory of a step, so nothing is tried out; on a CPU, which has no limit of its own, the whole batch is used.
    """
    limit = find_memory_limit(engine)
    if limit is None:
        return None
    whole = size = batch_length(batch)
    while True:
        engine.micro_batch_size = None if size == whole else size
        analysis = engine.analyse_step(batch)
        smaller = size // 2
        fits = analysis is None or count_bytes(analysis) <= MAX_SHARE * limit
        if fits or smaller < engine.mesh.num_data or smaller % engine.mesh.num_data:
            return engine.micro_batch_size
        size = smaller


def find_memory_limit(engine: JaxEngine) -> int | None:
    """Return the bytes that JAX may use on the device; None if the device does not tell."""
    statistics = engine.device.memory_stats() if engine.device_type == "cuda" else None
    return int(statistics["bytes_limit"]) if statistics else None


def count_bytes(analysis: Any) -> int:
    """Return the bytes that a compiled step needs at once: its arguments, which its results reuse, and temporary values."""
    return int(
        analysis.argument_size_in_bytes
        + analysis.temp_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
    )
