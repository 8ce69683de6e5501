"""Registry of techniques: each folder of this package with a config.py that has a SPEC."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from bottega.config.technique_spec import TechniqueSpec

LISTED_FIRST = ("lora", "adapter", "distill", "ewc", "replay", "maml", "plasticity")
"""Order of the list; others follow by name."""


def find_techniques() -> dict[str, TechniqueSpec]:
    """Import and return the specs of all techniques; this loads no framework."""
    folders = {path.parent.name for path in Path(__file__).parent.glob("*/config.py")}
    specs = [
        import_module(f"bottega.techniques.{name}.config").SPEC
        for name in (*LISTED_FIRST, *sorted(folders - {*LISTED_FIRST}))
    ]
    return {spec.name: spec for spec in specs}
