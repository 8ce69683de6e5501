"""The same recipe under the torch engine and the JAX engine, without the training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bottega.core import checkpoint
from bottega.core.trainer import evaluate
from bottega.data.loading.loader import iter_eval_batches
from bottega.run.compose import build_engine, build_loader, build_training_plan, set_learning_rate_schedule
from bottega.tasks import registry
from bottega.tasks.recipes import load_recipe

TOTAL_STEPS = 8


class Subject:
    """Workload, plan, engine and loader of a run, with the hooks of its techniques."""

    def __init__(self, recipe: str, settings: Mapping[str, Any], *, engine: str) -> None:
        resolved = load_recipe([recipe, {**settings, "engine": engine}]).recipe
        self.workload: Any = registry.open_workload(resolved, progress=lambda stage, done, total: None)
        self.plan = build_training_plan(resolved, self.workload)
        self.engine: Any = build_engine(resolved, self.plan.task)
        self.loader = build_loader(resolved, self.plan.training, self.engine, self.plan.order)
        steps_per_epoch = round(self.loader.steps_per_epoch)
        set_learning_rate_schedule(resolved, self.engine, total=TOTAL_STEPS, steps_per_epoch=steps_per_epoch)
        if self.plan.on_train_start is not None:
            self.plan.on_train_start(self.engine, self.loader, resumed=False)

    def advance(
        self, start: int, stop: int, change: Callable[[dict[str, Any]], dict[str, Any]] = dict
    ) -> list[dict[str, float]]:
        """Train from step `start` up to `stop`; return the metrics of each step."""
        batches = ((step, change(dict(self.loader.batch(step)))) for step in range(start, stop))
        return [self.engine.fetch(self.engine.train_step(step, batch)) for step, batch in batches]

    def evaluate(self) -> dict[str, float]:
        """Return the metrics over the validation data."""
        assert self.plan.validation is not None
        return dict(evaluate(self.engine, iter_eval_batches(self.plan.validation, 5)))

    def state(self) -> dict[str, np.ndarray]:
        return copy_state(self.engine)

    def save(self, folder: Path, step: int) -> Path:
        files = self.engine.snapshot().files()
        return checkpoint.write(folder, step=step, files=files, progress={"step": step}, fingerprint={})


def copy_state(engine: Any) -> dict[str, np.ndarray]:
    """Return a copy of everything in a checkpoint of either engine, as `file/name` -> array."""
    files = engine.snapshot().files()
    return {f"{file}/{name}": array.copy() for file, arrays in files.items() for name, array in arrays.items()}


def build_both(recipe: str, settings: Mapping[str, Any]) -> tuple[Subject, Subject]:
    """Return the subjects of the torch engine and of the JAX engine; dropout is off, whose masks each engine draws by itself."""
    plain = {"model.dropout": 0.0, **settings}
    return Subject(recipe, plain, engine="torch"), Subject(recipe, plain, engine="jax")


def assert_same_metrics(actual: list[dict[str, float]], expected: list[dict[str, float]], *, rel: float = 1e-4) -> None:
    """Assert that two engines report the same metrics in each step."""
    for step, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=rel, abs=1e-6), f"{name} at step {step}"


def find_largest_difference(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> float:
    """Return the largest difference of any two tensors, relative to the largest value of the tensor if that is above 1."""
    assert a.keys() == b.keys()
    return max(float(np.abs(a[name] - b[name]).max(initial=0) / max(1.0, np.abs(a[name]).max(initial=0))) for name in a)
