"""Whether compiling pays for a run: the seconds that it saves in the steps that are left, against the seconds that it takes.

All functions are pure. The engine only carries out the choice, and the run refines it by the time of its own steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bottega.config.training import Training
from bottega.core.model_spec import ModelSpec
from bottega.core.task import Task
from bottega.models.generator.config import UNetShape

MARGIN = 1.5
"""Saving, relative to the time of compiling, from which a model is compiled: both are estimates, and a run may end early."""


class CompileCost(NamedTuple):
    """What compiling a kind of model costs and saves on a type of device."""

    compile_seconds: float
    """Seconds that a cold compilation adds to the first step."""
    factor: float
    """Time of a compiled step relative to an eager one."""
    step_seconds: float
    """Seconds of an eager step of the bundled recipe, whose model is small: larger ones take longer and save more."""

    def estimate_saving(self, num_steps: int, step_seconds: float | None = None) -> float:
        """Return the seconds that `num_steps` compiled steps save; `step_seconds` is the measured time of an eager one."""
        seconds = self.step_seconds if step_seconds is None else step_seconds
        return max(0, num_steps) * seconds * max(0.0, 1.0 - self.factor)

    def pays(self, num_steps: int, step_seconds: float | None = None) -> bool:
        """Return whether compiling saves clearly more than it takes."""
        return self.estimate_saving(num_steps, step_seconds) > MARGIN * self.compile_seconds


# From benchmarks/compile_cost.py on an H200, eight processes on 16 cores, where compiling takes up to 1.5 times as long as alone.
# Of personalize: docs/log.md. Not measured, and so estimates: unet, pretrained-encoder, autoencoder, clip, other.
COSTS: Mapping[str, Mapping[str, CompileCost]] = {
    "cuda": {
        "decoder": CompileCost(17.0, 0.72, 0.021),
        "ssm": CompileCost(16.0, 0.58, 0.038),
        "dit": CompileCost(32.0, 0.35, 0.020),
        "unet": CompileCost(60.0, 0.75, 0.040),
        "encoder": CompileCost(47.0, 0.82, 0.025),
        "text-cnn": CompileCost(33.0, 0.73, 0.010),
        "pretrained-encoder": CompileCost(47.0, 0.75, 0.030),
        "convnet": CompileCost(29.0, 0.65, 0.010),
        "spiking": CompileCost(13.0, 0.63, 0.011),
        "autoencoder": CompileCost(30.0, 0.85, 0.020),
        "clip": CompileCost(30.0, 0.75, 0.030),
        "routing": CompileCost(27.0, 0.36, 0.031),
        "recall": CompileCost(15.0, 0.45, 0.059),
        "personalize": CompileCost(145.0, 0.72, 0.200),
        "other": CompileCost(30.0, 0.80, 0.020),
    }
}
"""Device type -> kind of model -> cost. `training.compile: auto` compiles on these types of device only."""

KINDS = {
    "bottega.models.decoder": "decoder",
    "bottega.models.text_classifier.encoder": "encoder",
    "bottega.models.text_classifier.kim": "text-cnn",
    "bottega.models.text_classifier.ngrams": "ngrams",
    "bottega.models.text_classifier.pretrained": "pretrained-encoder",
    "bottega.models.convnet": "convnet",
    "bottega.models.spiking": "spiking",
    "bottega.models.autoencoder": "autoencoder",
    "bottega.models.clip": "clip",
    "bottega.models.routing": "routing",
    "bottega.models.recall": "recall",
    "bottega.models.frozen": "personalize",
}
"""Module of an architecture -> kind of model in `COSTS`; the others are "other". A linear model over n-grams has nothing to fuse and
is in no table, so that `auto` never compiles it."""
COMPILED_PARTS = ("decoder", "ssm", "dit", "unet", "encoder")
"""Kinds that are compiled as a part of a multitask model."""


class CompileChoice(NamedTuple):
    """Whether a run starts compiled, and a note for the user, if there was something to choose."""

    is_compiled: bool
    note: str | None = None


def is_compilable(task: Task) -> bool:
    """Return whether an engine may compile the model: not if the task calls it with other weights, sets hooks in it, or
    back-propagates its terms one by one."""
    return not (task.needs_unwrapped_model or task.gradient_surgery)


def find_cost(task: Task, device_type: str) -> CompileCost | None:
    """Return the cost of compiling the task's model; None if it is never compiled without a request on this type of device."""
    costs = COSTS.get(device_type)
    if costs is None or not is_compilable(task):
        return None
    spec = task.specs()["model"]
    if not spec.parts:
        return costs.get(_find_kind(spec))
    kinds = [_find_kind(part) for part in spec.parts.values()]
    return _add_costs([costs[kind] for kind in kinds if kind in COMPILED_PARTS])


def _find_kind(spec: ModelSpec) -> str:
    if isinstance(spec.architecture, str) and spec.architecture.startswith("bottega.models.generator."):
        return "unet" if isinstance(spec.config.backbone, UNetShape) else "dit"
    module = spec.architecture.partition(":")[0] if isinstance(spec.architecture, str) else ""
    kind = next((kind for name, kind in KINDS.items() if f"{module}.".startswith(f"{name}.")), "other")
    return "ssm" if kind == "decoder" and getattr(spec.config, "ssm", None) is not None else kind


def _add_costs(costs: Sequence[CompileCost]) -> CompileCost | None:
    """Return the cost of parts that are compiled one by one; None if there are none."""
    if not costs:
        return None
    step_seconds = sum(cost.step_seconds for cost in costs)
    factor = sum(cost.factor * cost.step_seconds for cost in costs) / step_seconds
    return CompileCost(sum(cost.compile_seconds for cost in costs), factor, step_seconds)


def choose_at_start(task: Task, training: Training, *, device_type: str, num_steps: int) -> CompileChoice:
    """Return whether a run of `num_steps` starts compiled: as the recipe says, and by the table of costs if it says `auto`.

    Measured times do not enter, so the choice is the same at each start of the same run.
    """
    cost = find_cost(task, device_type)
    if training.compile != "auto" or cost is None:
        return CompileChoice(training.compile is True and is_compilable(task))
    seconds, saving = cost.compile_seconds, cost.estimate_saving(num_steps)
    if cost.pays(num_steps):
        reason = f"compiling takes about {seconds:.0f} s and saves about {saving:.0f} s"
        return CompileChoice(
            True,
            f"training.compile: auto is on for {num_steps:,} steps ({reason}); training.compile=false starts at once",
        )
    reason = f"compiling would take about {seconds:.0f} s and save about {saving:.0f} s"
    return CompileChoice(
        False,
        f"training.compile: auto is off for {num_steps:,} steps ({reason}); training.compile=true compiles anyway",
    )
