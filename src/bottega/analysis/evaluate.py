"""`bottega evaluate`: metrics of a run on held-out data, and for a generator the quality of its samples."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bottega.core.errors import UsageError
from bottega.data.output_files import explain_write_errors, replace_non_finite
from bottega.data.sources.source import Source
from bottega.run.saved import SavedRun, open_run, without_flag_dashes
from bottega.storage.durable import replacing_file
from bottega.tasks.evaluation_data import DataRequest
from bottega.terminal import open_console

UNDEFINED_REASONS = {
    "nearest_ratio": "is left out: half or more of the held-out samples are training samples, at a distance of 0",
    "variance_ratio": "is left out: no class has two held-out samples that differ, and two that were drawn",
}
TITLES = {"generated": "generated", "real": "real, held out", "through_codec": "real, through codec"}


MAX_CLASSES_SHOWN = 50
"""Up to which the terminal shows each; JSON has all."""


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
    """`bottega.evaluate`: {"metrics", "split", "samples", "checkpoint"}, and of a generator the same measures of real data.

    Measured is the run's own validation part, or `split` of it: test, or train on request. `data` is a path of other data,
    `data_config` a recipe file whose data is meant, and `settings` say how it is read: {"data.train.field": "review"}.
    `count` samples are drawn for that; 0 measures the loss alone. A classifier's answers are written to `out`. Of a
    personalised run `count` are people, and {"arms": ...} what they were drawn with and without being known.
    """
    overrides = [(key, json.dumps(value), "settings") for key, value in (settings or {}).items()]
    named = [str(one) if one is not None else None for one in (data, data_config)]
    request = DataRequest(named[0], named[1], overrides, split)
    options: dict[str, Any] = {"checkpoint": checkpoint, "device": device}
    options |= {"count": count, "inception": inception, "lpips": lpips, "quiet": quiet}
    try:
        return evaluate_run(run, request=request, **options, out=Path(out) if out is not None else None)
    except UsageError as error:
        raise without_flag_dashes(error) from None


def evaluate_run(run: str | Path, *, request: DataRequest, out: Path | None = None, **options: Any) -> dict[str, Any]:
    """The same for the command line. To `out` goes metrics.json, and of a classifier its answers and pictures. What is drawn
    for people is for looking at and goes into the run's folder where no other is named."""
    result = _measured(run, request=request, out=out, **options)
    if out is not None or "folder" in result:
        file = (out or Path(result["folder"])) / "metrics.json"
        beside = {name: value for name, value in result.items() if name not in ("metrics", "files", "folder")}
        fields = {**result["metrics"], **beside}
        with explain_write_errors(file), replacing_file(file) as temporary:
            temporary.write_text(json.dumps(replace_non_finite(fields), indent=1) + "\n")
    return result


def _measured(
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
        raise UsageError(f"--count {count}: expected 0, for the loss alone, or more")
    if out is not None and Path(out).is_file():
        raise UsageError(f"--out {out}: is a file; name a folder")
    saved = open_run(Path(run), checkpoint=checkpoint, device=device)
    is_personal = saved.recipe.task == "personalize"
    _check_judged(saved, {"--count": count, "--inception": inception, "--lpips": lpips})
    chosen = saved.select_data(request)
    means, rows, source = saved.evaluate_data(chosen)
    result: dict[str, Any] = {
        "metrics": {**means, **_codes_used(saved, source)},
        "checkpoint": str(saved.checkpoint),
        "data": chosen.path,
        "split": chosen.split,
        "samples": len(source),
        **({"notes": chosen.notes} if chosen.notes else {}),
    }
    if "probability" in rows:
        from bottega.analysis.classifier_predictions import ClassifierPredictions

        predictions = ClassifierPredictions(rows, source, tuple(saved.workload.classes.names))  # type: ignore[attr-defined]
        result["per_class"] = predictions.class_metrics()
        if out is not None:
            notes: list[str] = []
            result["files"] = [str(path) for path in predictions.write_files(out, warn=notes.append)]
            result |= {"notes": [*result.get("notes", []), *notes]} if notes else {}
    if is_personal and count != 0:
        is_own = chosen.given is None
        out = out or saved.directory.path / "evaluation" / (str(chosen.split) if is_own else "data")
        weights = Path(lpips) if lpips is not None else None
        return _over_people(saved, source, result, count=count, lpips=weights, is_own=is_own, out=out, quiet=quiet)
    if not _generates(saved) or count == 0:
        return result
    return _beside_real(saved, result, data=chosen, count=count, inception=inception, quiet=quiet)


def _check_judged(saved: SavedRun, given: dict[str, Any]) -> None:
    """Refuses what would change nothing."""
    is_personal, generates, task = saved.recipe.task == "personalize", _generates(saved), saved.recipe.task
    takes = {"--count": is_personal or generates, "--inception": generates, "--lpips": is_personal}
    for flag, value in given.items():
        if value and not takes[flag]:
            why = "samples are not judged by that" if takes["--count"] else "no samples are judged"
            raise UsageError(f"{flag} {value}: of a run of {task} {why}; leave it out")


def _beside_real(
    saved: SavedRun, result: dict[str, Any], *, inception: str | Path | None, quiet: bool, **options: Any
) -> dict[str, Any]:
    """What a generator draws, beside real data."""
    from bottega.analysis.generation_scores import score_samples
    from bottega.callbacks.progress_bars import progress_bars

    weights = Path(inception) if inception is not None else None
    with progress_bars(open_console(quiet=quiet), in_bytes=False) as say:
        scores = score_samples(saved, **options, inception=weights, report_progress=say, quiet=quiet)
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
        + [f"{name}: {UNDEFINED_REASONS.get(name, 'is no number here')}" for name in _undefined(result)]
    )
    if notes:
        result["notes"] = notes
    return result


