"""Losses of classification: every file of this folder but base.py is one, named like its file, and sets `LOSS`.

To add one, add a file. Listing the names imports none of them, so that recipes are read without a framework.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from bottega.tasks.classify.losses.base import ClassificationLoss

FIRST = ("cross_entropy", "focal")
"""The order in which they are listed to people; others follow by name."""


def loss_names() -> tuple[str, ...]:
    """Return the name of every loss, by the files there are."""
    files = {file.stem for file in Path(__file__).parent.glob("*.py")} - {"__init__", "base"}
    return (*FIRST, *sorted(files - {*FIRST}))


def find_loss(name: str) -> type[ClassificationLoss]:
    """Import the loss of this name."""
    kind: type[ClassificationLoss] = import_module(f"{__name__}.{name}").LOSS
    return kind


if TYPE_CHECKING:
    LossName = str
else:
    LossName = Literal[loss_names()]
