"""The paths between data and noise: what is mixed can be split again, schedules are the published ones, times are fair."""

from __future__ import annotations

from typing import Literal, get_args

import pytest
import torch
from torch import Tensor

from bottega.core.noise import Noise
from bottega.tasks.generation.paths import NoisePath
from bottega.tasks.generation.schedules import STEPS

Schedule = Literal["cosine", "linear", "scaled_linear"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
OBJECTIVES: tuple[Literal["noise", "v"], ...] = ("noise", "v")
PATHS = [NoisePath(), *(NoisePath(objective=o, schedule=s) for o in OBJECTIVES for s in SCHEDULES)]
LEVELS = [0.0, 0.001, 0.25, 0.5, 0.75, 0.9]
DIFFUSERS = {"cosine": "squaredcos_cap_v2", "linear": "linear", "scaled_linear": "scaled_linear"}


def many(count: int = 200_000) -> Noise:
    return Noise(0, 0, torch.arange(count), torch)


def named(path: NoisePath) -> str:
    return path.objective if path.objective == "flow" else f"{path.objective}-{path.schedule}"


@pytest.fixture(params=PATHS, ids=named)
def path(request: pytest.FixtureRequest) -> NoisePath:
    return request.param


def mixed(path: NoisePath, clean: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    alpha, sigma = (level.float()[:, None] for level in path.levels(torch.tensor(LEVELS)))
    return alpha * clean + sigma * noise, alpha, sigma


def test_a_prediction_splits_into_what_was_mixed(path: NoisePath) -> None:
    draw = Noise(0, 0, torch.arange(len(LEVELS)), torch)
    clean, noise = draw.normal("clean", (64,)), draw.normal("noise", (64,))
    x, alpha, sigma = mixed(path, clean, noise)
    found = path.split_prediction(path.target(clean, noise, alpha, sigma), x, alpha, sigma)
    torch.testing.assert_close(found, (clean, noise), rtol=0, atol=1e-5)


def test_the_target_is_the_one_of_its_name() -> None:
    clean, noise, alpha, sigma = (torch.tensor(v) for v in (3.0, 5.0, 0.6, 0.8))
    assert NoisePath().target(clean, noise, alpha, sigma).item() == 2.0, "rectified flow: the velocity noise - clean"
    assert NoisePath(objective="noise").target(clean, noise, alpha, sigma).item() == 5.0
    v = NoisePath(objective="v").target(clean, noise, alpha, sigma).item()
    assert v == pytest.approx(0.6 * 5 - 0.8 * 3), "Salimans and Ho: alpha noise - sigma clean"


def test_levels_begin_at_data_and_end_at_noise(path: NoisePath) -> None:
    alpha, sigma = path.levels(torch.linspace(0, 1, STEPS + 1))
    assert alpha[0] == pytest.approx(1, abs=1e-3)
    assert sigma[0] < 0.03
    assert sigma[-1] == pytest.approx(1, abs=3e-3), "scaled_linear keeps 0.0047 of the variance"
    assert alpha[-1] < 0.07
    assert (alpha.diff() <= 0).all()
    assert (sigma.diff() >= 0).all()
    if path.objective != "flow":
        torch.testing.assert_close(alpha.square() + sigma.square(), torch.ones_like(alpha), rtol=0, atol=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_kept_of_the_data_is_what_diffusers_keeps(schedule: Schedule) -> None:
    schedulers = pytest.importorskip("diffusers.schedulers")
    ends = {"beta_start": 0.00085, "beta_end": 0.012} if schedule == "scaled_linear" else {}
    theirs = schedulers.DDPMScheduler(beta_schedule=DIFFUSERS[schedule], **ends).alphas_cumprod.double()
    alpha, _ = NoisePath(objective="noise", schedule=schedule).levels(torch.arange(STEPS) / STEPS)
    torch.testing.assert_close(alpha.square(), theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("schedule", "kept"), [("linear", 4.0358e-5), ("scaled_linear", 4.6600e-3)])
def test_the_last_step_keeps_the_published_share(schedule: Schedule, kept: float) -> None:
    """Of DDPM and of Stable Diffusion, as Lin et al. (2024) tabulate them: sqrt is 0.006353 and 0.068265."""
    alpha, _ = NoisePath(objective="v", schedule=schedule).levels(torch.tensor([0.999]))
    assert alpha.square().item() == pytest.approx(kept, rel=2e-4)


def test_times_of_the_flow_are_logit_normal_or_uniform() -> None:
    quantiles = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9])
    # Of the standard normal; 200,000 draws are within 0.01 of them, by far.
    normal = torch.tensor([-1.28155, -0.67449, 0.0, 0.67449, 1.28155])
    drawn = NoisePath().draw_times(many())
    assert ((drawn > 0) & (drawn < 1)).all()
    torch.testing.assert_close(drawn.quantile(quantiles), normal.sigmoid(), rtol=0, atol=4e-3)
    even = NoisePath(times="uniform").draw_times(many())
    torch.testing.assert_close(even.quantile(quantiles), quantiles, rtol=0, atol=4e-3)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_step_of_a_thousand_is_as_likely(objective: Literal["noise", "v"]) -> None:
    path = NoisePath(objective=objective)
    t = path.draw_times(many())
    told = path.model_time(t)
    assert torch.equal(told, (t * STEPS).round()), "on the grid"
    counts = torch.bincount(told.long(), minlength=STEPS)
    assert len(counts) == STEPS
    # Chi-squared with 999 degrees of freedom: mean 999, deviation 45; five of them.
    chi = ((counts - 200.0).square() / 200).sum()
    assert abs(chi - 999) < 5 * 45


def test_a_time_is_told_and_mixed_alike(path: NoisePath) -> None:
    """The level of step k is the k-th of the schedule, through float32 and back, for every k."""
    t = torch.arange(STEPS, dtype=torch.float32) / STEPS
    if path.objective == "flow":
        torch.testing.assert_close(path.model_time(t), torch.arange(STEPS).float(), rtol=1e-6, atol=1e-4)
    else:
        assert torch.equal(path.model_time(t), torch.arange(STEPS).float())
        alpha, _ = path.levels(t)
        torch.testing.assert_close(alpha.square(), torch.cumprod(1 - path.betas(), 0), rtol=1e-12, atol=0)


def test_min_snr_caps_what_is_nearly_clean() -> None:
    """Hang et al. (2023), gamma 5: min(snr, 5) / snr for noise, min(snr, 5) / (snr + 1) for v."""
    alpha, sigma = torch.tensor([0.1, 0.5, 3.0]), torch.tensor([1.0, 0.5, 1.0])
    noise = NoisePath(objective="noise", min_snr=5.0).weight(alpha, sigma)
    v = NoisePath(objective="v", min_snr=5.0).weight(alpha, sigma)
    torch.testing.assert_close(noise, torch.tensor([1.0, 1.0, 5 / 9]))
    torch.testing.assert_close(v, torch.tensor([0.01 / 1.01, 0.5, 0.5]))
    assert NoisePath(objective="noise").weight(alpha, sigma) is None
    assert NoisePath(min_snr=5.0).weight(alpha, sigma) is None, "the flow has no such weight"


def test_a_copy_with_other_values_has_other_numbers() -> None:
    alpha, sigma = torch.tensor([3.0]), torch.tensor([1.0])
    path = NoisePath(objective="noise")
    assert path.weight(alpha, sigma) is None
    assert path.max_steps != STEPS
    copied = path.model_copy(update={"objective": "v", "min_snr": 5.0})
    torch.testing.assert_close(copied.weight(alpha, sigma), torch.tensor([0.5]))
    assert copied.max_steps == STEPS


@pytest.mark.parametrize("steps", [1, 2, 30, 500, None])
def test_a_grid_goes_from_noise_to_data_without_standing_still(path: NoisePath, steps: int | None) -> None:
    """None is as many as there can be."""
    steps = steps or path.max_steps or 5000
    times = path.grid(steps, "cpu")
    alpha, sigma = path.grid_levels(times)
    assert len(times) == steps + 1
    assert (alpha[-1].item(), sigma[-1].item()) == (1.0, 0.0), "the end is free of noise"
    assert (sigma.diff() < 0).all()
    assert (alpha.diff() > 0).all()
    assert sigma[0] > 0.995
    if steps > 1 and path.objective != "flow":
        assert sigma[-2] < 0.04, "nothing is left to jump over at the end"


def test_predicted_noise_is_never_divided_by_next_to_nothing() -> None:
    """The cosine keeps 2.4e-9 of the variance in the end: an error of 0.01 in the noise would be one of 200 in the data."""
    assert NoisePath(objective="v").levels(torch.tensor([0.999]))[0].item() < 1e-4
    for schedule in SCHEDULES:
        path = NoisePath(objective="noise", schedule=schedule)
        alpha, sigma = path.grid_levels(path.grid(30, "cpu"))
        assert 0.068 <= alpha[0] / sigma[0] < 0.072
    assert path.grid(30, "cpu")[0] == 0.999, "what Stable Diffusion was trained with is used whole"


@pytest.mark.parametrize("times", ["logit_normal", "uniform"])
def test_a_shift_looks_longer_at_noise(times: Literal["logit_normal", "uniform"]) -> None:
    """A time t' = s t / (1 + (s - 1) t) has s times the ratio of noise to data that t has, in training and sampling."""
    plain, shifted = (NoisePath(times=times, shift=s) for s in (1.0, 3.0))

    def ratio(t: Tensor) -> Tensor:
        return t / (1 - t)

    drawn = [ratio(path.draw_times(many(1000)).double()) for path in (plain, shifted)]
    torch.testing.assert_close(drawn[1], 3 * drawn[0], rtol=1e-3, atol=0)
    grid = shifted.grid(8, "cpu")
    torch.testing.assert_close(ratio(grid[1:]), 3 * ratio(plain.grid(8, "cpu")[1:]))
    assert grid[0] == 1
    assert grid[-1] == 0
