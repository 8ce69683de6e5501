"""Probe that imports packages one after another, in a process of its own."""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any

from bottega.analysis.doctor.probes import emit, run_probe_main
from bottega.core.errors import first_line


def probe(options: dict[str, Any]) -> None:
    """Emit `imported` for each module of the option `modules`, with `error` if it cannot be imported."""
    warnings.simplefilter("ignore")
    for module in options["modules"]:
        emit("start", step=f"import {module}")
        emit("imported", module=module, error=_import(module))


def _import(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except BaseException as error:  # a package may call sys.exit, or raise anything
        return f"{type(error).__name__}: {first_line(error)}"
    return None


if __name__ == "__main__":
    sys.exit(run_probe_main(probe))
