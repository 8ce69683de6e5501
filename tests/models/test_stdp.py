"""Spike timing: what a pair changes, in which direction, and what triplets add; in float64 against sums written out."""

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
    eligibility,
    gain_and_loss,
    match_row_statistics,
    trace,
    weight_change,
)

PAIR = STDPRule(a_plus=0.7, a_minus=0.4, tau_plus=3.0, tau_minus=5.0)
TRIPLET = replace(PAIR, a3_plus=0.9, a3_minus=0.3, tau_x=6.0, tau_y=7.0)
EVEN = STDPRule(a_plus=1.0, a_minus=1.0, tau_plus=4.0, tau_minus=4.0, same_step="none")


def at(*steps: int, of: int = 12) -> Tensor:
    """One train [S, 1, 1] with spikes at these steps."""
    found = torch.zeros(of, 1, 1, dtype=torch.float64)
    found[list(steps)] = 1.0
    return found


def trains(seed: int, *, steps: int = 9, batch: int = 4, inputs: int = 3, outputs: int = 2) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    pre, post = (rng.random((steps, batch, n)) < 0.4 for n in (inputs, outputs))
    return torch.from_numpy(pre.astype(np.float64)), torch.from_numpy(post.astype(np.float64))


def net(pre: Tensor, post: Tensor, rule: STDPRule) -> float:
    gain, loss = gain_and_loss(pre, post, rule)
    return float(gain - loss)


def written_out(pre: Tensor, post: Tensor, rule: STDPRule) -> Tensor:
    """[B, O, I], spike by spike."""
    steps, batch, inputs = pre.shape
    outputs = post.shape[2]
    found = torch.zeros(batch, outputs, inputs, dtype=torch.float64)
    first = 0 if rule.same_step == "causal" else 1
    for b, o, i in product(range(batch), range(outputs), range(inputs)):
        ins, outs = pre[:, b, i].tolist(), post[:, b, o].tolist()
        for s in range(steps):
            r1 = sum(ins[t] * math.exp((t - s) / rule.tau_plus) for t in range(s + 1 - first))
            r2 = sum(ins[t] * math.exp((t - s) / rule.tau_x) for t in range(s))
            o1 = sum(outs[t] * math.exp((t - s) / rule.tau_minus) for t in range(s))
            o2 = sum(outs[t] * math.exp((t - s) / rule.tau_y) for t in range(s))
            found[b, o, i] += outs[s] * r1 * (rule.a_plus + rule.a3_plus * o2)
            found[b, o, i] -= ins[s] * o1 * (rule.a_minus + rule.a3_minus * r2)
    return found


@pytest.mark.parametrize("apart", [1, 2, 5])
def test_input_first_strengthens_and_output_first_weakens_by_the_time_between(apart: int) -> None:
    early, late = at(2), at(2 + apart)
    assert net(early, late, PAIR) == pytest.approx(0.7 * math.exp(-apart / 3.0), rel=1e-12)
    assert net(late, early, PAIR) == pytest.approx(-0.4 * math.exp(-apart / 5.0), rel=1e-12)


def test_spikes_of_one_step_are_a_pair_only_where_the_input_comes_first() -> None:
    assert net(at(4), at(4), PAIR) == pytest.approx(0.7, rel=1e-12)
    assert net(at(4), at(4), replace(PAIR, same_step="none")) == 0.0


