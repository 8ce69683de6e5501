"""State of a run from its files alone: task, step, best metric, and whether it trains, finished, stopped or failed."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

from bottega.config.yaml_io import read_yaml
from bottega.core import checkpoint
from bottega.core.errors import BottegaError, CheckpointError, EnvironmentProblem
from bottega.core.rundir import RunDirectory
from bottega.storage.durable import is_locked

TAIL_BYTES = 64 << 10
"""Bytes read from the end of metrics.jsonl and log.txt."""
_ERROR_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ERROR (.*)")
_NOT_FINITE = re.compile(r"not finite|diverged", re.IGNORECASE)


def describe_run(
    path: Path, folder: Path, *, is_running: bool | None = None, failure: str | None = None
) -> dict[str, Any]:
    """Return task, step and number of steps, best metric, state and its reason, from the files of a run.

    `is_running=False` is for the process that has just trained the run and still holds its lock; `failure` is the error that
    ended it, which is not in the log yet.
    """
    run = RunDirectory(path)
    task, metric, num_planned_steps, recipe_problem = _read_recipe_fields(run)
    progress, has_checkpoint, checkpoint_problem = _read_progress(run)
    last_row = _read_last_row(run.metrics)
    step = max(_get_whole(progress, "step"), _get_whole(last_row, "step"))
    if is_running is None:
        is_running = is_locked(run.path / "LOCK")
    state, reason = _determine_state(
        progress,
        is_running=is_running,
        has_checkpoint=has_checkpoint,
        problem=recipe_problem or checkpoint_problem,
        failure=failure or _read_failure(run.log),
    )
    best, best_step = progress.get("best"), _get_whole(progress, "best_step") or None
    return {
        "run": str(path),
        "name": path.name if path == folder else path.relative_to(folder).as_posix(),
        "task": task,
        "step": step if state == "running" else _get_whole(progress, "step"),
        "total": _get_whole(progress, "total") or num_planned_steps,
        "metric": metric,
        "best": best if isinstance(best, int | float) and best_step is not None else None,
        "best_step": best_step,
        "state": state,
        "reason": reason,
        "updated": _read_last_modified(run),
    }


def _get_whole(row: dict[str, Any], name: str) -> int:
    """Return a whole number of a file that may be damaged, or 0."""
    value = row.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _read_recipe_fields(run: RunDirectory) -> tuple[str | None, str | None, int | None, str | None]:
    """Return the task, metric and number of steps of the recipe, and why it cannot be read, if so.

    Nothing else is parsed, so that runs of other versions are listed too.
    """
    try:
        values = read_yaml(run.recipe).value
    except (BottegaError, OSError):
        values = None
    if not isinstance(values, dict):
        return None, None, None, f"{run.recipe.name} cannot be read"
    blocks = {name: values[name] if isinstance(values.get(name), dict) else {} for name in ("evaluation", "training")}
    metric, steps = blocks["evaluation"].get("metric") or "loss", blocks["training"].get("max_steps")
    num_planned_steps = steps if isinstance(steps, int) else None
    return str(values.get("task")), str(metric), num_planned_steps, None


def _read_progress(run: RunDirectory) -> tuple[dict[str, Any], bool, str | None]:
    """Return the progress of the newest readable checkpoint, whether any checkpoint exists, and an error of listing them."""
    try:
        saved = checkpoint.list_checkpoints(run.checkpoints)
    except EnvironmentProblem as error:
        return {}, False, str(error)
    for path, _ in saved:
        try:
            return checkpoint.read_progress(path), True, None
        except CheckpointError:
            continue
    return {}, bool(saved), None


def _determine_state(
    progress: dict[str, Any], *, is_running: bool, has_checkpoint: bool, problem: str | None, failure: str | None
) -> tuple[str, str | None]:
    """Return the state of a run in one word, and its reason or None."""
    if is_running:
        return "running", None
    step, total = _get_whole(progress, "step"), _get_whole(progress, "total")
    if total and step >= total:
        return "finished", None
    if progress.get("stop"):
        return "finished", f"stopped early: {progress['stop']}"
    if problem is not None:
        return "damaged", problem
    if failure is not None:
        return ("diverged" if _NOT_FINITE.search(failure) else "failed"), failure
    if not has_checkpoint:
        return "no checkpoint", None
    return "stopped", f"at step {step}; the same command resumes it"


def _read_failure(log: Path) -> str | None:
    """Return the error that ended a run, if its log ends with one."""
    error = _ERROR_LINE.fullmatch(_read_last_line(log))
    return error[1] if error is not None else None


def _read_last_row(path: Path) -> dict[str, Any]:
    for line in reversed(_read_tail(path)):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # truncated by a killed process, or not a log
        return row if isinstance(row, dict) else {}
    return {}


def _read_last_line(path: Path) -> str:
    return next((line for line in reversed(_read_tail(path)) if line.strip()), "")


def _read_tail(path: Path) -> list[str]:
    if not path.is_file():  # a pipe would block its reader
        return []
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def _read_last_modified(run: RunDirectory) -> str | None:
    times = [path.stat().st_mtime for path in (run.metrics, run.log, run.recipe, run.checkpoints) if path.exists()]
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(max(times))) if times else None
