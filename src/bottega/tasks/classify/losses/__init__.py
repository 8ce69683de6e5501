"""Classification losses: each file of this folder except base.py defines one, named after the file, as `LOSS`.

To add a loss, add a file; it is written once for torch and JAX. The names are listed without importing the files.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from bottega.tasks.classify.losses.base import ClassificationLoss

LISTED_FIRST = ("cross_entropy", "focal")
"""Losses listed first; the others follow in alphabetical order."""


def list_loss_names() -> tuple[str, ...]:
    """Return the name of every loss, from the files in this folder."""
    files = {file.stem for file in Path(__file__).parent.glob("*.py")} - {"__init__", "base"}
    return (*LISTED_FIRST, *sorted(files - {*LISTED_FIRST}))


def find_loss(name: str) -> type[ClassificationLoss]:
    """Import and return the loss of this name."""
    loss_class: type[ClassificationLoss] = import_module(f"{__name__}.{name}").LOSS
    return loss_class


if TYPE_CHECKING:
    LossName = str
else:
    LossName = Literal[list_loss_names()]
