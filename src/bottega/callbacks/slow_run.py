"""Warn after the first steps that a run will take hours on a CPU, and name the keys that make a step cheaper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bottega.config.recipe import Recipe
from bottega.core.callback import Callback, Progress

LONG_RUN_SECONDS = 3600.0
"""Estimated seconds to the end of the run above which a warning is printed."""
NUM_MEASURED_STEPS = 3
"""Steps after the start before the estimate is made: the first one allocates and warms up."""
LARGER_IS_CHEAPER = ("model.patch_size", "model.temporal_patch_size")
SMALLER_IS_CHEAPER = (
    *("model.size", "model.hidden_size", "model.num_layers", "data.image_size", "data.num_frames"),
    *("data.sequence_length", "training.batch_size"),
)
PATCH_BACKBONES = ("dit", None)
"""Backbones that use model.patch_size; a U-Net has the key and ignores it."""


class SlowRunWarning(Callback):
    """Warns once per start of a run, from the seconds of a step and the steps left."""

    name = "slow_run"

    def __init__(self, recipe: Recipe, warn: Callable[[str], None]) -> None:
        self.recipe, self.warn = recipe, warn
        self._first_step, self._is_done = 0, False

    def start(self, progress: Progress) -> None:
        self._first_step = progress.step

    def after_step(self, progress: Progress, metrics: dict[str, float]) -> None:
        if self._is_done or progress.step - self._first_step < NUM_MEASURED_STEPS:
            return
        self._is_done = True
        seconds, steps_left = metrics["step_seconds"], progress.total - progress.step
        if seconds * steps_left > LONG_RUN_SECONDS:
            self.warn(
                f"{steps_left:,} more steps of {seconds:.2g} s take about {_format_duration(seconds * steps_left)} on this CPU; "
                f"{suggest_cheaper_steps(self.recipe)}; Ctrl-C saves and stops"
            )


def suggest_cheaper_steps(recipe: Recipe) -> str:
    """Return a sentence with the keys of this recipe that make a step cheaper, and their values."""
    larger = (
        _format_settings(recipe, LARGER_IS_CHEAPER)
        if getattr(recipe.model, "backbone", None) in PATCH_BACKBONES
        else []
    )
    smaller = _format_settings(recipe, SMALLER_IS_CHEAPER)
    parts = [f"a larger {' or '.join(larger)}"] if larger else []
    parts += [f"a smaller {', '.join(smaller[:-1])}{' or ' if len(smaller) > 1 else ''}{smaller[-1]}"]
    return f"a step is cheaper with {', or '.join(parts)}"


def _format_settings(recipe: Recipe, keys: tuple[str, ...]) -> list[str]:
    """Return "key (value)" of each key that is set in this recipe."""
    settings = []
    for key in keys:
        value: Any = recipe
        for part in key.split("."):
            value = getattr(value, part, None)
        if value is not None:
            settings.append(f"{key} ({value})")
    return settings


def _format_duration(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.1f} days"
