"""Progress bars for long work, on a terminal only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bottega.terminal import escape_controls


@contextmanager
def progress_bars(console: Any, *, in_bytes: bool = True) -> Iterator[Callable[[str, int, int], None]]:
    """A function `say(stage, done, total)`; each stage has a bar with the time left, and of bytes their rate."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar

    amounts = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else (TaskProgressColumn(),)
    columns = (TextColumn("{task.description:<10}", markup=False), BarColumn(), *amounts, TimeRemainingColumn())
    # What a verb prints is its result and goes where standard output goes; rich would send it to this console, which may
    # be quiet, and is not where `> file` points.
    is_shown = console.is_terminal and not console.quiet
    with Bar(*columns, console=console, transient=True, disable=not is_shown, redirect_stdout=False) as bar:
        rows: dict[str, Any] = {}

        def say(stage: str, done: int, total: int) -> None:
            if stage not in rows:
                rows[stage] = bar.add_task(escape_controls(stage), total=total)
            bar.update(rows[stage], completed=done, total=total)

        yield say
