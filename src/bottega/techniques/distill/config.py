"""Distillation: options and conflicts."""

from __future__ import annotations

from pydantic import Field

from bottega.config.section import Number, Probability, Section
from bottega.config.technique_spec import KeyConflict, TechniqueSpec


class DistillOptions(Section):
    """Trains on a teacher's outputs beside the data (knowledge distillation; Hinton et al., 2015)."""

    teacher: str = Field(description="a run, needs.NAME, or a model folder of transformers")
    temperature: Number = Field(2.0, gt=0, description="softens the logits of both; for classes and tokens only")
    alpha: Probability = Field(0.5, description="weight of the teacher in the loss; the data has 1 - alpha")
    hidden: Number = Field(0.0, ge=0, description="weight of the loss between hidden states of blocks; 0 is off")


SPEC = TechniqueSpec(
    name="distill",
    options=DistillOptions,
    apply="bottega.techniques.distill.apply:apply",
    conflicts={"maml": "distill and maml cannot be combined, because the teacher does not adapt to episodes; keep one"},
    key_conflicts=(
        KeyConflict(
            "training.compile",
            "techniques.distill.hidden records activations inside the model, which is then not compiled; keep one",
            value=True,
            option="hidden",
        ),
    ),
    jax_values={"hidden": (0.0,)},
)
