"""The recipe that aligns pictures with captions: two towers, CLIP's, whose answers meet where they mean the same."""

from __future__ import annotations

import json
from typing import Literal

from pydantic import Field

from bottega.config.media import MediaRecipe
from bottega.config.recipe import Model, Samples
from bottega.config.section import Positive, Probability
from bottega.data.image.config import ImageData
from bottega.models.clip.config import ClipShape

BYTES = 2 * 256 + 2
"""The least that a vocabulary of CLIP has: every byte within a word, every byte at the end of one, and two marks."""


class AlignModel(Model):
    """A CLIP of transformers, by these sizes or from a folder."""

    from_: str | None = Field(
        None,
        alias="from",
        description="a run, or a CLIP folder or hub name to start from; sizes and tokens are its own",
    )
    hidden_size: Positive = Field(128, description="width of the tower that sees")
    num_layers: Positive = Field(4, description="its blocks")
    num_heads: Positive = Field(4, description="attention heads of both towers")
    patch_size: Positive = Field(4, description="side of a patch")
    text_hidden_size: Positive = Field(128, description="width of the tower that reads")
    text_num_layers: Positive = Field(2, description="its blocks")
    vocab_size: Positive = Field(2048, ge=BYTES, description="tokens learnt from the captions, bytes among them")
    max_tokens: Positive = Field(32, ge=3, description="captions are cut at so many tokens, marks among them")
    projection_size: Positive = Field(128, description="width of where both meet")
    negatives: Positive = Field(
        15, description="other captions each picture is told apart from in a step, drawn from the data"
    )
    hard_negatives: Probability = Field(
        0.0, description="share of them that say another word in one place, as far as there are such in the data"
    )


def clip_shape(model: AlignModel, *, image_size: int, tokens: int, bos: int, eos: int, padding: int) -> ClipShape:
    """The CLIP that a recipe describes, for pictures of a size and a vocabulary of so many tokens."""
    shared = {"num_attention_heads": model.num_heads, "attention_dropout": model.dropout or 0.0, "hidden_act": "gelu"}
    config = {
        "model_type": "clip",
        "architectures": ["CLIPModel"],
        "projection_dim": model.projection_size,
        "text_config": {
            "model_type": "clip_text_model",
            "vocab_size": tokens,
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
    task: Literal["align"] = Field("align", description="pictures and captions that mean the same")
    model: AlignModel = Field(default_factory=AlignModel, description="the model")
    data: ImageData = Field(default_factory=ImageData, description="the data")
    samples: Samples = Field(
        default_factory=lambda: Samples(count=16), description="pictures with the caption that fits best"
    )

    def find_conflicts(self) -> list[tuple[str, str, str]]:
        found, model, side = super().find_conflicts(), self.model, self.data.image_size
        if model.from_ is not None:
            return found
        for key in ("hidden_size", "text_hidden_size"):
            width = getattr(model, key)
            if width % model.num_heads:
                said = f"{width} is not a multiple of model.num_heads {model.num_heads}"
                found.append((f"model.{key}", "model.num_heads", said))
        if side is not None and side % model.patch_size:
            said = f"patches of {model.patch_size} do not divide a side of {side} (data.image_size)"
            found.append(("model.patch_size", "data.image_size", said))
        return found
