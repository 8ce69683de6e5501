"""Objectives of generation: every file of this folder but base.py is one, named like its file, and sets `OBJECTIVE`.

To add an objective, add a file. Listing the names imports no file, so that recipes are read without a framework.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from bottega.tasks.generation.objectives.base import Objective

LISTED_FIRST = ("flow", "noise", "v")
"""Order in which objectives are listed; others follow by name."""


def list_objective_names() -> tuple[str, ...]:
    """Return the name of every objective, from the files of this folder."""
    files = {file.stem for file in Path(__file__).parent.glob("*.py")} - {"__init__", "base"}
    return (*LISTED_FIRST, *sorted(files - {*LISTED_FIRST}))


def find_objective(name: str) -> type[Objective]:
    """Import the objective of this name."""
    objective_class: type[Objective] = import_module(f"{__name__}.{name}").OBJECTIVE
    return objective_class


if TYPE_CHECKING:
    ObjectiveName = str
else:
    ObjectiveName = Literal[list_objective_names()]
