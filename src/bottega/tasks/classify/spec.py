"""The task `classify`: classification of text, images, audio or video."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bottega.config.layers import FlatConfig
from bottega.config.task_spec import TaskSpec
from bottega.tasks.classify.config import AudioClassifyRecipe, ClassifyRecipe, ImageClassifyRecipe, VideoClassifyRecipe
from bottega.tasks.weights import drop_dimensions


def prepare(recipe: Any, progress: Any) -> Any:
    """Prepare the data of a classifier of any medium."""
    if not isinstance(recipe, ClassifyRecipe):
        from bottega.data.prepare.media import prepare_media

        return prepare_media(recipe, progress=progress)
    from bottega.tasks.base_model import resolve_tokenizer_spec
    from bottega.tasks.classify.prepare import prepare_classify

    return prepare_classify(
        recipe.data,
        resolve_tokenizer_spec(recipe),
        seed=recipe.seed,
        num_classes=recipe.model.num_labels,
        ngrams=recipe.model.ngrams,
        progress=progress,
    )


def adapt(base: FlatConfig, layer: FlatConfig) -> list[str]:
    """Drop the dimensions of `base` if `layer` starts from pretrained weights, which have their own, and its n-grams."""
    notes = _note_learning_rate(base, layer)
    drop_dimensions(base, layer, _is_encoder)
    base_model = layer.get("model.from")
    values = {name: entry.value for flat in (base, layer) for name, entry in flat.items()}
    if base_model is not None and base_model.value is not None and _is_encoder(values):
        for key in NGRAM_KEYS:
            if key not in layer:
                base.pop(key, None)
        if "model.kind" not in layer and values.get("model.kind") == "ngrams":
            base.pop("model.kind")
    return notes


def _note_learning_rate(base: FlatConfig, layer: FlatConfig) -> list[str]:
    """Return a note if `layer` replaces n-grams by a network but keeps their learning rate, which is too high for it."""
    kind, rate = base.get("model.kind"), base.get("training.learning_rate")
    is_replaced = any(key in layer and layer[key].value not in (None, "ngrams") for key in ("model.kind", "model.from"))
    if kind is None or kind.value != "ngrams" or rate is None or not is_replaced or "training.learning_rate" in layer:
        return []
    return [
        f"training.learning_rate: {rate.value:g} suits n-grams, and is too high for a network; start from classify/transformer, "
        "classify/cnn or classify/pretrained, or set it"
    ]


NGRAM_KEYS = tuple(f"model.{name}" for name in ("wide", "word_ngrams", "character_ngrams", "num_buckets"))


def _is_encoder(values: Mapping[str, Any]) -> bool:
    is_text = values.get("task") == "classify" and values.get("data.input", "text") == "text"
    return is_text and values.get("model.kind", "transformer") != "cnn"


def example_input(recipe: Any, processor: Path) -> str | None:
    """Return an example argument for `bottega predict RUN`."""
    return '"your text"' if isinstance(recipe, ClassifyRecipe) else recipe.data.train.path


SPEC = TaskSpec(
    name="classify",
    recipe=ClassifyRecipe,
    inputs={
        "text": ClassifyRecipe,
        "image": ImageClassifyRecipe,
        "audio": AudioClassifyRecipe,
        "video": VideoClassifyRecipe,
    },
    open="bottega.tasks.classify.media_workload:open_workload",
    reopen="bottega.tasks.classify.media_workload:reopen_workload",
    prepare=prepare,
    preview="bottega.tasks.classify.preview:LabelledTextPreview",
    fields=frozenset(("text", "label")),
    unsupported_verbs={
        "generate": "a classifier does not generate; bottega predict classifies new samples, bottega evaluate measures it"
    },
    example_input=example_input,
    has_labels=True,
    supports_label_smoothing=True,
    loss_is_cross_entropy=True,
    adapt=adapt,
    jax_values={"model.kind": ("transformer", "cnn", "convnet"), "model.wide": (False,)},
)
