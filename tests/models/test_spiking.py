"""Spiking units: closed forms, causality, surrogate gradients, the spiking router and activity metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bottega.models.spiking import units
from bottega.models.spiking.config import SpikingShape, Surrogate
from bottega.models.spiking.surrogate import smooth_spike, spike, surrogate_gradient
from bottega.models.spiking.units import (
    LIF,
    MAX_LOGIT,
    SpikingGate,
    SpikingLayer,
    firing_rate_penalty,
    sum_activity,
    unit_activity,
    unit_activity_metrics,
)

KINDS = get_args(Surrogate)
EPS = 1e-6
NEURONS = {
    "plain": {},
    "zero": {"reset": "zero"},
    "refractory": {"refractory": 2, "reset": "zero"},
    "adaptive": {"adaptation": 0.4, "adaptation_leak": 0.8},
    "everything": {"refractory": 1, "adaptation": 0.3, "threshold": 0.7, "leak": 0.6},
}


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.from_numpy(scale * np.random.default_rng(seed).standard_normal(shape))


def firing_steps(shape: SpikingShape, current: list[float]) -> list[int]:
    """Return the steps in which a single unit fires."""
    spikes = LIF(shape)(torch.tensor(current, dtype=torch.float64).view(-1, 1, 1))
    return spikes.flatten().nonzero().flatten().tolist()


def reference_spikes(
    shape: SpikingShape, current: np.ndarray, fire: Callable[[int, np.ndarray], np.ndarray]
) -> np.ndarray:
    """Reference implementation of the neuron with `fire(step, excess)` in place of the spike."""
    potential, threshold_increase, spikes = np.zeros_like(current[0]), np.zeros_like(current[0]), []
    for step, step_current in enumerate(current):
        can_fire = np.ones_like(step_current)
        for previous in spikes[max(0, step - shape.refractory) : step] if shape.refractory else ():
            can_fire = can_fire * (1 - previous)
        potential = shape.leak * potential + can_fire * step_current
        increase = shape.adaptation * spikes[-1] if spikes else 0
        threshold_increase = shape.adaptation_leak * threshold_increase + increase
        threshold = shape.threshold + threshold_increase
        new_spikes = can_fire * fire(step, potential - threshold)
        potential = potential * (1 - new_spikes) if shape.reset == "zero" else potential - threshold * new_spikes
        spikes.append(new_spikes)
    return np.stack(spikes)


# The surrogate


@pytest.mark.parametrize("kind", KINDS)
def test_spike_is_binary_with_the_gradient_of_the_smooth_step(kind: Surrogate) -> None:
    excess = torch.linspace(-2, 2, 401, dtype=torch.float64, requires_grad=True)
    spikes = spike(excess, kind, 3.0)
    assert spikes.tolist() == [float(value >= 0) for value in excess.tolist()]
    (gradient,) = torch.autograd.grad(spikes.sum(), excess)
    up, down = (smooth_spike(excess.detach() + change, kind, 3.0) for change in (EPS, -EPS))
    torch.testing.assert_close(gradient, (up - down) / (2 * EPS), rtol=1e-5, atol=1e-8)
    assert (gradient > 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_smooth_step_rises_from_0_to_1_and_is_half_at_the_threshold(kind: Surrogate) -> None:
    ends = smooth_spike(torch.tensor([-1e6, 0.0, 1e6], dtype=torch.float64), kind, 2.0)
    torch.testing.assert_close(ends, torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64), rtol=0, atol=1e-5)
    top = surrogate_gradient(torch.zeros(1), kind, 2.0).item()
    assert top == pytest.approx(0.5 if kind == "sigmoid" else 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivative_matches_finite_differences(kind: Surrogate) -> None:
    excess = draw(50).requires_grad_()
    (first,) = torch.autograd.grad(spike(excess, kind, 2.0).sum(), excess, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), excess)
    up, down = (surrogate_gradient(excess.detach() + change, kind, 2.0) for change in (EPS, -EPS))
    torch.testing.assert_close(second, (up - down) / (2 * EPS), rtol=1e-4, atol=1e-6)


# The neuron's gradient


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NEURONS)
def test_gradient_equals_the_neuron_with_a_smooth_step(name: str, kind: Surrogate) -> None:
    """Through time, resets, refractory periods and adaptive thresholds. The smooth step is shifted to pass through each
    spike, so both neurons have the same state, and finite differences of one must equal the gradient of the other."""
    shape = SpikingShape(surrogate=kind, **NEURONS[name])
    current, weight = draw(6, 2, 3, scale=1.5).requires_grad_(), draw(6, 2, 3, seed=1).numpy()
    spikes = LIF(shape)(current)
    assert 0.1 < spikes.mean().item() < 0.9, "a unit that never or always fires would test nothing"
    (gradient,) = torch.autograd.grad((spikes * torch.from_numpy(weight)).sum(), current)
    original_excess: list[np.ndarray] = []

    def fire_step(step: int, excess: np.ndarray) -> np.ndarray:
        original_excess.append(excess)
        return (excess >= 0).astype(float)

    def fire_smooth(step: int, excess: np.ndarray) -> np.ndarray:
        change = smooth_spike(torch.from_numpy(excess), kind, 2.0) - smooth_spike(
            torch.from_numpy(original_excess[step]), kind, 2.0
        )
        return (original_excess[step] >= 0) + change.numpy()

    original = current.detach().numpy()
    np.testing.assert_array_equal(reference_spikes(shape, original, fire_step), spikes.detach().numpy())
    expected = np.zeros_like(original)
    for index in np.ndindex(original.shape):
        losses = []
        for change in (EPS, -EPS):
            changed = original.copy()
            changed[index] += change
            losses.append((reference_spikes(shape, changed, fire_smooth) * weight).sum())
        expected[index] = (losses[0] - losses[1]) / (2 * EPS)
    np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-5, atol=1e-7)
    assert np.abs(expected[0]).max() > 1e-3, "gradients flow back through time"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NEURONS)
def test_smooth_neuron_passes_gradcheck(name: str, kind: Surrogate) -> None:
    neuron = LIF(SpikingShape(surrogate=kind, **NEURONS[name]), smooth=True)
    current = draw(5, 1, 2).requires_grad_()
    spikes = neuron(current)
    assert ((spikes > 0) & (spikes < 1)).all()
    assert torch.autograd.gradcheck(neuron, (current,))


def test_every_weight_of_a_deep_network_gets_a_gradient() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*[SpikingLayer(16, 16, SpikingShape()) for _ in range(4)])
    layers(draw(8, 4, 16).float()).mean().backward()
    for name, parameter in layers.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


# The neuron in time


@pytest.mark.parametrize("leak", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("refractory", [0, 3])
def test_constant_current_gives_the_analytic_period(leak: float, refractory: int) -> None:
    """From rest, n steps of a current I give the potential I (1 - leak^n) / (1 - leak)."""
    current, threshold = 0.7, 1.3
    shape = SpikingShape(leak=leak, threshold=threshold, reset="zero", refractory=refractory)
    steps = math.ceil(math.log(1 - threshold * (1 - leak) / current) / math.log(leak))
    fired = firing_steps(shape, [current] * 60)
    assert fired[0] == steps - 1
    assert {b - a for a, b in pairwise(fired)} == {steps + refractory}


def test_current_that_leaks_before_it_reaches_the_threshold_never_fires() -> None:
    shape = SpikingShape(leak=0.5)
    assert firing_steps(shape, [0.49] * 200) == []  # the potential approaches 0.98
    assert firing_steps(shape, [0.51] * 200) != []


def test_without_leak_spikes_count_whole_thresholds() -> None:
    """The spikes so far are the number of thresholds in the cumulative current."""
    current = np.random.default_rng(0).uniform(0, 0.9, 200)
    spikes = LIF(SpikingShape(leak=1.0))(torch.from_numpy(current).view(-1, 1, 1)).flatten()
    np.testing.assert_array_equal(spikes.cumsum(0).numpy(), np.floor(np.cumsum(current)))


def test_without_leak_the_potential_is_the_cumulative_sum() -> None:
    """The largest cumulative sum decides whether the unit ever fires."""
    current = np.random.default_rng(0).normal(0, 1, 50)
    highest = float(current.cumsum().max())
    assert firing_steps(SpikingShape(leak=1.0, threshold=highest - 1e-9), list(current)) == [
        int(current.cumsum().argmax())
    ]
    assert firing_steps(SpikingShape(leak=1.0, threshold=highest + 1e-9), list(current)) == []


@pytest.mark.parametrize("refractory", [1, 2, 5])
@pytest.mark.parametrize("reset", ["subtract", "zero"])
def test_refractory_unit_is_silent_after_a_spike(refractory: int, reset: Any) -> None:
    spikes = LIF(SpikingShape(refractory=refractory, reset=reset))(draw(60, 8, 8, scale=4.0))
    assert spikes.sum() > 0
    for gap in range(1, refractory + 1):
        assert (spikes[gap:] * spikes[:-gap]).sum() == 0, gap
    assert (spikes[refractory + 1 :] * spikes[: -refractory - 1]).sum() > 0, "and it may fire again after that"
    assert spikes.mean(0).max() <= SpikingShape(time_steps=60, refractory=refractory).highest_rate


def test_adaptation_lengthens_the_intervals() -> None:
    fired = firing_steps(SpikingShape(adaptation=0.5, adaptation_leak=1.0, leak=1.0), [0.6] * 120)
    gaps = [b - a for a, b in pairwise(fired)]
    assert len(gaps) > 4
    assert gaps == sorted(gaps)
    assert gaps[-1] > 2 * gaps[0]
    plain = firing_steps(SpikingShape(leak=1.0), [0.6] * 120)
    assert {b - a for a, b in pairwise(plain)} <= {1, 2}


def test_adaptation_decays() -> None:
    shape = SpikingShape(adaptation=5.0, adaptation_leak=0.5, leak=0.0)
    assert firing_steps(shape, [1.1] * 3) == [0]
    assert firing_steps(shape, [1.1] * 12)[1] == 7  # 5 * 0.5^k is below 0.1 at k 6, counted from the step after


def test_rate_falls_with_higher_threshold_and_smaller_leak() -> None:
    current = draw(40, 16, 16)
    by_threshold = [LIF(SpikingShape(threshold=t))(current).mean().item() for t in (0.5, 1.0, 2.0, 4.0)]
    by_leak = [LIF(SpikingShape(leak=v))(current.abs()).mean().item() for v in (1.0, 0.8, 0.4, 0.0)]
    for rates in (by_threshold, by_leak):
        assert all(a > b for a, b in pairwise(rates)), rates


def test_neuron_is_causal_and_not_time_symmetric() -> None:
    """A reversed current does not give the reversed train, and later input does not change earlier spikes."""
    neuron, current = LIF(SpikingShape(leak=0.8)), draw(20, 4, 8)
    spikes = neuron(current)
    assert not torch.equal(neuron(current.flip(0)).flip(0), spikes)
    changed = current.clone()
    changed[12:] += 3
    assert torch.equal(neuron(changed)[:12], spikes[:12])
    assert not torch.equal(neuron(changed)[12:], spikes[12:])


def test_layer_is_stateless_and_independent_of_the_batch_split() -> None:
    layer = SpikingLayer(12, 9, SpikingShape(adaptation=0.2, refractory=1)).double()
    assert [name for name, _ in layer.named_buffers()] == []
    x = draw(8, 10, 12)
    full = layer(x)
    assert torch.equal(layer(x), full)
    for size in (1, 3, 7):
        assert torch.equal(torch.cat([layer(part) for part in x.split(size, dim=1)], dim=1), full)


def test_potential_of_bf16_currents_is_summed_in_float32() -> None:
    """In bfloat16 a running sum of 0.01 stops growing at 2."""
    shape = SpikingShape(leak=1.0, threshold=3.0)
    spikes = LIF(shape)(torch.full((400, 1, 1), 0.01, dtype=torch.bfloat16))
    assert spikes.dtype == torch.float32
    assert spikes.sum() == 1


def test_constant_current_is_multiplied_once() -> None:
    layer, x = SpikingLayer(6, 5, SpikingShape()).double(), draw(1, 4, 6, scale=2.0)
    calls: list[tuple[int, ...]] = []
    layer.synapse.register_forward_hook(lambda module, args, out: calls.append(tuple(args[0].shape)))
    shapes: list[tuple[int, ...]] = []
    layer.register_forward_hook(lambda module, args, out: shapes.extend((tuple(args[0].shape), tuple(out.shape))))
    a, b = layer(x.expand(8, -1, -1)), layer(x.repeat(8, 1, 1))
    assert torch.equal(a, b)
    assert calls == [(1, 4, 6), (8, 4, 6)]
    assert shapes == [(8, 4, 6), (8, 4, 5)] * 2


# The router


def build_gate() -> SpikingGate:
    model = SpikingGate(10, 4, SpikingShape(), group_size=3).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=number, scale=0.5))
    return model


def test_gate_logits_are_the_firing_rates_of_groups() -> None:
    router, x = build_gate(), draw(2, 5, 10, seed=9)
    logits, rates = router(x)
    assert rates.shape == (2, 5, 12)
    groups = rates.unflatten(-1, (4, 3)).mean(-1)
    torch.testing.assert_close(logits, MAX_LOGIT * groups)
    assert ((rates >= 0) & (rates <= 1)).all()
    separate = torch.stack([router(row)[0] for row in x.reshape(-1, 10)]).view(2, 5, 4)
    torch.testing.assert_close(separate, logits)
    logits[..., 0].sum().backward()
    for name, parameter in router.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0, name


def test_permuted_groups_permute_the_logits() -> None:
    router, x = build_gate(), draw(6, 10, seed=9)
    before = router(x)[0]
    order = [2, 0, 3, 1]
    with torch.no_grad():
        for parameter in router.groups.synapse.parameters():
            parameter.copy_(parameter.unflatten(0, (4, 3))[order].flatten(0, 1))
    torch.testing.assert_close(router(x)[0], before[:, order])


def test_gate_modules_with_weights_are_leaves() -> None:
    for module in build_gate().modules():
        assert not (dict(module.named_parameters(recurse=False)) and list(module.children()))


# Activity metrics


def build_spikes() -> Tensor:
    """Build spikes [4 steps, 3 examples, 4 units] of units that fire: never; always; always in the last two examples;
    once in the last example."""
    spikes = torch.zeros(4, 3, 4)
    spikes[:, :, 1] = 1
    spikes[:, 1:, 2] = 1
    spikes[2, 2, 3] = 1
    return spikes


def test_dead_units_never_fire_and_saturated_units_always_do() -> None:
    spikes = build_spikes()
    assert unit_activity_metrics(unit_activity(spikes).numpy()) == {"dead": 0.25, "saturated": 0.25}
    first = spikes[:, :1]
    assert unit_activity_metrics(unit_activity(first).numpy()) == {"dead": 0.75, "saturated": 0.25}
    split = [unit_activity(part).numpy() for part in spikes.split(1, dim=1)]
    assert unit_activity_metrics(np.concatenate(split)) == {"dead": 0.25, "saturated": 0.25}
    assert unit_activity(spikes).dtype == torch.uint8
    assert unit_activity_metrics(np.zeros((0, 4), np.uint8)) == {}


def test_rates_give_the_same_metrics_as_spikes() -> None:
    spikes = build_spikes()
    rates = units.spike_rate(spikes)[None]
    assert torch.equal(unit_activity(rates), unit_activity(spikes))
    assert sum_activity(rates) == sum_activity(spikes)
    torch.testing.assert_close(firing_rate_penalty(rates, 0.3), firing_rate_penalty(spikes, 0.3))


def test_refractory_unit_at_its_highest_rate_is_saturated() -> None:
    shape = SpikingShape(time_steps=7, refractory=2)
    spikes = LIF(shape)(torch.full((7, 2, 1), 9.0))
    assert spikes.flatten(1).mean(1).tolist() == [1, 0, 0, 1, 0, 0, 1]
    assert shape.highest_rate == pytest.approx(spikes.mean().item())
    assert unit_activity_metrics(unit_activity(spikes, shape.highest_rate).numpy())["saturated"] == 1.0
    assert unit_activity_metrics(unit_activity(spikes).numpy())["saturated"] == 0.0


def test_activity_is_a_sum_over_the_examples_of_the_mask() -> None:
    spikes = build_spikes()
    total, number = sum_activity(spikes)["firing_rate"]
    assert (total.item(), number.item()) == (pytest.approx(0.25 + 0.5 + 0.5625), 3)
    total, number = sum_activity(spikes, torch.tensor([1, 0, 1]))["firing_rate"]
    assert (total.item(), number.item()) == (pytest.approx(0.25 + 0.5625), 2)
    assert sum_activity(spikes)["silent"][0].item() == pytest.approx(0.75 + 0.5 + 0.25)


def test_rate_penalty_is_a_sum_and_decreases_towards_the_target() -> None:
    spikes = build_spikes()
    each = [firing_rate_penalty(spikes[:, i : i + 1], 0.3) for i in range(3)]
    torch.testing.assert_close(firing_rate_penalty(spikes, 0.3), torch.stack(each).sum())
    assert firing_rate_penalty(spikes[:, :1], 0.25) == 0
    current = draw(8, 6, 20, scale=2.0).requires_grad_()
    neuron = LIF(SpikingShape())
    firing_rate_penalty(neuron(current), 0.0).backward()
    assert current.grad is not None
    lower = current.detach() - 20 * current.grad
    assert firing_rate_penalty(neuron(lower), 0.0) < firing_rate_penalty(neuron(current), 0.0)
