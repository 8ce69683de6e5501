"""Meta-learning: options and conflicts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bottega.config.section import Number, Positive, Section
from bottega.config.technique_spec import KeyConflict, TechniqueSpec


class MamlOptions(Section):
    """Learns weights that adapt to a new task in a few steps (Finn et al., 2017; Nichol et al., 2018)."""

    method: Literal["maml", "fomaml", "reptile", "none"] = Field(
        "maml", description="second order, first order, or Reptile; none is plain training that adapts in validation"
    )
    inner_steps: Positive = Field(3, description="adaptation steps in an episode")
    inner_rate: Number = Field(0.1, gt=0, description="learning rate of the adaptation steps")
    by: str | None = Field(
        None,
        description="what defines a task: label, source, region of a text, or a field; null is the first that exists",
    )
    ways: Positive | None = Field(None, description="classify: classes in an episode, renumbered; null is all")
    shots: Positive = Field(5, description="support examples; classify: of each class")
    queries: Positive = Field(5, description="query examples; classify: of each class")


SPEC = TechniqueSpec(
    name="maml",
    options=MamlOptions,
    apply="bottega.techniques.maml.apply:apply",
    conflicts={
        name: f"{name} trains on its sources in order, and maml draws episodes from all of them; keep one"
        for name in ("ewc", "replay")
    },
    must_follow={name: f"maml adapts the modules of {name}; list it after {name}" for name in ("lora", "adapter")},
    key_conflicts=(
        KeyConflict("data.online", "maml draws episodes, and a stream trains on samples as they arrive; keep one"),
        KeyConflict("data.curriculum", "maml samples its tasks uniformly, in its own order; remove it"),
        KeyConflict("training.gradient_checkpointing", "maml would recompute blocks with different weights; remove it"),
        KeyConflict(
            "training.mixed_precision", "the inner steps of maml have no loss scaling; use bf16 or fp32", "fp16"
        ),
    ),
    needs_sources=True,
)
