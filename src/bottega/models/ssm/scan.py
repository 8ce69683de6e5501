"""Selective scan of a state-space layer: the recurrence that defines it, and a chunked form with matrix products.

    h[t] = exp(dt[t] A) h[t-1] + dt[t] x[t] B[t]        y[t] = C[t] h[t]

B batch   T tokens   H heads   P head size   N state size   G groups of heads   R heads per group
K chunks   L tokens per chunk

x [B, T, H, P]   dt [B, T, H], not negative   A [H], negative   B, C [B, T, G, N]   state [B, H, P, N]

Decays and states are float32 whatever the precision of x: rounding a rate near 1 changes how fast it forgets.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_CHUNKS_PER_PRODUCT = 256
"""Maximum number of chunks whose states are passed on in one matrix product. Its cost is quadratic in their number: at a
million tokens a single product would cost more than the rest of the layer. For fewer chunks, large products are faster."""


def scan_step(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the new state of one token: x (B, H, P), dt (B, H), B and C (B, G, N)."""
    dtype = state.dtype
    heads_per_group = x.shape[1] // B.shape[1]
    dt = dt.to(dtype)
    B, C = (t.to(dtype).repeat_interleave(heads_per_group, dim=1) for t in (B, C))
    update = (x.to(dtype) * dt[..., None])[..., None] * B[:, :, None, :]
    # expm1, because exp(-0.0001) is off by 3e-8 in float32, which is a relative error of 3e-4 in the rate.
    state = state + (torch.expm1(dt * A.to(dtype))[..., None, None] * state + update)
    return (state * C[:, :, None, :]).sum(-1).to(x.dtype), state


