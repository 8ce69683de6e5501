"""Reports of given folders: which of them are runs, cross-validations and studies, and where the page is written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from bottega.core.errors import UsageError
from bottega.reporting.media import MediaBudget
from bottega.reporting.page import Page, write_page
from bottega.reporting.run_report import RunReport, build_run_report
from bottega.reporting.study_report import read_crossval, read_study
from bottega.run_files.record import RunRecord, read_record
from bottega.similar_names import find_similar_names

REPORT_FILE = "report.html"
TOTAL_MEDIA_BYTES = 32 << 20
"""Media on a page, shared equally by its runs."""


def write_run_report(record: RunRecord) -> Path:
    """Write the report of a run into its directory, and return its path."""
    path = record.path / REPORT_FILE
    write_page(Page(runs=[build_run_report(record, budget=MediaBudget(TOTAL_MEDIA_BYTES))]), path)
    return path


def build_page(paths: Sequence[Path]) -> Page:
    """Read runs, cross-validations and studies into a page; the folds of a cross-validation are shown as runs, too."""
    page = Page()
    runs: list[Path] = []
    for path in dict.fromkeys(paths):
        if (path / "study.json").is_file():
            page.folders.append(read_study(path))
        elif (path / "crossval.json").is_file():
            page.folders.append(read_crossval(path))
            runs += sorted(path.glob("fold-*"))
        else:
            _check_is_run(path)
            runs.append(path)
    for path, name in zip(runs, _shorten_names(runs), strict=True):
        try:
            budget = MediaBudget(TOTAL_MEDIA_BYTES // len(runs))
            page.runs.append(build_run_report(read_record(path), name=name, budget=budget))
        except UsageError:
            if len(paths) == 1 and path in paths:
                raise
            page.notes.append(f"{path} is not a run and is left out")
    _note_mixed_tasks(page, page.runs)
    return page


def is_reportable(path: Path) -> bool:
    """Return whether a folder is a run, a cross-validation or a study."""
    return any((path / name).is_file() for name in ("recipe.yaml", "metrics.jsonl", "study.json", "crossval.json"))


def _check_is_run(path: Path) -> None:
    """Raise UsageError with a suggestion if a path is neither a run, a cross-validation nor a study."""
    if is_reportable(path):
        return
    if not path.exists():
        siblings = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        similar = find_similar_names(path.name, siblings)
        hint = f"did you mean {path.parent / similar[0]}?" if similar else "bottega runs lists the runs of a folder"
        raise UsageError(f"{path} does not exist; {hint}")
    if path.is_dir() and any(path.glob("*/recipe.yaml")):
        raise UsageError(f"{path} is a folder of runs; name the runs, such as bottega report '{path}/*'")
    raise UsageError(f"{path} is not a run, a cross-validation or a study; bottega runs lists the runs of a folder")


def _shorten_names(runs: Sequence[Path]) -> list[str]:
    """Return the folder names of the runs, with as many parent folders as tell them apart."""
    parts = [Path(os.path.abspath(run)).parts for run in runs]
    length = 1
    while len({part[-length:] for part in parts}) < len(parts) and length < max(map(len, parts), default=1):
        length += 1
    return ["/".join(part[-length:]) for part in parts]


def _note_mixed_tasks(page: Page, runs: Sequence[RunReport]) -> None:
    tasks = sorted({str(run.state["task"]) for run in runs})
    if len(tasks) > 1:
        page.notes.append(
            f"These runs have different tasks ({', '.join(tasks)}): metrics of one name are drawn together, but their values "
            "cannot be compared."
        )
