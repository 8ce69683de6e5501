"""The arguments of a training step: the batch in micro-batches, and all that changes from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from bottega.core.batch import batch_length
from bottega.core.noise import derive_key
from bottega.core.types import Batch
from bottega.engines.jax.devices import convert_batch
from bottega.engines.jax.step import MicroBatches, StepInputs
from bottega.models.jax_noise import derive_noise_keys

if TYPE_CHECKING:
    from bottega.engines.jax.engine import JaxEngine


def build_inputs(
    engine: JaxEngine, step: int, batch: Batch, *, counts: Mapping[str, float], rate: float, average_decay: float
) -> StepInputs:
    """Return the arguments of a step, on the device."""
    size = batch_length(batch)
    micro_batch_size = min(engine.micro_batch_size or size, size)
    num_whole = size // micro_batch_size
    arrays = convert_batch(engine.task.bucket(batch))
    positions = np.arange(engine.data_rank * size, (engine.data_rank + 1) * size, dtype=np.uint32)
    groups = [_split(engine, step, arrays, positions, start=0, count=num_whole, size=micro_batch_size)]
    if rest := size % micro_batch_size:
        groups.append(_split(engine, step, arrays, positions, start=size - rest, count=1, size=rest))
    mesh = engine.mesh
    placed = tuple(
        MicroBatches(
            mesh.put_batch(group.batch, axis=1),
            mesh.put_batch(group.positions, axis=1),
            mesh.put_batch(group.dropout_keys, axis=2),
        )
        for group in groups
    )
    inputs = StepInputs(
        (),
        {name: mesh.put_count(count) for name, count in counts.items()},
        derive_noise_keys(engine.seed, step, engine.task.noise_names),
        np.float32(rate),
        np.bool_(step in engine.skip_steps),
        np.float32(average_decay),
    )
    if jax.process_count() > 1:  # values of the host are taken to be the same on all processes
        return inputs._replace(groups=placed)
    moved: StepInputs = jax.device_put(inputs, mesh.replicated)
    return moved._replace(groups=placed)


def _split(
    engine: JaxEngine,
    step: int,
    arrays: Mapping[str, Any],
    positions: np.ndarray,
    *,
    start: int,
    count: int,
    size: int,
) -> MicroBatches:
    """Return `count` micro-batches of `size` examples from the example `start` on."""

    def split_value(value: Any) -> Any:
        if value.ndim == 0:  # belongs to the whole batch
            return np.broadcast_to(value, (count,))
        return value[start : start + count * size].reshape(count, size, *value.shape[1:])

    first_number = 0 if start == 0 else start // max(1, engine.micro_batch_size or 1)
    # Only dropout depends on micro-batches; all other randomness is from `Noise`.
    keys = [derive_key(engine.seed, step, first_number + i, 0) for i in range(count)]
    return MicroBatches(
        jax.tree.map(split_value, dict(arrays)), split_value(positions), np.array(keys, np.uint32).reshape(count, 2)
    )


def move_batch(engine: JaxEngine, batch: Batch) -> dict[str, Any]:
    """Copy a host batch to the device, padded to a length that the task compiles for."""
    moved: dict[str, Any] = engine.mesh.put_batch(convert_batch(engine.task.bucket(batch)))
    return moved


def make_dropout_key() -> Any:
    """Return a key for a forward in training mode whose dropout does not matter, such as an inspection."""
    return jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32))
