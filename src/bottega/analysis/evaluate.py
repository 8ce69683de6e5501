"""`bottega evaluate`: metrics of a run on held-out data, and for a generator the quality of its samples."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bottega.core.errors import EnvironmentProblem, UsageError
from bottega.core.rundir import split_checkpoint_path
from bottega.data.output_files import explain_write_errors
from bottega.data.sources.source import Source
from bottega.redaction import redact_values
from bottega.run.saved import SavedRun, open_run, strip_flag_dashes
from bottega.storage.durable import replacing_file
from bottega.storage.json_values import replace_non_finite
from bottega.tasks.evaluation_data import DataRequest
from bottega.terminal import open_console

UNDEFINED_REASONS = {
    "nearest_ratio": "is left out: at least half of the held-out samples are also training samples (distance 0)",
    "variance_ratio": "is left out: no class has two different held-out samples and two generated ones",
}
COLUMN_TITLES = {"generated": "generated", "real": "real, held out", "through_codec": "real, through codec"}


MAX_CLASSES_SHOWN = 50
"""Number of classes up to which the terminal shows the metrics of each; JSON always has them."""


def evaluate(
    run: str | Path,
    *,
    data: str | Path | None = None,
    data_config: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    split: str | None = None,
    checkpoint: str | int = "best",
    device: str = "auto",
    count: int | None = None,
    inception: str | Path | None = None,
    lpips: str | Path | None = None,
    out: str | Path | None = None,
    quiet: bool = True,
) -> dict[str, Any]:
    """`bottega.evaluate`: {"metrics", "split", "samples", "checkpoint"}, and for a generator the same measures of real data.

    The data is the run's own validation split, or its `split` test or train. `data` is a path of other data, `data_config`
    a recipe file with a data section, and `settings` say how to read it: {"data.train.field": "review"}. A generator draws
    `count` samples; 0 computes the loss only. The predictions of a classifier are written to `out`. For a personalised run
    `count` is the number of people, and {"arms": ...} has the metrics with and without their preferences.
    """
    overrides = [(key, json.dumps(value), "settings") for key, value in (settings or {}).items()]
    paths = [str(path) if path is not None else None for path in (data, data_config)]
    request = DataRequest(paths[0], paths[1], overrides, split)
    options: dict[str, Any] = {"checkpoint": checkpoint, "device": device}
    options |= {"count": count, "inception": inception, "lpips": lpips, "quiet": quiet}
    try:
        return evaluate_run(run, request=request, **options, out=Path(out) if out is not None else None)
    except UsageError as error:
        raise strip_flag_dashes(error) from None


def evaluate_run(run: str | Path, *, request: DataRequest, out: Path | None = None, **options: Any) -> dict[str, Any]:
    """Evaluate a run, and write metrics.json and the predictions and plots of a classifier to `out`.

    Without `out`, metrics.json of the run's own data is written to RUN/evaluation/SPLIT, from where `bottega report` reads it, and so
    are the images of a personalised run. With `count` 0 nothing is.
    """
    result = _evaluate(run, request=request, out=out, **options)
    if out is not None or "folder" in result:
        _write_result(result, out or Path(result["folder"]))
    elif result["data"] is None and options.get("count") != 0:  # a loss alone must not replace the scores of samples
        try:
            _write_result(result, split_checkpoint_path(Path(run))[0] / "evaluation" / str(result["split"]))
        except EnvironmentProblem as error:  # the run of somebody else, or a full disk: the result is still printed
            result["notes"] = [*result.get("notes", []), f"not recorded for the report: {error}"]
    return result


def _write_result(result: dict[str, Any], folder: Path) -> None:
    """Write metrics.json: the metrics by name, and everything else that --json prints."""
    file = folder / "metrics.json"
    metadata = {name: value for name, value in result.items() if name not in ("metrics", "files", "folder")}
    fields = {**result["metrics"], **metadata}
    with explain_write_errors(file), replacing_file(file) as temporary:
        temporary.write_text(json.dumps(redact_values(replace_non_finite(fields)), indent=1) + "\n")


def _evaluate(
    run: str | Path,
    *,
    request: DataRequest,
    checkpoint: str | int,
    device: str,
    count: int | None,
    inception: str | Path | None,
    lpips: str | Path | None = None,
    quiet: bool,
    out: Path | None,
) -> dict[str, Any]:
    if count is not None and count < 0:
        raise UsageError(f"--count {count}: expected 0 (loss only) or more")
    if out is not None and Path(out).is_file():
        raise UsageError(f"--out {out} is a file; give a folder")
    saved = open_run(Path(run), checkpoint=checkpoint, device=device)
    is_personalized = saved.recipe.task == "personalize"
    _check_sampling_options(saved, {"--count": count, "--inception": inception, "--lpips": lpips})
    data = saved.select_data(request)
    metrics, rows, source = saved.evaluate_data(data)
    result: dict[str, Any] = {
        "metrics": {**metrics, **_compute_code_usage(saved, source)},
        "checkpoint": str(saved.checkpoint),
        "data": data.path,
        "split": data.split,
        "samples": len(source),
        **({"notes": data.notes} if data.notes else {}),
    }
    if "probability" in rows:
        from bottega.analysis.classifier_predictions import ClassifierPredictions

        result |= saved.workload.build_evaluation_tables(rows)
        if out is not None:
            predictions = ClassifierPredictions(rows, source, tuple(saved.workload.classes.names))  # type: ignore[attr-defined]
            notes: list[str] = []
            result["files"] = [str(path) for path in predictions.write_files(out, warn=notes.append)]
            result |= {"notes": [*result.get("notes", []), *notes]} if notes else {}
    if is_personalized and count != 0:
        uses_own_data = data.external is None
        out = out or saved.directory.path / "evaluation" / (str(data.split) if uses_own_data else "data")
        lpips_weights = Path(lpips) if lpips is not None else None
        return _evaluate_people(
            saved, source, result, count=count, lpips=lpips_weights, uses_own_data=uses_own_data, out=out, quiet=quiet
        )
    if not _is_generator(saved) or count == 0:
        return result
    return _score_generated(saved, result, data=data, count=count, inception=inception, quiet=quiet)


def _check_sampling_options(saved: SavedRun, options: dict[str, Any]) -> None:
    """Raise `UsageError` for an option that has no effect on this task."""
    is_personalized, is_generator, task = saved.recipe.task == "personalize", _is_generator(saved), saved.recipe.task
    accepted = {"--count": is_personalized or is_generator, "--inception": is_generator, "--lpips": is_personalized}
    for flag, value in options.items():
        if value and not accepted[flag]:
            reason = "does not use it" if accepted["--count"] else "does not score generated samples"
            raise UsageError(f"{flag} {value}: the task {task} {reason}; remove it")


def _score_generated(
    saved: SavedRun, result: dict[str, Any], *, inception: str | Path | None, quiet: bool, **options: Any
) -> dict[str, Any]:
    """Add the scores of generated samples, of real held-out ones, and notes to `result`."""
    from bottega.analysis.generation_scores import score_samples
    from bottega.callbacks.progress_bars import progress_bars

    inception_weights = Path(inception) if inception is not None else None
    with progress_bars(open_console(quiet=quiet), in_bytes=False) as report_progress:
        scores = score_samples(
            saved, **options, inception=inception_weights, report_progress=report_progress, quiet=quiet
        )
    result["metrics"] = {**result["metrics"], **scores.generated}
    result["real"] = scores.real
    if scores.through_processor:
        result["through_codec"] = scores.through_processor
    result["counts"] = scores.counts
    if scores.weakly_judged:
        result["weakly_judged"] = list(scores.weakly_judged)
    notes = (
        result.get("notes", [])
        + scores.notes
        + [f"{name} {UNDEFINED_REASONS.get(name, 'is undefined here')}" for name in _list_undefined(result)]
    )
    if notes:
        result["notes"] = notes
    return result


def _evaluate_people(
    saved: SavedRun,
    source: Source,
    result: dict[str, Any],
    *,
    uses_own_data: bool,
    out: Path,
    quiet: bool,
    **options: Any,
) -> dict[str, Any]:
    """Add the metrics of all arms; those of the full method (`both`) are the metrics of the run."""
    from bottega.analysis.personalize_evaluation import evaluate_personalization
    from bottega.analysis.personalize_generator import open_personalized_generator
    from bottega.callbacks.progress_bars import progress_bars

    with (
        progress_bars(open_console(quiet=quiet), in_bytes=False) as report_progress,
        open_personalized_generator(saved, source, uses_own_data=uses_own_data) as generator,
    ):
        evaluation = evaluate_personalization(generator, **options, out=out, report_progress=report_progress)
    metrics = {measure: values["mean"] for measure, values in evaluation["arms"]["both"].items()}
    return {**result, "metrics": {**result["metrics"], **metrics}, **evaluation, "folder": str(out)}


def _list_undefined(result: dict[str, Any]) -> list[str]:
    """Return the measures that are not finite in some column."""
    columns = [result["metrics"], *(result[name] for name in COLUMN_TITLES if name in result)]
    return [name for name in result["real"] if not all(math.isfinite(values[name]) for values in columns)]


def format_report(result: dict[str, Any]) -> str:
    """Format a result for the terminal: the data, the loss, and a table of generated beside real samples or of arms."""
    compared_measures = result["arms"]["both"] if "arms" in result else result.get("real", {})
    width = max(20, *(len(name) + 2 for name in result["metrics"]))
    lines = [_describe_data(result), ""] if "samples" in result else []
    lines += [
        f"{name:<{width}}{value:.4f}" for name, value in result["metrics"].items() if name not in compared_measures
    ]
    if "arms" in result:
        from bottega.analysis.personalize_table import format_report as format_arms

        lines += [*format_arms(result), "", f"written to {result['folder']}"]
    elif compared_measures:
        undefined = _list_undefined(result)
        columns = {"generated": result["metrics"], **{name: result[name] for name in COLUMN_TITLES if name in result}}
        lines += ["", " " * 20 + "".join(f"{COLUMN_TITLES[name]:>22}" for name in columns)]
        lines += [
            f"{measure + ('*' if measure in result.get('weakly_judged', ()) else ''):<20}"
            + "".join(f"{values[measure]:>22.4f}" for values in columns.values())
            for measure in compared_measures
            if measure not in undefined
        ]
        counts = result["counts"]
        lines.append(f"{'samples':<20}" + "".join(f"{counts.get(n, counts['real']):>22,}" for n in columns))
        if "training" in counts:
            training = f"{counts['training']:,} of {counts['training_available']:,} training samples"
            lines.append(f"compared with {training}, distributions at {counts['compared']:,} samples each")
    if 1 < len(result.get("per_class", {})) <= MAX_CLASSES_SHOWN:
        lines += _format_classes(result["per_class"])
    return "\n".join([*lines, *result.get("notes", ())])


def _describe_data(result: dict[str, Any]) -> str:
    """Return one line with the data, the number of samples and the checkpoint."""
    split = f"the {result['split']} split" if result["split"] is not None else "all data"
    origin = f" of {result['data']}" if result["data"] is not None else ""
    samples = f"{result['samples']:,} sample{'s' if result['samples'] != 1 else ''}"
    return f"measured on {split}{origin}: {samples}, checkpoint {Path(result['checkpoint']).name}"


def _format_classes(class_metrics: dict[str, dict[str, float]]) -> list[str]:
    width = max(20, max(map(len, class_metrics)) + 2)
    lines = ["", " " * width + "".join(f"{name:>12}" for name in ("precision", "recall", "f1", "samples"))]
    for name, row in class_metrics.items():
        numbers = "".join(f"{row[key]:>12.4f}" for key in ("precision", "recall", "f1"))
        lines.append(f"{name:<{width}}{numbers}{row['support']:>12,}")
    return lines


def _compute_code_usage(saved: SavedRun, source: Source) -> dict[str, float]:
    """Return the codebook usage of an image or audio tokenizer on `source`; empty for other tasks."""
    from bottega.tasks.autoencode.tokens_workload import TokensWorkload

    workload = saved.workload
    if not isinstance(workload, TokensWorkload):
        return {}
    with saved.engine.sampling() as models:
        return workload.measure_code_usage(models, source, device=saved.engine.device)


def _is_generator(saved: SavedRun) -> bool:
    from bottega.tasks.generation.workload import GenerationWorkload

    return isinstance(saved.workload, GenerationWorkload)
