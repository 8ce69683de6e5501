"""Cross-entropy over a vocabulary in JAX, fused with the output layer so that the logits are never materialised as a whole.

N rows   D hidden size   V vocabulary
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from bottega.models.jax_layers import get_platform
from bottega.models.losses import IGNORE_INDEX

Array = Any
CHUNK_BYTES = {"gpu": 384 << 20, "cpu": 16 << 20}
"""Size of one chunk of logits, as in torch."""


def cap_logits(logits: Array, softcap: float | None) -> Array:
    """Return c * tanh(logits / c) in float32 for a cap c; the logits themselves without one."""
    if softcap is None:
        return logits
    return softcap * jnp.tanh(logits.astype(jnp.float32) / softcap)


def linear_cross_entropy(
    hidden: Array,
    weight: Array,
    targets: Array,
    *,
    dtype: Any,
    softcap: float | None = None,
    num_chunks: int | None = None,
) -> Array:
    """Return the sum over rows of -log softmax(hidden @ weight.T)[target] as a float32 scalar, without ignored targets.

    hidden (N, D), weight (V, D), targets (N). The products are computed in `dtype`, the softmax and the gradient of the weight in
    float32. The forward of a gradient computes the gradient too, chunk by chunk: the loss is a sum, so the backward only scales it.
    """
    itemsize = jnp.dtype(dtype).itemsize
    budget = CHUNK_BYTES["cpu" if get_platform() == "cpu" else "gpu"]
    num_chunks = num_chunks or max(1, -(-len(hidden) * weight.shape[0] * itemsize // budget))
    num_padding = -len(hidden) % num_chunks
    hidden = jnp.pad(hidden.astype(dtype), ((0, num_padding), (0, 0)))
    targets = jnp.pad(targets, (0, num_padding), constant_values=IGNORE_INDEX)
    return _sum_losses(hidden, weight, targets, num_chunks, softcap, jnp.dtype(dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _sum_losses(
    hidden: Array, weight: Array, targets: Array, num_chunks: int, softcap: float | None, dtype: Any
) -> Array:
    matrix = weight.astype(dtype)

    def add_chunk(total: Array, chunk: tuple[Array, Array]) -> tuple[Array, None]:
        rows, columns = chunk
        return total + _compute_losses(rows, matrix, columns, softcap)[0].sum(), None

    return jax.lax.scan(add_chunk, jnp.zeros(()), _split(hidden, targets, num_chunks))[0]


def _compute_with_gradients(
    hidden: Array, weight: Array, targets: Array, num_chunks: int, softcap: float | None, dtype: Any
) -> tuple[Array, tuple[Array, Array, Any]]:
    matrix = weight.astype(dtype)

    def add_chunk(carry: tuple[Array, Array], chunk: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
        (total, grad_weight), (rows, columns) = carry, chunk
        losses, logits, log_sums = _compute_losses(rows, matrix, columns, softcap)
        gradient = jnp.exp(logits - log_sums[:, None]) - jax.nn.one_hot(columns, logits.shape[1], dtype=logits.dtype)
        if softcap is not None:
            gradient = gradient * (1 - jnp.square(logits / softcap))
        gradient = jnp.where((columns != IGNORE_INDEX)[:, None], gradient, 0.0).astype(dtype)
        grad_weight = grad_weight + jnp.einsum("nv,nd->vd", gradient, rows, preferred_element_type=jnp.float32)
        return (total + losses.sum(), grad_weight), gradient @ matrix

    start = (jnp.zeros(()), jnp.zeros(weight.shape, jnp.float32))
    (total, grad_weight), grad_hidden = jax.lax.scan(add_chunk, start, _split(hidden, targets, num_chunks))
    return total, (grad_hidden.swapaxes(0, 1).reshape(hidden.shape), grad_weight, jnp.zeros((0,), weight.dtype))


def _scale_gradients(
    num_chunks: int, softcap: float | None, dtype: Any, saved: tuple[Array, Array, Any], grad: Array
) -> tuple[Array, Array, None]:
    grad_hidden, grad_weight, like_weight = saved
    return grad_hidden * grad.astype(grad_hidden.dtype), (grad_weight * grad).astype(like_weight.dtype), None


_sum_losses.defvjp(_compute_with_gradients, _scale_gradients)


def _split(hidden: Array, targets: Array, num_chunks: int) -> tuple[Array, Array]:
    """Return every num_chunks-th row in one chunk: of rows that are split over devices, each device has a part of every chunk."""
    return hidden.reshape(-1, num_chunks, hidden.shape[1]).swapaxes(0, 1), targets.reshape(-1, num_chunks).T


def _compute_losses(rows: Array, matrix: Array, columns: Array, softcap: float | None) -> tuple[Array, Array, Array]:
    """Return the loss of each row (0 where ignored), the capped logits, and the logarithms of the sums of their exponentials."""
    logits = jnp.einsum("nd,vd->nv", rows, matrix, preferred_element_type=jnp.float32)
    logits = cap_logits(logits, softcap)
    log_sums = jax.nn.logsumexp(logits, axis=1)
    is_counted = columns != IGNORE_INDEX
    own = jnp.take_along_axis(logits, jnp.where(is_counted, columns, 0)[:, None], axis=1)[:, 0]
    return jnp.where(is_counted, log_sums - own, 0.0), logits, log_sums
