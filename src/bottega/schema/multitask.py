"""The recipe of one model that learns several tasks at once."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bottega.schema.data import Data
from bottega.schema.recipe import Model, Recipe
from bottega.schema.section import Number, Positive, Section


class Part(Section):
    recipe: str = Field(description="the recipe this task comes from, with its data")
    weight: Number = Field(1.0, gt=0, description="of its loss in the sum")
    metric: str = Field("loss", description="what measures its progress")


class MultitaskModel(Model):
    hidden_size: Positive = Field(256, description="width of the shared trunk")
    num_layers: Positive = Field(4, description="blocks of the shared trunk")
    num_heads: Positive = Field(4, description="attention heads of the shared trunk")


class MultitaskData(Data):
    parts: dict[str, Part] = Field(default_factory=dict, description="the tasks, by name")
    weights: Literal["fixed", "dynamic"] = Field("fixed", description="dynamic evens out how fast the tasks learn")


class MultitaskRecipe(Recipe):
    task: Literal["multitask"] = Field("multitask", description="several tasks, one model")
    model: MultitaskModel = Field(default_factory=MultitaskModel, description="the model")
    data: MultitaskData = Field(default_factory=MultitaskData, description="the data")

    def missing(self) -> list[tuple[str, str]]:
        few = [("data.parts", "expected at least two tasks")] if len(self.data.parts) < 2 else []
        return super().missing() + few
