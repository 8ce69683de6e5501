"""Every technique: each folder of this package that has a config.py with its SPEC."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from bottega.config.technique_spec import TechniqueSpec

FIRST = ("lora", "adapter", "distill", "ewc", "replay", "maml", "plasticity")
"""The order in which they are listed; others follow by name."""


def find_techniques() -> dict[str, TechniqueSpec]:
    """Import the specs, which load no framework."""
    there = {path.parent.name for path in Path(__file__).parent.glob("*/config.py")}
    specs = [import_module(f"bottega.techniques.{name}.config").SPEC for name in (*FIRST, *sorted(there - {*FIRST}))]
    return {spec.name: spec for spec in specs}
