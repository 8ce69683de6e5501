"""The recipe of one model that learns several tasks at once, each a whole recipe with data and head of its own."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from bottega.config.data import Data
from bottega.config.recipe import Model, Recipe
from bottega.config.section import Number, Positive, Section
from bottega.data.text.config import Tokenizer, find_tokenizer_problems

RESERVED = ("weight", "index")
"""What a batch has beside its parts."""


def _customary(value: Any) -> Any:
    # What other trainers call weights that change by themselves.
    return "uncertainty" if value == "dynamic" else value


Balance = Annotated[Literal["fixed", "uncertainty", "pcgrad", "dynamic"], AfterValidator(_customary)]


class Part(Section):
    recipe: str = Field(description="the recipe this task comes from, with its data and its head")
    settings: dict[str, Any] = Field(default_factory=dict, description="dotted keys that differ from that recipe")
    weight: Number = Field(1.0, gt=0, description="of its loss in the sum")
    metric: str = Field("loss", description="what measures its progress; an evaluation says it first")


class MultitaskModel(Model):
    hidden_size: Positive | None = Field(None, description="width of the shared trunk; null is what the parts say")
    num_layers: Positive | None = Field(None, description="blocks of the shared trunk; null is what the parts say")
    num_heads: Positive | None = Field(None, description="its attention heads; null is what the parts say")

    @model_validator(mode="after")
    def _heads_agree(self) -> MultitaskModel:
        width, heads = self.hidden_size, self.num_heads
        if width is not None and heads is not None and width % (2 * heads):
            raise ValueError(f"hidden_size: {width} does not give each of {heads} heads an even number of channels")
        return self


class MultitaskData(Data):
    parts: dict[str, Part] = Field(default_factory=dict, description="the tasks, by name")
    weights: Balance = Field(
        "fixed",
        description="how losses are weighed: as given, by learned uncertainty, or gradients kept apart (pcgrad)",
    )
    tokenizer: Tokenizer | None = Field(
        None, description="of all parts of text, learnt from the first of them; null is what that part's recipe says"
    )

    @field_validator("parts", mode="before")
    @classmethod
    def _left_out(cls, parts: Any) -> Any:
        """null takes away a part that a parent recipe has."""
        return {name: part for name, part in parts.items() if part is not None} if isinstance(parts, dict) else parts

    @field_validator("parts")
    @classmethod
    def _named(cls, parts: dict[str, Part]) -> dict[str, Part]:
        for name in parts:
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name) or name in RESERVED:
                raise ValueError(f"{name!r} cannot name a part; use letters, digits, - and _, and not {RESERVED}")
        return parts


class MultitaskRecipe(Recipe):
    task: Literal["multitask"] = Field("multitask", description="several tasks, one model")
    model: MultitaskModel = Field(default_factory=MultitaskModel, description="the model")
    data: MultitaskData = Field(default_factory=MultitaskData, description="the data")

    def find_missing_keys(self) -> list[tuple[str, str]]:
        found = super().find_missing_keys()
        if len(self.data.parts) < 2:
            found.append(("data.parts", f"expected at least two tasks, got {', '.join(self.data.parts) or 'none'}"))
        if self.data.tokenizer is not None:
            found += find_tokenizer_problems(self.data.tokenizer)
        return found + [
            (f"data.{key}", f"is a part's own; say data.parts.NAME.settings.data.{key}") for key in self._said_here()
        ]

    def _said_here(self) -> list[str]:
        """Keys of the data that only a part has a use for."""
        usual = Data()
        general = ("online", "workers", "prefetch", "pin_memory")
        keys = [key for key in Data.model_fields if key not in general]
        return [key for key in keys if getattr(self.data, key) != getattr(usual, key)]
