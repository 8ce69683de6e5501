"""Classification of texts, images, audio or video into one class or several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from bottega.core.errors import UsageError
from bottega.core.model_spec import Initial, ModelSpec, resolve_reference
from bottega.core.noise import Noise
from bottega.core.task import Task
from bottega.core.types import Array, Batch, Loss, Models, Rows
from bottega.models import find_framework
from bottega.models.convnet.config import ConvNetShape
from bottega.models.spiking.config import SpikingNetShape
from bottega.models.text_classifier.config import (
    EncoderShape,
    KimShape,
    NgramShape,
    PretrainedShape,
    TextClassifierShape,
)
from bottega.tasks.classify.losses import LossName, find_loss
from bottega.tasks.classify.losses.base import ClassificationLoss
from bottega.tasks.metrics import classification

DRAWS_MULTIPLE = 64
"""Random numbers for a text are drawn in multiples of this: on a GPU each size is compiled anew, and the first numbers are
the same whatever the size."""

MIN_LENGTH_MULTIPLE = 32
"""Lengths of `Classification.bucket` are multiples of this."""

Network = ConvNetShape | SpikingNetShape | NgramShape | KimShape | EncoderShape
NETWORKS: dict[type[Network], tuple[str, str]] = {
    ConvNetShape: (
        "bottega.models.convnet.{framework}:ConvNet",
        "bottega.models.convnet.{framework}:initialise_convnet",
    ),
    SpikingNetShape: (
        "bottega.models.spiking.network:SpikingNet",
        "bottega.models.spiking.network:initialise_spiking",
    ),
    NgramShape: (
        "bottega.models.text_classifier.ngrams:NgramClassifier",
        "bottega.models.text_classifier.ngrams:initialise_ngrams",
    ),
    KimShape: (
        "bottega.models.text_classifier.kim.{framework}:Kim",
        "bottega.models.text_classifier.kim.{framework}:initialise_kim",
    ),
    EncoderShape: (
        "bottega.models.text_classifier.encoder.{framework}:TextClassifier",
        "bottega.models.text_classifier.encoder.{framework}:initialise_encoder",
    ),
}
"""Shape -> network and the rule of its initial values."""


class Classification(Task):
    """Classification with one class for each example, or several (`multi_label`).

    A batch of texts has `input_ids` and `attention_mask`, both (batch, length), with 0 for padding at the end, and for a model of
    n-grams `ngram_ids` and `ngram_weights`, both (batch, n-grams), with weight 0 for padding; any other batch has its samples under
    `key`, (batch, *grid, channels). Labels are `label` (batch,), the class number, or with `multi_label` `labels` (batch, classes) of
    0 and 1. Optional: `weight` (batch,), 0 for a padding row.
    """

    key: Literal["image", "mel", "video", "text"]
    shape: ConvNetShape | SpikingNetShape | TextClassifierShape
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    objective: LossName = "cross_entropy"
    gamma: float = Field(2.0, ge=0)
    """Focusing parameter of the focal loss (Lin et al., 2017)."""
    class_weights: tuple[float, ...] | None = None
    """Weight of the examples of each class; with `multi_label`, weight of each label."""
    multi_label: bool = False
    word_dropout: float = Field(0.0, ge=0, lt=1)
    """Fraction of a text's tokens that training replaces by `unknown`."""
    unknown: int | None = None
    """Id of the unknown token."""
    firing_rate: float | None = Field(None, ge=0, le=1)
    """Target fraction of time steps in which a unit of a spiking network fires."""
    firing_rate_weight: float = Field(1.0, ge=0)
    pretrained: str | None = None
    """Folder of the weights to start from; for an encoder of transformers, also a hub name."""

    @model_validator(mode="after")
    def _check_fields(self) -> Classification:
        is_text = not isinstance(self.shape, ConvNetShape | SpikingNetShape)
        assert is_text == (self.key == "text"), f"{type(self.shape).__name__} does not read {self.key}"
        weights, count = self.class_weights, self.shape.num_labels
        if weights is not None and len(weights) != count:
            raise UsageError(f"loss.class_weights: {len(weights)} weights for {count} classes; give one for each class")
        if weights is not None and not (min(weights) >= 0 and 0 < sum(weights) < float("inf")):
            raise UsageError(f"loss.class_weights: {list(weights)} must be 0 or more, and not all 0")
        if self.word_dropout and (not is_text or self.unknown is None):
            raise UsageError(
                f"model.word_dropout: {self.word_dropout} needs text and a tokenizer with an unknown token; set it to 0"
            )
        return self

    def specs(self) -> dict[str, ModelSpec]:
        if isinstance(self.shape, PretrainedShape):
            build = "bottega.models.text_classifier.pretrained:build_pretrained"
            return {
                "model": ModelSpec(build, self.shape, pretrained=self.pretrained, load=None, is_seeded=True),
            }
        network, initial = _describe_network(self.shape)
        return {"model": ModelSpec(network, self.shape, initial=initial, pretrained=self.pretrained, is_filled=True)}

    @property
    def noise_names(self) -> tuple[str, ...]:
        codes_spikes = isinstance(self.shape, SpikingNetShape) and self.shape.coding == "rate"
        return (*(("word_dropout",) if self.word_dropout else ()), *(("rate_code",) if codes_spikes else ()))

    def new_modules(self) -> tuple[str, ...]:
        """Return the prefixes of parameters that are not pretrained: the head, and the pooler if the encoder was pretrained
        with a masked-language-model head only."""
        has_new_pooler = False
        if self.pretrained is not None and isinstance(self.shape, PretrainedShape):
            from bottega.models.text_classifier.pretrained import lacks_pooler

            has_new_pooler = lacks_pooler(self.pretrained)
        return ("head", "pooling", *(("backbone.pooler",) if has_new_pooler else ()))

    def counts(self, batch: Batch) -> Mapping[str, float]:
        if self.class_weights is not None and not self.multi_label:
            weights = np.asarray(self.class_weights)[np.asarray(batch["label"])]
        else:
            weights = np.ones(len(batch["labels" if self.multi_label else "label"]))
        if "weight" in batch:
            weights = weights[np.asarray(batch["weight"]) > 0]
        return {
            "loss": float(weights.sum()),
            **({"firing": float(len(weights))} if self.has_firing_rate_target else {}),
        }

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        compute_loss = resolve_reference("bottega.tasks.classify.{framework}:compute_loss", rng.framework)
        loss: Loss = compute_loss(self, models["model"], batch, rng)
        return loss

    @property
    def has_firing_rate_target(self) -> bool:
        """Whether a loss term pulls the firing rate towards `firing_rate`."""
        return self.firing_rate is not None and self.firing_rate_weight > 0

    @property
    def has_modified_loss(self) -> bool:
        """Whether the minimised loss differs from plain cross-entropy."""
        return not self.build_loss().is_cross_entropy or self.class_weights is not None

    def build_loss(self) -> ClassificationLoss:
        """Return the loss of single examples, without class weights."""
        return find_loss(self.objective)(gamma=self.gamma, label_smoothing=self.label_smoothing)

    def predict(self, models: Models, batch: Batch) -> Array:
        """Return logits, (batch, classes), of a batch on the device of the model."""
        model = models["model"]
        compute_logits = resolve_reference("bottega.tasks.classify.{framework}:compute_logits", find_framework(model))
        return compute_logits(self, model, batch)

    def predict_probabilities(self, models: Models, batch: Batch, *, device: Any) -> np.ndarray:
        """Return class probabilities, float32 (batch, classes), of a host batch. With `multi_label`, rows do not sum to 1."""
        model = models["model"]
        predict = resolve_reference("bottega.tasks.classify.{framework}:predict_probabilities", find_framework(model))
        probabilities: np.ndarray = predict(self, model, batch, device=device)
        return probabilities

    def predict_with_features(
        self, models: Models, samples: np.ndarray, *, device: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the class probabilities, (n, classes), and the inputs of the head, (n, features), of samples of a medium."""
        model = models["model"]
        predict = resolve_reference("bottega.tasks.classify.{framework}:predict_with_features", find_framework(model))
        outputs: tuple[np.ndarray, np.ndarray] = predict(model, samples, device=device)
        return outputs

    def bucket(self, batch: Batch) -> Batch:
        """Return the batch with texts padded to one of few lengths; padding has no influence."""
        if "input_ids" not in batch:
            return batch
        length, limit = batch["input_ids"].shape[1], getattr(self.shape, "max_positions", None)
        new_length = round_up_length(length) if limit is None else min(round_up_length(length), limit)
        names = ("input_ids", "attention_mask")
        return {**batch, **{name: np.pad(batch[name], ((0, 0), (0, new_length - length))) for name in names}}

    def score(self, rows: Rows) -> dict[str, float]:
        metrics = classification.classification_metrics(
            rows["probability"], rows["labels" if self.multi_label else "label"]
        )
        if "units" not in rows:
            return metrics
        from bottega.models.spiking.units import unit_activity_metrics

        return metrics | unit_activity_metrics(rows["units"])


def round_up_length(length: int) -> int:
    """Return a length of at least `length`: one of few, which an engine may have to compile for.

    32, 64, 96, 128, 192, 256, 384, 512, ...: four lengths up to 128, and two for each doubling beyond.
    """
    multiple = max(MIN_LENGTH_MULTIPLE, 1 << max(0, (length - 1).bit_length() - 2))
    return -(-length // multiple) * multiple


def _describe_network(shape: Network) -> tuple[str, Initial]:
    """Return the architecture of a shape and the rule of its initial values."""
    network, rule = NETWORKS[type(shape)]
    options: dict[str, Any] = {}
    if isinstance(shape, ConvNetShape):
        options = {"residual_layers": shape.num_blocks}
    elif isinstance(shape, EncoderShape):
        options = {"residual_layers": shape.num_layers}
    if getattr(shape, "num_buckets", None) is not None:  # n-grams have no JAX form
        network, rule = network.format(framework="torch"), rule.format(framework="torch")
    return network, Initial(rule, options)
