"""LoRA: options and conflicts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bottega.config.conflicts import INJECTION_CONFLICTS
from bottega.config.section import Dropout, Number, Positive, Section
from bottega.config.technique_spec import TechniqueSpec


class LoraOptions(Section):
    """Low-rank updates of weight matrices over a frozen base model (Hu et al., 2021)."""

    rank: Positive = Field(8, description="rank of the update; the number of parameters grows with it")
    alpha: Number | None = Field(None, gt=0, description="the update is scaled by alpha / rank; null is twice the rank")
    dropout: Dropout = Field(0.0, description="dropout on the inputs of the update while training")
    targets: tuple[str, ...] | Literal["all-linear"] | None = Field(
        None, description="suffixes of module names, or patterns over them; null is every matrix inside the blocks"
    )
    train: tuple[str, ...] | None = Field(
        None, description="further modules to train in full; null selects the randomly initialised ones, such as a head"
    )
    start: str | None = Field(None, description="a folder of an adapter to start from, exported by Bottega or peft")


ALIASES = {"r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "targets"}
"""Option names of peft -> option names of LoraOptions."""


SPEC = TechniqueSpec(
    name="lora",
    options=LoraOptions,
    option_aliases=ALIASES,
    apply="bottega.techniques.lora.apply:apply",
    conflicts={"adapter": "lora and adapter change the same layers; keep one"},
    key_conflicts=INJECTION_CONFLICTS,
    inject="bottega.techniques.lora.apply:inject",
)
