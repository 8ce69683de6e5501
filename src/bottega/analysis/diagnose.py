"""`bottega diagnose`: what is wrong with runs, and what to try."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bottega.analysis.runs import find_runs
from bottega.core.errors import EnvironmentProblem, UsageError, first_line
from bottega.core.rundir import split_checkpoint_path
from bottega.diagnosis.rules import RULES, apply_rules
from bottega.run_files.record import read_record


def diagnose(run: str | Path) -> dict[str, Any]:
    """`bottega.diagnose`: apply the rules to a run; return `run`, `state`, `reason`, `step`, `findings`, `lines`, `not_checked` and `notes`."""
    path = split_checkpoint_path(Path(run))[0]
    if not path.is_dir():
        raise UsageError(f"{path} is not a run: there is no such folder")
    record = read_record(path)
    diagnosis = apply_rules(record)
    notes = list(record.notes)
    for name, count in (("metrics.jsonl", record.log.num_bad_lines), ("modules.jsonl", record.modules.num_bad_lines)):
        if count:
            notes.append(
                f"{count:,} line{'s' if count > 1 else ''} of {name} {'are' if count > 1 else 'is'} damaged and left out"
            )
    return {
        "run": str(path),
        "state": record.state["state"],
        "reason": record.state["reason"],
        "step": record.state["step"] or max((row["step"] for row in record.log.last_rows.values()), default=0),
        "logged_rows": record.log.num_rows,
        **diagnosis.to_plain_dict(),
        "lines": diagnosis.format_lines(),
        "notes": notes,
    }


def diagnose_all(names: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Diagnose runs, folders of runs and patterns; return a report for each run, and notes on names that are not runs.

    A name that is not a run is an error only if there is no other: `runs/*` also matches files beside runs.
    """
    if not names:
        raise UsageError("name a run: bottega diagnose runs/NAME")
    paths: list[Path] = []
    notes: list[str] = []
    for name in names:
        is_pattern = glob.has_magic(name) and not Path(name).exists()
        matches = [run for path in sorted(glob.glob(name)) for run in _expand(Path(path))] if is_pattern else []
        matches = matches or (_expand(Path(name)) if name else [])
        if not matches:
            notes.append(_explain_missing(name, is_pattern=is_pattern))
        paths += matches
    if not paths:
        raise UsageError("; ".join(notes))
    reports: list[dict[str, Any]] = []
    for path in dict.fromkeys(paths):
        try:
            reports.append(diagnose(path))
        except OSError as error:  # the others are still diagnosed
            notes.append(f"{path} cannot be read: {error.strerror or first_line(error)}")
    if not reports:
        raise EnvironmentProblem("; ".join(notes))
    return reports, notes


def _expand(path: Path) -> list[Path]:
    """Return the run of a path, or the runs in a folder; nothing if there is none."""
    run = split_checkpoint_path(path)[0]
    if not run.is_dir():
        return []
    return [run] if (run / "metrics.jsonl").is_file() else find_runs(run)


def _explain_missing(name: str, *, is_pattern: bool) -> str:
    path = Path(name)
    if is_pattern:
        return f"{path} matches no run"
    if not name:
        return "an empty name is not a run"
    if "=" in path.name:
        return f"{path}: diagnose takes no settings; name runs or folders of runs"
    if not path.exists():
        return f"{path} does not exist"
    return f"{path} is not a run and has none: there is neither recipe.yaml nor metrics.jsonl"


def format_report(report: dict[str, Any]) -> str:
    """Format the diagnosis of a run for the terminal: its state, a line for each finding, and what could not be checked."""
    head = f"{report['run']}: {report['state']}, step {report['step']:,}"
    if report["reason"]:
        head += f" ({report['reason']})"
    notes = [f"note: {note}" for note in report["notes"]]
    if not report["logged_rows"] and not report["findings"]:
        return "\n".join(
            [f"{head}; nothing to diagnose, because no logged step can be read from metrics.jsonl", *notes]
        )
    lines = [head, *report["lines"], *notes]
    if not report["findings"]:
        num_checked = len(RULES) - len(report["not_checked"])
        lines.append(f"nothing wrong was found by {num_checked} of {len(RULES)} checks")
    names: dict[str, list[str]] = {}
    for name, reason in report["not_checked"].items():
        names.setdefault(reason, []).append(name.replace("-", " "))
    lines += [f"not checked: {', '.join(group)} ({reason})" for reason, group in names.items()]
    return "\n".join(lines)
