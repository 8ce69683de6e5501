"""The recipe of image-caption alignment: a CLIP with an image and a text tower."""

from __future__ import annotations

import json
from typing import Literal

from pydantic import Field

from bottega.config.media import MediaRecipe
from bottega.config.recipe import Model, Samples
from bottega.config.section import Positive, Probability
from bottega.data.image.config import ImageData
from bottega.models.clip.config import ClipShape

MIN_VOCAB_SIZE = 2 * 256 + 2
"""Smallest vocabulary of CLIP: every byte within a word and at the end of one, and two special tokens."""


class AlignModel(Model):
    """A CLIP of transformers, with these sizes or from a folder."""

    from_: str | None = Field(
        None,
        alias="from",
        description="a run, CLIP folder or hub name to start from, with its sizes and tokenizer",
    )
    hidden_size: Positive = Field(128, description="width of the image tower")
    num_layers: Positive = Field(4, description="blocks of the image tower")
    num_heads: Positive = Field(4, description="attention heads of both towers")
    patch_size: Positive = Field(4, description="side of a patch")
    text_hidden_size: Positive = Field(128, description="width of the text tower")
    text_num_layers: Positive = Field(2, description="blocks of the text tower")
    vocab_size: Positive = Field(2048, ge=MIN_VOCAB_SIZE, description="size of the vocabulary, bytes included")
    max_tokens: Positive = Field(32, ge=3, description="captions are cut at this many tokens, special tokens included")
    projection_size: Positive = Field(128, description="width of the shared embedding")
    negatives: Positive = Field(15, description="negative captions for each image in a step, drawn from the data")
    hard_negatives: Probability = Field(
        0.0, description="fraction of negatives that differ in one word only, as far as the data has such captions"
    )


def build_clip_shape(
    model: AlignModel, *, image_size: int, vocab_size: int, bos: int, eos: int, padding: int
) -> ClipShape:
    """Return the shape of a recipe's CLIP; `bos`, `eos` and `padding` are the ids of the special tokens."""
    shared = {"num_attention_heads": model.num_heads, "attention_dropout": model.dropout or 0.0, "hidden_act": "gelu"}
    config = {
        "model_type": "clip",
        "architectures": ["CLIPModel"],
        "projection_dim": model.projection_size,
        "text_config": {
            "model_type": "clip_text_model",
            "vocab_size": vocab_size,
            "hidden_size": model.text_hidden_size,
            "intermediate_size": 4 * model.text_hidden_size,
            "num_hidden_layers": model.text_num_layers,
            "max_position_embeddings": model.max_tokens,
            "projection_dim": model.projection_size,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": padding,
            **shared,
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": model.hidden_size,
            "intermediate_size": 4 * model.hidden_size,
            "num_hidden_layers": model.num_layers,
            "num_channels": 3,
            "image_size": image_size,
            "patch_size": model.patch_size,
            "projection_dim": model.projection_size,
            **shared,
        },
    }
    return ClipShape(config=json.dumps(config, sort_keys=True))


class AlignRecipe(MediaRecipe):
    """A recipe that trains a CLIP on images and captions."""

    task: Literal["align"] = Field("align", description="images and captions that belong together")
    model: AlignModel = Field(default_factory=AlignModel, description="the model")
    data: ImageData = Field(default_factory=ImageData, description="the data")
    samples: Samples = Field(
        default_factory=lambda: Samples(count=16), description="images with the highest-scoring caption"
    )

    def find_conflicts(self) -> list[tuple[str, str, str]]:
        problems, model, side = super().find_conflicts(), self.model, self.data.image_size
        if model.from_ is not None:
            return problems
        for key in ("hidden_size", "text_hidden_size"):
            width = getattr(model, key)
            if width % model.num_heads:
                message = f"{width} is not a multiple of model.num_heads {model.num_heads}"
                problems.append((f"model.{key}", "model.num_heads", message))
        if side is not None and side % model.patch_size:
            message = f"patches of {model.patch_size} do not divide a side of {side} (data.image_size)"
            problems.append(("model.patch_size", "data.image_size", message))
        return problems