def _over_people(
    saved: SavedRun, source: Source, result: dict[str, Any], *, is_own: bool, out: Path, quiet: bool, **options: Any
) -> dict[str, Any]:
    """The arms; the metrics of the run are those of the whole method."""
    from bottega.analysis.personalize_evaluation import evaluate_personalization
    from bottega.analysis.personalize_generator import open_personalized_generator
    from bottega.callbacks.progress_bars import progress_bars

    with (
        progress_bars(open_console(quiet=quiet), in_bytes=False) as say,
        open_personalized_generator(saved, source, is_own=is_own) as studio,
    ):
        found = evaluate_personalization(studio, **options, out=out, report_progress=say)
    both = {measure: values["mean"] for measure, values in found["arms"]["both"].items()}
    return {**result, "metrics": {**result["metrics"], **both}, **found, "folder": str(out)}


def _undefined(result: dict[str, Any]) -> list[str]:
    """Measures that are no number in some column, and so compare nothing."""
    columns = [result["metrics"], *(result[name] for name in TITLES if name in result)]
    return [name for name in result["real"] if not all(math.isfinite(values[name]) for values in columns)]


def format_report(result: dict[str, Any]) -> str:
    """What was measured, the loss, and a table of what was drawn beside what is real, or of people drawn for."""
    compared = result["arms"]["both"] if "arms" in result else result.get("real", {})
    width = max(20, *(len(name) + 2 for name in result["metrics"]))
    lines = [_measured_shown(result), ""] if "samples" in result else []
    lines += [f"{name:<{width}}{value:.4f}" for name, value in result["metrics"].items() if name not in compared]
    if "arms" in result:
        from bottega.analysis.personalize_table import format_report as arms_shown

        lines += [*arms_shown(result), "", f"written to {result['folder']}"]
    elif compared:
        undefined = _undefined(result)
        columns = {"generated": result["metrics"], **{name: result[name] for name in TITLES if name in result}}
        lines += ["", " " * 20 + "".join(f"{TITLES[name]:>22}" for name in columns)]
        lines += [
            f"{measure + ('*' if measure in result.get('weakly_judged', ()) else ''):<20}"
            + "".join(f"{values[measure]:>22.4f}" for values in columns.values())
            for measure in compared
            if measure not in undefined
        ]
        counts = result["counts"]
        lines.append(f"{'samples':<20}" + "".join(f"{counts.get(n, counts['real']):>22,}" for n in columns))
        if "training" in counts:
            some = f"{counts['training']:,} of {counts['training_available']:,} training samples"
            lines.append(f"compared with {some}, distributions at {counts['compared']:,} samples each")
    if 1 < len(result.get("per_class", {})) <= MAX_CLASSES_SHOWN:
        lines += _classes_shown(result["per_class"])
    return "\n".join([*lines, *result.get("notes", ())])


def _measured_shown(result: dict[str, Any]) -> str:
    """Which data, how many samples, which checkpoint, on one line."""
    part = f"the {result['split']} part" if result["split"] is not None else "all"
    of = f" of {result['data']}" if result["data"] is not None else ""
    samples = f"{result['samples']:,} sample{'s' if result['samples'] != 1 else ''}"
    return f"measured {part}{of}, {samples}, by checkpoint {Path(result['checkpoint']).name}"


def _classes_shown(found: dict[str, dict[str, float]]) -> list[str]:
    width = max(20, max(map(len, found)) + 2)
    lines = ["", " " * width + "".join(f"{name:>12}" for name in ("precision", "recall", "f1", "samples"))]
    for name, row in found.items():
        numbers = "".join(f"{row[key]:>12.4f}" for key in ("precision", "recall", "f1"))
        lines.append(f"{name:<{width}}{numbers}{row['support']:>12,}")
    return lines


def _codes_used(saved: SavedRun, source: Source) -> dict[str, float]:
    """Of a tokenizer: how many of its codes the same data uses."""
    from bottega.tasks.autoencode.tokens_workload import TokensWorkload

    workload = saved.workload
    if not isinstance(workload, TokensWorkload):
        return {}
    with saved.engine.sampling() as models:
        return workload.code_usage(models, source, device=saved.engine.device)


def _generates(saved: SavedRun) -> bool:
    from bottega.tasks.generation.workload import GenerationWorkload

    return isinstance(saved.workload, GenerationWorkload)
