"""The end of a run: a sample, the result, the diagnosis, the report, and the commands to try next."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from bottega.callbacks.console import Console
from bottega.config.recipe import Recipe
from bottega.core.callback import Progress
from bottega.core.errors import first_line
from bottega.core.rundir import RunDirectory
from bottega.core.trainer import BestMetric
from bottega.run_files.record import BASELINE_FILE, RunRecord, read_record
from bottega.tasks import plugins
from bottega.tasks.workload import Workload
from bottega.world import World


def announce_result(
    recipe: Recipe,
    directory: RunDirectory,
    workload: Workload,
    progress: Progress,
    console: Console,
    *,
    seconds: float,
    has_validation: bool,
) -> None:
    """Print a sample, the result and the commands to try next; write the report."""
    path = directory.path
    if progress.stop:
        console.info(f"stopped early: {progress.stop}")
    newest_samples = max(directory.samples.glob("step-*"), default=None)
    if newest_samples is not None:
        _show_samples(console, newest_samples)
    best = (
        f", best {recipe.evaluation.metric} {progress.best:.4f} at step {progress.best_step}"
        if progress.best_step
        else ""
    )
    console.info(f"\n{path}: {progress.step} steps in {seconds:.0f} s{best}", style="bold")
    if has_validation and World.from_environment().is_main:
        _compare_with_baseline(recipe, directory, workload, progress, console)
    conclude_run(recipe, directory, console)
    commands = [f"generate {path}{example}"] if (example := workload.sampler.example_flags()) is not None else []
    commands += [f"evaluate {path}{'' if has_validation else ' --data PATH'}", f"export {path}"]
    for number, command in enumerate(commands):
        console.info(f"{'next:' if not number else '':<7}bottega {command}{plugins.quote_plugin_flags()}")


def _compare_with_baseline(
    recipe: Recipe, directory: RunDirectory, workload: Workload, progress: Progress, console: Console
) -> None:
    """Print the result of the task's simple baseline on the same split, and write it to baseline.json.

    What fails here costs a warning, not the run.
    """
    metric = recipe.evaluation.metric
    try:
        baseline = workload.fit_baseline()
        if baseline is None:
            return
        directory.write(directory.path / BASELINE_FILE, json.dumps(asdict(baseline), indent=1) + "\n")
    except Exception as error:
        console.warn(f"the baseline was not fitted: {_describe_error(error)}; evaluation.baseline=false turns it off")
        return
    metric = metric if metric in baseline.metrics else "accuracy"
    value, notes = baseline.metrics[metric], "".join(f", {note}" for note in baseline.notes)
    line = f"{baseline.name} on the same split: {metric} {value:.4f} ({baseline.seconds:.0f} s{notes})"
    best_metric = BestMetric(metric, maximise=recipe.evaluation.resolved_mode == "max")
    is_comparable = metric == recipe.evaluation.metric and progress.best is not None
    if is_comparable and best_metric.is_better(value, progress.best):
        console.warn(f"{line}, better than this run")
    else:
        console.info(line)


def _show_samples(console: Console, folder: Path) -> None:
    """Print a text sample; for other media print the paths of the files."""
    text = folder / "00.txt"
    if text.is_file():
        console.info(f"\na sample ({text}):\n", style="bold")
        console.info(text.read_text(encoding="utf-8").strip())
        return
    files = [
        path for name in ("sheet.png", "sheet.gif", "spectrograms.png", "00.wav") if (path := folder / name).is_file()
    ]
    if files:
        console.info(f"\nsamples: {', '.join(map(str, files))}", style="bold")


def conclude_run(
    recipe: Recipe, directory: RunDirectory, console: Console, *, failure: BaseException | None = None
) -> None:
    """Print what `bottega diagnose` finds, and write report.html if the recipe wants it; only the main process does so.

    `failure` is the error that ended the run, if any. What fails here costs a warning, not the run.
    """
    if not World.from_environment().is_main:
        return
    try:
        # Long logs take seconds to read, so diagnosis and report share them.
        record = read_record(directory.path, is_running=False, failure=str(failure) if failure is not None else None)
    except Exception as error:
        console.warn(f"the run was not diagnosed, and no report was written: {_describe_error(error)}")
        return
    _print_diagnosis(record, console)
    if recipe.logging.report:
        _write_report(record, console)


def _print_diagnosis(record: RunRecord, console: Console) -> None:
    """Print what `bottega diagnose` finds."""
    from bottega.diagnosis.rules import apply_rules

    try:
        for line in apply_rules(record).format_lines():
            console.warn(line)
    except Exception as error:
        console.warn(f"the run was not diagnosed: {_describe_error(error)}")


def _write_report(record: RunRecord, console: Console) -> None:
    """Write report.html."""
    from bottega.reporting.write import write_run_report

    try:
        console.info(f"report: {write_run_report(record)}")
    except Exception as error:
        console.warn(f"no report was written: {_describe_error(error)}; bottega report {record.path} tries again")


def _describe_error(error: Exception) -> str:
    return error.strerror or first_line(error) if isinstance(error, OSError) else first_line(error)
