"""Sampling options of generators, from the request or else from the recipe, and checks of options and samples."""

from __future__ import annotations

from typing import Any

import numpy as np

from bottega.core.errors import Diverged, UsageError
from bottega.tasks.generation.config import Generator

DIFFUSION_OPTIONS = ("steps", "sampler", "guidance")
CODE_OPTIONS = ("temperature", "top_k", "top_p", "guidance")


def list_sampling_options(model: Generator) -> tuple[str, ...]:
    """Return the names of a model's sampling options, as in recipes and on the command line."""
    return CODE_OPTIONS if model.backbone == "tokens" else DIFFUSION_OPTIONS


def resolve_sampling_options(
    recipe: Any, task: Any, requested: dict[str, Any], *, prefix: str = "--"
) -> dict[str, Any]:
    """Return checked options for the task's `draw`: those of the recipe, overridden by `requested`.

    `prefix` goes before option names in error messages.
    """
    names, model = list_sampling_options(recipe.model), recipe.model
    options = {name: getattr(recipe.samples, name) for name in names}
    options |= {name: value for name, value in requested.items() if value is not None}
    unknown = sorted(options.keys() - set(names))
    assert not unknown, unknown
    if model.backbone == "tokens":
        _check_code_options(options["temperature"], options["top_k"], options["top_p"], prefix=prefix)
    else:
        check_steps(options["steps"], options["sampler"], task.path.max_steps, prefix=prefix)
    check_guidance(options["guidance"], prefix=prefix)
    _check_guidance_supported(options["guidance"], model, prefix=prefix)
    return {"method" if name == "sampler" else name: value for name, value in options.items()}


def require_finite(samples: np.ndarray) -> np.ndarray:
    """Return the samples; raise Diverged if any value is not finite, which would become noise in a valid file."""
    num_bad = sum(not np.isfinite(sample).all() for sample in samples)
    if num_bad:
        raise Diverged(
            f"{num_bad:,} of {len(samples):,} samples are not finite: the request is far from the training data, or the model "
            "has diverged; request values in the range of its data, use less guidance, or another checkpoint"
        )
    return samples


def check_steps(steps: int, sampler: str, max_steps: int | None, *, prefix: str) -> None:
    """Raise UsageError for a number of steps or a sampler that the objective does not support."""
    if steps < 1:
        raise UsageError(f"{prefix}steps {steps}: expected 1 or more")
    if max_steps is not None and steps > max_steps:
        raise UsageError(
            f"{prefix}steps {steps}: objectives noise and v allow at most {max_steps}; only flow allows more"
        )
    if sampler not in ("euler", "heun", "dpm"):
        raise UsageError(f"{prefix}sampler {sampler}: expected euler, heun or dpm")


def _check_code_options(temperature: float, top_k: int | None, top_p: float | None, *, prefix: str) -> None:
    if not 0 <= temperature < float("inf"):
        raise UsageError(
            f"{prefix}temperature {temperature:g}: expected 0 or more; 0 is greedy, 1 is the model's own distribution"
        )
    if top_k is not None and top_k < 1:
        raise UsageError(f"{prefix}top_k {top_k}: expected 1 or more; remove it to sample from all tokens")
    if top_p is not None and not 0 < top_p <= 1:
        raise UsageError(f"{prefix}top_p {top_p:g}: expected a number above 0 and at most 1")


def check_guidance(guidance: float, *, prefix: str) -> None:
    """Raise UsageError for a guidance scale below 0 or out of any useful range."""
    if not 0 <= guidance < 1e4:
        raise UsageError(f"{prefix}guidance {guidance:g}: expected 0 or more; 1 turns guidance off")


def _check_guidance_supported(guidance: float, model: Generator, *, prefix: str) -> None:
    if guidance != 1 and model.condition == "none":
        raise UsageError(f"{prefix}guidance {guidance:g}: this run has no condition; remove it")
    if guidance != 1 and model.condition_dropout == 0:
        raise UsageError(
            f"{prefix}guidance {guidance:g}: this run was never trained without its condition "
            "(model.condition_dropout is 0); use 1, or train with model.condition_dropout=0.1"
        )
