"""Classifier-free guidance: the prediction under a condition, extrapolated from that without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bottega.core.types import Array
from bottega.tasks.generation.arrays import as_float32, get_namespace
from bottega.tasks.generation.solvers import Predict

MAX_JOINED_ROWS = 64
"""Largest batch whose two passes of guidance are joined on a GPU. A larger batch fills a device by itself, and twice as many rows would
take twice the memory."""


def guide(
    model: Callable[..., Array],
    condition: Mapping[str, Array],
    dropped: Mapping[str, Array],
    *,
    guidance: float,
    joins_passes: bool,
) -> Predict:
    """Return the prediction under `condition`, extrapolated from that under the `dropped` one (classifier-free guidance).

    Guidance 1 is the conditional model, 0 the unconditional one, which need one pass only. `joins_passes` computes both
    passes in one batch, which is equal up to rounding.
    """
    if guidance in (0, 1):
        chosen = condition if guidance == 1 else dropped
        return lambda x, time: model(x, time, **chosen)
    return extrapolate(model, condition, dropped, guidance=guidance, joins_passes=joins_passes)


def extrapolate(
    model: Callable[..., Array],
    condition: Mapping[str, Array],
    dropped: Mapping[str, Array],
    *,
    guidance: Array,
    joins_passes: bool,
) -> Predict:
    """Return the prediction from both passes; `guidance` may be traced by JAX."""

    def join(first: Array, second: Array) -> Array:
        return get_namespace(first).concatenate((first, second))

    joined = {name: join(value, dropped[name]) for name, value in condition.items()} if joins_passes else {}

    def predict(x: Array, time: Array) -> Array:
        if joins_passes:
            both = as_float32(model(join(x, x), join(time, time), **joined))
            conditional, unconditional = both[: len(x)], both[len(x) :]
        else:
            conditional, unconditional = (as_float32(model(x, time, **part)) for part in (condition, dropped))
        return unconditional + guidance * (conditional - unconditional)

    return predict
