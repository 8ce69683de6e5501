"""The dimensions of a text classifier, from its recipe and its data."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from bottega.config.error_messages import format_shape_error
from bottega.core.errors import UsageError
from bottega.models.text_classifier.config import EncoderShape, KimShape, NgramShape, TextClassifierShape
from bottega.tasks.base_model import find_base_folder
from bottega.tasks.classify.config import ClassifyRecipe

MAX_WEIGHTS, MIN_ROWS = 2**22, 2**15
"""Class weights of n-grams that a table has at most by default, and its rows at least. The time of a step is that of the optimizer over
all of them: with 52 classes, a quarter of the rows is 2.4 times as fast, and as accurate."""


def resolve_text_classifier_shape(
    recipe: ClassifyRecipe, vocab_size: int, class_names: Sequence[str]
) -> TextClassifierShape:
    """Return the dimensions of the model: those of the recipe, and defaults for the rest."""
    model = recipe.model
    if model.kind == "pretrained":
        from bottega.models.text_classifier.pretrained import read_pretrained_shape

        base_folder = find_base_folder(recipe)
        assert base_folder is not None, "the recipe schema requires model.from"
        shape = read_pretrained_shape(
            base_folder,
            class_names,
            multi_label=recipe.data.multi_label,
            dropout=model.dropout,
            attention_dropout=model.attention_dropout,
        )
        for key in ("hidden_size", "num_layers", "num_heads"):
            value, actual = getattr(model, key), shape.get_dimension(key)
            if value is not None and actual is not None and value != actual:
                raise UsageError(f"model.{key}: {value} differs from {actual} of model.from; remove it")
        return shape
    if model.kind == "ngrams":
        assert model.ngrams is not None
        return NgramShape(num_labels=len(class_names), **_size_ngram_table(recipe, len(class_names)))
    if model.vocab_size is not None and model.vocab_size < vocab_size:
        raise UsageError(f"model.vocab_size: {model.vocab_size} is less than the tokenizer's {vocab_size}; remove it")
    keys: tuple[str, ...] = ("embed_size", "num_filters", "filter_sizes", "dropout")
    if model.kind == "transformer":
        keys = ("hidden_size", "num_layers", "num_heads", "dropout", "attention_dropout")
    sizes = {key: value for key in keys if (value := getattr(model, key)) is not None}
    common = {"vocab_size": model.vocab_size or vocab_size, "num_labels": len(class_names)}
    if model.ngrams is not None:
        common |= _size_ngram_table(recipe, len(class_names))
    if model.kind == "transformer" and recipe.data.sequence_length is not None:
        sizes["max_positions"] = recipe.data.sequence_length
    try:
        return EncoderShape(**common, **sizes) if model.kind == "transformer" else KimShape(**common, **sizes)
    except ValidationError as error:
        raise UsageError(format_shape_error(error)) from None


def _size_ngram_table(recipe: ClassifyRecipe, num_classes: int) -> dict[str, int]:
    """Return the sizes of the table of n-grams: a row for each bucket, unless there are many classes and the recipe is silent."""
    ngrams = recipe.model.ngrams
    assert ngrams is not None, "the model has n-grams"
    buckets_per_row = 1
    if recipe.model.num_buckets is None:
        rows = max(MIN_ROWS, MAX_WEIGHTS // num_classes)
        while ngrams.buckets // buckets_per_row > rows:
            buckets_per_row *= 2
    return {"num_buckets": ngrams.buckets, "buckets_per_row": buckets_per_row}
