"""Whether the checkpoints of a run fit on its disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from bottega.core import checkpoint
from bottega.core.errors import EnvironmentProblem


def check_disk_space(folder: Path, *, size: int, keep: int, has_best: bool, warn: Callable[[str], None]) -> None:
    """Raise if two checkpoints of `size` bytes do not fit on the disk; warn if all that are there at once do not.

    These are `keep`, one more while it replaces another, and with `has_best` that of the best evaluation.
    """
    free = shutil.disk_usage(folder).free
    # Checkpoints from before a resume are deleted as new ones are saved, so their bytes count as free.
    files = (file for step in checkpoint.list_step_folders(folder) for file in step.iterdir())
    available = free + sum(file.stat().st_size for file in files)
    if size > free or size * 2 > available:
        raise EnvironmentProblem(
            f"cannot write {folder}: replacing a checkpoint needs {2 * size:,} bytes, {free:,} bytes are free; free some "
            "space, or choose another output_dir"
        )
    count = keep + 1 + has_best
    if size * count > available:
        others = "the best, and one more while replacing" if has_best else "one more checkpoint while replacing"
        needed = f"checkpoint.keep={keep} needs {count * size:,} bytes ({others}), {available:,} are available"
        warn(f"{needed}; lower checkpoint.keep or free some space")
