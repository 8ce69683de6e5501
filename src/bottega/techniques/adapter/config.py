"""Adapters: options and what they do not go with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from bottega.config.conflicts import find_injection_conflicts
from bottega.config.recipe import Recipe
from bottega.config.section import Positive, Section
from bottega.config.technique_spec import Conflict, TechniqueSpec


class AdapterOptions(Section):
    """Narrow layers behind the blocks' outputs; the base stays as it is (Houlsby et al., 2019)."""

    size: Positive = Field(32, description="width of the narrow layer")
    targets: tuple[str, ...] | None = Field(
        None, description="ends of module names, or patterns over them; null is the last matrix of each half block"
    )
    train: tuple[str, ...] | None = Field(
        None, description="parts that learn in full beside it; null is what begins at random, such as a head"
    )
    start: str | None = Field(None, description="a folder of an adapter of ours to start from")


SPELLINGS = {"bottleneck_size": "size", "adapter_layers": "targets", "target_modules": "targets"}
"""What other guides call an option -> its name here."""


def respell(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "targets": None} if options.get("targets") == "all" else options


def clashes(recipe: Recipe, names: list[str]) -> Iterator[Conflict]:
    yield from find_injection_conflicts(recipe, "adapter")


SPEC = TechniqueSpec(
    name="adapter",
    options=AdapterOptions,
    option_aliases=SPELLINGS,
    convert_options=respell,
    apply="bottega.techniques.adapter.apply:apply",
    find_conflicts=clashes,
    inject="bottega.techniques.adapter.apply:inject",
)
