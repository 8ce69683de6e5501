"""Spike-timing-dependent plasticity (STDP): the weight change that two spike trains cause.

An input spike that comes before an output spike strengthens the synapse, one that comes after it weakens it; the pair rule
weights each such pair by the time between them, and the triplet rule (Pfister & Gerstner, 2006) by earlier spikes of
the same unit too. The functions have no parameters and no state.

S time steps   B examples   I inputs   O outputs   N inputs or outputs
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

SameStep = Literal["causal", "none"]
"""How an input and an output spike of the same step count. `causal`: in a layer without delays the input arrives first and
may have caused the output, so the pair strengthens. `none`: in recorded trains the order within a step is
unknown, so the pair is ignored."""


@dataclass(frozen=True)
class STDPRule:
    """Amplitudes of an STDP rule, and its time constants in time steps. With a3_plus and a3_minus 0 it is the pair rule.

    At an output spike a synapse gains r1 (a_plus + a3_plus o2), at an input spike it loses o1 (a_minus + a3_minus r2).
    r1 and r2 are traces of the input with tau_plus and tau_x, o1 and o2 of the output with tau_minus and tau_y: each spike
    raises them by 1, and they fall by exp(-1 / tau) a step. Traces are read before the spikes of the step are added
    to them, so that no unit forms a pair with itself; only r1 includes the spikes of its own step, if `same_step` is causal.

    With causal pairs of the same step, independent trains are balanced at a_minus = a_plus exp(1 / tau), which
    is 1.28 for tau 4. The default is 5 % above that, so that chance pairs weaken a synapse (as in Song et al., 2000).
    """

    a_plus: float = 1.0
    a_minus: float = 1.35
    tau_plus: float = 4.0
    tau_minus: float = 4.0
    a3_plus: float = 0.0
    a3_minus: float = 0.0
    tau_x: float = 8.0
    tau_y: float = 8.0
    same_step: SameStep = "causal"


def compute_trace(spikes: Tensor, tau: float, *, with_own_step: bool) -> Tensor:
    """Return the trace (S, B, N): the sum of exp(-age / tau) over earlier spikes, and with `with_own_step` those of age 0."""
    return torch.einsum("st,tbn->sbn", _build_decay_kernel(spikes, tau, with_own_step=with_own_step), spikes)


def _build_decay_kernel(spikes: Tensor, tau: float, *, with_own_step: bool) -> Tensor:
    """Return the fraction that remains, at each step (row), of a spike at each step (column), (S, S).

    For the few steps of a sample, one matrix product is faster than a loop.
    """
    steps = torch.arange(len(spikes), device=spikes.device)
    age = steps[:, None] - steps[None, :]
    remaining = torch.exp(-age.clamp(min=0).to(spikes.dtype) / tau)
    return remaining.where(age >= (0 if with_own_step else 1), 0.0)


def compute_weight_change(pre: Tensor, post: Tensor, rule: STDPRule, *, weight: Tensor | None = None) -> Tensor:
    """Return the weight change (O, I): gain minus loss, as `compute_gain_and_loss` returns them.

    The pair rule takes a single matrix product.
    """
    if rule.a3_plus or rule.a3_minus:
        gain, loss = compute_gain_and_loss(pre, post, rule, weight=weight)
        return gain - loss
    pre, post = _to_float(pre, post)
    gain_kernel = _build_decay_kernel(pre, rule.tau_plus, with_own_step=rule.same_step == "causal")
    loss_kernel = _build_decay_kernel(pre, rule.tau_minus, with_own_step=False).T
    filtered = torch.einsum("st,tbi->sbi", rule.a_plus * gain_kernel - rule.a_minus * loss_kernel, pre)
    return _sum_products((post, filtered), weight)


def compute_gain_and_loss(
    pre: Tensor, post: Tensor, rule: STDPRule, *, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return gain and loss of synapses (O, I), summed over the examples of pre (S, B, I) and post (S, B, O).

    `weight` (B) is the weight of each example, such as its reward. The sum is linear in it, so (B, O, I) is never
    materialised. Values between 0 and 1 are fractions of a spike. Both results are 0 or more for spikes; a negative input
    current or weight changes the sign of its contribution.
    """
    gain, loss = _compute_factors(pre, post, rule)
    return _sum_products(gain, weight), _sum_products(loss, weight)


