"""`bottega crossval`: train a recipe once per fold of its data, and summarise the metrics of the held-out folds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bottega.analysis import crossval_table
from bottega.analysis.crossval_folds import (
    Fold,
    check_class_counts,
    check_metric_available,
    check_same_data,
    check_same_recipe,
    is_trained,
    plan_folds,
    prepare_fold,
    resolve_splitting,
)
from bottega.analysis.crossval_jobs import train_folds
from bottega.config.data import Splitting
from bottega.config.load import to_yaml
from bottega.config.recipe import Recipe
from bottega.core import checkpoint as checkpoints
from bottega.core.errors import DataError, UsageError
from bottega.core.rundir import RunDirectory
from bottega.plots.figure import is_plot_warning, try_plot
from bottega.run.checks import find_problems, raise_all
from bottega.run.job_pool import Job, plan_job_environments
from bottega.run.train import lock_directory, set_aside
from bottega.tasks.recipes import load_recipe, parse_overrides
from bottega.terminal import escape_controls, open_console
from bottega.world import is_launched

if TYPE_CHECKING:
    import numpy as np

    from bottega.data.prepare.prepared import PreparedData

RESULTS_FOLDER, TEST_FOLDER = "results", "test"
"""Folder of a fold with its results, and the folder within it with those of the test set."""


def crossval(
    recipe: str | Path | Mapping[str, Any] | Sequence[str | Path | Mapping[str, Any]],
    overrides: Mapping[str, Any] | None = None,
    *,
    folds: int | None = None,
    by: str | None = None,
    field: str | None = None,
    repeats: int = 1,
    jobs: int | str = "auto",
    checkpoint: str = "best",
    out: str | Path | None = None,
    fresh: bool = False,
    quiet: bool = True,
) -> dict[str, Any]:
    """`bottega.crossval`: train a recipe once per fold, and return the content of crossval.json.

    The same call continues where an earlier one stopped.
    """
    from bottega.run.saved import strip_flag_dashes

    sources = [recipe] if isinstance(recipe, str | Path | Mapping) else list(recipe)
    options: dict[str, Any] = {"folds": folds, "by": by, "field": field, "repeats": repeats, "checkpoint": checkpoint}
    try:
        resolved_recipe = load_recipe([*sources, overrides or {}]).recipe
        return cross_validate(resolved_recipe, **options, jobs=jobs, out=out, fresh=fresh, quiet=quiet)
    except UsageError as error:
        raise strip_flag_dashes(error) from None
    except DataError as error:
        raise DataError(str(strip_flag_dashes(UsageError(str(error))))) from None


def crossval_command(words: list[str], **options: Any) -> dict[str, Any]:
    """Run `bottega crossval` with the recipe and overrides of the command line."""
    sources, overrides = parse_overrides(words)
    if not sources:
        raise UsageError("no recipe given; run bottega crossval RECIPE, such as bottega crossval classify --folds 5")
    return cross_validate(load_recipe(sources, overrides).recipe, **options)


def cross_validate(
    recipe: Recipe,
    *,
    folds: int | None,
    by: str | None,
    field: str | None,
    repeats: int,
    jobs: int | str,
    checkpoint: str,
    out: str | Path | None,
    fresh: bool,
    quiet: bool,
) -> dict[str, Any]:
    """Train and evaluate all folds of a resolved recipe, write crossval.json and plots, and return the report."""
    from bottega.callbacks.progress_bars import progress_bars

    if is_launched():
        raise UsageError("crossval starts processes of its own; start it without torchrun")
    if checkpoint not in ("best", "last"):
        raise UsageError(f"--checkpoint {checkpoint}: expected best or last")
    if repeats < 1:
        raise UsageError(f"--repeats {repeats}: expected 1 or more")
    raise_all(find_problems(recipe))
    split, notes = resolve_splitting(recipe, folds=folds, by=by, field=field)
    planned_folds = plan_folds(recipe, split, repeats=repeats, out=Path(out) if out is not None else None)
    environments = plan_job_environments(recipe.device, jobs, num_runs=len(planned_folds))
    root = RunDirectory(planned_folds[0].run.path.parent)
    if fresh and root.path.exists():
        set_aside(root.path, subject="folds are")
    console = open_console(quiet=quiet)

    def log(text: str) -> None:
        console.print(escape_controls(text), soft_wrap=True, markup=False)

    with lock_directory(root, has_log=False):
        check_same_recipe(root, planned_folds)
        with progress_bars(console) as bar:
            # The last fold first: if there are too few rows or groups, the last one is empty.
            prepared = [prepare_fold(fold.recipe, bar) for fold in reversed(planned_folds)][::-1]
        check_class_counts(prepared[0], split)
        check_same_data(planned_folds, prepared)
        untrained_folds = [fold for fold in planned_folds if not is_trained(fold)]
        if untrained_folds:
            with progress_bars(console) as bar:
                check_metric_available(untrained_folds[0].recipe, bar)
        untrained_jobs = [_write_fold_recipe(root, fold) for fold in untrained_folds]
        num_trained = len(planned_folds) - len(untrained_jobs)
        log(
            f"{root.path}: {len(planned_folds)} folds, {_describe_progress(num_trained, untrained_jobs)}, {len(environments)} at a time"
        )
        with progress_bars(console, in_bytes=False) as bar:
            train_folds(untrained_jobs, environments, num_trained=num_trained, log=log, report_progress=bar)
        runs = [
            _evaluate_fold(fold, table, checkpoint, notes) for fold, table in zip(planned_folds, prepared, strict=True)
        ]
        report = _build_report(root, planned_folds, runs, split, repeats=repeats, checkpoint=checkpoint, notes=notes)
        matrix, classes = _pool_predictions(root, planned_folds, report)
        _write_report(root, report)
        _write_plots(root, report, matrix, classes)
        _write_report(root, report)  # again, now with the paths of the plots
    return report


def _describe_progress(num_trained: int, jobs: Sequence[Job]) -> str:
    num_started = sum(job.step is not None for job in jobs)
    return f"{num_trained} already trained" + (f" and {num_started} started" if num_started else "")


def _write_fold_recipe(root: RunDirectory, fold: Fold) -> Job:
    """Write the recipe of a fold to a file that `bottega train` accepts, and return its job."""
    file = root.path / "recipes" / f"{fold.run.path.name}.yaml"
    file.parent.mkdir(exist_ok=True)
    root.write(file, to_yaml(fold.recipe), redact=False)
    return Job(fold.run, file)


def _evaluate_fold(fold: Fold, prepared: PreparedData | None, checkpoint: str, notes: list[str]) -> dict[str, Any]:
    """Evaluate a checkpoint of a fold on its held-out rows, and on the test set if there is one."""
    from bottega.run.saved import choose_checkpoint

    rows = prepared.tables["validation"]["rows"] if prepared is not None else None
    checkpoint_path = choose_checkpoint(fold.run, checkpoint)
    split = fold.recipe.data.split
    assert split is not None
    result = {
        "number": fold.number,
        "fold": split.fold,
        "split_seed": split.seed,
        "run": str(fold.run.path),
        "step": checkpoints.read_manifest(checkpoint_path).step,
        "held_out": rows,
        "metrics": _evaluate_split(
            fold, checkpoint_path, checkpoint, "validation", fold.run.path / RESULTS_FOLDER, notes
        ),
    }
    if fold.recipe.data.test is not None:
        result[TEST_FOLDER] = _evaluate_split(
            fold, checkpoint_path, checkpoint, TEST_FOLDER, fold.run.path / RESULTS_FOLDER / TEST_FOLDER, notes
        )
    return result


def _evaluate_split(
    fold: Fold, checkpoint_path: Path, checkpoint: str, split: str, folder: Path, notes: list[str]
) -> dict[str, float | None]:
    """Return the metrics of a checkpoint on a split; results of the same checkpoint are read from `folder`."""
    from bottega.analysis.evaluate import evaluate_run
    from bottega.tasks.evaluation_data import DataRequest

    file = folder / "metrics.json"
    fields: dict[str, Any] = {}
    if file.is_file():
        try:
            fields = json.loads(file.read_bytes())
        except ValueError:
            fields = {}  # truncated by a killed process, or written by something else
    if (fields.get("checkpoint"), fields.get("split")) != (checkpoint_path.name, split):
        request = DataRequest(split=split)
        options: dict[str, Any] = {"request": request, "checkpoint": checkpoint, "device": fold.recipe.device}
        # For a generator only the loss is computed: scoring samples can take as long as training.
        options |= {"count": 0, "inception": None, "quiet": True}
        result = evaluate_run(fold.run.path, **options, out=folder)
        plot_warnings = [note for note in result.get("notes", []) if is_plot_warning(note)]
        note = {"note": f"no plots of single folds: {plot_warnings[0].partition(': ')[2]}"} if plot_warnings else {}
        metrics = {name: value if math.isfinite(value) else None for name, value in result["metrics"].items()}
        classes = {"per_class": result["per_class"]} if "per_class" in result else {}
        metadata = {"split": split, "checkpoint": checkpoint_path.name, "metrics_named": list(metrics)}
        fields = {**metrics, **classes, **metadata, **note}
        folder.mkdir(parents=True, exist_ok=True)
        fold.run.write(file, json.dumps(fields, indent=1) + "\n")
    if "note" in fields and fields["note"] not in notes:
        notes.append(fields["note"])
    return {name: fields[name] for name in fields["metrics_named"]}


def _build_report(
    root: RunDirectory,
    folds: list[Fold],
    runs: list[dict[str, Any]],
    split: Splitting,
    *,
    repeats: int,
    checkpoint: str,
    notes: list[str],
) -> dict[str, Any]:
    assert split.folds is not None
    recipe, num_runs = folds[0].recipe, len(folds)
    notes = [
        f"intervals are t intervals with {num_runs - 1} degrees of freedom and the correction of Nadeau and Bengio (2003): folds "
        f"share training data, so the variance is scaled by 1/{num_runs} + 1/{split.folds - 1}, not by 1/{num_runs}",
        *notes,
    ]
    if checkpoint == "best" and any(run["step"] < _read_last_step(fold) for run, fold in zip(runs, folds, strict=True)):
        notes.append(
            "the best checkpoint of a fold was selected on the data it is evaluated on, which is slightly optimistic; "
            "--checkpoint last avoids this"
        )
    metric = recipe.evaluation.metric
    report: dict[str, Any] = {
        "folder": str(root.path),
        "task": recipe.task,
        "metric": metric,
        "mode": recipe.evaluation.resolved_mode,
        "folds": split.folds,
        "repeats": repeats,
        "by": split.by,
        "field": split.field,
        "checkpoint": checkpoint,
        "level": crossval_table.CONFIDENCE_LEVEL,
        "runs": runs,
        "metrics": {
            name: crossval_table.summarise_folds(values, num_folds=split.folds)
            for name, values in _collect_metric_columns(runs, "metrics", notes).items()
        },
        "files": {},
        "notes": notes,
    }
    if recipe.data.test is not None:
        report[TEST_FOLDER] = {
            name: crossval_table.summarise_test(values)
            for name, values in _collect_metric_columns(runs, TEST_FOLDER, notes).items()
        }
    return report


def _read_last_step(fold: Fold) -> int:
    newest = checkpoints.find_newest(fold.run.checkpoints)
    return checkpoints.read_manifest(newest).step if newest is not None else 0


def _collect_metric_columns(runs: list[dict[str, Any]], part: str, notes: list[str]) -> dict[str, list[float]]:
    """Return metric -> its value in each fold, without metrics that are undefined in some fold."""
    names = dict.fromkeys(name for run in runs for name in run[part])
    columns = {name: [run[part].get(name) for run in runs] for name in names}
    for name, values in columns.items():
        undefined_folds = [f"fold-{run['number']}" for run, value in zip(runs, values, strict=True) if value is None]
        if undefined_folds:
            notes.append(f"{name} is undefined in {', '.join(undefined_folds)} and is left out")
    return {name: values for name, values in columns.items() if None not in values}


def _write_report(root: RunDirectory, report: dict[str, Any]) -> None:
    root.write(root.path / "crossval.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n")


def _pool_predictions(
    root: RunDirectory, folds: list[Fold], report: dict[str, Any]
) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Write the predictions of all folds to one file, for classifiers, and add metrics of the pooled predictions.

    Return the confusion matrix (classes, classes), None for multi-label data, and the names of the classes.
    """
    files = [(fold.number, fold.run.path / RESULTS_FOLDER / "predictions.jsonl") for fold in folds]
    if not all(file.is_file() for _, file in files):
        return None, ()
    rows = crossval_table.read_fold_predictions(files)
    results = [json.loads((file.parent / "metrics.json").read_bytes()) for _, file in files]
    classes = tuple(dict.fromkeys(name for result in results for name in result["per_class"]))
    report["pooled"], matrix = crossval_table.pool_predictions(rows, classes)
    predictions_file = root.path / "predictions.jsonl"
    root.write(predictions_file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), redact=False)
    report["files"]["predictions"] = str(predictions_file)
    return (matrix if matrix.ndim == 2 else None), classes


