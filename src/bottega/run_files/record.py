"""Everything that a run has recorded in its files, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bottega.core.errors import UsageError
from bottega.core.rundir import RunDirectory
from bottega.run_files.configuration import get_value, read_configuration
from bottega.run_files.logs import MetricsLog, ModuleLog, read_metrics_log, read_module_log
from bottega.run_files.reading import is_readable, read_json_object
from bottega.run_files.state import describe_run

BASELINE_FILE = "baseline.json"
"""The result of a simple model on the same split: name, metrics, seconds, notes."""


@dataclass(frozen=True)
class RunRecord:
    """The files of one run. What is missing or damaged is empty; `notes` say what was damaged."""

    path: Path
    state: dict[str, Any]
    """As in `bottega runs`: task, step, total, metric, best, best_step, state, reason."""
    configuration: dict[str, Any]
    """recipe.yaml: nested values with all defaults, not validated."""
    environment: dict[str, Any]
    data: dict[str, Any]
    memory: dict[str, Any]
    profile: dict[str, Any]
    log: MetricsLog
    modules: ModuleLog
    evaluation: dict[str, Any] = field(default_factory=dict)
    """evaluation/validation/metrics.json: metrics of the best evaluation during training, and for a classifier those of each class."""
    notes: tuple[str, ...] = ()

    def get(self, key: str) -> Any:
        """Return the value of a dotted key of the recipe, or None."""
        return get_value(self.configuration, key)


def read_record(path: Path, *, is_running: bool | None = None, failure: str | None = None) -> RunRecord:
    """Read the files of a run; `is_running` and `failure` are what the caller knows of its state, see `describe_run`."""
    directory = RunDirectory(path)
    if not directory.recipe.is_file() and not directory.metrics.is_file():
        raise UsageError(f"{path} is not a run: it has neither recipe.yaml nor metrics.jsonl")
    notes: list[str] = []
    modules = path / "modules.jsonl"
    return RunRecord(
        path=path,
        configuration=read_configuration(directory.recipe, notes),
        environment=read_json_object(directory.environment, path, notes),
        data=read_json_object(path / "data.json", path, notes),
        memory=read_json_object(path / "memory.json", path, notes),
        evaluation=read_json_object(path / "evaluation" / "validation" / "metrics.json", path, notes),
        profile=read_json_object(path / "profile" / "operations.json", path, notes),
        log=read_metrics_log(directory.metrics) if is_readable(directory.metrics, path, notes) else MetricsLog(),
        state=describe_run(path, path.parent, is_running=is_running, failure=failure),
        modules=read_module_log(modules) if is_readable(modules, path, notes) else ModuleLog(),
        notes=tuple(notes),
    )
