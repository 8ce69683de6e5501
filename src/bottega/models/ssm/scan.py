"""The selective scan of a state-space layer: a recurrence by definition, matrix products in chunks for speed.

    h[t] = exp(dt[t] A) h[t-1] + dt[t] x[t] B[t]        y[t] = C[t] h[t]

B batch   T tokens   H heads   P head size   N state size   G groups of heads   R heads of one
K chunks   L tokens of a chunk

x [B, T, H, P]   dt [B, T, H], not negative   A [H], negative   B, C [B, T, G, N]   state [B, H, P, N]

Decays and states are float32 whatever the precision of x: a rate near 1 that is rounded forgets at another speed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 256
"""So many chunks at most pass their states on in one matrix product, whose work grows with the square of their number: at
a million tokens one for all would cost more than the rest of the layer. Below, fewer and larger products are faster."""


def scan_step(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: x [B, H, P], dt [B, H], B and C [B, G, N]. The output, and the state behind it."""
    exact = state.dtype
    heads = x.shape[1] // B.shape[1]
    dt = dt.to(exact)
    B, C = (t.to(exact).repeat_interleave(heads, dim=1) for t in (B, C))
    written = (x.to(exact) * dt[..., None])[..., None] * B[:, :, None, :]
    # What is lost, and not what is kept: exp(-0.0001) is off by 3e-8 in float32, a rate that is wrong by 3e-4 for good.
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
    """The definition, one token after the other. Where `resets` [B, T] is true, what came before is forgotten."""
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
    """The same by matrix products: within a chunk every token looks at those before it, as in attention, and between
    chunks only the state passes (Dao & Gu 2024, section 6). The length may be any; of none, the state stays as it is.

    With `kernels`, and from no state, `scan_kernel` passes the states on; it must be loaded."""
    assert chunk > 0, f"a chunk of {chunk} tokens reads nothing; give 1 or more"
    if not x.shape[1]:
        return scan_recurrent(x, dt, A, B, C, state=state)
    length, chunk, groups = x.shape[1], min(chunk, x.shape[1]), B.shape[2]
    # A time step of 0 neither forgets nor writes, so what the last chunk is filled up with changes no state.
    x, dt, B, C = (_cut(t, chunk) for t in (x, dt.to(_exact(x)), B, C))
    fresh = None if resets is None else _cut(resets, chunk).cumsum(2)
    sums = _running(dt * A.to(dt.dtype), dim=2)
    written = (x * dt[..., None]).to(x.dtype).unflatten(3, (groups, -1))
    y = _within(written, B, C, sums, fresh)
    before, state = _between(written, B, sums, fresh, state, kernels=kernels)
    if before is not None:
        y = y + _read(C, before, sums, fresh)
    return y.to(x.dtype).flatten(3, 4).flatten(1, 2)[:, :length], state