def _write_plots(
    root: RunDirectory, report: dict[str, Any], matrix: np.ndarray | None, classes: tuple[str, ...]
) -> None:
    """Plot the confusion matrix and the metric of each fold; a plot that cannot be written becomes a note."""
    from bottega.analysis.compare import plot_comparison
    from bottega.plots.classification import plot_confusion_matrix

    plots: dict[str, tuple[Path, Callable[[Path], None]]] = {}
    if matrix is not None:
        plots["confusion"] = root.path / "confusion.png", partial(plot_confusion_matrix, matrix, classes)
    if report["metric"] in report["metrics"]:
        plots["picture"] = root.path / "crossval.png", partial(plot_comparison, _convert_to_comparison(report))
    for name, (path, plot) in plots.items():
        if try_plot(plot, path, warn=report["notes"].append):
            report["files"][name] = str(path)


def _convert_to_comparison(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report as `plot_comparison` expects it: one group, and no pairs."""
    summary = report["metrics"][report["metric"]]
    runs = [
        {"run": run["run"], "seed": None, "fold": run["number"], "value": run["metrics"][report["metric"]]}
        for run in report["runs"]
    ]
    group = {"label": "", "name": report["folder"], "kind": "folds", "n": len(runs), "runs": runs, **summary}
    return {
        "metric": report["metric"],
        "mode": report["mode"],
        "level": report["level"],
        "groups": [group],
        "pairs": [],
    }
