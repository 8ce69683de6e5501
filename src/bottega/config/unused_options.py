"""Options of the optimizer and the schedule that have no effect, reported before a run starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bottega.config.optimizers import list_optimizers_with_option
from bottega.config.section import Section

if TYPE_CHECKING:
    from bottega.config.recipe import Recipe

OPTIMIZER_OPTIONS = {option: list_optimizers_with_option(option) for option in ("betas", "eps", "momentum", "nesterov")}
"""Option -> the optimizers that use it."""

DECAYING_SCHEDULES = ("linear", "cosine", "cosine_with_restarts", "polynomial", "exponential", "inverse_sqrt", "wsd")
SCHEDULER_OPTIONS: dict[str, tuple[str, ...]] = {
    "min_ratio": (*DECAYING_SCHEDULES, "one_cycle", "plateau"),
    "eta_min": (*DECAYING_SCHEDULES, "one_cycle", "plateau"),
    "cycles": ("cosine_with_restarts",),
    "t_max": ("cosine_with_restarts",),
    "power": ("polynomial",),
    "gamma": ("exponential",),
    "decay_fraction": ("wsd",),
    "factor": ("plateau",),
    "patience": ("plateau",),
}
"""Option -> the schedules that use it."""


def list_unused_options(recipe: Recipe) -> list[str]:
    """Return a message for each option that the chosen optimizer or schedule does not use."""
    training = recipe.training
    return [
        *_list_unused_in_section("training.optimizer", training.optimizer, OPTIMIZER_OPTIONS),
        *_list_unused_in_section("training.scheduler", training.scheduler, SCHEDULER_OPTIONS),
    ]


def _list_unused_in_section(key: str, section: Section, names_by_option: dict[str, tuple[str, ...]]) -> list[str]:
    name = getattr(section, "name")  # noqa: B009 (a section of either kind)
    default = type(section).model_validate({"name": name})
    changed = [option for option in names_by_option if getattr(section, option) != getattr(default, option)]
    return [
        f"{key}.{option}: has no effect with {name}; it is an option of {', '.join(names_by_option[option])}"
        for option in changed
        if name not in names_by_option[option]
    ]
