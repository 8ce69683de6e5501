"""Reads the training objective and noise schedule of a diffusers scheduler_config.json.

The sampling settings in the same file (timesteps, solver) are ignored: our samplers use the schedule alone. diffusers'
scheduler classes would compute the same betas, but diffusers is optional and takes 3 s to import.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from bottega.core.errors import UsageError
from bottega.models.folders.json_object import read_json_object

NUM_TRAIN_TIMESTEPS = 1000
MIN_SIGNAL_TO_NOISE = 0.068
"""Ratio of data to noise at which sampling starts if the model predicts noise; the betas of our exports end there."""
BETA_SCHEDULES = {
    "linear": ("linear", 1e-4, 0.02),
    "scaled_linear": ("scaled_linear", 0.00085, 0.012),
    "squaredcos_cap_v2": ("cosine", None, None),
}
"""diffusers' beta_schedule -> (our name, supported beta_start, supported beta_end); None: any value."""
OBJECTIVES = {"epsilon": "noise", "v_prediction": "v"}

Objective = Literal["noise", "v", "flow"]
Schedule = Literal["cosine", "linear", "scaled_linear"]


class NoiseSchedule(NamedTuple):
    """The objective and schedule under our names."""

    objective: Objective
    schedule: Schedule
    """Not used if the objective is flow."""
    shift: float


def read_schedule(file: Path) -> NoiseSchedule:
    """Return the schedule of a scheduler_config.json; refuse a schedule that we cannot compute exactly."""
    config = read_json_object(file)
    if _is_flow(config):
        return NoiseSchedule("flow", "cosine", _read_shift(config, file))
    prediction_type = config.get("prediction_type", "epsilon")
    if prediction_type not in OBJECTIVES:
        raise UsageError(
            f"{file}: prediction_type {prediction_type!r} is not supported; supported: {', '.join(OBJECTIVES)}"
        )
    objective: Any = OBJECTIVES[prediction_type]
    if config.get("rescale_betas_zero_snr"):
        raise UsageError(f"{file}: rescale_betas_zero_snr is not supported; use a model that was trained without it")
    if config.get("trained_betas") is not None:
        return NoiseSchedule(objective, _match_betas(config["trained_betas"], prediction_type, file), 1.0)
    return NoiseSchedule(objective, _match_schedule(config, file), 1.0)


def is_flow_scheduler(file: Path) -> bool:
    """Return whether a scheduler_config.json is of a flow-matching scheduler."""
    return _is_flow(read_json_object(file))


def _is_flow(config: Mapping[str, Any]) -> bool:
    return str(config.get("_class_name")).startswith("FlowMatch")


def _read_shift(config: Mapping[str, Any], file: Path) -> float:
    for key in ("use_dynamic_shifting", "invert_sigmas", "shift_terminal"):
        if config.get(key):
            raise UsageError(f"{file}: {key} {config[key]!r} is not supported; supported: a flow with a fixed shift")
    steps = config.get("num_train_timesteps", NUM_TRAIN_TIMESTEPS)
    if steps != NUM_TRAIN_TIMESTEPS:
        raise UsageError(f"{file}: num_train_timesteps {steps} is not supported; supported: {NUM_TRAIN_TIMESTEPS}")
    return float(config.get("shift", 1.0))


def _match_schedule(config: Mapping[str, Any], file: Path) -> Schedule:
    beta_schedule, steps = config.get("beta_schedule"), config.get("num_train_timesteps", NUM_TRAIN_TIMESTEPS)
    if beta_schedule not in BETA_SCHEDULES:
        raise UsageError(
            f"{file}: beta_schedule {beta_schedule!r} is not supported; supported: {', '.join(BETA_SCHEDULES)}"
        )
    schedule, beta_start, beta_end = BETA_SCHEDULES[beta_schedule]
    values = (config.get("beta_start"), config.get("beta_end"), steps)
    supported = (
        (beta_start, beta_end, NUM_TRAIN_TIMESTEPS) if beta_start is not None else (*values[:2], NUM_TRAIN_TIMESTEPS)
    )
    if values != supported:
        raise UsageError(
            f"{file}: {beta_schedule} from beta_start {values[0]} to beta_end {values[1]} in {values[2]} steps "
            f"is not supported; supported: {supported[0]} to {supported[1]} in {supported[2]}"
        )
    return schedule  # type: ignore[return-value]


def _match_betas(betas: Any, prediction_type: str, file: Path) -> Schedule:
    """Return the schedule of explicit betas, which our exports write if the end of a schedule is never sampled."""
    values = np.asarray(betas, np.float64)
    for name in BETA_SCHEDULES:
        default_betas = _compute_betas(BETA_SCHEDULES[name][0])
        num_sampled = _count_sampled_steps(default_betas) if prediction_type == "epsilon" else NUM_TRAIN_TIMESTEPS
        for length in {NUM_TRAIN_TIMESTEPS, num_sampled}:
            if values.shape == (length,) and np.allclose(values, default_betas[:length], rtol=1e-5, atol=0):
                return BETA_SCHEDULES[name][0]  # type: ignore[return-value]
    raise UsageError(
        f"{file}: trained_betas of {values.size} steps match no supported schedule; supported: {', '.join(BETA_SCHEDULES)}"
    )


def _compute_betas(schedule: str) -> np.ndarray:
    """Return the betas of our schedule; a test compares them with those of tasks/generation."""
    if schedule == "linear":
        return np.linspace(1e-4, 0.02, NUM_TRAIN_TIMESTEPS)
    if schedule == "scaled_linear":
        return np.square(np.linspace(0.00085**0.5, 0.012**0.5, NUM_TRAIN_TIMESTEPS))
    alphas_cumprod = np.square(
        np.cos((np.arange(NUM_TRAIN_TIMESTEPS + 1) / NUM_TRAIN_TIMESTEPS + 0.008) / 1.008 * np.pi / 2)
    )
    return np.minimum(1 - alphas_cumprod[1:] / alphas_cumprod[:-1], 0.999)


def _count_sampled_steps(betas: np.ndarray) -> int:
    """Return the number of steps whose ratio of data to noise is high enough to start sampling at."""
    alphas_cumprod = np.cumprod(1 - betas)
    is_sampled = np.sqrt(alphas_cumprod) >= MIN_SIGNAL_TO_NOISE * np.sqrt(1 - alphas_cumprod)
    return int(np.flatnonzero(is_sampled).max()) + 1
