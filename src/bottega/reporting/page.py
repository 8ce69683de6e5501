"""The page: runs, cross-validations and studies as one self-contained HTML file.

The text of runs (samples, file names, recipes) is untrusted. The template escapes everything, the data of the charts is JSON in
which no tag can begin, and the content security policy of the page allows only its own scripts, by their hashes, and no network.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from bottega import __version__
from bottega.reporting.charts import build_charts, build_module_charts
from bottega.reporting.configuration import compare_configurations
from bottega.reporting.run_report import RunReport, get_best_metric
from bottega.reporting.study_report import FolderReport
from bottega.reporting.tables import Table, format_number
from bottega.storage.durable import replacing_file
from bottega.storage.json_values import replace_non_finite

SCRIPTS = ("echarts.min.js", "charts.js", "report.js")
SECTION_TITLES = {
    "loss": "Loss",
    "validation": "Validation metrics",
    "optimisation": "Optimisation and stability",
    "throughput": "Throughput",
    "resources": "Resources",
}


@dataclass
class Page:
    """What a page shows: runs and folders of runs, and whether it refreshes itself."""

    runs: list[RunReport] = field(default_factory=list)
    folders: list[FolderReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refresh_seconds: float | None = None
    """Seconds between two looks at a live run; None for a page on disk."""
    version: str | None = None
    """Version of the files that a live page shows, by which it knows whether they have changed."""

    @property
    def title(self) -> str:
        """The name of the run or folder; folds are part of their cross-validation."""
        folders = [folder for folder in self.folders if folder.kind != "significance"]
        runs = [run for run in self.runs if not any(folder.path in run.path.parents for folder in folders)]
        names = [*(folder.title for folder in folders), *(run.name for run in runs)]
        return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more" if names else "Report"


def write_page(page: Page, path: Path) -> int:
    """Write the page to a file and return its size in bytes."""
    content = render_page(page).encode("utf-8", "replace")  # a file name may hold bytes that are no text
    with replacing_file(path) as temporary:  # not flushed to disk: it can be written again at any time
        temporary.write_bytes(content)
    return len(content)


def render_page(page: Page) -> str:
    """Return the HTML of the page."""
    data = _build_chart_data(page)
    scripts = [_read_asset(name) for name in SCRIPTS]
    return _compile_template().render(
        page=page,
        runs=page.runs,
        folders=page.folders,
        sections=[(name, title) for name, title in SECTION_TITLES.items() if data["sections"][name]],
        has_resource_tables=any(run.has_resource_tables for run in page.runs),
        differences=_build_differences(page.runs),
        comparison=_build_run_table(page.runs),
        charts=data["sections"],
        module_charts=data["modules"],
        data_json=_encode_json(data),
        policy=_build_policy(scripts, is_live=page.refresh_seconds is not None),
        style=_read_asset("report.css"),
        scripts=scripts,
        version=__version__,
    )


def _build_chart_data(page: Page) -> dict[str, Any]:
    """Return the data of all charts. Charts outside of sections are found by their position: run or folder, and number."""
    sections = build_charts(
        [run.log for run in page.runs],
        best_metrics=[get_best_metric(run) for run in page.runs],
        units=[run.unit for run in page.runs],
    )
    return {
        "runs": [run.name for run in page.runs],
        "sections": sections,
        "modules": [
            build_module_charts(run.modules, run=index, num_runs=len(page.runs)) for index, run in enumerate(page.runs)
        ],
        "evaluations": [[result.charts for result in run.evaluations] for run in page.runs],
        "memory": [run.memory_chart for run in page.runs],
        "folders": [folder.charts for folder in page.folders],
        "refresh": page.refresh_seconds,
        "version": page.version,
    }


def _build_run_table(runs: Sequence[RunReport]) -> Table | None:
    """Return the table that compares several runs; None for one."""
    if len(runs) < 2:
        return None
    rows = [
        (
            run.name,
            str(run.state["task"] or ""),
            run.state["state"],
            f"{run.state['step']:,}/{run.state['total']:,}" if run.state["total"] else f"{run.state['step']:,}",
            get_best_metric(run),
            format_number(run.state["best"]),
            format_number(float(series.values[-1])) if (series := run.log.get("train", "loss")) is not None else "",
        )
        for run in runs
    ]
    return Table(
        "Runs", ("run", "task", "state", "step", "metric", "best", "last training loss"), rows, num_text_columns=3
    )


def _build_differences(runs: Sequence[RunReport]) -> Table | None:
    if len(runs) < 2:
        return None
    return compare_configurations([run.name for run in runs], [run.configuration for run in runs])


def _encode_json(value: Any) -> str:
    """Return JSON that can stand inside a script element: no tag, comment or line separator can begin in it."""
    text = json.dumps(replace_non_finite(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _build_policy(scripts: Sequence[str], *, is_live: bool) -> str:
    """Return the content security policy: these scripts by hash, inline styles, inlined media, and no network.

    A live page may fetch itself again from its own server.
    """
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    sources = " ".join(f"'sha256-{digest}'" for digest in hashes)
    connect = "'self'" if is_live else "'none'"
    return (
        f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; img-src data:; media-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


@cache
def _compile_template() -> Any:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_read_asset("report.html.j2"))


@cache
def _read_asset(name: str) -> str:
    return files("bottega.reporting").joinpath("assets", name).read_text(encoding="utf-8")