def scan_recurrent(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    state: Tensor | None = None,
    resets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the scan token by token, as defined. Where `resets` (B, T) is true, the state is set to 0 before the token."""
    if state is None:
        state = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[3], dtype=_choose_exact_dtype(x))
    outputs = []
    if not x.shape[1]:
        return x, state
    for t in range(x.shape[1]):
        if resets is not None:
            state = state.masked_fill(resets[:, t, None, None, None], 0.0)
        y, state = scan_step(x[:, t], dt[:, t], A, B[:, t], C[:, t], state=state)
        outputs.append(y)
    return torch.stack(outputs, dim=1), state


def scan_chunked(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk: int,
    state: Tensor | None = None,
    resets: Tensor | None = None,
    use_kernels: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the scan with matrix products: attention-like within a chunk, and states between chunks.

    See Dao & Gu 2024, section 6. Any length is allowed; a length of 0 returns the state unchanged. With `use_kernels` and
    without a state, the operator of `scan_kernel`, which must be imported, passes the states on.
    """
    assert chunk > 0, f"chunk must be 1 token or more, got {chunk}"
    if not x.shape[1]:
        return scan_recurrent(x, dt, A, B, C, state=state)
    length, chunk, groups = x.shape[1], min(chunk, x.shape[1]), B.shape[2]
    # A time step of 0 neither forgets nor writes, so the padding of the last chunk changes no state.
    x, dt, B, C = (_split_chunks(t, chunk) for t in (x, dt.to(_choose_exact_dtype(x)), B, C))
    segment = None if resets is None else _split_chunks(resets, chunk).cumsum(2)
    decay_sums = _sum_cumulatively(dt * A.to(dt.dtype), dim=2)
    scaled_inputs = (x * dt[..., None]).to(x.dtype).unflatten(3, (groups, -1))
    y = _compute_output_within_chunks(scaled_inputs, B, C, decay_sums, segment)
    states_before, state = _compute_states_between_chunks(
        scaled_inputs, B, decay_sums, segment, state, use_kernels=use_kernels
    )
    if states_before is not None:
        y = y + _compute_output_from_states(C, states_before, decay_sums, segment)
    return y.to(x.dtype).flatten(3, 4).flatten(1, 2)[:, :length], state


def _choose_exact_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _split_chunks(x: Tensor, chunk: int) -> Tensor:
    """Split into chunks, (B, T, ...) -> (B, K, L, ...), padded with zeros."""
    missing = -x.shape[1] % chunk
    if missing:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
    return x.unflatten(1, (-1, chunk))


def _sum_cumulatively(x: Tensor, *, dim: int) -> Tensor:
    """Return the inclusive cumulative sum in float64.

    The decay between two tokens is a difference of two sums, in which float32 would lose digits. It is a product with a
    triangular matrix, because the cumulative sum of a GPU has no fixed order of additions.
    """
    dtype = torch.float32 if x.device.type == "mps" else torch.float64  # Apple GPUs have no float64
    triangle = torch.ones(x.shape[dim], x.shape[dim], dtype=dtype, device=x.device).tril()
    return (triangle @ x.to(dtype).movedim(dim, -2)).movedim(-2, dim)


def _compute_output_within_chunks(
    scaled_inputs: Tensor, B: Tensor, C: Tensor, decay_sums: Tensor, segment: Tensor | None
) -> Tensor:
    """Return the output of each token from its own chunk, (B, K, L, G, R, P)."""
    chunk, groups = scaled_inputs.shape[2:4]
    visible = torch.ones(chunk, chunk, dtype=torch.bool, device=scaled_inputs.device).tril()
    if segment is not None:
        visible = (visible & (segment[..., :, None] == segment[..., None, :]))[:, :, None]
    decay_sums = decay_sums.transpose(2, 3)
    # Float64 as two float32, the second the rounding error of the first: most of the time goes into this L x L
    # matrix, for which float64 would cost twice as much.
    high = decay_sums.to(_choose_exact_dtype(scaled_inputs))
    low = (decay_sums.detach() - high.detach()).to(high.dtype)
    log_decay = (high[..., :, None] - high[..., None, :]) + (low[..., :, None] - low[..., None, :])
    decay = torch.exp(log_decay.masked_fill(~visible, -torch.inf)).unflatten(2, (groups, -1))
    scores = torch.einsum("bklgn,bksgn->bkgls", C, B)
    return torch.einsum("bkgrls,bksgrp->bklgrp", (scores[:, :, :, None] * decay).to(scaled_inputs.dtype), scaled_inputs)


def _compute_states_between_chunks(
    scaled_inputs: Tensor,
    B: Tensor,
    decay_sums: Tensor,
    segment: Tensor | None,
    state: Tensor | None,
    *,
    use_kernels: bool,
) -> tuple[Tensor | None, Tensor]:
    """Return the state before each chunk, (B, K, H, P, N), and the one after the last."""
    dtype = _choose_exact_dtype(scaled_inputs)
    remaining = torch.exp((decay_sums[:, :, -1:] - decay_sums).to(dtype))
    if segment is not None:
        remaining = remaining * (segment == segment[:, :, -1:])[..., None]
    decayed = (scaled_inputs * remaining.unflatten(3, scaled_inputs.shape[3:5])[..., None]).to(scaled_inputs.dtype)
    added = torch.einsum("bklgn,bklgrp->bkgrpn", B, decayed)
    if use_kernels and state is None and added.shape[1] > 1:
        decay = _compute_remaining_fraction(
            decay_sums[:, :, -1], None if segment is None else segment[:, :, -1:], dtype
        )
        states_before, last = torch.ops.bottega.pass_states(added.flatten(2, 3).flatten(-2), decay)
        return states_before.unflatten(-1, added.shape[-2:]), last.unflatten(-1, added.shape[-2:])
    added = added.permute(0, 2, 3, 1, 4, 5).to(dtype).flatten(1, 2)
    total = decay_sums[:, :, -1].transpose(1, 2)
    num_resets = None if segment is None else segment[:, None, :, -1]
    state = None if state is None else state.to(dtype).flatten(-2)
    states_before, last = _pass_states(added.flatten(-2), total, num_resets, state)
    shape = added.shape[-2:]
    return None if states_before is None else states_before.transpose(1, 2).unflatten(-1, shape), last.unflatten(
        -1, shape
    )


def _pass_states(
    added: Tensor, total: Tensor, num_resets: Tensor | None, state: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """Return the state before each chunk, (..., K, M), and after the last.

    A chunk multiplies the state by exp(total) and adds `added`.

    added (..., K, M), total (..., K), num_resets (..., K), state (..., M), where M = P N. A chunk with a reset forgets the
    state before it. The first result is None if all states before are 0.
    """
    num_chunks = added.shape[-2]
    if num_chunks > MAX_CHUNKS_PER_PRODUCT:
        return _pass_states_in_groups(added, total, num_resets, state)
    if num_chunks == 1 and state is None:
        return None, added[..., 0, :]
    sums, resets_until = _sum_cumulatively(total, dim=-1), None if num_resets is None else num_resets.cumsum(-1)
    # Sums before each chunk and, as the last row, after all.
    sums_before, resets_before = F.pad(sums, (1, 0)), None if resets_until is None else F.pad(resets_until, (1, 0))
    order = torch.ones(num_chunks + 1, num_chunks, dtype=torch.bool, device=added.device).tril(diagonal=-1)
    visible = (
        order
        if resets_until is None or resets_before is None
        else order & (resets_before[..., :, None] == resets_until[..., None, :])
    )
    log_decay = (sums_before[..., :, None] - sums[..., None, :]).to(added.dtype)
    decay = torch.exp(log_decay.masked_fill(~visible, -torch.inf))
    # Two products, since K + 1 rows would not fit the matrix units, and training does not use the last row.
    states_before, last = decay[..., :-1, :].contiguous() @ added, (decay[..., -1:, :] @ added)[..., 0, :]
    if state is not None:
        remaining = _compute_remaining_fraction(sums_before, resets_before, added.dtype)[..., None]
        states_before, last = (
            states_before + remaining[..., :-1, :] * state[..., None, :],
            last + remaining[..., -1, :] * state,
        )
    return states_before, last


def _pass_states_in_groups(
    added: Tensor, total: Tensor, num_resets: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Pass states within groups of chunks that start from 0, then from group to group."""
    num_chunks = added.shape[-2]
    missing = -num_chunks % MAX_CHUNKS_PER_PRODUCT
    added = F.pad(added, (0, 0, 0, missing)).unflatten(-2, (-1, MAX_CHUNKS_PER_PRODUCT))
    total = F.pad(total, (0, missing)).unflatten(-1, (-1, MAX_CHUNKS_PER_PRODUCT))
    num_resets = (
        None if num_resets is None else F.pad(num_resets, (0, missing)).unflatten(-1, (-1, MAX_CHUNKS_PER_PRODUCT))
    )
    inner, ends = _pass_states(added, total, num_resets, None)
    starts, last = _pass_states(ends, total.sum(-1), None if num_resets is None else num_resets.sum(-1), state)
    assert inner is not None, "a group has more than one chunk"
    assert starts is not None, "there are at least two groups"
    sums_before = F.pad(_sum_cumulatively(total, dim=-1)[..., :-1], (1, 0))
    resets_before = None if num_resets is None else F.pad(num_resets.cumsum(-1)[..., :-1], (1, 0))
    states_before = (
        inner + _compute_remaining_fraction(sums_before, resets_before, added.dtype)[..., None] * starts[..., None, :]
    )
    return states_before.flatten(-3, -2)[..., :num_chunks, :], last


def _compute_remaining_fraction(sums: Tensor, num_resets: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the fraction that remains of the state before the first position."""
    remaining = torch.exp(sums.to(dtype))
    return remaining if num_resets is None else remaining * (num_resets == 0)


def _compute_output_from_states(C: Tensor, states_before: Tensor, decay_sums: Tensor, segment: Tensor | None) -> Tensor:
    """Return the output of each token from the state before its chunk, (B, K, L, G, R, P)."""
    states_before = states_before.to(C.dtype).unflatten(2, (C.shape[3], -1))
    remaining = _compute_remaining_fraction(
        decay_sums, None if segment is None else segment[..., None], _choose_exact_dtype(C)
    )
    outputs = torch.einsum("bklgn,bkgrpn->bklgrp", C, states_before)
    return outputs * remaining.unflatten(3, states_before.shape[2:4])[..., None]
