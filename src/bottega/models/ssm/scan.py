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

GROUP = 256
"""Most chunks whose states are passed on in one matrix product. Its cost is quadratic in their number: at a million tokens
a single product would cost more than the rest of the layer. For fewer chunks, large products are faster."""


def scan_step(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the new state of one token: x (B, H, P), dt (B, H), B and C (B, G, N)."""
    exact = state.dtype
    heads = x.shape[1] // B.shape[1]
    dt = dt.to(exact)
    B, C = (t.to(exact).repeat_interleave(heads, dim=1) for t in (B, C))
    written = (x.to(exact) * dt[..., None])[..., None] * B[:, :, None, :]
    # expm1, because exp(-0.0001) is off by 3e-8 in float32, which is a relative error of 3e-4 in the rate.
    state = state + (torch.expm1(dt * A.to(exact))[..., None, None] * state + written)
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
        state = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[3], dtype=_exact(x))
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
    kernels: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the scan with matrix products: attention-like within a chunk, and states between chunks.

    See Dao & Gu 2024, section 6. Any length is allowed; a length of 0 returns the state unchanged. With `kernels` and
    without a state, the operator of `scan_kernel`, which must be imported, passes the states on.
    """
    assert chunk > 0, f"chunk must be 1 token or more, got {chunk}"
    if not x.shape[1]:
        return scan_recurrent(x, dt, A, B, C, state=state)
    length, chunk, groups = x.shape[1], min(chunk, x.shape[1]), B.shape[2]
    # A time step of 0 neither forgets nor writes, so the padding of the last chunk changes no state.
    x, dt, B, C = (_split_chunks(t, chunk) for t in (x, dt.to(_exact(x)), B, C))
    segment = None if resets is None else _split_chunks(resets, chunk).cumsum(2)
    sums = _cumulative_sum(dt * A.to(dt.dtype), dim=2)
    written = (x * dt[..., None]).to(x.dtype).unflatten(3, (groups, -1))
    y = _output_within_chunks(written, B, C, sums, segment)
    before, state = _states_between_chunks(written, B, sums, segment, state, kernels=kernels)
    if before is not None:
        y = y + _output_from_states(C, before, sums, segment)
    return y.to(x.dtype).flatten(3, 4).flatten(1, 2)[:, :length], state


def _exact(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _split_chunks(x: Tensor, chunk: int) -> Tensor:
    """Split into chunks, (B, T, ...) -> (B, K, L, ...), padded with zeros."""
    missing = -x.shape[1] % chunk
    if missing:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
    return x.unflatten(1, (-1, chunk))


def _cumulative_sum(x: Tensor, *, dim: int) -> Tensor:
    """Return the inclusive cumulative sum in float64.

    The decay between two tokens is a difference of two sums, in which float32 would lose digits. It is a product with a
    triangular matrix, because the cumulative sum of a GPU has no fixed order of additions.
    """
    wide = torch.float32 if x.device.type == "mps" else torch.float64  # Apple GPUs have no float64
    triangle = torch.ones(x.shape[dim], x.shape[dim], dtype=wide, device=x.device).tril()
    return (triangle @ x.to(wide).movedim(dim, -2)).movedim(-2, dim)


def _output_within_chunks(written: Tensor, B: Tensor, C: Tensor, sums: Tensor, segment: Tensor | None) -> Tensor:
    """Return the output of each token from its own chunk, (B, K, L, G, R, P)."""
    chunk, groups = written.shape[2:4]
    visible = torch.ones(chunk, chunk, dtype=torch.bool, device=written.device).tril()
    if segment is not None:
        visible = (visible & (segment[..., :, None] == segment[..., None, :]))[:, :, None]
    sums = sums.transpose(2, 3)
    # Float64 as two float32, the second the rounding error of the first: most of the time goes into this L x L
    # matrix, for which float64 would cost twice as much.
    high = sums.to(_exact(written))
    low = (sums.detach() - high.detach()).to(high.dtype)
    gap = (high[..., :, None] - high[..., None, :]) + (low[..., :, None] - low[..., None, :])
    decay = torch.exp(gap.masked_fill(~visible, -torch.inf)).unflatten(2, (groups, -1))
    scores = torch.einsum("bklgn,bksgn->bkgls", C, B)
    return torch.einsum("bkgrls,bksgrp->bklgrp", (scores[:, :, :, None] * decay).to(written.dtype), written)


def _states_between_chunks(
    written: Tensor, B: Tensor, sums: Tensor, segment: Tensor | None, state: Tensor | None, *, kernels: bool
) -> tuple[Tensor | None, Tensor]:
    """Return the state before each chunk, (B, K, H, P, N), and the one after the last."""
    exact = _exact(written)
    remaining = torch.exp((sums[:, :, -1:] - sums).to(exact))
    if segment is not None:
        remaining = remaining * (segment == segment[:, :, -1:])[..., None]
    decayed = (written * remaining.unflatten(3, written.shape[3:5])[..., None]).to(written.dtype)
    added = torch.einsum("bklgn,bklgrp->bkgrpn", B, decayed)
    if kernels and state is None and added.shape[1] > 1:
        decay = _remaining_fraction(sums[:, :, -1], None if segment is None else segment[:, :, -1:], exact)
        before, last = torch.ops.bottega.pass_states(added.flatten(2, 3).flatten(-2), decay)
        return before.unflatten(-1, added.shape[-2:]), last.unflatten(-1, added.shape[-2:])
    added = added.permute(0, 2, 3, 1, 4, 5).to(exact).flatten(1, 2)
    total = sums[:, :, -1].transpose(1, 2)
    cuts = None if segment is None else segment[:, None, :, -1]
    state = None if state is None else state.to(exact).flatten(-2)
    before, last = _pass_states(added.flatten(-2), total, cuts, state)
    shape = added.shape[-2:]
    return None if before is None else before.transpose(1, 2).unflatten(-1, shape), last.unflatten(-1, shape)


def _pass_states(
    added: Tensor, total: Tensor, cuts: Tensor | None, state: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """Return the state before each chunk, (..., K, M), and after the last, where each multiplies it by exp(total) and adds.

    added (..., K, M), total (..., K), cuts (..., K), state (..., M). A chunk with cuts forgets the state before it. The
    first result is None if all states before are 0.
    """
    num_chunks = added.shape[-2]
    if num_chunks > GROUP:
        return _pass_states_in_groups(added, total, cuts, state)
    if num_chunks == 1 and state is None:
        return None, added[..., 0, :]
    sums, times = _cumulative_sum(total, dim=-1), None if cuts is None else cuts.cumsum(-1)
    # Sums before each chunk and, as the last row, after all.
    ahead, resets_before = F.pad(sums, (1, 0)), None if times is None else F.pad(times, (1, 0))
    order = torch.ones(num_chunks + 1, num_chunks, dtype=torch.bool, device=added.device).tril(diagonal=-1)
    visible = (
        order
        if times is None or resets_before is None
        else order & (resets_before[..., :, None] == times[..., None, :])
    )
    gap = (ahead[..., :, None] - sums[..., None, :]).to(added.dtype)
    decay = torch.exp(gap.masked_fill(~visible, -torch.inf))
    # Two products, since K + 1 rows would not fit the matrix units, and training does not use the last row.
    before, last = decay[..., :-1, :].contiguous() @ added, (decay[..., -1:, :] @ added)[..., 0, :]
    if state is not None:
        remaining = _remaining_fraction(ahead, resets_before, added.dtype)[..., None]
        before, last = before + remaining[..., :-1, :] * state[..., None, :], last + remaining[..., -1, :] * state
    return before, last


def _pass_states_in_groups(
    added: Tensor, total: Tensor, cuts: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Pass states within groups of chunks that start from 0, then from group to group."""
    num_chunks = added.shape[-2]
    missing = -num_chunks % GROUP
    added = F.pad(added, (0, 0, 0, missing)).unflatten(-2, (-1, GROUP))
    total = F.pad(total, (0, missing)).unflatten(-1, (-1, GROUP))
    cuts = None if cuts is None else F.pad(cuts, (0, missing)).unflatten(-1, (-1, GROUP))
    inner, ends = _pass_states(added, total, cuts, None)
    starts, last = _pass_states(ends, total.sum(-1), None if cuts is None else cuts.sum(-1), state)
    assert inner is not None, "a group has more than one chunk"
    assert starts is not None, "there are at least two groups"
    ahead = F.pad(_cumulative_sum(total, dim=-1)[..., :-1], (1, 0))
    resets_before = None if cuts is None else F.pad(cuts.cumsum(-1)[..., :-1], (1, 0))
    before = inner + _remaining_fraction(ahead, resets_before, added.dtype)[..., None] * starts[..., None, :]
    return before.flatten(-3, -2)[..., :num_chunks, :], last


def _remaining_fraction(sums: Tensor, times: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the fraction that remains of the state before the first position."""
    remaining = torch.exp(sums.to(dtype))
    return remaining if times is None else remaining * (times == 0)


def _output_from_states(C: Tensor, before: Tensor, sums: Tensor, segment: Tensor | None) -> Tensor:
    """Return the output of each token from the state before its chunk, (B, K, L, G, R, P)."""
    before = before.to(C.dtype).unflatten(2, (C.shape[3], -1))
    remaining = _remaining_fraction(sums, None if segment is None else segment[..., None], _exact(C))
    read = torch.einsum("bklgn,bkgrpn->bklgrp", C, before)
    return read * remaining.unflatten(3, before.shape[2:4])[..., None]
