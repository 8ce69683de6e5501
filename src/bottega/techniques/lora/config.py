"""LoRA: options and what it does not go with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from bottega.config.recipe import Recipe
from bottega.config.section import Dropout, Number, Positive, Section
from bottega.config.technique_spec import KEY, Clash, TechniqueSpec
from bottega.config.together import clashes_of_injected


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


def clashes(recipe: Recipe, names: list[str]) -> Iterator[Clash]:
    yield from clashes_of_injected(recipe, "lora")
    if "adapter" in names:
        yield KEY, KEY, "lora and adapter change the same layers; keep one"


SPEC = TechniqueSpec(
    name="lora",
    options=LoraOptions,
    spellings=SPELLINGS,
    apply="bottega.techniques.lora.apply:apply",
    clashes=clashes,
    inject="bottega.techniques.lora.apply:inject",
)
