"""The recipe of a multitask model: several tasks trained together, each a complete recipe with its own data and head."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from bottega.config.data import Data
from bottega.config.recipe import Model, Recipe
from bottega.config.section import Number, Positive, Section
from bottega.data.text.config import Tokenizer, find_tokenizer_problems

RESERVED_NAMES = ("weight", "index")
"""Keys of a batch beside its parts."""


def _resolve_synonym(value: Any) -> Any:
    # Other trainers call learned weights dynamic.
    return "uncertainty" if value == "dynamic" else value


Balance = Annotated[Literal["fixed", "uncertainty", "pcgrad", "dynamic"], AfterValidator(_resolve_synonym)]


class Part(Section):
    """One of the tasks."""

    recipe: str = Field(description="the recipe of this task, with its data and its head")
    settings: dict[str, Any] = Field(default_factory=dict, description="dotted keys that override that recipe")
    weight: Number = Field(1.0, gt=0, description="weight of its loss in the sum")
    metric: str = Field("loss", description="its main metric, which an evaluation lists first")


class MultitaskModel(Model):
    """The trunk that the tasks share."""

    hidden_size: Positive | None = Field(None, description="width of the shared trunk; null is that of each part")
    num_layers: Positive | None = Field(None, description="blocks of the shared trunk; null is that of each part")
    num_heads: Positive | None = Field(
        None, description="attention heads of the shared trunk; null is that of each part"
    )

    @model_validator(mode="after")
    def _check_heads(self) -> MultitaskModel:
        width, heads = self.hidden_size, self.num_heads
        if width is not None and heads is not None and width % (2 * heads):
            raise ValueError(
                f"hidden_size: {width} does not give each of {heads} heads an even number of channels; "
                f"use a multiple of {2 * heads}"
            )
        return self


class MultitaskData(Data):
    """The tasks, each with its own data, and how their losses are combined."""

    parts: dict[str, Part] = Field(default_factory=dict, description="the tasks, by name")
    weights: Balance = Field(
        "fixed",
        description="loss weights: fixed, learned by uncertainty, or fixed with gradient surgery (pcgrad)",
    )
    tokenizer: Tokenizer | None = Field(
        None, description="tokenizer of all text parts, trained on the first; null is that of the first part's recipe"
    )

    @field_validator("parts", mode="before")
    @classmethod
    def _drop_nulls(cls, parts: Any) -> Any:
        """Drop a part that is null, which removes it from a parent recipe."""
        return {name: part for name, part in parts.items() if part is not None} if isinstance(parts, dict) else parts

    @field_validator("parts")
    @classmethod
    def _check_names(cls, parts: dict[str, Part]) -> dict[str, Part]:
        for name in parts:
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name) or name in RESERVED_NAMES:
                raise ValueError(
                    f"{name!r} cannot name a part; start with a letter, use letters, digits, - and _, "
                    f"and none of the reserved names {', '.join(RESERVED_NAMES)}"
                )
        return parts


class MultitaskRecipe(Recipe):
    """A recipe that trains one model on several tasks."""

    task: Literal["multitask"] = Field("multitask", description="train one model on several tasks")
    model: MultitaskModel = Field(default_factory=MultitaskModel, description="the model")
    data: MultitaskData = Field(default_factory=MultitaskData, description="the data")

    def find_missing_keys(self) -> list[tuple[str, str]]:
        problems = super().find_missing_keys()
        if len(self.data.parts) < 2:
            problems.append(("data.parts", f"expected at least two tasks, got {', '.join(self.data.parts) or 'none'}"))
        if self.data.tokenizer is not None:
            problems += find_tokenizer_problems(self.data.tokenizer)
        return problems + [
            (f"data.{key}", f"belongs to a part; set data.parts.NAME.settings.data.{key}")
            for key in self._find_part_keys()
        ]

    def _find_part_keys(self) -> list[str]:
        """Return the data keys of this recipe that apply to a part only."""
        defaults = Data()
        general_keys = ("online", "workers", "prefetch", "pin_memory")
        keys = [key for key in Data.model_fields if key not in general_keys]
        return [key for key in keys if getattr(self.data, key) != getattr(defaults, key)]
