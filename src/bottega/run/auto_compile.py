"""`training.compile` of a run: the choice at its start, in its checkpoints, and refined by the time of its own steps."""

from __future__ import annotations

import math
from typing import Any

from bottega.callbacks.console import Console
from bottega.config.recipe import Recipe
from bottega.core.callback import Callback, Progress
from bottega.core.engine import Engine
from bottega.engines.compile_choice import choose_at_start, find_cost, is_compilable

MIN_TIMED_STEPS = 5
"""Steps that are timed before the choice is refined; those before the first log, which include the start, are not counted."""


def build_compile_callback(recipe: Recipe, engine: Engine, console: Console) -> list[Callback]:
    """Return the callback of a run that is or may be compiled; nothing for one that never is, such as `auto` on a CPU."""
    if recipe.engine == "jax":
        return [CompileNote(console)]
    switch, cost = recipe.training.compile, find_cost(engine.task, engine.device_type)
    may_compile = cost is not None if switch == "auto" else switch and is_compilable(engine.task)
    return [AutoCompile(recipe, engine, console)] if may_compile else []


class CompileNote(Callback):
    """Says that the first step of JAX compiles: until then the console shows nothing."""

    name = "compile_note"

    def __init__(self, console: Console) -> None:
        self.console = console

    def start(self, progress: Progress) -> None:
        if progress.step < progress.total:
            self.console.info("the first step compiles the model, which can take minutes where it is not in the cache")


class AutoCompile(Callback):
    """Decides whether the steps of a run are compiled, and says so.

    A resumed run continues in the mode of its checkpoint, because a compiled step rounds differently. Otherwise the table of
    costs decides at the start, and the time of eager steps once a few have run: if compiling pays for the steps that are
    left, the next step is compiled. With `deterministic: true` no measured time enters. All ranks follow rank 0.
    """

    name = "compile"

    def __init__(self, recipe: Recipe, engine: Engine, console: Console) -> None:
        self.recipe, self.engine, self.console = recipe, engine, console
        self.cost = find_cost(engine.task, engine.device_type)
        self._saved: dict[str, Any] = {}
        self._has_failed = False
        self._eager_seconds = math.inf
        self._start_timing(0, is_done=True)

    def start(self, progress: Progress) -> None:
        engine, recipe = self.engine, self.recipe
        is_auto, is_resumed = recipe.training.compile == "auto", "compiled" in self._saved
        num_steps = progress.total if recipe.deterministic else progress.total - progress.step
        choice = choose_at_start(engine.task, recipe.training, device_type=engine.device_type, num_steps=num_steps)
        engine.is_compiled = choice.is_compiled
        if is_resumed:
            self._restore()
        if is_auto and progress.step < progress.total:
            mode = "on" if engine.is_compiled else "off"
            resumed_note = f"training.compile: auto is {mode}, as in the checkpoint"
            self.console.info(resumed_note if is_resumed or choice.note is None else choice.note)
        elif engine.is_compiled and progress.step < progress.total:
            self.console.info("training.compile: the first step compiles the model, which can take minutes")
        self._start_timing(progress.step, is_done=not is_auto or recipe.deterministic or engine.is_compiled)

    def _restore(self) -> None:
        """Return to the mode of the checkpoint; a mode that the recipe sets stays, unless the compiler has failed."""
        # A failure after the checkpoint stays known when the run rolls back to it.
        self._has_failed = self._has_failed or bool(self._saved.get("failed"))
        if self.recipe.training.compile == "auto":
            self.engine.is_compiled = bool(self._saved["compiled"]) and not self._has_failed
        elif self._has_failed:
            self.engine.is_compiled = False
            self.console.warn("training.compile: the compiler failed earlier in this run, which continues without it")

    def rewind(self, progress: Progress) -> None:
        if "compiled" in self._saved:
            self._restore()
        self._start_timing(progress.step, is_done=self._is_done)

    def after_step(self, progress: Progress, metrics: dict[str, float]) -> None:
        engine = self.engine
        metrics["compiled"] = float(engine.is_compiled)
        if engine.compile_error is not None and not engine.is_compiled and not self._has_failed:
            self._has_failed, self._is_done = True, True
            self.console.warn(f"training.compile: {engine.compile_error}; training continues without compiling")
        if self._has_failed:
            metrics["compile_failed"] = 1.0
        step_seconds = None if self._is_done else self._time_steps(progress, metrics)
        if step_seconds is None:
            return
        if engine.is_compiled:
            self._check_speed(progress, step_seconds)
        else:
            self._compile_if_it_pays(progress, step_seconds)

    def _start_timing(self, step: int, *, is_done: bool) -> None:
        self._is_done, self._last_step, self._num_timed = is_done, step, -1
        self._fastest = math.inf

    def _time_steps(self, progress: Progress, metrics: dict[str, float]) -> float | None:
        """Return the seconds of a step, without the wait for data, once enough are timed.

        They are those between two fetches, which wait for the device anyway; the fastest, because saving and sampling count too.
        """
        num_steps, self._last_step = progress.step - self._last_step, progress.step
        if self._num_timed < 0:
            self._num_timed = 0
            return None
        self._num_timed += num_steps
        self._fastest = min(self._fastest, metrics["step_seconds"] * (1.0 - metrics["data_wait"]))
        return self._fastest if self._num_timed >= MIN_TIMED_STEPS else None

    def _compile_if_it_pays(self, progress: Progress, step_seconds: float) -> None:
        assert self.cost is not None, "only `auto` is timed, and only where there is a cost"
        num_steps = progress.total - progress.step
        self._start_timing(progress.step, is_done=True)
        if not self._decide(self.cost.pays(num_steps, step_seconds)):
            return
        self.engine.is_compiled = True
        self._start_timing(progress.step, is_done=False)
        self._eager_seconds = step_seconds
        saving = self.cost.estimate_saving(num_steps, step_seconds)
        self.console.info(
            f"training.compile: auto is on from step {progress.step + 1} ({num_steps:,} steps of {step_seconds:.2g} s are left: "
            f"compiling takes about {self.cost.compile_seconds:.0f} s and saves about {saving:.0f} s)"
        )

    def _check_speed(self, progress: Progress, step_seconds: float) -> None:
        """Return to eager steps if compiled ones turn out to be slower."""
        self._is_done = True
        if self._decide(step_seconds > self._eager_seconds):
            self.engine.is_compiled = False
            self.console.info(
                f"training.compile: auto is off from step {progress.step + 1} (a compiled step takes {step_seconds:.2g} s, an "
                f"eager one {self._eager_seconds:.2g} s)"
            )

    def _decide(self, flag: bool) -> bool:
        """Return the flag of rank 0 on all ranks, whose clocks differ."""
        return self.engine.any_rank(flag and self.engine.rank == 0)

    def state_dict(self) -> dict[str, Any]:
        return {"compiled": self.engine.is_compiled, "failed": self._has_failed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved = dict(state)
