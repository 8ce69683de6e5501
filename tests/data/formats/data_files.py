"""Files for tests of how sources are listed."""

from __future__ import annotations

from pathlib import Path

from bottega.config.data import Source
from bottega.data.formats import find_files


def write_files(folder: Path, contents: dict[str, bytes]) -> Path:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def relative_names(source: Source) -> list[str]:
    """Return the relative names of a source's files, from which record keys are built."""
    source_files = find_files(source)
    return [source_files.get_relative_name(file) for file in source_files.paths]
