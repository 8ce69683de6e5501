"""The end of a finished run: a sample, the result, the report, warnings, and the commands to try next."""

from __future__ import annotations

from pathlib import Path

from bottega.callbacks.console import Console
from bottega.config.recipe import Recipe
from bottega.core.callback import Progress
from bottega.core.errors import first_line
from bottega.core.rundir import RunDirectory
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
    if World.from_environment().is_main:
        print_diagnosis(directory, console)
        write_report(recipe, directory, console)
    commands = [f"generate {path}{example}"] if (example := workload.sampler.example_flags()) is not None else []
    commands += [f"evaluate {path}{'' if has_validation else ' --data PATH'}", f"export {path}"]
    for number, command in enumerate(commands):
        console.info(f"{'next:' if not number else '':<7}bottega {command}{plugins.quote_plugin_flags()}")


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


def print_diagnosis(directory: RunDirectory, console: Console, *, failure: BaseException | None = None) -> None:
    """Print what `bottega diagnose` finds; a diagnosis that fails costs a warning, not the run.

    `failure` is the error that ended the run, if any.
    """
    from bottega.diagnosis.rules import apply_rules
    from bottega.run_files.record import read_record

    try:
        reason = str(failure) if failure is not None else None
        for line in apply_rules(read_record(directory.path, is_running=False, failure=reason)).format_lines():
            console.warn(line)
    except Exception as error:
        console.warn(f"the run was not diagnosed: {first_line(error)}")


def write_report(
    recipe: Recipe, directory: RunDirectory, console: Console, *, failure: BaseException | None = None
) -> None:
    """Write report.html if the recipe wants it; a failed write costs a warning, not the run.

    `failure` is the error that ended the run, if any.
    """
    from bottega.reporting.write import write_run_report

    if not recipe.logging.report or not World.from_environment().is_main:
        return
    try:
        path = write_run_report(directory.path, failure=str(failure) if failure is not None else None)
        console.info(f"report: {path}")
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) else first_line(error)
        console.warn(f"no report was written: {reason}; bottega report {directory.path} tries again")
