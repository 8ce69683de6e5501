"""The samplers against the exact model of a normal distribution, whose ODE has a closed-form solution.

For data N(mu, s^2) a sample at time t is N(alpha mu, v^2), v^2 = alpha^2 s^2 + sigma^2, and so the best prediction of the
clean value is mu + alpha s^2 / v^2 (x - alpha mu), of the noise sigma / v^2 (x - alpha mu). The ODE keeps
(x - alpha mu) / v, so a start x becomes mu + s (x - alpha mu) / v with the levels of the start.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bottega.core.noise import Noise
from bottega.tasks.generation.paths import NoisePath
from bottega.tasks.generation.schedules import NUM_TRAIN_TIMESTEPS as TIME_SCALE
from bottega.tasks.generation.solvers import Method, Predict, sample

MU, S = 1.5, 0.5
FLOW = NoisePath(objective="flow")
COSINE = NoisePath(objective="v", schedule="cosine")
LINEAR = NoisePath(objective="noise", schedule="linear")
SCALED_LINEAR = NoisePath(objective="noise", schedule="scaled_linear")
METHODS: tuple[Method, ...] = ("euler", "heun", "dpm")


def path_id(path: NoisePath) -> str:
    return f"{path.objective}-{path.schedule}"


def exact_model(path: NoisePath) -> Predict:
    """Return the optimal prediction, computed in float64 so that only the sampler contributes an error."""

    def predict(x: Tensor, time: Tensor) -> Tensor:
        alpha, sigma = (level[:, None] for level in path.levels(time.double() / TIME_SCALE))
        scaled_difference = (x.double() - alpha * MU) / (alpha**2 * S**2 + sigma**2)
        return path.target(MU + alpha * S**2 * scaled_difference, sigma * scaled_difference, alpha, sigma).float()

    return predict


def exact_solution(path: NoisePath, start: Tensor) -> Tensor:
    alpha, sigma = (torch.tensor(level[0]) for level in path.grid_levels(path.grid(1)))
    return MU + S * (start.double() - alpha * MU) / (alpha**2 * S**2 + sigma**2).sqrt()


def error(path: NoisePath, method: Method, steps: int) -> float:
    start = torch.linspace(-2, 2, 9)[:, None]
    samples = sample(exact_model(path), start, path, steps=steps, method=method)
    return (samples - exact_solution(path, start)).square().mean().sqrt().item()


@pytest.mark.parametrize(
    "path", [FLOW, COSINE, LINEAR, SCALED_LINEAR, NoisePath(objective="noise", schedule="cosine")], ids=path_id
)
@pytest.mark.parametrize("method", METHODS)
def test_noise_becomes_the_data_distribution(path: NoisePath, method: Method) -> None:
    """Against N(mu, s^2) itself: a path that does not start at pure noise adds an error of at most alpha mu s."""
    start = Noise(0, 0, torch.arange(20_000), torch).normal("start", (1,))
    samples = sample(exact_model(path), start, path, steps=64, method=method)
    start_error = path.grid_levels(path.grid(1))[0][0].item() * MU * S
    # The mean of 20,000 draws is within 3 S / sqrt(n), the deviation within 3 S / sqrt(2 n); Euler is off by 0.04.
    solver_error = 0.04 if method == "euler" else 0.01
    assert samples.mean().item() == pytest.approx(MU, abs=start_error + solver_error + 0.011)
    assert samples.std().item() == pytest.approx(S, abs=solver_error + 0.008)


@pytest.mark.parametrize("path", [FLOW, COSINE, LINEAR], ids=path_id)
def test_orders_of_convergence(path: NoisePath) -> None:
    """Doubling the steps halves Euler's error and quarters the others'; over three doublings, since dpm's error changes sign.

    scaled_linear is excluded: its noise grows like the square root of time, which uniform steps resolve badly.
    """
    for method, min_ratio in (("euler", 1.7), ("heun", 3.0), ("dpm", 3.0)):
        few, many = error(path, method, 8), error(path, method, 64)  # type: ignore[arg-type]
        assert (few / many) ** (1 / 3) > min_ratio, method
        assert many < 0.04
    assert error(path, "euler", 16) / error(path, "euler", 32) == pytest.approx(2, abs=0.1)
    assert error(path, "heun", 16) / error(path, "heun", 32) == pytest.approx(4, abs=0.5)


def test_second_order_methods_are_more_accurate_at_thirty_evaluations() -> None:
    """Heun evaluates the model twice in each step but the last, so that 15 of its steps are 29 evaluations."""
    for path in (FLOW, COSINE, LINEAR, SCALED_LINEAR):
        plain = error(path, "euler", 30)
        assert error(path, "heun", 15) < plain / 3
        assert error(path, "dpm", 30) < plain / 3


def test_few_steps_do_not_overshoot() -> None:
    for path in (COSINE, LINEAR, SCALED_LINEAR):
        assert error(path, "dpm", 8) < error(path, "euler", 8)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("path", [FLOW, COSINE, LINEAR], ids=path_id)
def test_one_step_returns_the_prediction_from_pure_noise(path: NoisePath, method: Method) -> None:
    start = torch.linspace(-2, 2, 9)[:, None]
    samples = sample(exact_model(path), start, path, steps=1, method=method)
    times = path.grid(1)
    alpha, sigma = (torch.tensor(level[0], dtype=torch.float32) for level in path.grid_levels(times))
    time = path.model_time(torch.tensor(times[0])).expand(9)
    torch.testing.assert_close(
        samples, path.split_prediction(exact_model(path)(start, time), start, alpha, sigma)[0], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("path", [FLOW, COSINE, LINEAR], ids=path_id)
def test_a_constant_clean_prediction_is_reached_in_any_number_of_steps(path: NoisePath, method: Method) -> None:
    """A model that predicts one fixed sample reaches it in any number of steps."""
    clean, start = torch.linspace(-1, 1, 8)[:, None], torch.linspace(2, -3, 8)[:, None]

    def predict(x: Tensor, time: Tensor) -> Tensor:
        alpha, sigma = (level[:, None] for level in path.levels(time.double() / TIME_SCALE))
        noise = (x - alpha * clean) / sigma
        return path.target(clean.double(), noise, alpha, sigma).float()

    for steps in (1, 2, 7, 30):
        samples = sample(predict, start, path, steps=steps, method=method)
        torch.testing.assert_close(samples, clean, rtol=0, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_number_of_model_evaluations_per_method(method: Method) -> None:
    times: list[float] = []

    def predict(x: Tensor, time: Tensor) -> Tensor:
        assert time.shape == (len(x),)
        assert len(set(time.tolist())) == 1
        times.append(time[0].item())
        return torch.zeros_like(x)

    progress: list[tuple[int, int]] = []
    sample(
        predict, torch.zeros(3, 2, 2), FLOW, steps=4, method=method, progress=lambda *report: progress.append(report)
    )
    assert progress == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert times == ([1000, 750, 750, 500, 500, 250, 250] if method == "heun" else [1000, 750, 500, 250])
