"""Paths between data and noise: predictions can be inverted, schedules match the published ones, times are distributed as stated."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from bottega.core.noise import Noise
from bottega.tasks.generation.paths import NoisePath
from bottega.tasks.generation.schedules import NUM_TRAIN_TIMESTEPS

Schedule = Literal["cosine", "linear", "scaled_linear"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
OBJECTIVES: tuple[Literal["noise", "v"], ...] = ("noise", "v")
PATHS = [NoisePath(), *(NoisePath(objective=o, schedule=s) for o in OBJECTIVES for s in SCHEDULES)]
LEVELS = [0.0, 0.001, 0.25, 0.5, 0.75, 0.9]
DIFFUSERS = {"cosine": "squaredcos_cap_v2", "linear": "linear", "scaled_linear": "scaled_linear"}


def many_draws(count: int = 200_000) -> Noise:
    return Noise(0, 0, torch.arange(count), torch)


def path_id(path: NoisePath) -> str:
    return path.objective if path.objective == "flow" else f"{path.objective}-{path.schedule}"


@pytest.fixture(params=PATHS, ids=path_id)
def path(request: pytest.FixtureRequest) -> NoisePath:
    return request.param


def mix(path: NoisePath, clean: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    alpha, sigma = (level.float()[:, None] for level in path.levels(torch.tensor(LEVELS)))
    return alpha * clean + sigma * noise, alpha, sigma


def test_split_prediction_recovers_data_and_noise(path: NoisePath) -> None:
    draw = Noise(0, 0, torch.arange(len(LEVELS)), torch)
    clean, noise = draw.normal("clean", (64,)), draw.normal("noise", (64,))
    x, alpha, sigma = mix(path, clean, noise)
    result = path.split_prediction(path.target(clean, noise, alpha, sigma), x, alpha, sigma)
    torch.testing.assert_close(result, (clean, noise), rtol=0, atol=1e-5)


def test_targets_of_each_objective() -> None:
    clean, noise, alpha, sigma = (torch.tensor(v) for v in (3.0, 5.0, 0.6, 0.8))
    assert NoisePath().target(clean, noise, alpha, sigma).item() == 2.0, "rectified flow: the velocity noise - clean"
    assert NoisePath(objective="noise").target(clean, noise, alpha, sigma).item() == 5.0
    v = NoisePath(objective="v").target(clean, noise, alpha, sigma).item()
    assert v == pytest.approx(0.6 * 5 - 0.8 * 3), "Salimans and Ho: alpha noise - sigma clean"


def test_levels_begin_at_data_and_end_at_noise(path: NoisePath) -> None:
    alpha, sigma = path.levels(torch.linspace(0, 1, NUM_TRAIN_TIMESTEPS + 1))
    assert alpha[0] == pytest.approx(1, abs=1e-3)
    assert sigma[0] < 0.03
    assert sigma[-1] == pytest.approx(1, abs=3e-3), "scaled_linear ends at a signal variance of 0.0047"
    assert alpha[-1] < 0.07
    assert (alpha.diff() <= 0).all()
    assert (sigma.diff() >= 0).all()
    if path.objective != "flow":
        torch.testing.assert_close(alpha.square() + sigma.square(), torch.ones_like(alpha), rtol=0, atol=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_alphas_cumprod_match_diffusers(schedule: Schedule) -> None:
    schedulers = pytest.importorskip("diffusers.schedulers")
    ends = {"beta_start": 0.00085, "beta_end": 0.012} if schedule == "scaled_linear" else {}
    theirs = schedulers.DDPMScheduler(beta_schedule=DIFFUSERS[schedule], **ends).alphas_cumprod.double()
    alpha, _ = NoisePath(objective="noise", schedule=schedule).levels(
        torch.arange(NUM_TRAIN_TIMESTEPS) / NUM_TRAIN_TIMESTEPS
    )
    torch.testing.assert_close(alpha.square(), theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("schedule", "signal_variance"), [("linear", 4.0358e-5), ("scaled_linear", 4.6600e-3)])
def test_the_last_step_has_the_published_signal_variance(schedule: Schedule, signal_variance: float) -> None:
    """DDPM and Stable Diffusion, from the table of Lin et al. (2024), whose square roots are 0.006353 and 0.068265."""
    alpha, _ = NoisePath(objective="v", schedule=schedule).levels(torch.tensor([0.999]))
    assert alpha.square().item() == pytest.approx(signal_variance, rel=2e-4)


def test_times_of_the_flow_are_logit_normal_or_uniform() -> None:
    quantiles = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9])
    # Quantiles of the standard normal; those of 200,000 draws are well within 0.01.
    normal = torch.tensor([-1.28155, -0.67449, 0.0, 0.67449, 1.28155])
    training_times = NoisePath().draw_times(many_draws())
    assert ((training_times > 0) & (training_times < 1)).all()
    torch.testing.assert_close(training_times.quantile(quantiles), normal.sigmoid(), rtol=0, atol=4e-3)
    uniform_times = NoisePath(times="uniform").draw_times(many_draws())
    torch.testing.assert_close(uniform_times.quantile(quantiles), quantiles, rtol=0, atol=4e-3)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_training_steps_are_uniformly_distributed(objective: Literal["noise", "v"]) -> None:
    path = NoisePath(objective=objective)
    t = path.draw_times(many_draws())
    steps = path.model_time(t)
    assert torch.equal(steps, (t * NUM_TRAIN_TIMESTEPS).round()), "times lie on the grid"
    counts = torch.bincount(steps.long(), minlength=NUM_TRAIN_TIMESTEPS)
    assert len(counts) == NUM_TRAIN_TIMESTEPS
    # Chi-squared with 999 degrees of freedom: mean 999, standard deviation 45; five of them are allowed.
    chi = ((counts - 200.0).square() / 200).sum()
    assert abs(chi - 999) < 5 * 45


def test_model_time_and_noise_level_belong_to_the_same_step(path: NoisePath) -> None:
    """The level of step k is the k-th of the schedule, through float32 and back, for every k."""
    t = torch.arange(NUM_TRAIN_TIMESTEPS, dtype=torch.float32) / NUM_TRAIN_TIMESTEPS
    if path.objective == "flow":
        torch.testing.assert_close(path.model_time(t), torch.arange(NUM_TRAIN_TIMESTEPS).float(), rtol=1e-6, atol=1e-4)
    else:
        assert torch.equal(path.model_time(t), torch.arange(NUM_TRAIN_TIMESTEPS).float())
        alpha, _ = path.levels(t)
        torch.testing.assert_close(alpha.square(), torch.from_numpy(np.cumprod(1 - path.betas())), rtol=1e-12, atol=0)


def test_min_snr_caps_the_weight_of_low_noise() -> None:
    """Hang et al. (2023), gamma 5: min(snr, 5) / snr for noise, min(snr, 5) / (snr + 1) for v."""
    alpha, sigma = torch.tensor([0.1, 0.5, 3.0]), torch.tensor([1.0, 0.5, 1.0])
    noise = NoisePath(objective="noise", min_snr=5.0).weight(alpha, sigma)
    v = NoisePath(objective="v", min_snr=5.0).weight(alpha, sigma)
    torch.testing.assert_close(noise, torch.tensor([1.0, 1.0, 5 / 9]))
    torch.testing.assert_close(v, torch.tensor([0.01 / 1.01, 0.5, 0.5]))
    assert NoisePath(objective="noise").weight(alpha, sigma) is None
    assert NoisePath(min_snr=5.0).weight(alpha, sigma) is None, "the flow has no such weight"


def test_a_copy_with_other_fields_recomputes_its_values() -> None:
    alpha, sigma = torch.tensor([3.0]), torch.tensor([1.0])
    path = NoisePath(objective="noise")
    assert path.weight(alpha, sigma) is None
    assert path.max_steps != NUM_TRAIN_TIMESTEPS
    copied = path.model_copy(update={"objective": "v", "min_snr": 5.0})
    torch.testing.assert_close(copied.weight(alpha, sigma), torch.tensor([0.5]))
    assert copied.max_steps == NUM_TRAIN_TIMESTEPS


@pytest.mark.parametrize("steps", [1, 2, 30, 500, None])
def test_the_grid_is_strictly_monotonic_from_noise_to_data(path: NoisePath, steps: int | None) -> None:
    """None means the maximum number of steps."""
    steps = steps or path.max_steps or 5000
    times = path.grid(steps)
    alpha, sigma = path.grid_levels(times)
    assert len(times) == steps + 1
    assert (alpha[-1].item(), sigma[-1].item()) == (1.0, 0.0), "the end has no noise"
    assert (np.diff(sigma) < 0).all()
    assert (np.diff(alpha) > 0).all()
    assert sigma[0] > 0.995
    if steps > 1 and path.objective != "flow":
        assert sigma[-2] < 0.04, "the last step is small"


def test_noise_prediction_starts_where_the_signal_is_not_negligible() -> None:
    """The cosine schedule ends at a signal variance of 2.4e-9, where a noise error of 0.01 is a data error of 200."""
    assert NoisePath(objective="v").levels(torch.tensor([0.999]))[0].item() < 1e-4
    for schedule in SCHEDULES:
        path = NoisePath(objective="noise", schedule=schedule)
        alpha, sigma = path.grid_levels(path.grid(30))
        assert 0.068 <= alpha[0] / sigma[0] < 0.072
    assert path.grid(30)[0] == 0.999, "Stable Diffusion's schedule is used completely"


@pytest.mark.parametrize("times", ["logit_normal", "uniform"])
def test_shift_multiplies_the_noise_to_data_ratio(times: Literal["logit_normal", "uniform"]) -> None:
    """A time t' = s t / (1 + (s - 1) t) has s times the ratio of noise to data that t has, in training and sampling."""
    plain, shifted = (NoisePath(times=times, shift=s) for s in (1.0, 3.0))

    def ratio(t: Tensor) -> Tensor:
        return t / (1 - t)

    training_times = [ratio(path.draw_times(many_draws(1000)).double()) for path in (plain, shifted)]
    torch.testing.assert_close(training_times[1], 3 * training_times[0], rtol=1e-3, atol=0)
    grid, plain_grid = (torch.from_numpy(path.grid(8)) for path in (shifted, plain))
    torch.testing.assert_close(ratio(grid[1:]), 3 * ratio(plain_grid[1:]))
    assert grid[0] == 1
    assert grid[-1] == 0
