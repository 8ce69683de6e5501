"""Files for tests of how sources are found."""

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
    """What a source's records are called after."""
    found = find_files(source)
    return [found.relative_name(file) for file in found.paths]
