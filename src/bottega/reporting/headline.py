"""The headline of a run: what was trained, on what, how good it is, and compared with what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bottega.reporting.evaluations import EvaluationResult
from bottega.reporting.tables import format_large, format_number, format_seconds
from bottega.run_files.configuration import get_value
from bottega.run_files.logs import MetricsLog, is_number

MODEL_KEYS = ("model.kind", "model.size", "model.backbone", "model.architecture", "model.from")
"""Keys that name a model, in order; the first two that are set are shown."""


@dataclass(frozen=True)
class Figure:
    """One number of the headline: its label, its value, and what it is compared with."""

    label: str
    value: str
    comparison: str = ""


@dataclass(frozen=True)
class Headline:
    """A sentence on what was trained, and its main figures."""

    sentence: str
    figures: list[Figure]


def build_headline(
    configuration: dict[str, Any],
    environment: dict[str, Any],
    data: dict[str, Any],
    log: MetricsLog,
    state: dict[str, Any],
    evaluations: Sequence[EvaluationResult],
) -> Headline:
    """Build the headline of a run from what its files say; parts that are not known are left out."""
    parts = [
        _describe_model(configuration, environment, state),
        _describe_data(configuration, data),
        _describe_training(environment, state, seconds=log.seconds),
    ]
    unit = str(environment.get("unit") or "samples")
    return Headline(f"{', '.join(filter(None, parts))}.", _list_figures(log, state, evaluations, unit=unit))


def _describe_model(configuration: dict[str, Any], environment: dict[str, Any], state: dict[str, Any]) -> str:
    names = [str(value) for key in MODEL_KEYS if isinstance(value := get_value(configuration, key), str)][:2]
    task = str(state["task"] or "unknown task").replace("_", " ").capitalize()
    is_size_known = is_number(environment.get("parameters"))
    parameters = f", {format_large(environment['parameters'])} parameters" if is_size_known else ""
    return f"{task}{_put_in_brackets(names)}{parameters}"


def _put_in_brackets(names: Sequence[str]) -> str:
    return f" ({', '.join(names)})" if names else ""


def _describe_training(environment: dict[str, Any], state: dict[str, Any], *, seconds: float) -> str:
    steps = f"{state['step']:,} steps"
    if state["total"] and state["step"] != state["total"]:
        steps = f"{state['step']:,} of {state['total']:,} steps"
    device = f" on {environment['device']}" if environment.get("device") else ""
    processes = environment.get("world")
    device += f" ({processes} processes)" if isinstance(processes, int) and processes > 1 else ""
    return f"{steps}{device}{f' in {format_seconds(seconds)}' if seconds else ''}"


def _describe_data(configuration: dict[str, Any], data: dict[str, Any]) -> str:
    section = configuration.get("data")
    names = list(map(describe_source, list_sources(section)))
    splits = data.get("splits")
    count = splits.get("train") if isinstance(splits, dict) else None
    samples = f"{count:,} samples of " if isinstance(count, int) else ""
    return f"trained on {samples}{', '.join(names[:3])}" if names else ""


def list_sources(section: Any) -> list[dict[str, Any]]:
    """Return the sources of the data section of a recipe."""
    sources = (section.get("sources") or [section.get("train")]) if isinstance(section, dict) else []
    return [source for source in sources if isinstance(source, dict)] if isinstance(sources, list) else []


def describe_source(source: dict[str, Any]) -> str:
    """Return the path of a data source, or its kind if it comes with the program."""
    kind = source.get("kind")
    is_named = kind not in (None, "auto", "embedded")
    return str(source.get("path") or (f"bundled data ({kind})" if is_named else "bundled data"))


def _list_figures(
    log: MetricsLog, state: dict[str, Any], evaluations: Sequence[EvaluationResult], *, unit: str
) -> list[Figure]:
    """Return the best value of the selecting metric, the last losses, evaluation metrics with a baseline, and the speed."""
    figures = []
    metric = str(state["metric"] or "loss")
    baselines = {
        name: baseline for result in evaluations if result.is_validation for name, baseline in result.baselines.items()
    }
    series = log.get("eval", metric)
    if series is not None and len(series):
        is_best_known = is_number(state["best"])  # it is saved in checkpoints
        value = state["best"] if is_best_known else float(series.values[-1])
        at_step = f" at step {state['best_step']:,}" if is_best_known and state["best_step"] else ""
        comparison = f"{format_number(float(series.values[0]))} at the first evaluation" if len(series) > 1 else ""
        if metric in baselines:
            comparison = f"{baselines[metric][0]}: {format_number(baselines[metric][1])}"
        label = f"{'best' if is_best_known else 'last'} validation {metric.replace('_', ' ')}{at_step}"
        figures.append(Figure(label, format_number(value), comparison))
    for result in evaluations:
        for name, (title, value) in result.baselines.items():
            if name in result.metrics and name != metric and len(figures) < 4:
                figures.append(
                    Figure(
                        name.replace("_", " "), format_number(result.metrics[name]), f"{title}: {format_number(value)}"
                    )
                )
    training = log.get("train", "loss")
    if training is not None and len(training):
        first, last = float(training.values[0]), float(training.values[-1])
        figures.append(Figure("last training loss", format_number(last), f"{format_number(first)} at the first log"))
    speed = log.get("train", "units_per_second")
    if speed is not None and len(speed):
        ordered = sorted(speed.values)
        figures.append(Figure(f"{unit} per second, median", format_large(ordered[len(ordered) // 2])))
    return figures
