"""Distillation: options and conflicts."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from bottega.config.recipe import Recipe
from bottega.config.section import Number, Probability, Section
from bottega.config.technique_spec import TECHNIQUES_KEY, Conflict, TechniqueSpec


class DistillOptions(Section):
    """Trains on a teacher's outputs beside the data (knowledge distillation; Hinton et al., 2015)."""

    teacher: str = Field(description="a run, needs.NAME, or a model folder of transformers")
    temperature: Number = Field(2.0, gt=0, description="softens the logits of both; for classes and tokens only")
    alpha: Probability = Field(0.5, description="weight of the teacher in the loss; the data has 1 - alpha")
    hidden: Number = Field(0.0, ge=0, description="weight of the loss between hidden states of blocks; 0 is off")


def clashes(recipe: Recipe, names: list[str]) -> Iterator[Conflict]:
    if "maml" in names:
        yield (
            TECHNIQUES_KEY,
            TECHNIQUES_KEY,
            "distill and maml do not go together, since the teacher knows no episode; keep one",
        )
    if recipe.training.compile is True and any(getattr(one.options, "hidden", 0) for one in recipe.techniques):
        yield (
            "training.compile",
            TECHNIQUES_KEY,
            "true, and techniques.distill.hidden listens inside the model, which is then not compiled; leave one of "
            "them out",
        )


SPEC = TechniqueSpec(
    name="distill",
    options=DistillOptions,
    apply="bottega.techniques.distill.apply:apply",
    find_conflicts=clashes,
)
