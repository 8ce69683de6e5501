"""The recipe of personalised images: soft prompts between a frozen language model and a frozen image generator."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bottega.schema.data import Data
from bottega.schema.media import GeneratorSamples
from bottega.schema.recipe import Model, Recipe, path_problems
from bottega.schema.section import Collection, Positive, Probability


class PersonalizeModel(Model):
    diffusion: str | None = Field(None, description="frozen image generator: a folder or hub name, or needs.<part>")
    language_model: str | None = Field(None, description="frozen language model: a folder or hub name, or needs.<part>")
    clip: str | None = Field(None, description="judge of samples: a folder or hub name")
    num_image_tokens: Positive = Field(2, description="learned tokens that ask for an image")
    num_prefix_tokens: Positive = Field(2, description="learned prefix of each layer")


class PersonalizeData(Data):
    collection: Collection | None = Field(None, description="whose layout the histories have; null is our own")
    sequence_length: Positive = Field(600, description="history and target are cut at so many tokens")
    image_size: Positive = Field(512, description="side in pixels")


class PersonalizeSamples(GeneratorSamples):
    preference_weight: Probability = Field(
        0.5, description="preference against target when the best of a set is picked"
    )


class PersonalizeRecipe(Recipe):
    task: Literal["personalize"] = Field("personalize", description="images of a target as one user would like it")
    model: PersonalizeModel = Field(default_factory=PersonalizeModel, description="the model")
    data: PersonalizeData = Field(default_factory=PersonalizeData, description="the data")
    samples: PersonalizeSamples = Field(
        default_factory=PersonalizeSamples, description="what the model draws while it learns"
    )

    def missing(self) -> list[tuple[str, str]]:
        parts = [
            (f"model.{part}", "missing; give a folder or a hub name")
            for part in ("diffusion", "language_model")
            if getattr(self.model, part) is None
        ]
        return super().missing() + path_problems(self.data) + parts
