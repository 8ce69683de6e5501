"""Meta-learning: options and conflicts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from bottega.config.conflicts import find_sequential_technique
from bottega.config.recipe import Recipe
from bottega.config.section import Number, Positive, Section
from bottega.config.technique_spec import TECHNIQUES_KEY, Conflict, TechniqueSpec


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


def clashes(recipe: Recipe, names: list[str]) -> Iterator[Conflict]:
    other = find_sequential_technique(names)
    if recipe.data.online is not None:
        message = "maml draws episodes, and a stream (data.online) takes samples as they come; leave one out"
        yield TECHNIQUES_KEY, "data.online", message
    if other is not None:
        yield (
            TECHNIQUES_KEY,
            TECHNIQUES_KEY,
            f"{other} goes through its sources in order, and maml draws episodes; keep one",
        )
    elif names[-1] != "maml":
        yield TECHNIQUES_KEY, TECHNIQUES_KEY, f"maml adapts what the others have made; list it after {names[-1]}"
    if recipe.data.curriculum is not None:
        yield "data.curriculum", TECHNIQUES_KEY, "maml draws its tasks evenly, in an order of its own; leave it out"
    if recipe.training.gradient_checkpointing:
        key = "training.gradient_checkpointing"
        yield key, TECHNIQUES_KEY, "maml would compute blocks again with other weights; leave it out"
    if recipe.training.mixed_precision == "fp16":
        yield "training.mixed_precision", TECHNIQUES_KEY, "the inner steps of maml have no loss scale; use bf16 or fp32"


SPEC = TechniqueSpec(
    name="maml",
    options=MamlOptions,
    apply="bottega.techniques.maml.apply:apply",
    find_conflicts=clashes,
    needs_sources=True,
)
