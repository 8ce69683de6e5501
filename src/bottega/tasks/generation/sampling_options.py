"""How samples are drawn: what is asked for, else what the recipe says, checked before anything is computed and after."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bottega.core.errors import Diverged, UsageError
from bottega.tasks.generation.config import Generator

DIFFUSION_OPTIONS = ("steps", "sampler", "guidance")
CODE_OPTIONS = ("temperature", "top_k", "top_p", "guidance")


def sampling_option_names(model: Generator) -> tuple[str, ...]:
    """What drawing can be told, by the names that recipes and the command line have for it."""
    return CODE_OPTIONS if model.backbone == "tokens" else DIFFUSION_OPTIONS


def resolve_sampling_options(recipe: Any, task: Any, asked: dict[str, Any], *, prefix: str = "--") -> dict[str, Any]:
    """The options of the task's `draw`. `prefix` is for messages: who said what is wrong."""
    names, model = sampling_option_names(recipe.model), recipe.model
    said = {name: getattr(recipe.samples, name) for name in names}
    said |= {name: value for name, value in asked.items() if value is not None}
    unknown = sorted(said.keys() - set(names))
    assert not unknown, unknown
    if model.backbone == "tokens":
        _check_codes(said["temperature"], said["top_k"], said["top_p"], prefix=prefix)
    else:
        check_steps(said["steps"], said["sampler"], task.path.max_steps, prefix=prefix)
    check_guidance(said["guidance"], prefix=prefix)
    _check_guided(said["guidance"], model, prefix=prefix)
    return {"method" if name == "sampler" else name: value for name, value in said.items()}


def uses_bfloat16(device: Any, precision: str) -> bool:
    return torch.device(device).type == "cuda" and precision in ("auto", "bf16") and torch.cuda.is_bf16_supported()


def require_finite(samples: np.ndarray) -> np.ndarray:
    """The samples; infinite ones would become pictures and sounds that look like an answer."""
    bad = sum(not np.isfinite(sample).all() for sample in samples)
    if bad:
        raise Diverged(
            f"{bad:,} of {len(samples):,} samples are not finite: the model has no answer to what is asked for, or has "
            "diverged; ask for values as its data has them, use less guidance, or another checkpoint"
        )
    return samples


def check_steps(steps: int, sampler: str, most: int | None, *, prefix: str) -> None:
    if steps < 1:
        raise UsageError(f"{prefix}steps {steps}: at least one step is needed")
    if most is not None and steps > most:
        raise UsageError(f"{prefix}steps {steps}: noise and v have {most} steps that can be taken; only flow has more")
    if sampler not in ("euler", "heun", "dpm"):
        raise UsageError(f"{prefix}sampler {sampler}: expected euler, heun or dpm")


def _check_codes(temperature: float, top_k: int | None, top_p: float | None, *, prefix: str) -> None:
    if not 0 <= temperature < float("inf"):
        raise UsageError(f"{prefix}temperature {temperature:g}: expected a number from 0; 0 is greedy, 1 is plain")
    if top_k is not None and top_k < 1:
        raise UsageError(f"{prefix}top_k {top_k}: keeps nothing; use 1 or more, or leave it out")
    if top_p is not None and not 0 < top_p <= 1:
        raise UsageError(f"{prefix}top_p {top_p:g}: expected a share above 0, up to 1")


def check_guidance(guidance: float, *, prefix: str) -> None:
    if not 0 <= guidance < 1e4:
        raise UsageError(f"{prefix}guidance {guidance:g}: expected a number from 0; 1 is plain")


def _check_guided(guidance: float, model: Generator, *, prefix: str) -> None:
    if guidance != 1 and model.condition == "none":
        raise UsageError(f"{prefix}guidance {guidance:g}: this run has no condition to be guided by; leave it out")
    if guidance != 1 and model.condition_dropout == 0:
        raise UsageError(
            f"{prefix}guidance {guidance:g}: this run never learnt to go without a condition "
            "(model.condition_dropout is 0); use 1, or train with 0.1"
        )
