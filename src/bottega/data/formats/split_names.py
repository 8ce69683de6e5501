"""Splits named by files or sub-folders of a data set: train, validation, test and their usual spellings.

Reading such a folder as one source would put the held-out samples into train.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_SPLIT_NAME = re.compile(
    r"(?:split[-_])?(train|training|val|valid|validation|dev|eval|test)(?=[-_.\d]|$)", re.IGNORECASE
)
_ALIASES = {"training": "train", "val": "validation", "valid": "validation", "dev": "validation", "eval": "validation"}


def group_by_split(files: list[Path]) -> dict[str, list[Path]]:
    """Return the files of each split; empty unless every file belongs to a split, and there are train and another split."""
    if len(files) < 2:
        return {}
    base = Path(os.path.commonpath([file.parent for file in files]))
    splits: dict[str, list[Path]] = {}
    for file in files:
        match = _SPLIT_NAME.match(file.relative_to(base).parts[0])
        if match is None:
            return {}
        splits.setdefault(normalize_split_name(match[1]), []).append(file)
    return splits if len(splits) > 1 and "train" in splits else {}


def find_split_root(files: list[Path], root: Path) -> Path:
    """Return the folder that names and classes are relative to: the split's own folder if it has one."""
    base = Path(os.path.commonpath([file.parent for file in files]))
    folders_below_root = base.relative_to(root).parts if base.is_relative_to(root) else ()
    for number, name in enumerate(folders_below_root):
        if _SPLIT_NAME.match(name):
            return root.joinpath(*folders_below_root[: number + 1])
    return root


def normalize_split_name(name: str) -> str:
    """Map val, valid, dev and eval to validation, and training to train."""
    return _ALIASES.get(name.lower(), name.lower())
