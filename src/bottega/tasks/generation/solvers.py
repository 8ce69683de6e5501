"""ODE solvers for sampling: Euler (which is DDIM on variance-preserving paths), Heun and DPM-Solver++(2M).

All integrate dx = clean d(alpha) + noise d(sigma), with clean and noise as the model's prediction implies them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from bottega.tasks.generation.paths import NoisePath

Method = Literal["euler", "heun", "dpm"]
Predict = Callable[[Tensor, Tensor], Tensor]
"""(x (batch, ...), model times (batch,)) -> the model's prediction."""


def sample(
    predict: Predict,
    start: Tensor,
    path: NoisePath,
    *,
    steps: int,
    method: Method = "heun",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tensor:
    """Return samples for the noise `start`; rows are independent, so a sample does not depend on its batch."""
    times = path.grid(steps, start.device)
    alphas, sigmas = (level.tolist() for level in path.grid_levels(times))
    x, previous = start.float(), None

    def split(x: Tensor, i: int) -> tuple[Tensor, Tensor]:
        model_time = path.model_time(times[i].float()).expand(len(x))
        return path.split_prediction(
            predict(x, model_time).float(), x, torch.tensor(alphas[i]), torch.tensor(sigmas[i])
        )

    for i in range(steps):
        alpha, next_alpha, sigma, next_sigma = alphas[i], alphas[i + 1], sigmas[i], sigmas[i + 1]
        clean, noise = split(x, i)
        if method == "dpm":
            x, previous = (
                _take_dpm_step(x, clean, previous, (alpha, next_alpha), (sigma, next_sigma)),
                (clean, _compute_log_ratio(alpha, sigma)),
            )
        else:
            next_x = x + (next_alpha - alpha) * clean + (next_sigma - sigma) * noise
            # At the end sigma is 0 and the noise is undefined, so the last step is an Euler step.
            if method == "heun" and i + 1 < steps:
                clean_ahead, noise_ahead = split(next_x, i + 1)
                next_x = (
                    x
                    + (next_alpha - alpha) * (clean + clean_ahead) / 2
                    + (next_sigma - sigma) * (noise + noise_ahead) / 2
                )
            x = next_x
        progress(i + 1, steps)
    return x


def _take_dpm_step(
    x: Tensor,
    clean: Tensor,
    previous: tuple[Tensor, float] | None,
    alphas: tuple[float, float],
    sigmas: tuple[float, float],
) -> Tensor:
    """Take one step of DPM-Solver++(2M) (Lu et al., 2022); it is first-order where log(alpha / sigma) is not finite.

    `previous` holds the clean sample and log(alpha / sigma) of the previous step; `alphas` and `sigmas` are (current, next).
    """
    current_log_ratio, next_log_ratio = (
        _compute_log_ratio(alphas[0], sigmas[0]),
        _compute_log_ratio(alphas[1], sigmas[1]),
    )
    step_size = next_log_ratio - current_log_ratio
    extrapolated = clean
    if previous is not None and all(map(_is_finite, (current_log_ratio, next_log_ratio, previous[1]))):
        # Near the data the log-SNR grows faster with every step while `clean` hardly changes: extrapolation by the ratio of
        # the step sizes, as published, overshot by 0.36 in 8 steps; with a ratio of at least 1, the error is 0.04.
        ratio = max(1.0, (current_log_ratio - previous[1]) / step_size)
        extrapolated = clean + (clean - previous[0]) / (2 * ratio)
    if sigmas[1] == 0:
        return extrapolated
    decay = 0.0 if not _is_finite(step_size) else float(torch.exp(torch.tensor(-step_size, dtype=torch.float64)))
    return sigmas[1] / sigmas[0] * x + alphas[1] * (1 - decay) * extrapolated


def _compute_log_ratio(alpha: float, sigma: float) -> float:
    if alpha <= 0:
        return -torch.inf
    return torch.inf if sigma <= 0 else float(torch.log(torch.tensor(alpha / sigma, dtype=torch.float64)))


def _is_finite(value: float) -> bool:
    return value not in (torch.inf, -torch.inf)
