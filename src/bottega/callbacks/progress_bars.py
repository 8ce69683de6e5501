"""Progress bars for long operations, shown on a terminal only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bottega.terminal import escape_controls


@contextmanager
def progress_bars(console: Any, *, in_bytes: bool = True) -> Iterator[Callable[[str, int, int], None]]:
    """Yield `report_progress(stage, done, total)`: each stage gets a bar with its remaining time, and with `in_bytes` its rate."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar

    amount_columns = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else (TaskProgressColumn(),)
    columns = (TextColumn("{task.description:<10}", markup=False), BarColumn(), *amount_columns, TimeRemainingColumn())
    # rich would redirect standard output to this console, which may be quiet and is not where `> file` points.
    is_shown = console.is_terminal and not console.quiet
    with Bar(*columns, console=console, transient=True, disable=not is_shown, redirect_stdout=False) as progress:
        task_ids: dict[str, Any] = {}

        def report_progress(stage: str, done: int, total: int) -> None:
            if stage not in task_ids:
                task_ids[stage] = progress.add_task(escape_controls(stage), total=total)
            progress.update(task_ids[stage], completed=done, total=total)

        yield report_progress
