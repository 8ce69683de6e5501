"""Sizes of the text classifiers (n-grams, Kim's CNN, our encoder, pretrained encoders), without importing torch."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from bottega.models.decoder.config import MLP_RATIO, TransformerShape

OFFSET_POSITIONS = (
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
    "camembert",
    "roberta-prelayernorm",
    "longformer",
    "mpnet",
)
"""model_types whose positions start after the padding id, so that their first position embeddings are never used."""


NGRAM_MODULE = "ngrams"
"""Name of the layer over n-grams in every model that has one."""


class NgramShape(BaseModel):
    """Sizes of the linear classifier over hashed n-grams."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["ngrams"] = "ngrams"
    num_buckets: int = Field(gt=1)
    num_labels: int = Field(gt=1)
    buckets_per_row: int = Field(1, gt=0)
    """Neighbouring buckets that share a row of class weights."""

    @property
    def max_positions(self) -> None:
        """None: the n-grams of a text are a set."""
        return None


class KimShape(BaseModel):
    """Sizes of Kim's convolutional classifier. Models of equal shapes have interchangeable checkpoints."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["cnn"] = "cnn"
    vocab_size: int = Field(gt=1)
    num_labels: int = Field(gt=1)
    embed_size: int = Field(128, gt=0)
    num_filters: int = Field(100, gt=0)
    filter_sizes: tuple[Annotated[int, Field(gt=0)], ...] = Field((3, 4, 5), min_length=1)
    dropout: float = Field(0.5, ge=0, lt=1)
    num_buckets: int | None = Field(None, gt=1)
    """Buckets of n-grams of the wide part; None leaves that part out."""
    buckets_per_row: int = Field(1, gt=0)
    """Neighbouring buckets of the wide part that share a row of class weights."""

    @property
    def num_features(self) -> int:
        return self.num_filters * len(self.filter_sizes)

    @property
    def max_positions(self) -> None:
        """None: a convolution accepts texts of any length."""
        return None


class EncoderShape(BaseModel):
    """Sizes of our transformer encoder. Models of equal shapes have interchangeable checkpoints."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["transformer"] = "transformer"
    vocab_size: int = Field(gt=1)
    num_labels: int = Field(gt=1)
    hidden_size: int = Field(128, gt=0)
    num_layers: int = Field(2, gt=0)
    num_heads: int = Field(4, gt=0)
    max_positions: int = Field(512, gt=0)
    dropout: float = Field(0.1, ge=0, lt=1)
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    num_buckets: int | None = Field(None, gt=1)
    """Buckets of n-grams of the wide part; None leaves that part out."""
    buckets_per_row: int = Field(1, gt=0)
    """Neighbouring buckets of the wide part that share a row of class weights."""

    @model_validator(mode="after")
    def _check_head_size(self) -> EncoderShape:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} does not give each of {self.num_heads} heads an even number of "
                f"channels; try hidden_size {2 * self.num_heads * max(1, round(self.hidden_size / (2 * self.num_heads)))}"
            )
        return self

    @property
    def num_features(self) -> int:
        return self.hidden_size

    @property
    def block_shape(self) -> TransformerShape:
        """The shape of the language model's blocks that the encoder uses."""
        return TransformerShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_size=self.hidden_size // self.num_heads,
            intermediate_size=MLP_RATIO * self.hidden_size,
            vocab_size=self.vocab_size,
            context=self.max_positions,
            dropout=self.dropout,
        )


DIMENSIONS = {
    "hidden_size": ("hidden_size", "dim", "d_model", "n_embd"),
    "num_layers": ("num_hidden_layers", "n_layers", "n_layer", "num_layers"),
    "num_heads": ("num_attention_heads", "n_heads", "n_head"),
}
"""Names of each size in configurations of transformers."""
DROPOUTS = {
    "dropout": ("hidden_dropout_prob", "dropout", "resid_pdrop", "embd_pdrop", "hidden_dropout"),
    "attention_dropout": ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop"),
}


class PretrainedShape(BaseModel):
    """A complete configuration of transformers, so that the model can be rebuilt without its original folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["pretrained"] = "pretrained"
    config: str
    """The configuration as JSON, with the class names in id2label."""

    @field_validator("config")
    @classmethod
    def _check_config(cls, text: str) -> str:
        config = json.loads(text)
        if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
            raise ValueError("config is not a configuration of transformers: model_type is missing")
        if not isinstance(config.get("id2label"), dict) or len(config["id2label"]) < 2:
            raise ValueError("config.id2label must have two classes or more")
        return text

    @property
    def config_dict(self) -> dict[str, Any]:
        """The model's config.json."""
        return json.loads(self.config)

    @property
    def num_labels(self) -> int:
        return len(self.config_dict["id2label"])

    @property
    def vocab_size(self) -> int | None:
        return self.config_dict.get("vocab_size")

    def get_dimension(self, key: str) -> int | None:
        """Return the size that recipes call `key`, whatever the configuration calls it; None if it has no such size."""
        values = self.config_dict
        return next((values[name] for name in DIMENSIONS[key] if isinstance(values.get(name), int)), None)

    @property
    def max_positions(self) -> int | None:
        """Largest number of input tokens; None if unlimited or unknown."""
        values = self.config_dict
        num_positions = values.get("max_position_embeddings", values.get("n_positions"))
        if not isinstance(num_positions, int) or num_positions <= 0:
            return None
        if values["model_type"] in OFFSET_POSITIONS:
            return num_positions - (values.get("pad_token_id") or 0) - 1
        return num_positions


TextClassifierShape = Annotated[NgramShape | KimShape | EncoderShape | PretrainedShape, Field(discriminator="kind")]
