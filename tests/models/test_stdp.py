"""Spike-timing-dependent plasticity: pair and triplet rules in float64 against explicit sums, bounds and normalisation."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bottega.models.spiking.stdp import (
    STDPRule,
    apply_soft_bounds,
    clamp_to_bounds,
    compute_eligibility,
    compute_gain_and_loss,
    compute_trace,
    compute_weight_change,
    match_row_statistics,
)

PAIR = STDPRule(a_plus=0.7, a_minus=0.4, tau_plus=3.0, tau_minus=5.0)
TRIPLET = replace(PAIR, a3_plus=0.9, a3_minus=0.3, tau_x=6.0, tau_y=7.0)
EVEN = STDPRule(a_plus=1.0, a_minus=1.0, tau_plus=4.0, tau_minus=4.0, same_step="none")


def build_train(*steps: int, num_steps: int = 12) -> Tensor:
    """Build a train [S, 1, 1] with spikes at these steps."""
    train = torch.zeros(num_steps, 1, 1, dtype=torch.float64)
    train[list(steps)] = 1.0
    return train


def draw_trains(
    seed: int, *, steps: int = 9, batch: int = 4, inputs: int = 3, outputs: int = 2
) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    pre, post = (rng.random((steps, batch, n)) < 0.4 for n in (inputs, outputs))
    return torch.from_numpy(pre.astype(np.float64)), torch.from_numpy(post.astype(np.float64))


def net_change(pre: Tensor, post: Tensor, rule: STDPRule) -> float:
    gain, loss = compute_gain_and_loss(pre, post, rule)
    return float(gain - loss)


def reference_eligibility(pre: Tensor, post: Tensor, rule: STDPRule) -> Tensor:
    """Compute the eligibility [B, O, I] spike by spike."""
    steps, batch, inputs = pre.shape
    outputs = post.shape[2]
    result = torch.zeros(batch, outputs, inputs, dtype=torch.float64)
    first = 0 if rule.same_step == "causal" else 1
    for b, o, i in product(range(batch), range(outputs), range(inputs)):
        ins, outs = pre[:, b, i].tolist(), post[:, b, o].tolist()
        for s in range(steps):
            r1 = sum(ins[t] * math.exp((t - s) / rule.tau_plus) for t in range(s + 1 - first))
            r2 = sum(ins[t] * math.exp((t - s) / rule.tau_x) for t in range(s))
            o1 = sum(outs[t] * math.exp((t - s) / rule.tau_minus) for t in range(s))
            o2 = sum(outs[t] * math.exp((t - s) / rule.tau_y) for t in range(s))
            result[b, o, i] += outs[s] * r1 * (rule.a_plus + rule.a3_plus * o2)
            result[b, o, i] -= ins[s] * o1 * (rule.a_minus + rule.a3_minus * r2)
    return result


@pytest.mark.parametrize("delay", [1, 2, 5])
def test_pre_before_post_potentiates_and_post_before_pre_depresses(delay: int) -> None:
    early, late = build_train(2), build_train(2 + delay)
    assert net_change(early, late, PAIR) == pytest.approx(0.7 * math.exp(-delay / 3.0), rel=1e-12)
    assert net_change(late, early, PAIR) == pytest.approx(-0.4 * math.exp(-delay / 5.0), rel=1e-12)


def test_same_step_spikes_pair_only_when_causal() -> None:
    assert net_change(build_train(4), build_train(4), PAIR) == pytest.approx(0.7, rel=1e-12)
    assert net_change(build_train(4), build_train(4), replace(PAIR, same_step="none")) == 0.0


@pytest.mark.parametrize("rule", [PAIR, TRIPLET, replace(TRIPLET, same_step="none"), replace(PAIR, same_step="none")])
def test_eligibility_matches_the_formula(rule: STDPRule) -> None:
    pre, post = draw_trains(0)
    expected = reference_eligibility(pre, post, rule)
    torch.testing.assert_close(compute_eligibility(pre, post, rule), expected, rtol=1e-12, atol=1e-12)
    gain, loss = compute_gain_and_loss(pre, post, rule)
    torch.testing.assert_close(gain - loss, expected.sum(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(compute_weight_change(pre, post, rule), expected.sum(0), rtol=1e-12, atol=1e-12)
    assert (gain >= 0).all()
    assert (loss >= 0).all()
    assert expected.abs().min() > 0


@given(st.integers(0, 10_000))
def test_time_reversal_flips_the_sign_of_the_pair_rule(seed: int) -> None:
    pre, post = draw_trains(seed, steps=7)
    forwards, backwards = compute_eligibility(pre, post, EVEN), compute_eligibility(pre.flip(0), post.flip(0), EVEN)
    torch.testing.assert_close(backwards, -forwards, rtol=1e-12, atol=1e-12)
    # With the causal convention same-step pairs potentiate in both directions.
    causal = replace(EVEN, same_step="causal")
    together = torch.einsum("sbo,sbi->boi", post, pre)
    both = compute_eligibility(pre, post, causal) + compute_eligibility(pre.flip(0), post.flip(0), causal)
    torch.testing.assert_close(both, 2 * together, rtol=1e-12, atol=1e-12)


def test_symmetric_train_changes_by_the_difference_of_both_sides() -> None:
    pre, post = build_train(5), build_train(3, 7)  # one output spike 2 steps before the input and one 2 steps after it
    assert net_change(pre, post, PAIR) == pytest.approx(0.7 * math.exp(-2 / 3) - 0.4 * math.exp(-2 / 5), rel=1e-12)
    assert net_change(pre, post, EVEN) == pytest.approx(0.0, abs=1e-15)
    # With a longer output trace the same trains depress.
    assert net_change(pre, post, replace(EVEN, tau_minus=8.0)) == pytest.approx(
        math.exp(-0.5) - math.exp(-0.25), rel=1e-12
    )


def change_per_pair(interval: int, rule: STDPRule) -> float:
    """Return the mean change of twenty pairs (input 1 step before output), one every `interval` steps."""
    num_steps = 20 * interval
    pre_steps = range(0, num_steps, interval)
    pre = build_train(*pre_steps, num_steps=num_steps)
    post = build_train(*(step + 1 for step in pre_steps), num_steps=num_steps)
    return net_change(pre, post, rule) / 20


def test_potentiation_grows_with_rate_for_triplets_only() -> None:
    pair = replace(EVEN, tau_minus=6.0)
    triplet = replace(pair, a3_plus=1.0, tau_y=12.0)
    alone = math.exp(-1 / 4)
    slow, quick = (change_per_pair(interval, pair) for interval in (40, 4))
    assert slow == pytest.approx(alone, rel=0.01)  # so far apart that pairs do not interact
    assert quick < slow
    changes = [change_per_pair(interval, triplet) for interval in (40, 20, 10, 6)]
    assert changes == sorted(changes)
    assert changes[-1] > 1.3 * changes[0]
    assert changes[0] == pytest.approx(alone * (1 + math.exp(-40 / 12)), rel=0.01)


def test_earlier_output_spike_raises_the_gain_by_its_trace() -> None:
    rule = replace(PAIR, a3_plus=0.9, tau_y=7.0, a_minus=0.0)
    gain = 0.7 * math.exp(-2 / 3) * (1 + 0.9 / 0.7 * math.exp(-5 / 7))
    assert net_change(build_train(4), build_train(1, 6), rule) == pytest.approx(gain, rel=1e-12)
    assert net_change(build_train(4), build_train(6), rule) == pytest.approx(
        0.7 * math.exp(-2 / 3), rel=1e-12
    )  # a spike does not form a triplet with itself


def test_trace_with_and_without_its_own_step() -> None:
    spikes = build_train(0, 3, num_steps=5)
    before, after = (compute_trace(spikes, 2.0, with_own_step=flag)[:, 0, 0] for flag in (False, True))
    torch.testing.assert_close(after, before + spikes[:, 0, 0])
    expected = [0.0, math.exp(-0.5), math.exp(-1.0), math.exp(-1.5), math.exp(-2.0) + math.exp(-0.5)]
    torch.testing.assert_close(before, torch.tensor(expected, dtype=torch.float64))


def test_sums_are_independent_of_the_split_and_weighted() -> None:
    pre, post = draw_trains(1, batch=6)
    full = compute_gain_and_loss(pre, post, TRIPLET)
    for cuts in ((2, 4), (1, 2, 3)):
        parts = [
            compute_gain_and_loss(*pair, TRIPLET) for pair in zip(pre.split(cuts, 1), post.split(cuts, 1), strict=True)
        ]
        for side in (0, 1):
            summed = torch.stack([part[side] for part in parts]).sum(0)
            torch.testing.assert_close(summed, full[side], rtol=1e-12, atol=1e-12)
    reward = torch.tensor([1.0, -2.0, 0.0, 0.5, 3.0, 0.0], dtype=torch.float64)
    gain, loss = compute_gain_and_loss(pre, post, TRIPLET, weight=reward)
    expected = torch.einsum("b,boi->oi", reward, compute_eligibility(pre, post, TRIPLET))
    torch.testing.assert_close(gain - loss, expected, rtol=1e-12, atol=1e-12)
    expected = torch.einsum("b,boi->oi", reward, compute_eligibility(pre, post, PAIR))
    torch.testing.assert_close(compute_weight_change(pre, post, PAIR, weight=reward), expected, rtol=1e-12, atol=1e-12)


def test_example_of_zero_weight_may_be_nan() -> None:
    pre, post = draw_trains(2)
    pre[:, 1], weight = torch.nan, torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    counted = [0, 2, 3]
    for actual, expected in zip(
        compute_gain_and_loss(pre, post, PAIR, weight=weight),
        compute_gain_and_loss(pre[:, counted], post[:, counted], PAIR),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected)


def test_bf16_is_summed_in_float32() -> None:
    pre, post = draw_trains(3)
    for actual, expected in zip(
        compute_gain_and_loss(pre.bfloat16(), post.bfloat16(), PAIR),
        compute_gain_and_loss(pre, post, PAIR),
        strict=True,
    ):
        assert actual.dtype is torch.float32
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@given(st.integers(0, 10_000))
def test_changes_slow_down_towards_soft_bounds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight, gain, loss = (torch.from_numpy(x) for x in rng.normal(size=(3, 4, 5)))
    weight, gain, loss = weight.clamp(-1, 2), gain.abs(), loss.abs()
    change = apply_soft_bounds(gain, loss, weight, low=-1, high=2)
    torch.testing.assert_close(change, gain * (2 - weight) / 3 - loss * (weight + 1) / 3)
    # A gain with a negative reward is a loss, and vice versa.
    torch.testing.assert_close(
        apply_soft_bounds(-gain, -loss, weight, low=-1, high=2), loss * (2 - weight) / 3 - gain * (weight + 1) / 3
    )


def test_out_of_bounds_weights_may_only_move_back() -> None:
    weight, change = torch.tensor([3.0, 3.0, -2.0, 0.9, -0.9]), torch.tensor([0.5, -0.5, -0.5, 0.5, -0.5])
    assert clamp_to_bounds(weight + change, weight, low=-1, high=1).tolist() == pytest.approx(
        [3.0, 2.5, -2.0, 1.0, -1.0]
    )
    assert torch.equal(clamp_to_bounds(weight, weight, low=-1, high=1), weight)
    assert apply_soft_bounds(change, torch.zeros(5), weight, low=-1, high=1)[0] == 0


@given(st.integers(0, 10_000))
def test_matched_rows_have_the_sum_and_norm_of_their_reference(seed: int) -> None:
    new, like = (torch.from_numpy(x) for x in np.random.default_rng(seed).normal(size=(2, 3, 5)))
    matched = match_row_statistics(new, like)
    torch.testing.assert_close(matched.sum(1), like.sum(1))
    torch.testing.assert_close(matched.norm(dim=1), like.norm(dim=1))
    # The order of weights is preserved.
    assert torch.equal(matched.argsort(1), new.argsort(1))


def test_row_of_equal_weights_is_restored() -> None:
    like = torch.tensor([[2.0, 2.0], [3.0, 3.0]])
    assert torch.equal(match_row_statistics(torch.tensor([[5.0, 5.0], [0.0, 1.0]]), like), like)
