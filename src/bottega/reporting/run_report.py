"""Everything that the page shows of one run, collected from its directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bottega.diagnosis.finding import Finding
from bottega.diagnosis.rules import apply_rules
from bottega.measurements import format_bytes
from bottega.redaction import redact_text
from bottega.reporting.configuration import compare_with_origin, list_configuration
from bottega.reporting.evaluations import UNKNOWN_FORMAT, EvaluationResult, collect_evaluations
from bottega.reporting.headline import Headline, build_headline, describe_source, list_sources
from bottega.reporting.media import MediaBudget, MediaItem, SampleStep, collect_samples, read_item
from bottega.reporting.tables import Table, format_number
from bottega.run_files.configuration import get_value
from bottega.run_files.logs import MetricsLog, ModuleLog, Series, is_number
from bottega.run_files.record import RunRecord

MAX_CLASSES = 200
"""Rows of the table of classes."""
PLOTS = ("forgetting.png", "lr-find.png")
"""Plots that training itself may have written to the run directory."""


@dataclass
class RunReport:
    """One run on the page."""

    path: Path
    name: str
    state: dict[str, Any]
    """As in `bottega runs`: task, step, total, metric, best, best_step, state, reason."""
    configuration: dict[str, Any]
    environment: dict[str, Any]
    log: MetricsLog
    modules: dict[str, dict[str, Series]]
    headline: Headline
    evaluations: list[EvaluationResult]
    samples: list[SampleStep]
    plots: list[MediaItem]
    tables: dict[str, list[Table]]
    """Section -> tables: data, modules, memory, profile, environment, configuration."""
    findings: tuple[Finding, ...] = ()
    """What `bottega diagnose` finds."""
    memory_chart: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def has_resource_tables(self) -> bool:
        return bool(self.memory_chart or self.tables["memory"] or self.tables["profile"])

    @property
    def unit(self) -> str:
        """What the throughput counts, such as tokens."""
        return str(self.environment.get("unit") or "samples")


def build_run_report(record: RunRecord, *, name: str | None = None, budget: MediaBudget) -> RunReport:
    """Collect the report of a run. What is missing, damaged or of an unknown format is left out and named in the notes."""
    path = record.path
    configuration, environment, data, memory = record.configuration, record.environment, record.data, record.memory
    log, state, modules = record.log, record.state, record.modules
    notes: list[str] = []
    samples = collect_samples(path, budget)  # before other pictures, because the budget is limited
    evaluations = collect_evaluations(path, budget, notes, class_counts=data.get("classes"))
    notes = [*_list_state_notes(state, log), *_list_log_notes(log, modules, state), *record.notes, *notes]

    def build_tables(subject: str, build: Callable[[], list[Table]]) -> list[Table]:
        try:
            return build()
        except UNKNOWN_FORMAT:
            notes.append(f"the files about {subject} have an unknown format and are left out")
            return []

    return RunReport(
        path=path,
        name=redact_text(name or path.name),
        state=state,
        configuration=configuration,
        environment=environment,
        log=log,
        modules=modules.series,
        headline=build_headline(configuration, environment, data, log, state, evaluations),
        evaluations=evaluations,
        samples=samples,
        plots=[read_item(path / plot, path, budget) for plot in PLOTS if (path / plot).is_file()],
        tables={
            "data": build_tables("the data", lambda: _build_data_tables(configuration, data)),
            "modules": _build_module_table(modules),
            "memory": build_tables("memory", lambda: _build_memory_table(memory)),
            "profile": build_tables("the profile", lambda: _build_profile_table(record.profile)),
            "environment": build_tables("the environment", lambda: [_build_environment_table(environment, path)]),
            "configuration": [
                *([table] if (table := compare_with_origin(configuration)) is not None else []),
                list_configuration(configuration),
            ],
        },
        findings=apply_rules(record).findings,
        memory_chart=_build_memory_chart(memory),
        notes=notes,
    )


def _list_state_notes(state: dict[str, Any], log: MetricsLog) -> list[str]:
    """Return why a run is not finished, and which logged steps are lost."""
    notes = []
    if state["state"] == "running":
        notes.append("This run is still training; the page shows it as of when the page was written.")
    elif state["reason"]:
        notes.append(f"{state['state'].capitalize()}: {state['reason']}")
    last_step = log.last_rows.get("train", {}).get("step", 0)
    if state["state"] not in ("running", "finished") and last_step > state["step"]:
        notes.append(
            f"Steps {state['step'] + 1:,} to {last_step:,} are logged but not saved; a resumed run repeats them."
        )
    return notes


def _list_log_notes(log: MetricsLog, modules: ModuleLog, state: dict[str, Any]) -> list[str]:
    notes = []
    if not log.num_rows:
        notes.append(
            "metrics.jsonl has no metrics yet" if state["state"] == "running" else "metrics.jsonl has no metrics"
        )
    for name, count in (("metrics.jsonl", log.num_bad_lines), ("modules.jsonl", modules.num_bad_lines)):
        if count:
            notes.append(
                f"{count} line{'s' if count > 1 else ''} of {name} cannot be read, and {'are' if count > 1 else 'is'} left out"
            )
    notes += [f"{name} was not finite {count} times" for name, count in log.num_nonfinite.items()]
    return notes


def _build_data_tables(configuration: dict[str, Any], data: dict[str, Any]) -> list[Table]:
    """Return what the run was trained on: its sources, the size of each split, and the classes."""
    sources = list_sources(configuration.get("data"))
    rows = [
        (f"source {number}" if len(sources) > 1 else "source", describe_source(source))
        for number, source in enumerate(sources, 1)
    ]
    rows += [(f"{split} samples", format_number(count)) for split, count in (data.get("splits") or {}).items()]
    rows += [("fingerprint", str(data["fingerprint"]))] if data.get("fingerprint") else []
    rows += [("note", str(note)) for note in data.get("notes") or ()]
    tables = [Table("Data", ("", "value"), rows, num_text_columns=2)]
    classes = {str(name): count for name, count in (data.get("classes") or {}).items() if is_number(count)}
    if classes:
        total = sum(classes.values()) or 1
        class_rows = [
            (name, format_number(count), f"{100 * count / total:.1f} %")
            for name, count in list(classes.items())[:MAX_CLASSES]
        ]
        tables.append(Table("Classes of the training data", ("class", "samples", "share"), class_rows))
    return tables


def _build_module_table(modules: ModuleLog) -> list[Table]:
    """Return the statistics of each module as a table if there was a single inspection; several are charts."""
    if not modules.series or any(len(series) > 1 for values in modules.series.values() for series in values.values()):
        return []
    names = dict.fromkeys(name for values in modules.series.values() for name in values)
    rows = [
        (name, *(format_number(values[name].values[0]) if name in values else "" for values in modules.series.values()))
        for name in names
    ]
    columns = (statistic.replace("_", " ") for statistic in modules.series)
    return [Table("Statistics of the one inspected step", ("module", *columns), rows)]


def _build_memory_table(memory: dict[str, Any]) -> list[Table]:
    if not memory:
        return []
    rows = [(name, format_bytes(size)) for name, size in memory["categories"].items() if size > 0]
    rows.append(("peak", format_bytes(memory["peak"])))
    if memory.get("total"):
        rows.append((f"{memory.get('device', 'device')} has", format_bytes(memory["total"])))
    return [Table("Memory", ("category", "size"), rows)]


def _build_profile_table(profile: dict[str, Any]) -> list[Table]:
    if not profile:
        return []
    first, last = profile["steps"]
    rows = [
        (row["name"], format_number(row["calls"]), f"{row['self_ms']:.1f}", f"{100 * row['share']:.1f} %")
        for row in profile["operations"]
    ]
    title = f"Costliest operations of steps {first} to {last}"
    note = "The trace is in profile/trace.json.gz; open it at https://ui.perfetto.dev."
    return [Table(title, ("operation", "calls", "ms", "share"), rows, note=note)]


def _build_memory_chart(memory: dict[str, Any]) -> dict[str, Any] | None:
    categories = memory.get("categories")
    if not isinstance(categories, dict) or not all(is_number(size) for size in categories.values()) or not categories:
        return None
    return {
        "kind": "memory",
        "title": f"Memory at its peak, {memory.get('device', '')}".rstrip(", "),
        "categories": {name: size / 2**30 for name, size in categories.items() if size > 0},
    }


def _build_environment_table(environment: dict[str, Any], path: Path) -> Table:
    packages = environment.get("packages")
    git = environment.get("git")
    fields = {
        "directory": redact_text(str(path)),
        "command": " ".join(map(str, environment.get("command") or ())),
        "started": environment.get("started"),
        "device": environment.get("device"),
        "processes": environment.get("world"),
        "bottega": environment.get("bottega"),
        "python": environment.get("python"),
        "packages": ", ".join(f"{k} {v}" for k, v in packages.items()) if isinstance(packages, dict) else None,
        "platform": environment.get("platform"),
        "cores": environment.get("cores"),
        "git": ", ".join(f"{k} {v}" for k, v in git.items()) if isinstance(git, dict) else git,
    }
    rows = [(name, str(value)) for name, value in fields.items() if value not in (None, "")]
    return Table("Environment", ("", "value"), rows, num_text_columns=2)


def get_best_metric(report: RunReport) -> str:
    """Return the metric that selects the best checkpoint."""
    return str(get_value(report.configuration, "evaluation.metric") or "loss")