@pytest.mark.parametrize("rule", [PAIR, TRIPLET, replace(TRIPLET, same_step="none"), replace(PAIR, same_step="none")])
def test_sums_are_those_of_the_formula(rule: STDPRule) -> None:
    pre, post = trains(0)
    expected = written_out(pre, post, rule)
    torch.testing.assert_close(eligibility(pre, post, rule), expected, rtol=1e-12, atol=1e-12)
    gain, loss = gain_and_loss(pre, post, rule)
    torch.testing.assert_close(gain - loss, expected.sum(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weight_change(pre, post, rule), expected.sum(0), rtol=1e-12, atol=1e-12)
    assert (gain >= 0).all()
    assert (loss >= 0).all()
    assert expected.abs().min() > 0


@given(st.integers(0, 10_000))
def test_backwards_in_time_the_pair_rule_changes_its_sign(seed: int) -> None:
    pre, post = trains(seed, steps=7)
    forwards, backwards = eligibility(pre, post, EVEN), eligibility(pre.flip(0), post.flip(0), EVEN)
    torch.testing.assert_close(backwards, -forwards, rtol=1e-12, atol=1e-12)
    # Where the input of a step comes first, it does so in both directions.
    causal = replace(EVEN, same_step="causal")
    together = torch.einsum("sbo,sbi->boi", post, pre)
    both = eligibility(pre, post, causal) + eligibility(pre.flip(0), post.flip(0), causal)
    torch.testing.assert_close(both, 2 * together, rtol=1e-12, atol=1e-12)


def test_a_train_with_its_mirror_image_changes_by_the_difference_of_the_two_sides() -> None:
    pre, post = at(5), at(3, 7)  # one output spike 2 steps before the input and one 2 steps after it
    assert net(pre, post, PAIR) == pytest.approx(0.7 * math.exp(-2 / 3) - 0.4 * math.exp(-2 / 5), rel=1e-12)
    assert net(pre, post, EVEN) == pytest.approx(0.0, abs=1e-15)
    # With a longer memory of the output the same trains weaken.
    assert net(pre, post, replace(EVEN, tau_minus=8.0)) == pytest.approx(math.exp(-0.5) - math.exp(-0.25), rel=1e-12)


def per_pair(every: int, rule: STDPRule) -> float:
    """Change of one pairing, the input 1 step before the output, among twenty at this distance."""
    firsts = range(0, 20 * every, every)
    pre, post = at(*firsts, of=20 * every), at(*(s + 1 for s in firsts), of=20 * every)
    return net(pre, post, rule) / 20


def test_triplets_make_potentiation_grow_with_the_rate_and_pairs_do_not() -> None:
    pair = replace(EVEN, tau_minus=6.0)
    triplet = replace(pair, a3_plus=1.0, tau_y=12.0)
    alone = math.exp(-1 / 4)
    slow, quick = (per_pair(every, pair) for every in (40, 4))
    assert slow == pytest.approx(alone, rel=0.01)  # so far apart they know nothing of each other
    assert quick < slow
    rates = [per_pair(every, triplet) for every in (40, 20, 10, 6)]
    assert rates == sorted(rates)
    assert rates[-1] > 1.3 * rates[0]
    assert rates[0] == pytest.approx(alone * (1 + math.exp(-40 / 12)), rel=0.01)


def test_an_earlier_output_spike_raises_the_gain_by_its_trace() -> None:
    rule = replace(PAIR, a3_plus=0.9, tau_y=7.0, a_minus=0.0)
    gain = 0.7 * math.exp(-2 / 3) * (1 + 0.9 / 0.7 * math.exp(-5 / 7))
    assert net(at(4), at(1, 6), rule) == pytest.approx(gain, rel=1e-12)
    assert net(at(4), at(6), rule) == pytest.approx(0.7 * math.exp(-2 / 3), rel=1e-12)  # no unit is its own triplet


def test_a_trace_before_and_after_its_own_spike() -> None:
    spikes = at(0, 3, of=5)
    before, after = (trace(spikes, 2.0, with_own_step=own)[:, 0, 0] for own in (False, True))
    torch.testing.assert_close(after, before + spikes[:, 0, 0])
    expected = [0.0, math.exp(-0.5), math.exp(-1.0), math.exp(-1.5), math.exp(-2.0) + math.exp(-0.5)]
    torch.testing.assert_close(before, torch.tensor(expected, dtype=torch.float64))


def test_examples_add_up_whatever_the_split_and_count_by_their_weight() -> None:
    pre, post = trains(1, batch=6)
    whole = gain_and_loss(pre, post, TRIPLET)
    for cuts in ((2, 4), (1, 2, 3)):
        parts = [gain_and_loss(*pair, TRIPLET) for pair in zip(pre.split(cuts, 1), post.split(cuts, 1), strict=True)]
        for side in (0, 1):
            summed = torch.stack([part[side] for part in parts]).sum(0)
            torch.testing.assert_close(summed, whole[side], rtol=1e-12, atol=1e-12)
    reward = torch.tensor([1.0, -2.0, 0.0, 0.5, 3.0, 0.0], dtype=torch.float64)
    gain, loss = gain_and_loss(pre, post, TRIPLET, weight=reward)
    expected = torch.einsum("b,boi->oi", reward, eligibility(pre, post, TRIPLET))
    torch.testing.assert_close(gain - loss, expected, rtol=1e-12, atol=1e-12)
    expected = torch.einsum("b,boi->oi", reward, eligibility(pre, post, PAIR))
    torch.testing.assert_close(weight_change(pre, post, PAIR, weight=reward), expected, rtol=1e-12, atol=1e-12)


def test_an_example_that_counts_for_nothing_may_hold_anything() -> None:
    pre, post = trains(2)
    pre[:, 1], weight = torch.nan, torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    kept = [0, 2, 3]
    for found, expected in zip(
        gain_and_loss(pre, post, PAIR, weight=weight), gain_and_loss(pre[:, kept], post[:, kept], PAIR), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_half_precision_is_summed_in_single() -> None:
    pre, post = trains(3)
    for found, expected in zip(
        gain_and_loss(pre.bfloat16(), post.bfloat16(), PAIR), gain_and_loss(pre, post, PAIR), strict=True
    ):
        assert found.dtype is torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@given(st.integers(0, 10_000))
def test_soft_bounds_slow_down_towards_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight, gain, loss = (torch.from_numpy(x) for x in rng.normal(size=(3, 4, 5)))
    weight, gain, loss = weight.clamp(-1, 2), gain.abs(), loss.abs()
    found = apply_soft_bounds(gain, loss, weight, low=-1, high=2)
    torch.testing.assert_close(found, gain * (2 - weight) / 3 - loss * (weight + 1) / 3)
    # A gain that a bad reward has turned around is a loss, and the other way about.
    torch.testing.assert_close(
        apply_soft_bounds(-gain, -loss, weight, low=-1, high=2), loss * (2 - weight) / 3 - gain * (weight + 1) / 3
    )


def test_what_is_outside_already_goes_no_further_and_may_come_back() -> None:
    weight, change = torch.tensor([3.0, 3.0, -2.0, 0.9, -0.9]), torch.tensor([0.5, -0.5, -0.5, 0.5, -0.5])
    assert clamp_to_bounds(weight + change, weight, low=-1, high=1).tolist() == pytest.approx(
        [3.0, 2.5, -2.0, 1.0, -1.0]
    )
    assert torch.equal(clamp_to_bounds(weight, weight, low=-1, high=1), weight)
    assert apply_soft_bounds(change, torch.zeros(5), weight, low=-1, high=1)[0] == 0


@given(st.integers(0, 10_000))
def test_rows_keep_their_sum_and_their_length(seed: int) -> None:
    new, like = (torch.from_numpy(x) for x in np.random.default_rng(seed).normal(size=(2, 3, 5)))
    found = match_row_statistics(new, like)
    torch.testing.assert_close(found.sum(1), like.sum(1))
    torch.testing.assert_close(found.norm(dim=1), like.norm(dim=1))
    # In the order that the change gave them.
    assert torch.equal(found.argsort(1), new.argsort(1))


def test_a_row_of_equal_weights_has_nothing_to_share_out() -> None:
    like = torch.tensor([[2.0, 2.0], [3.0, 3.0]])
    assert torch.equal(match_row_statistics(torch.tensor([[5.0, 5.0], [0.0, 1.0]]), like), like)
