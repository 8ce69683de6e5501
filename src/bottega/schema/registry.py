"""Every task and the schema of its recipe."""

from __future__ import annotations

from bottega.schema.classify import ClassifyRecipe
from bottega.schema.language import LanguageRecipe
from bottega.schema.media import AudioRecipe, ImageRecipe, ImageTokensRecipe, ImageVaeRecipe, VideoRecipe
from bottega.schema.multitask import MultitaskRecipe
from bottega.schema.personalize import PersonalizeRecipe
from bottega.schema.recipe import Recipe
from bottega.schema.routing import RoutingRecipe

RECIPES: dict[str, type[Recipe]] = {
    "language": LanguageRecipe,
    "classify": ClassifyRecipe,
    "image": ImageRecipe,
    "audio": AudioRecipe,
    "video": VideoRecipe,
    "image_vae": ImageVaeRecipe,
    "image_tokens": ImageTokensRecipe,
    "personalize": PersonalizeRecipe,
    "routing": RoutingRecipe,
    "multitask": MultitaskRecipe,
}
