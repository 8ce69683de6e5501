"""Finds the framework of a model, without importing one."""

from __future__ import annotations

from typing import Any


def find_framework(model: Any) -> str:
    """Return jax for a module of Flax, else torch."""
    return "jax" if any(base.__module__.partition(".")[0] == "flax" for base in type(model).__mro__) else "torch"
