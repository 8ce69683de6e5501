"""Spike-timing-dependent plasticity: options and what it does not go with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, model_validator

from bottega.config.conflicts import find_injecting_technique
from bottega.config.recipe import Recipe
from bottega.config.section import Number, Probability, Section
from bottega.config.technique_spec import TECHNIQUES_KEY, Conflict, TechniqueSpec


class PlasticityOptions(Section):
    """Weights of spiking layers also follow the timing of spikes (Bi & Poo, 1998; Pfister & Gerstner, 2006)."""

    rule: Literal["pair", "triplet"] = Field("pair", description="what counts: pairs of spikes, or triplets too")
    rate: Number = Field(1e-4, ge=0, description="how far weights move in a step, times the mean change of an example")
    a_plus: Number = Field(1.0, ge=0, description="gain of a pair whose input comes first")
    a_minus: Number = Field(1.35, ge=0, description="loss of a pair whose output comes first")
    tau_plus: Number = Field(4.0, gt=0, description="time steps in which that gain falls to a third (1/e)")
    tau_minus: Number = Field(4.0, gt=0, description="time steps in which that loss falls to a third (1/e)")
    a3_plus: Number = Field(0.05, ge=0, description="triplet: more gain after an earlier spike of the output")
    a3_minus: Number = Field(0.0, ge=0, description="triplet: more loss after an earlier spike of the input")
    tau_x: Number = Field(8.0, gt=0, description="triplet: time steps for which earlier input spikes count")
    tau_y: Number = Field(8.0, gt=0, description="triplet: time steps for which earlier output spikes count")
    reward: Literal["none", "accuracy", "loss"] = Field(
        "none", description="each example counts by how much better than usual it was told: right or not, or its loss"
    )
    reward_decay: Probability = Field(0.99, lt=1, description="of the running mean that says what is usual")
    bounds: Literal["hard", "soft"] = Field("hard", description="cut off at low and high, or slower towards them")
    low: Number = Field(-1.0, description="plasticity takes no weight below it")
    high: Number = Field(1.0, description="plasticity takes no weight above it")
    normalise: bool = Field(True, description="keep sum and length of each unit's incoming weights as they were")
    targets: tuple[str, ...] | None = Field(
        None, description="spiking layers by name, by the part they are in, or patterns; null is all of them"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> PlasticityOptions:
        if self.low >= self.high:
            raise ValueError(f"low: {self.low:g} must be below high, which is {self.high:g}")
        fields = type(self).model_fields
        for key in ("a3_plus", "a3_minus", "tau_x", "tau_y"):
            if self.rule == "pair" and getattr(self, key) != fields[key].default:
                raise ValueError(f"{key}: {getattr(self, key):g} is of the triplet rule; set rule: triplet")
        return self


def clashes(recipe: Recipe, names: list[str]) -> Iterator[Conflict]:
    injected = find_injecting_technique(names)
    if injected is not None:
        yield (
            TECHNIQUES_KEY,
            TECHNIQUES_KEY,
            f"{injected} keeps the weights as they are that plasticity changes; keep one",
        )
    if "maml" in names:
        yield (
            TECHNIQUES_KEY,
            TECHNIQUES_KEY,
            "maml has several sets of weights in a step, and plasticity changes one; keep one",
        )
    if "distill" in names and names.index("distill") > names.index("plasticity"):
        yield (
            TECHNIQUES_KEY,
            TECHNIQUES_KEY,
            "plasticity listens to what the student does for its teacher too; list it after distill",
        )
    if recipe.training.compile is True:
        text = "true, and plasticity listens inside the model, which is then not compiled; leave one of them out"
        yield "training.compile", TECHNIQUES_KEY, text
    if recipe.task == "multitask" and any(
        getattr(one.options, "reward", "none") != "none" for one in recipe.techniques
    ):
        yield TECHNIQUES_KEY, "task", "plasticity.reward is of one task, and here are several; set it to none"


SPEC = TechniqueSpec(
    name="plasticity",
    options=PlasticityOptions,
    apply="bottega.techniques.plasticity.apply:apply",
    find_conflicts=clashes,
    supports_multitask=True,
)
