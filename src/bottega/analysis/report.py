"""`bottega report`: a page over runs, cross-validations and studies, with significance tests where runs allow them."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bottega.analysis.compare import compare
from bottega.core.errors import BottegaError, UsageError
from bottega.core.rundir import split_checkpoint_path
from bottega.data.output_files import explain_write_errors
from bottega.reporting.live import LiveServer
from bottega.reporting.page import Page, write_page
from bottega.reporting.run_report import RunReport
from bottega.reporting.study_report import build_significance
from bottega.reporting.write import REPORT_FILE, build_page, is_reportable
from bottega.tasks.recipes import load_saved_recipe


def report(*paths: str | Path, out: str | Path | None = None) -> dict[str, Any]:
    """`bottega.report`: write the HTML report of runs, cross-validations and studies; return its path, size and notes."""
    return write_report([str(path) for path in paths], Path(out) if out is not None else None, option="out")


def write_report(names: Sequence[str], out: Path | None, *, option: str = "--out") -> dict[str, Any]:
    """Write the report of folders and patterns of folders; return `report`, `bytes`, `runs`, `folders` and `notes`.

    Without `out`, the report of one folder is written into it, that of several into the working directory. `option` is the name
    of `out` in messages.
    """
    paths = find_paths(names)
    if out is not None and out.is_dir():
        out = out / REPORT_FILE
    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{option} {out}: expected a name that ends in .html, or a folder")
    file = out or (paths[0] if len(paths) == 1 else Path()) / REPORT_FILE
    page = build_report_page(paths)
    with explain_write_errors(file):
        size = write_page(page, file)
    return {
        "report": str(file),
        "bytes": size,
        "runs": [str(run.path) for run in page.runs],
        "folders": [str(folder.path) for folder in page.folders if folder.kind != "significance"],
        "notes": [*page.notes, *(f"{run.name}: {note}" for run in page.runs for note in run.notes)],
    }


def serve_report(names: Sequence[str], *, port: int, announce: Callable[[str], None]) -> None:
    """Serve the report on 127.0.0.1 until the command is stopped; `announce` gets its address."""
    paths = find_paths(names)
    build_report_page(paths)  # an error is told before the server starts
    with LiveServer(paths, lambda: build_report_page(paths), port=port) as server:
        announce(server.url)
        server.serve_forever(poll_interval=0.2)


def find_paths(names: Sequence[str]) -> list[Path]:
    """Return the folders of names and patterns; a checkpoint stands for its run."""
    if not names:
        raise UsageError("name a run, a cross-validation or a study: bottega report runs/NAME")
    paths: list[Path] = []
    for name in names:
        if glob.has_magic(name) and not Path(name).exists():
            matches = [Path(match) for match in sorted(glob.glob(name)) if is_reportable(Path(match))]
            if not matches:
                raise UsageError(f"{name} matches no run, cross-validation or study")
            paths += matches
        elif "=" in name and not Path(name).exists():
            raise UsageError(f"{name}: a report takes no settings; name runs, cross-validations and studies")
        else:
            paths.append(split_checkpoint_path(Path(name))[0])
    return list(dict.fromkeys(paths))


def build_report_page(paths: Sequence[Path]) -> Page:
    """Build the page of these folders, with a section on significance if groups of them can be compared."""
    page = build_page(paths)
    crossvals = [str(folder.path) for folder in page.folders if folder.kind == "crossval"]
    groups = crossvals or [",".join(map(str, group)) for group in _group_runs(page.runs)]
    if len(groups) < 2:
        return page
    try:
        page.folders.insert(0, build_significance(compare(groups)))
    except BottegaError as error:
        page.notes.append(f"Whether the runs differ by more than chance is not tested: {error}")
    return page


def _group_runs(runs: Sequence[RunReport]) -> list[list[Path]]:
    """Return the runs in groups that differ in their seed only. Runs of unknown tasks are not compared.

    Nor are runs whose path has a comma, which separates the runs of a group for `compare`.
    """
    groups: dict[str, list[Path]] = {}
    for run in runs:
        if "," in str(run.path):
            continue
        try:
            keys = load_saved_recipe(run.path / "recipe.yaml").results_key()
        except (BottegaError, OSError, RecursionError):
            continue
        keys.pop("seed", None)
        groups.setdefault(json.dumps(keys, sort_keys=True, default=str), []).append(run.path)
    tasks = {run.state["task"] for run in runs}
    return list(groups.values()) if len(tasks) == 1 else []
