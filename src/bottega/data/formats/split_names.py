"""Named parts of a folder: files or sub-folders called train, validation, test and the like, as data sets are published.

Poured together they would put what is held out into train.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_NAME = re.compile(r"(?:split[-_])?(train|training|val|valid|validation|dev|eval|test)(?=[-_.\d]|$)", re.IGNORECASE)
_MEANS = {"training": "train", "val": "validation", "valid": "validation", "dev": "validation", "eval": "validation"}


def group_by_split(files: list[Path]) -> dict[str, list[Path]]:
    """The files of each part; nothing where not all of them belong to one, or there is no train among several."""
    if len(files) < 2:
        return {}
    base = Path(os.path.commonpath([file.parent for file in files]))
    found: dict[str, list[Path]] = {}
    for file in files:
        match = _NAME.match(file.relative_to(base).parts[0])
        if match is None:
            return {}
        found.setdefault(normalize_split_name(match[1]), []).append(file)
    return found if len(found) > 1 and "train" in found else {}


def find_split_root(files: list[Path], root: Path) -> Path:
    """What names and classes are relative to: the part's own folder where it has one."""
    base = Path(os.path.commonpath([file.parent for file in files]))
    below = base.relative_to(root).parts if base.is_relative_to(root) else ()
    for number, name in enumerate(below):
        if _NAME.match(name):
            return root.joinpath(*below[: number + 1])
    return root


def normalize_split_name(name: str) -> str:
    """val, valid, dev and eval are all validation."""
    return _MEANS.get(name.lower(), name.lower())
