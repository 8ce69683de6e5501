"""Every task and the schema of its recipe. A task may have several forms, told apart by what it reads."""

from __future__ import annotations

from bottega.config.align import AlignRecipe
from bottega.config.autoencode import AudioVaeRecipe, ImageVaeRecipe, VideoVaeRecipe
from bottega.config.classify import AudioClassifyRecipe, ClassifyRecipe, ImageClassifyRecipe, VideoClassifyRecipe
from bottega.config.fields import has_key
from bottega.config.flat import Flat
from bottega.config.language import LanguageRecipe
from bottega.config.media import AudioRecipe, ImageRecipe, VideoRecipe
from bottega.config.multitask import MultitaskRecipe
from bottega.config.personalize import PersonalizeRecipe
from bottega.config.recall import LastingRecipe, RecallRecipe
from bottega.config.recipe import Recipe
from bottega.config.routing import RoutingRecipe
from bottega.config.tokens import AudioTokensRecipe, ImageTokensRecipe

RECIPES: dict[str, type[Recipe]] = {
    "language": LanguageRecipe,
    "classify": ClassifyRecipe,
    "image": ImageRecipe,
    "audio": AudioRecipe,
    "video": VideoRecipe,
    "image_vae": ImageVaeRecipe,
    "image_tokens": ImageTokensRecipe,
    "align": AlignRecipe,
    "personalize": PersonalizeRecipe,
    "routing": RoutingRecipe,
    "recall": RecallRecipe,
    "multitask": MultitaskRecipe,
}

FORMS: dict[str, dict[str, type[Recipe]]] = {
    "classify": {
        "text": ClassifyRecipe,
        "image": ImageClassifyRecipe,
        "audio": AudioClassifyRecipe,
        "video": VideoClassifyRecipe,
    },
    "image_vae": {"image": ImageVaeRecipe, "audio": AudioVaeRecipe, "video": VideoVaeRecipe},
    "image_tokens": {"image": ImageTokensRecipe, "audio": AudioTokensRecipe},
    "recall": {"streams": RecallRecipe, "facts": LastingRecipe},
}
"""Task -> data.input -> schema. The one in RECIPES is for recipes that do not say."""

SCHEMAS: tuple[type[Recipe], ...] = tuple(
    schema for task, usual in RECIPES.items() for schema in FORMS.get(task, {"": usual}).values()
)
"""All forms of all tasks."""


def schema_of(task: str, flat: Flat) -> type[Recipe]:
    """The schema of a recipe of this task that says what `flat` does."""
    said = flat["data.input"].value if "data.input" in flat else None
    return FORMS.get(task, {}).get(str(said), RECIPES[task])


def other_form(task: str, schema: type[Recipe], key: str) -> str | None:
    """The data.input with which the task has a key that it does not have in this form."""
    forms = FORMS.get(task, {}).items()
    return next((input for input, form in forms if form is not schema and has_key(key, form)), None)
