"""`bottega runs`: the runs of a folder, each with its task, step, best metric and state, read from its files alone."""

from __future__ import annotations

from pathlib import Path
from textwrap import shorten
from typing import Any

from bottega.core.errors import UsageError
from bottega.core.rundir import is_run
from bottega.run_files.state import describe_run

MAX_DEPTH = 2
"""Levels below the folder that are searched for runs: dependencies and folds are one level deeper than runs."""


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """Return the runs in a folder, or the folder itself if it is a run, the most recently changed first."""
    if not folder.is_dir():
        raise UsageError(f"{folder} does not exist; give a folder of runs, or start a run with bottega train")
    rows = [describe_run(path, folder) for path in find_runs(folder)]
    return sorted(rows, key=lambda row: (row["updated"] or "", row["run"]), reverse=True)


def find_runs(folder: Path, depth: int = 0) -> list[Path]:
    """Return the runs in a folder and up to MAX_DEPTH levels below it, or the folder itself if it is a run."""
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
    return [run for path in subfolders for run in find_runs(path, depth + 1)]


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