def _sum_products(factors: tuple[Tensor, Tensor], weight: Tensor | None) -> Tensor:
    output_factor, input_factor = factors
    if weight is not None:
        example_weight = weight.to(output_factor.dtype)[:, None]
        # Selected rather than multiplied, because an example of weight 0 may hold any value, also NaN.
        output_factor, input_factor = (
            torch.where(example_weight == 0, 0.0, output_factor * example_weight),
            torch.where(example_weight == 0, 0.0, input_factor),
        )
    return output_factor.flatten(0, 1).T @ input_factor.flatten(0, 1)


def compute_eligibility(pre: Tensor, post: Tensor, rule: STDPRule) -> Tensor:
    """Return the weight change of each example alone, (B, O, I): the eligibility that a reward multiplies."""
    gain, loss = _compute_factors(pre, post, rule)
    return torch.einsum("sbo,sbi->boi", *gain) - torch.einsum("sbo,sbi->boi", *loss)


def _compute_factors(pre: Tensor, post: Tensor, rule: STDPRule) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the factors (output (S, B, O), input (S, B, I)) of gain and loss; their products are summed over time."""
    pre, post = _to_float(pre, post)
    r1 = compute_trace(pre, rule.tau_plus, with_own_step=rule.same_step == "causal")
    o1 = compute_trace(post, rule.tau_minus, with_own_step=False)
    at_post, at_pre = rule.a_plus * post, rule.a_minus * pre
    if rule.a3_plus:
        at_post = at_post + rule.a3_plus * post * compute_trace(post, rule.tau_y, with_own_step=False)
    if rule.a3_minus:
        at_pre = at_pre + rule.a3_minus * pre * compute_trace(pre, rule.tau_x, with_own_step=False)
    return (at_post, r1), (o1, at_pre)


def _to_float(pre: Tensor, post: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in float32 or better, because sums over many examples lose precision."""
    dtype = torch.promote_types(torch.promote_types(pre.dtype, post.dtype), torch.float32)
    return pre.to(dtype), post.to(dtype)


def apply_soft_bounds(gain: Tensor, loss: Tensor, weight: Tensor, *, low: float, high: float) -> Tensor:
    """Return the change, slowed down towards the bounds.

    An increase is multiplied by the fraction of the range that is above the weight, a decrease by the fraction below it. A
    negative gain, which results from a negative reward, counts as a loss.
    """
    increase, decrease = gain.clamp(min=0) - loss.clamp(max=0), loss.clamp(min=0) - gain.clamp(max=0)
    room_above, room_below = ((high - weight) / (high - low)).clamp(0, 1), ((weight - low) / (high - low)).clamp(0, 1)
    return increase * room_above - decrease * room_below


def clamp_to_bounds(new: Tensor, old: Tensor, *, low: float, high: float) -> Tensor:
    """Return `new`, limited to [low, high] extended to include `old`: a weight that the gradient moved outside may stay."""
    return torch.clamp(new, old.clamp(max=low), old.clamp(min=high))


def match_row_statistics(new: Tensor, like: Tensor) -> Tensor:
    """Return each unit's incoming weights (a row), with the sum and the norm of the same row of `like`.

    What some inputs gain, others lose (Miller & MacKay, 1994). The norm alone would not suffice: all weights of a unit could
    become positive at the same norm, and the unit would always fire.
    """
    mean, old_mean = new.mean(dim=1, keepdim=True), like.mean(dim=1, keepdim=True)
    spread, old_spread = ((new - mean).norm(dim=1, keepdim=True), (like - old_mean).norm(dim=1, keepdim=True))
    ratio = torch.where(spread > 0, old_spread / spread.clamp(min=1e-30), 0.0)  # equal weights have no spread
    return torch.addcmul(old_mean - mean * ratio, new, ratio)
