"""A diverged loss is described; the curves of healthy runs are not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.diagnosis.divergence import describe_divergence


@pytest.mark.parametrize(
    "losses",
    [
        [9.0, 590.0, 0.0, 205.0],
        [2.3] * 30 + [40.0] * 30,
        [2.3, 2.0, 1.0, 1e6, 1e7, 1e8],
        [10.0, *np.linspace(10, 2, 60), *[9.5] * 30],
        [1.0] * 5 + [3.0, 30.0, 300.0] * 5,
    ],
)
def test_diverged_loss_is_described(losses: list[float]) -> None:
    assert "the training loss " in str(describe_divergence(losses))


def test_cross_entropy_above_chance_diverged_before_the_first_log() -> None:
    losses = [1685.0, 11845.0, 68690.0, 0.0]
    assert "rose to 6.869e+04 and ended at 0" in str(describe_divergence(losses, has_cross_entropy=True))
    assert describe_divergence([50.0, 40.0, 39.0]) is None, "a loss other than cross-entropy may start anywhere"


@given(
    seed=st.integers(0, 2**32 - 1),
    start=st.floats(0.01, 12),
    end=st.floats(0, 1),
    count=st.integers(2, 400),
    noise=st.floats(0, 0.3),
    has_spike=st.booleans(),
)
def test_healthy_curve_is_not_diverged(
    seed: int, start: float, end: float, count: int, noise: float, has_spike: bool
) -> None:
    """Falling or flat, with the noise of small batches and a spike in the first half that is recovered from."""
    rng = np.random.default_rng(seed)
    losses = start * (end + (1 - end) * np.exp(-5 * np.arange(count) / count))
    losses *= np.exp(noise * rng.standard_normal(count).clip(-3, 3))
    if has_spike and count > 30:
        losses[int(rng.integers(11, count // 2))] *= 100
    for has_cross_entropy in (False, True):
        assert describe_divergence(losses.tolist(), has_cross_entropy=has_cross_entropy) is None


def test_next_source_of_a_sequence_is_not_a_divergence() -> None:
    losses = [*np.linspace(5, 0.5, 60), *[4.8] * 30]
    assert describe_divergence(losses, is_one_task=False) is None
    assert describe_divergence(losses) is not None


def test_short_negative_and_converged_losses_are_not_diverged() -> None:
    assert describe_divergence([]) is None
    assert describe_divergence([3.0]) is None
    assert describe_divergence([0.0, 0.0, 2.7]) is None, "the loss started at zero"
    assert describe_divergence([-5.0, -20.0, -40.0]) is None
    assert describe_divergence([0.002, 0.005, 0.02]) is None, "noise of a converged model"
