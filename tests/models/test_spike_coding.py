"""Spike coding: rate and latency codes, their decoding, and independence of the batch split."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from bottega.core.noise import Noise
from bottega.models.spiking.coding import (
    constant_code,
    decode_latency,
    decode_rate,
    even_thresholds,
    latency_code,
    rate_code,
    rate_code_from_draws,
)


def build_noise(first: int, stop: int, *, step: int = 0) -> Noise:
    return Noise(0, step, torch.arange(first, stop), torch)


def draw_values(*shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).random(shape, np.float32))


def test_rate_is_the_probability_of_a_spike() -> None:
    """4,000 draws of each value: five standard errors of a mean are 5 * sqrt(0.25 / 4000)."""
    x = torch.linspace(0, 1, 11).expand(40, 11)
    spikes = rate_code(x, 100, build_noise(0, 40))
    assert set(spikes.unique().tolist()) == {0.0, 1.0}
    torch.testing.assert_close(decode_rate(spikes).mean(0), x[0], rtol=0, atol=5 * (0.25 / 4000) ** 0.5)
    assert spikes[..., 0].sum() == 0
    assert spikes[..., -1].min() == 1


def test_draws_are_independent_over_time_position_and_step() -> None:
    x = torch.full((50, 40), 0.5)
    spikes = rate_code(x, 60, build_noise(0, 50)) - 0.5
    deviation = 5 * 0.25 / spikes.numel() ** 0.5
    for other in (spikes.roll(1, 0), spikes.roll(1, 1), spikes.roll(1, 2)):
        assert abs((spikes * other).mean().item()) < deviation
    later = rate_code(x, 60, build_noise(0, 50, step=1)) - 0.5
    assert abs((spikes * later).mean().item()) < deviation


@pytest.mark.parametrize("size", [1, 3, 5])
def test_draws_are_independent_of_the_batch_split(size: int) -> None:
    x = draw_values(8, 4, 3)
    full = rate_code(x, 6, build_noise(0, 8))
    parts = [
        rate_code(x[start : start + size], 6, build_noise(start, min(start + size, 8))) for start in range(0, 8, size)
    ]
    assert torch.equal(torch.cat(parts, dim=1), full)
    assert torch.equal(rate_code_from_draws(x, build_noise(0, 8).uniform("rate_code", (6, 4, 3))), full)


@pytest.mark.parametrize("steps", [1, 2, 8, 25])
def test_without_noise_spike_counts_are_rounded_and_evenly_spread(steps: int) -> None:
    x = draw_values(5, 200)
    spikes = rate_code(x, steps)
    assert (decode_rate(spikes) - x).abs().max() <= 0.5 / steps + 1e-6
    assert sorted(even_thresholds(steps, x).tolist()) == pytest.approx([(i + 0.5) / steps for i in range(steps)])
    if steps == 8:
        half = rate_code(torch.full((1, 1), 0.5), 8).flatten()
        assert half[:4].sum() == half[4:].sum() == 2


@pytest.mark.parametrize("steps", [1, 4, 16])
def test_stronger_values_spike_earlier_and_zero_never(steps: int) -> None:
    x = torch.linspace(0, 1, 101)[None]
    spikes = latency_code(x, steps)[:, 0]
    assert spikes.sum(0).max() == 1
    assert spikes[:, 0].sum() == 0
    assert spikes[0, -1] == 1
    has_spike = spikes.sum(0) > 0
    times = spikes.argmax(0)[has_spike]
    assert (times.diff() <= 0).all()
    assert set(times.tolist()) == set(range(steps))


@pytest.mark.parametrize("steps", [1, 4, 16])
def test_latency_decodes_to_half_a_step(steps: int) -> None:
    x = draw_values(7, 30)
    assert (decode_latency(latency_code(x, steps)) - x).abs().max() <= 0.5 / steps + 1e-6
    assert decode_latency(torch.zeros(4, 2, 3)).abs().sum() == 0


def test_values_out_of_range_are_clamped() -> None:
    x = torch.tensor([[-3.0, 5.0]])
    for spikes in (latency_code(x, 4), rate_code(x, 4), rate_code(x, 4, build_noise(0, 1))):
        assert spikes[:, 0, 0].sum() == 0
        assert spikes[0, 0, 1] == 1


def test_constant_code_takes_no_memory() -> None:
    x = draw_values(2, 3)
    train = constant_code(x, 9)
    assert train.shape == (9, 2, 3)
    assert train.stride(0) == 0
    assert all(torch.equal(step, x) for step in train)
