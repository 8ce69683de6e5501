"""LoRA: options and what it does not go with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from bottega.config.conflicts import find_injection_conflicts
from bottega.config.recipe import Recipe
from bottega.config.section import Dropout, Number, Positive, Section
from bottega.config.technique_spec import TECHNIQUES_KEY, Conflict, TechniqueSpec


class LoraOptions(Section):
    """Low-rank changes of matrices; the base stays as it is (Hu et al., 2021)."""

    rank: Positive = Field(8, description="of the change; its parameters grow with it")
    alpha: Number | None = Field(None, gt=0, description="the change is scaled by alpha / rank; null is twice the rank")
    dropout: Dropout = Field(0.0, description="share of the inputs of the change that is dropped while training")
    targets: tuple[str, ...] | Literal["all-linear"] | None = Field(
        None, description="ends of module names, or patterns over them; null is every matrix inside the blocks"
    )
    train: tuple[str, ...] | None = Field(
        None, description="parts that learn in full beside it; null is what begins at random, such as a head"
    )
    start: str | None = Field(None, description="a folder of an adapter to start from, ours or peft's")


SPELLINGS = {"r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "targets"}
"""What peft calls an option -> its name here."""


def clashes(recipe: Recipe, names: list[str]) -> Iterator[Conflict]:
    yield from find_injection_conflicts(recipe, "lora")
    if "adapter" in names:
        yield TECHNIQUES_KEY, TECHNIQUES_KEY, "lora and adapter change the same layers; keep one"


SPEC = TechniqueSpec(
    name="lora",
    options=LoraOptions,
    option_aliases=SPELLINGS,
    apply="bottega.techniques.lora.apply:apply",
    find_conflicts=clashes,
    inject="bottega.techniques.lora.apply:inject",
)
