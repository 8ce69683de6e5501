"""Plain modules of torch and JAX, built from a shape; they know nothing of recipes, tasks and training."""

from __future__ import annotations

from typing import Any


def find_framework(model: Any) -> str:
    """Return the framework of a model: that of its class, or torch, whose modules do not say so."""
    return str(getattr(model, "framework", "torch"))
