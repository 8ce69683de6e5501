"""Adapters: options and conflicts."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from bottega.config.conflicts import INJECTION_CONFLICTS
from bottega.config.section import Positive, Section
from bottega.config.technique_spec import TechniqueSpec


class AdapterOptions(Section):
    """Bottleneck layers behind the blocks' outputs, over a frozen base model (Houlsby et al., 2019)."""

    size: Positive = Field(32, description="width of the bottleneck")
    targets: tuple[str, ...] | None = Field(
        None, description="suffixes of module names, or patterns over them; null is the output of attention and MLP"
    )
    train: tuple[str, ...] | None = Field(
        None, description="further modules to train in full; null selects the randomly initialised ones, such as a head"
    )
    start: str | None = Field(None, description="the folder of an exported adapter to start from")


ALIASES = {"bottleneck_size": "size", "adapter_layers": "targets", "target_modules": "targets"}
"""Option names of other libraries -> option names of this section."""


def convert_all_targets(options: dict[str, Any]) -> dict[str, Any]:
    """Read `targets: all` as no restriction."""
    return {**options, "targets": None} if options.get("targets") == "all" else options


SPEC = TechniqueSpec(
    name="adapter",
    options=AdapterOptions,
    option_aliases=ALIASES,
    convert_options=convert_all_targets,
    apply="bottega.techniques.adapter.apply:apply",
    key_conflicts=INJECTION_CONFLICTS,
    inject="bottega.techniques.adapter.apply:inject",
)
