"""What a diffusers scheduler says about how a model was trained: its objective and its path between data and noise.

How diffusers would sample (which steps, which solver) stands in the same file and is of no concern: our samplers follow the
path.
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
"""Of data to noise where a sampler of predicted noise begins; our exports end their betas there."""
BETAS = {
    "linear": ("linear", 1e-4, 0.02),
    "scaled_linear": ("scaled_linear", 0.00085, 0.012),
    "squaredcos_cap_v2": ("cosine", None, None),
}
"""diffusers' schedules: ours, and the first and last number that it must have."""
OBJECTIVES = {"epsilon": "noise", "v_prediction": "v"}

Objective = Literal["noise", "v", "flow"]
Schedule = Literal["cosine", "linear", "scaled_linear"]


class NoiseSchedule(NamedTuple):
    """Each as the path of the same name has it."""

    objective: Objective
    schedule: Schedule
    """Nothing looks at it where the objective is flow."""
    shift: float


def read_schedule(file: Path) -> NoiseSchedule:
    """Of a scheduler_config.json; refused where no path of ours is the same."""
    config = read_json_object(file)
    if _is_flow(config):
        return NoiseSchedule("flow", "cosine", _shift(config, file))
    kind = config.get("prediction_type", "epsilon")
    if kind not in OBJECTIVES:
        raise UsageError(f"{file}: prediction_type {kind!r} is not supported; supported: {', '.join(OBJECTIVES)}")
    objective: Any = OBJECTIVES[kind]
    if config.get("rescale_betas_zero_snr"):
        raise UsageError(f"{file}: rescale_betas_zero_snr is not supported; give a model that was trained without it")
    if config.get("trained_betas") is not None:
        return NoiseSchedule(objective, _named_by_betas(config["trained_betas"], kind, file), 1.0)
    return NoiseSchedule(objective, _named(config, file), 1.0)


def is_flow_scheduler(file: Path) -> bool:
    """Whether a scheduler_config.json is of a flow."""
    return _is_flow(read_json_object(file))


def _is_flow(config: Mapping[str, Any]) -> bool:
    return str(config.get("_class_name")).startswith("FlowMatch")


def _shift(config: Mapping[str, Any], file: Path) -> float:
    for key in ("use_dynamic_shifting", "invert_sigmas", "shift_terminal"):
        if config.get(key):
            raise UsageError(f"{file}: {key} {config[key]!r} is not supported; supported is a flow with a fixed shift")
    steps = config.get("num_train_timesteps", NUM_TRAIN_TIMESTEPS)
    if steps != NUM_TRAIN_TIMESTEPS:
        raise UsageError(f"{file}: num_train_timesteps {steps} is not supported; supported: {NUM_TRAIN_TIMESTEPS}")
    return float(config.get("shift", 1.0))


def _named(config: Mapping[str, Any], file: Path) -> Schedule:
    kind, steps = config.get("beta_schedule"), config.get("num_train_timesteps", NUM_TRAIN_TIMESTEPS)
    if kind not in BETAS:
        raise UsageError(f"{file}: beta_schedule {kind!r} is not supported; supported: {', '.join(BETAS)}")
    ours, first, last = BETAS[kind]
    given = (config.get("beta_start"), config.get("beta_end"), steps)
    wanted = (first, last, NUM_TRAIN_TIMESTEPS) if first is not None else (*given[:2], NUM_TRAIN_TIMESTEPS)
    if given != wanted:
        raise UsageError(
            f"{file}: {kind} from beta_start {given[0]} to beta_end {given[1]} in {given[2]} steps is not supported; "
            f"supported: {wanted[0]} to {wanted[1]} in {wanted[2]}"
        )
    return ours  # type: ignore[return-value]


def _named_by_betas(betas: Any, prediction_type: str, file: Path) -> Schedule:
    """The schedule of betas that were written out, as our exports do where the end of one is never sampled from."""
    found = np.asarray(betas, np.float64)
    for name in BETAS:
        whole = _betas(BETAS[name][0])
        for length in {NUM_TRAIN_TIMESTEPS, _sampled(whole) if prediction_type == "epsilon" else NUM_TRAIN_TIMESTEPS}:
            if found.shape == (length,) and np.allclose(found, whole[:length], rtol=1e-5, atol=0):
                return BETAS[name][0]  # type: ignore[return-value]
    raise UsageError(
        f"{file}: trained_betas of {found.size} steps are of no known schedule; supported: {', '.join(BETAS)}"
    )


def _betas(schedule: str) -> np.ndarray:
    """The formulas of the path's; a test holds them against each other."""
    if schedule == "linear":
        return np.linspace(1e-4, 0.02, NUM_TRAIN_TIMESTEPS)
    if schedule == "scaled_linear":
        return np.square(np.linspace(0.00085**0.5, 0.012**0.5, NUM_TRAIN_TIMESTEPS))
    bar = np.square(np.cos((np.arange(NUM_TRAIN_TIMESTEPS + 1) / NUM_TRAIN_TIMESTEPS + 0.008) / 1.008 * np.pi / 2))
    return np.minimum(1 - bar[1:] / bar[:-1], 0.999)


def _sampled(betas: np.ndarray) -> int:
    """How many steps there are with enough of the data left to begin at."""
    kept = np.cumprod(1 - betas)
    return int(np.flatnonzero(np.sqrt(kept) >= MIN_SIGNAL_TO_NOISE * np.sqrt(1 - kept)).max()) + 1
