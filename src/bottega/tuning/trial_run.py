"""The run of one trial: its recipe file, the metrics it writes while it trains, and its result."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bottega.config.load import to_yaml
from bottega.config.recipe import Recipe, diff_recipes
from bottega.core import checkpoint as checkpoints
from bottega.core.callback import Progress
from bottega.core.errors import BottegaError
from bottega.core.rundir import Lock, RunDirectory
from bottega.run.job_pool import ChildRun, Job
from bottega.tasks.recipes import load_saved_recipe
from bottega.tuning.study import PROGRESS_UNITS, Objective

EXIT_REASONS = {3: "data", 4: "checkpoint", 5: "environment", 6: "diverged", 7: "out of memory", 8: "a rank was lost"}
"""Exit code of a trial -> what it means, in front of its last line."""


def describe_failure(child: ChildRun) -> str:
    """Return why a process failed: what its exit code means, and its last line."""
    kind, error = EXIT_REASONS.get(child.code), child.describe_error()
    return f"{kind}: {error}" if kind is not None else error


def get_trial_name(number: int) -> str:
    """Return the folder name of a trial."""
    return f"trial-{number:05d}"


@dataclass
class TrialRun:
    """The run of a trial in the folder of a study."""

    number: int
    keys: dict[str, Any]
    recipe: Recipe
    job: Job
    rows: MetricsTail = field(init=False)
    lock: Lock | None = None
    """Held while a process works on the trial, so that no other one takes it."""

    def __post_init__(self) -> None:
        self.rows = MetricsTail(self.job.run.metrics)

    @classmethod
    def create(cls, folder: Path, number: int, keys: dict[str, Any], recipe: Recipe) -> TrialRun:
        """Write the recipe of a trial to a file that `bottega train` accepts."""
        run = RunDirectory(folder / "trials" / recipe.run_name())
        file = folder / "recipes" / f"{recipe.run_name()}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        run.write(file, to_yaml(recipe), redact=False)
        return cls(number, keys, recipe, Job(run, file, num_processes=recipe.distributed.processes or 1))

    def read_total_steps(self) -> int | None:
        """Return the length of the run in steps; None before it has started."""
        return read_environment(self.job.run).get("steps") or self.recipe.training.max_steps

    def is_finished(self) -> bool:
        """Return whether the run of this recipe is complete and evaluated: at its last step, or stopped early by its recipe."""
        newest = checkpoints.find_newest(self.job.run.checkpoints)
        if newest is None:
            return False
        try:
            progress = Progress.from_json(checkpoints.read_progress(newest))
            is_same_recipe = not diff_recipes(load_saved_recipe(self.job.run.recipe), self.recipe)
        except (BottegaError, KeyError, TypeError, ValueError):
            return False  # damaged: `train` starts from an older checkpoint, or says what is wrong
        early_stopping = self.recipe.training.early_stopping
        num_waited = progress.callback_states.get("early_stop", {}).get("waited", 0)
        has_ended = progress.step >= progress.total or (
            early_stopping is not None and num_waited >= early_stopping.patience
        )
        return is_same_recipe and has_ended and progress.evaluated_step >= progress.step

    def compute_values(self, objectives: tuple[Objective, ...]) -> tuple[float, ...] | None:
        """Return the best value of the first objective and the others at the same evaluation; None without an evaluation."""
        self.rows.read()
        best = find_best_row(self.rows.evaluations, objectives[0])
        if best is None:
            return None
        run_metrics = self._compute_run_metrics()
        values = [best.get(objective.name, run_metrics.get(objective.name)) for objective in objectives]
        return None if None in values else tuple(float(value) for value in values if value is not None)

    def _compute_run_metrics(self) -> dict[str, float]:
        seconds, previous = 0.0, 0
        for row in self.rows.training:
            seconds += (row["step"] - previous) * row.get("step_seconds", 0.0)
            previous = row["step"]
        metrics = {"seconds": seconds}
        samples = self.rows.training[-1]["samples"] if self.rows.training else 0
        if seconds:
            metrics["samples_per_second"] = samples / seconds
        parameters = read_environment(self.job.run).get("parameters")
        return {**metrics, "parameters": float(parameters)} if parameters is not None else metrics


def read_environment(run: RunDirectory) -> dict[str, Any]:
    """Return environment.json of a run; empty before it is written."""
    try:
        fields = json.loads(run.environment.read_bytes())
    except (OSError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def find_best_row(rows: list[dict[str, Any]], objective: Objective) -> dict[str, Any] | None:
    """Return the evaluation with the best value of an objective; of equal ones the first."""
    best: dict[str, Any] | None = None
    for row in rows:
        value = row.get(objective.name)
        if value is not None and (best is None or objective.is_better(value, best[objective.name])):
            best = row
    return best


class MetricsTail:
    """The lines of metrics.jsonl, read as they are written. A resumed run rewrites the file, which is then read again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.training: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self._inode, self._offset = 0, 0

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return max((rows[-1]["step"] for rows in (self.training, self.evaluations) if rows), default=0)

    def read(self) -> list[dict[str, Any]]:
        """Read new lines; return the evaluations among them, or all if the file was rewritten."""
        try:
            file = self.path.open("rb")
        except OSError:
            return []
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self.training, self.evaluations, self._inode, self._offset = [], [], status.st_ino, 0
            file.seek(self._offset)
            data = file.read() if status.st_size > self._offset else b""
        data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        num_read = len(self.evaluations)
        for line in data.splitlines():
            try:
                row = json.loads(line)
                rows = self.evaluations if row["kind"] == "eval" else self.training
                rows.append({**row, "step": int(row["step"])})
            except (ValueError, KeyError, TypeError):
                continue  # a line that a killed process has cut
        return self.evaluations[num_read:]


def to_progress(step: int, total: int | None) -> int:
    """Return a step in thousandths of the run."""
    return max(1, min(PROGRESS_UNITS, round(PROGRESS_UNITS * step / total))) if total else step
