"""Spike-timing-dependent plasticity: options and conflicts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from bottega.config.section import Number, Probability, Section
from bottega.config.technique_spec import KeyConflict, TechniqueSpec


class PlasticityOptions(Section):
    """STDP: weights of spiking layers also follow spike timing (Bi & Poo, 1998; Pfister & Gerstner, 2006)."""

    rule: Literal["pair", "triplet"] = Field("pair", description="STDP rule: pairs of spikes, or triplets too")
    rate: Number = Field(1e-4, ge=0, description="learning rate of the mean weight change per example")
    a_plus: Number = Field(1.0, ge=0, description="potentiation of a pair whose input spike comes first")
    a_minus: Number = Field(1.35, ge=0, description="depression of a pair whose output spike comes first")
    tau_plus: Number = Field(4.0, gt=0, description="time constant of potentiation, in time steps")
    tau_minus: Number = Field(4.0, gt=0, description="time constant of depression, in time steps")
    a3_plus: Number = Field(0.05, ge=0, description="triplet: extra potentiation after an earlier output spike")
    a3_minus: Number = Field(0.0, ge=0, description="triplet: extra depression after an earlier input spike")
    tau_x: Number = Field(8.0, gt=0, description="triplet: time constant of earlier input spikes, in time steps")
    tau_y: Number = Field(8.0, gt=0, description="triplet: time constant of earlier output spikes, in time steps")
    reward: Literal["none", "accuracy", "loss"] = Field(
        "none", description="weight each example by its reward above the running mean: accuracy, or log likelihood"
    )
    reward_decay: Probability = Field(0.99, lt=1, description="decay of the running mean of the reward")
    bounds: Literal["hard", "soft"] = Field("hard", description="clip at low and high, or slow down towards them")
    low: Number = Field(-1.0, description="lower bound of weights for plasticity")
    high: Number = Field(1.0, description="upper bound of weights for plasticity")
    normalise: bool = Field(True, description="preserve sum and norm of each unit's incoming weights")
    targets: tuple[str, ...] | None = Field(
        None, description="spiking layers by name, by enclosing module, or patterns; null is all of them"
    )

    @model_validator(mode="after")
    def _check_bounds_and_rule(self) -> PlasticityOptions:
        if self.low >= self.high:
            raise ValueError(f"low: {self.low:g} must be below high ({self.high:g})")
        fields = type(self).model_fields
        for key in ("a3_plus", "a3_minus", "tau_x", "tau_y"):
            if self.rule == "pair" and getattr(self, key) != fields[key].default:
                raise ValueError(f"{key}: {getattr(self, key):g} applies to the triplet rule only; set rule: triplet")
        return self


SPEC = TechniqueSpec(
    name="plasticity",
    options=PlasticityOptions,
    apply="bottega.techniques.plasticity.apply:apply",
    conflicts={
        **{name: f"{name} freezes the weights that plasticity changes; keep one" for name in ("lora", "adapter")},
        "maml": "maml has several sets of weights in a step, and plasticity changes only one; keep one",
    },
    must_follow={"distill": "plasticity records the student's spikes for its teacher too; list it after distill"},
    key_conflicts=(
        KeyConflict(
            "training.compile",
            "plasticity records spikes inside the model, which is then not compiled; keep one",
            value=True,
        ),
        KeyConflict(
            "task",
            "plasticity.reward needs a single task, but this recipe has several; set it to none",
            "multitask",
            "reward",
        ),
    ),
    supports_multitask=True,
)