def _exact(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _cut(x: Tensor, chunk: int) -> Tensor:
    """[B, T, ...] -> [B, K, L, ...], filled up with zeros."""
    missing = -x.shape[1] % chunk
    if missing:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
    return x.unflatten(1, (-1, chunk))


def _running(x: Tensor, *, dim: int) -> Tensor:
    """Sums up to and with each place, in float64: the decay from one token to a later one is the difference of two, and
    float32 would lose its last digits to whatever was forgotten before both.

    A product with a triangle, since the cumulative sum of a GPU has no fixed order of additions."""
    wide = torch.float32 if x.device.type == "mps" else torch.float64  # an Apple GPU knows no float64
    triangle = torch.ones(x.shape[dim], x.shape[dim], dtype=wide, device=x.device).tril()
    return (triangle @ x.to(wide).movedim(dim, -2)).movedim(-2, dim)


def _within(written: Tensor, B: Tensor, C: Tensor, sums: Tensor, fresh: Tensor | None) -> Tensor:
    """What each token reads of its own chunk, [B, K, L, G, R, P]."""
    chunk, groups = written.shape[2:4]
    seen = torch.ones(chunk, chunk, dtype=torch.bool, device=written.device).tril()
    if fresh is not None:
        seen = (seen & (fresh[..., :, None] == fresh[..., None, :]))[:, :, None]
    sums = sums.transpose(2, 3)
    # Float64 in two parts of float32, the second of them what rounding took from the first: the square of a chunk is
    # where the time goes, and there float64 would cost twice as much.
    high = sums.to(_exact(written))
    low = (sums.detach() - high.detach()).to(high.dtype)
    gap = (high[..., :, None] - high[..., None, :]) + (low[..., :, None] - low[..., None, :])
    decay = torch.exp(gap.masked_fill(~seen, -torch.inf)).unflatten(2, (groups, -1))
    scores = torch.einsum("bklgn,bksgn->bkgls", C, B)
    return torch.einsum("bkgrls,bksgrp->bklgrp", (scores[:, :, :, None] * decay).to(written.dtype), written)


def _between(
    written: Tensor, B: Tensor, sums: Tensor, fresh: Tensor | None, state: Tensor | None, *, kernels: bool
) -> tuple[Tensor | None, Tensor]:
    """The state before each chunk, [B, K, H, P, N], and the one behind the last."""
    exact = _exact(written)
    left = torch.exp((sums[:, :, -1:] - sums).to(exact))
    if fresh is not None:
        left = left * (fresh == fresh[:, :, -1:])[..., None]
    kept = (written * left.unflatten(3, written.shape[3:5])[..., None]).to(written.dtype)
    added = torch.einsum("bklgn,bklgrp->bkgrpn", B, kept)
    if kernels and state is None and added.shape[1] > 1:
        decay = _left(sums[:, :, -1], None if fresh is None else fresh[:, :, -1:], exact)
        before, last = torch.ops.bottega.pass_states(added.flatten(2, 3).flatten(-2), decay)
        return before.unflatten(-1, added.shape[-2:]), last.unflatten(-1, added.shape[-2:])
    added = added.permute(0, 2, 3, 1, 4, 5).to(exact).flatten(1, 2)
    total = sums[:, :, -1].transpose(1, 2)
    cuts = None if fresh is None else fresh[:, None, :, -1]
    state = None if state is None else state.to(exact).flatten(-2)
    before, last = _passed(added.flatten(-2), total, cuts, state)
    shape = added.shape[-2:]
    return None if before is None else before.transpose(1, 2).unflatten(-1, shape), last.unflatten(-1, shape)


def _passed(added: Tensor, total: Tensor, cuts: Tensor | None, state: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """What stands before each place and behind the last, if each fades what it finds by exp(total) and adds its own:
    added [..., K, M], total [..., K], cuts [..., K] (a place with cuts forgets all it finds), state [..., M]; `before` is
    None where it is nothing."""
    places = added.shape[-2]
    if places > GROUP:
        return _passed_in_groups(added, total, cuts, state)
    if places == 1 and state is None:
        return None, added[..., 0, :]
    sums, times = _running(total, dim=-1), None if cuts is None else cuts.cumsum(-1)
    # Sums before each place and, as the last row, behind all.
    ahead, gone = F.pad(sums, (1, 0)), None if times is None else F.pad(times, (1, 0))
    order = torch.ones(places + 1, places, dtype=torch.bool, device=added.device).tril(diagonal=-1)
    seen = order if times is None or gone is None else order & (gone[..., :, None] == times[..., None, :])
    gap = (ahead[..., :, None] - sums[..., None, :]).to(added.dtype)
    decay = torch.exp(gap.masked_fill(~seen, -torch.inf))
    # Two products, since K + 1 rows would not fit the matrix units, and in training nobody asks for the last.
    before, last = decay[..., :-1, :].contiguous() @ added, (decay[..., -1:, :] @ added)[..., 0, :]
    if state is not None:
        left = _left(ahead, gone, added.dtype)[..., None]
        before, last = before + left[..., :-1, :] * state[..., None, :], last + left[..., -1, :] * state
    return before, last


def _passed_in_groups(added: Tensor, total: Tensor, cuts: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """First within groups of places that start from nothing, then from group to group."""
    places = added.shape[-2]
    missing = -places % GROUP
    added = F.pad(added, (0, 0, 0, missing)).unflatten(-2, (-1, GROUP))
    total = F.pad(total, (0, missing)).unflatten(-1, (-1, GROUP))
    cuts = None if cuts is None else F.pad(cuts, (0, missing)).unflatten(-1, (-1, GROUP))
    inner, ends = _passed(added, total, cuts, None)
    starts, last = _passed(ends, total.sum(-1), None if cuts is None else cuts.sum(-1), state)
    assert inner is not None, "a group has more places than one"
    assert starts is not None, "and there are two groups at least"
    ahead = F.pad(_running(total, dim=-1)[..., :-1], (1, 0))
    gone = None if cuts is None else F.pad(cuts.cumsum(-1)[..., :-1], (1, 0))
    before = inner + _left(ahead, gone, added.dtype)[..., None] * starts[..., None, :]
    return before.flatten(-3, -2)[..., :places, :], last


def _left(sums: Tensor, times: Tensor | None, dtype: torch.dtype) -> Tensor:
    """How much is left of what stood before the first place."""
    left = torch.exp(sums.to(dtype))
    return left if times is None else left * (times == 0)


def _read(C: Tensor, before: Tensor, sums: Tensor, fresh: Tensor | None) -> Tensor:
    """What each token reads of the state before its chunk, [B, K, L, G, R, P]."""
    before = before.to(C.dtype).unflatten(2, (C.shape[3], -1))
    left = _left(sums, None if fresh is None else fresh[..., None], _exact(C))
    read = torch.einsum("bklgn,bkgrpn->bklgrp", C, before)
    return read * left.unflatten(3, before.shape[2:4])[..., None]
