"""memory.json is that of the last process that trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bottega.callbacks.memory import MemoryMonitor
from bottega.core.callback import Progress
from bottega.core.errors import OutOfMemory
from bottega.measurements import MemoryUse

USE = MemoryUse(device="cpu", peak=1, total=2, categories={})


@pytest.mark.parametrize(
    ("error", "num_steps", "is_written"),
    [
        (None, 2, True),
        (None, 0, False),
        (RuntimeError("a bug"), 2, True),
        (RuntimeError("a bug"), 0, False),
        (KeyboardInterrupt(), 0, False),
        (OutOfMemory("too large"), 0, True),
        (MemoryError(), 0, True),
    ],
)
def test_file_is_written_if_a_step_was_trained(
    error: BaseException | None, num_steps: int, is_written: bool, tmp_path: Path
) -> None:
    path = tmp_path / "memory.json"
    path.write_text("{}")
    monitor = MemoryMonitor(path, lambda: USE, warn=pytest.fail)
    progress = Progress(step=5)
    monitor.start(progress)
    progress.step += num_steps
    monitor.finish(progress, error)
    assert bool(json.loads(path.read_text())) is is_written
