"""Reading and truncating the logs of a run that have one JSON object per line and step: metrics.jsonl and modules.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bottega.core.callback import Progress
from bottega.core.saver import explain_os_error
from bottega.storage.durable import write_atomic

MODULES_LOG = "modules.jsonl"
MAX_LINE_BYTES = 1 << 20
"""A longer line is not a line of a log."""


def iterate_rows(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield each line of a JSON Lines file as a dict; None for a line that is not one, as a killed process leaves it.

    Empty lines are left out, and a missing file has none.
    """
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        while line := file.readline(MAX_LINE_BYTES):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                if line.strip():
                    yield None
                continue
            yield row if isinstance(row, dict) else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all complete lines of a metrics.jsonl."""
    return [row for row in iterate_rows(path) if row is not None]


def truncate_metrics(path: Path, progress: Progress) -> None:
    """Delete the lines written after the checkpoint that is resumed, so that no step or evaluation appears twice."""
    if not path.exists():
        return
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            # Compared by samples, which do not depend on the batch size. A pending evaluation is repeated even if a
            # killed process has already written its line.
            is_repeated = row["kind"] == "eval" and progress.evaluated_step < progress.step
            if row["samples"] < progress.samples + (not is_repeated):
                lines.append(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # the last line of a killed process
    try:
        write_atomic(path, "".join(line + "\n" for line in lines))
    except OSError as error:
        raise explain_os_error(error, path) from None
