"""`bottega runs`: the runs of a folder, each with its task, step, best metric and state, read from its files alone."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from textwrap import shorten
from typing import Any

from bottega.config.yaml_io import read_yaml
from bottega.core import checkpoint
from bottega.core.errors import BottegaError, CheckpointError, EnvironmentProblem, UsageError
from bottega.core.rundir import RunDirectory, is_run
from bottega.storage.durable import is_locked

MAX_DEPTH = 2
"""Levels below the folder that are searched for runs: dependencies and folds are one level deeper than runs."""
TAIL_BYTES = 64 << 10
"""Bytes read from the end of metrics.jsonl and log.txt."""
_ERROR_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ERROR (.*)")
_NOT_FINITE = re.compile(r"not finite|diverged", re.IGNORECASE)


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """Return the runs in a folder, or the folder itself if it is a run, the most recently changed first."""
    if not folder.is_dir():
        raise UsageError(f"{folder} does not exist; give a folder of runs, or start a run with bottega train")
    rows = [describe_run(path, folder) for path in _find_runs(folder)]
    return sorted(rows, key=lambda row: (row["updated"] or "", row["run"]), reverse=True)


def _find_runs(folder: Path, depth: int = 0) -> list[Path]:
    try:
        if is_run(folder):
            return [folder]
        if depth > MAX_DEPTH:
            return []
        subfolders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except PermissionError:
        if depth == 0:
            raise
        return []  # a folder of another user
    return [run for path in subfolders for run in _find_runs(path, depth + 1)]


def describe_run(path: Path, folder: Path) -> dict[str, Any]:
    """Return task, step and number of steps, best metric, state and its reason, from the files of a run."""
    run = RunDirectory(path)
    task, metric, num_planned_steps, recipe_problem = _read_recipe_fields(run)
    progress, has_checkpoint, checkpoint_problem = _read_progress(run)
    last_row = _read_last_row(run.metrics)
    step = max(progress.get("step") or 0, last_row.get("step") or 0)
    state, reason = _determine_state(
        run, progress, has_checkpoint=has_checkpoint, problem=recipe_problem or checkpoint_problem
    )
    best, best_step = progress.get("best"), progress.get("best_step") or None
    return {
        "run": str(path),
        "name": path.name if path == folder else path.relative_to(folder).as_posix(),
        "task": task,
        "step": step if state == "running" else progress.get("step") or 0,
        "total": progress.get("total") or num_planned_steps,
        "metric": metric,
        "best": best if isinstance(best, int | float) and best_step is not None else None,
        "best_step": best_step,
        "state": state,
        "reason": reason,
        "updated": _read_last_modified(run),
    }


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
    run: RunDirectory, progress: dict[str, Any], *, has_checkpoint: bool, problem: str | None
) -> tuple[str, str | None]:
    """Return the state of a run in one word, and its reason or None."""
    if is_locked(run.path / "LOCK"):
        return "running", None
    step, total = progress.get("step") or 0, progress.get("total") or 0
    if total and step >= total:
        return "finished", None
    if progress.get("stop"):
        return "finished", f"stopped early: {progress['stop']}"
    if problem is not None:
        return "damaged", problem
    error = _ERROR_LINE.fullmatch(_read_last_line(run.log))
    if error is not None:
        return ("diverged" if _NOT_FINITE.search(error[1]) else "failed"), error[1]
    if not has_checkpoint:
        return "no checkpoint", None
    return "stopped", f"at step {step}; the same command resumes it"


def _read_last_row(path: Path) -> dict[str, Any]:
    for line in reversed(_read_tail(path)):
        try:
            row = json.loads(line)
        except ValueError:
            continue  # truncated by a killed process
        return row if isinstance(row, dict) else {}
    return {}


def _read_last_line(path: Path) -> str:
    return next((line for line in reversed(_read_tail(path)) if line.strip()), "")


def _read_tail(path: Path) -> list[str]:
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


def format_runs(folder: Path, rows: list[dict[str, Any]]) -> str:
    """Format runs as a table for the terminal."""
    if not rows:
        return f"no runs in {folder}; start one with bottega train"
    table = [("run", "task", "step", "best", "changed", "state")]
    for row in rows:
        step = f"{row['step']}/{row['total']}" if row["total"] else str(row["step"])
        # The name of the metric is unknown if the recipe cannot be read.
        best = f"{row['metric'] or ''} {row['best']:.4f} at {row['best_step']}" if row["best"] is not None else ""
        state = f"{row['state']}: {shorten(row['reason'], 72, placeholder=' …')}" if row["reason"] else row["state"]
        changed = (row["updated"] or "")[:16]
        table.append((row["name"], row["task"] or "", step, best.lstrip(), changed, state))
    widths = [max(len(cells[column]) for cells in table) for column in range(5)]
    lines = ("  ".join([*(cell.ljust(w) for cell, w in zip(cells, widths, strict=False)), cells[5]]) for cells in table)
    return "\n".join(line.rstrip() for line in lines)
