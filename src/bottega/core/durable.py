"""On disk and not only in memory: what is announced after this survives a power cut."""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Of a file, its content; of a folder, the names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_all(folder: Path) -> None:
    """Every file and folder below, and the folder itself."""
    for path in sorted(folder.rglob("*")):
        flush(path)
    flush(folder)
