"""Progress bars for long work, on a terminal only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def bars(console: Any, *, in_bytes: bool = True) -> Iterator[Callable[[str, int, int], None]]:
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
    columns = (TextColumn("{task.description:<10}"), BarColumn(), *amounts, TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        rows: dict[str, Any] = {}

        def say(stage: str, done: int, total: int) -> None:
            if stage not in rows:
                rows[stage] = bar.add_task(stage, total=total)
            bar.update(rows[stage], completed=done, total=total)

        yield say
