"""`bottega lr-find`: a learning-rate range test on a copy of the model of a recipe or run."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from typing import Any

from bottega.callbacks.console import Console
from bottega.callbacks.progress_bars import progress_bars
from bottega.config.recipe import Recipe
from bottega.core.errors import CheckpointError, DataError, UsageError
from bottega.core.rundir import RunDirectory, split_checkpoint_path
from bottega.data.output_files import explain_write_errors
from bottega.engines.lr_range_test import check_range
from bottega.plots.figure import try_plot
from bottega.plots.lr_range import plot_range_test
from bottega.redaction import redact_values
from bottega.run import resume
from bottega.run.auto_learning_rate import PLOT_FILE, REPORT_FILE, run_range_test
from bottega.run.checks import find_problems, raise_all
from bottega.run.compose import prepare_workload
from bottega.run.train import ensure_dependency
from bottega.storage.durable import replacing_file
from bottega.tasks import dependencies
from bottega.tasks.data_paths import read_start_folders, resolve_paths
from bottega.tasks.recipes import load_recipe, load_saved_recipe, parse_overrides
from bottega.world import World


def lr_find_command(
    run_or_recipe: str, words: list[str], *, low: float, high: float, steps: int, out: Path, quiet: bool = False
) -> dict[str, Any]:
    """Run `bottega lr-find`: return the report of a range test, and write its curve and numbers to `out`."""
    check_range(low, high, steps)
    is_run = is_run_directory(run_or_recipe)
    if is_run and words:
        raise UsageError(f"{run_or_recipe} is a run and has its own recipe; remove {' '.join(words)}")
    sources, overrides = parse_overrides([run_or_recipe, *words])
    recipe = None if is_run else load_recipe(sources, overrides).recipe
    report = find_learning_rate(
        recipe, run=Path(run_or_recipe) if is_run else None, low=low, high=high, steps=steps, quiet=quiet
    )
    report["command"] = _build_train_command(run_or_recipe, words, report, is_run=is_run)
    return write_report(report, out) if World.from_environment().is_main else report


def is_run_directory(path: str | Path) -> bool:
    """Return whether `path` is a run directory, or a checkpoint in one."""
    return RunDirectory(split_checkpoint_path(Path(path))[0]).recipe.is_file()


def find_learning_rate(
    recipe: Recipe | None, *, run: Path | None, low: float, high: float, steps: int, quiet: bool
) -> dict[str, Any]:
    """Run the test on a recipe, or on the run directory or checkpoint `run` with its own recipe."""
    check_range(low, high, steps)
    start_checkpoint: tuple[Path, str] | None = None
    folders: tuple[Path, ...] = ()
    if run is not None:
        directory = RunDirectory(split_checkpoint_path(run)[0])
        recipe, start_checkpoint = load_saved_recipe(directory.recipe), _find_start(directory, run)
        folders = read_start_folders(directory.path)
    assert recipe is not None, "a recipe or a run"
    raise_all(find_problems(resolve_paths(recipe, folders)))
    for name in dependencies.find_referenced_dependencies(recipe):
        ensure_dependency(recipe, name, quiet=quiet)
    is_main = World.from_environment().is_main
    console = Console(unit="samples", quiet=quiet or not is_main)
    workload = prepare_workload(resolve_paths(dependencies.resolve_references(recipe), folders), console)
    if start_checkpoint is not None and start_checkpoint[1] != workload.data.fingerprint:
        raise DataError(f"{run}: the data has changed since its last checkpoint; undo the change")
    with progress_bars(console.rich, in_bytes=False) as report_progress:
        return run_range_test(
            recipe,
            workload,
            checkpoint_path=start_checkpoint[0] if start_checkpoint is not None else None,
            low=low,
            high=high,
            steps=steps,
            report_progress=lambda done, total: report_progress("lr-find", done, total),
        )


def _find_start(run: RunDirectory, path: Path) -> tuple[Path, str]:
    """Return the checkpoint that `path` names, or the newest valid one, and the fingerprint of its training data."""
    checkpoint = resume.find_checkpoint(run, path if path != run.path else None, lambda text: None)
    if checkpoint is None:
        raise CheckpointError(f"{run.path} has no checkpoint yet; give its recipe instead of the run")
    return checkpoint[0], str(checkpoint[1].fingerprint.get("data"))


def _build_train_command(run_or_recipe: str, words: list[str], report: dict[str, Any], *, is_run: bool) -> str:
    rate_override = f"training.learning_rate={report['suggestion']:g}"
    if not is_run:
        other_words = [
            word for word in words if not word.startswith(("training.learning_rate=", "learning_rate=", "lr="))
        ]
        return shlex.join(["bottega", "train", run_or_recipe, *other_words, rate_override])
    run = RunDirectory(split_checkpoint_path(Path(run_or_recipe))[0])
    name_override, length_overrides = f"name={run.path.resolve().name}-again", []
    recipe = load_saved_recipe(run.recipe)
    if recipe.training.max_steps is not None and report["from_step"] >= recipe.training.max_steps:
        length_overrides = [f"training.max_steps={report['from_step'] + recipe.training.max_steps}"]
    return shlex.join(
        [
            "bottega",
            "train",
            str(run.recipe),
            name_override,
            rate_override,
            *length_overrides,
            "--resume_from",
            run_or_recipe,
        ]
    )


def write_report(report: dict[str, Any], out: Path) -> dict[str, Any]:
    """Write lr-find.json and its plot to `out`, and return the report with the paths of both, or with a note on the plot."""
    file, plot_file = out / REPORT_FILE, out / PLOT_FILE
    with explain_write_errors(file), replacing_file(file) as temporary:
        temporary.write_text(json.dumps(redact_values(report), indent=1) + "\n", encoding="utf-8")
    notes: list[str] = []
    is_plotted = try_plot(partial(plot_range_test, report), plot_file, warn=notes.append)
    return {**report, "json": str(file), **({"picture": str(plot_file)} if is_plotted else {"notes": notes})}


def format_report(report: dict[str, Any]) -> str:
    """Format a report for the terminal."""
    rates = report["curve"]["rate"]
    end_text = f"diverges at {report['diverged']:.2e}" if report["diverged"] is not None else f"ends at {rates[-1]:.2e}"
    lines = [
        f"loss {report['start_loss']:.4f} -> {report['lowest_loss']:.4f}, rates from {rates[0]:.2e} on; it {end_text}",
        f"  steepest fall    {report['steepest']:.2e}",
        f"  minimum / 10     {report['minimum_tenth']:.2e}",
        f"  suggestion       {report['suggestion']:.2e}",
    ]
    if report["still_falling"]:
        lines.append("the loss still falls at the highest rate; try a higher --max")
    lines += [f"plot:   {report['picture']}"] if "picture" in report else []
    return "\n".join([*lines, f"use it: {report['command']}", *(f"note: {note}" for note in report.get("notes", ()))])
