"""Files for tests of how sources are found."""

from __future__ import annotations

from pathlib import Path

from bottega.config.data import Source
from bottega.data.formats import find


def write(folder: Path, contents: dict[str, bytes]) -> Path:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def names(source: Source) -> list[str]:
    """What a source's records are called after."""
    found = find(source)
    return [found.name(file) for file in found.files]
