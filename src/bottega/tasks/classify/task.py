"""Classification of texts, images, audio or video into one class or several."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from bottega.core.errors import UsageError
from bottega.core.model_spec import Initial, ModelSpec
from bottega.core.noise import Noise
from bottega.core.task import Task
from bottega.core.types import Batch, Loss, Models, Rows, Sums
from bottega.models.convnet.config import ConvNetShape
from bottega.models.spiking.config import SpikingNetShape
from bottega.models.spiking.units import firing_rate_penalties, sum_activity, unit_activity, unit_activity_metrics
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

NETWORKS: dict[type, tuple[str, str]] = {
    ConvNetShape: ("bottega.models.convnet.torch:ConvNet", "bottega.models.convnet.torch:initialise_convnet"),
    SpikingNetShape: (
        "bottega.models.spiking.network:SpikingNet",
        "bottega.models.spiking.network:initialise_spiking",
    ),
    NgramShape: (
        "bottega.models.text_classifier.ngrams:NgramClassifier",
        "bottega.models.text_classifier.ngrams:initialise_ngrams",
    ),
    KimShape: ("bottega.models.text_classifier.kim:Kim", "bottega.models.text_classifier.kim:initialise_kim"),
    EncoderShape: (
        "bottega.models.text_classifier.encoder:TextClassifier",
        "bottega.models.text_classifier.encoder:initialise_encoder",
    ),
}
"""Shape -> network and the function that initialises it."""


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
        network, initialiser = NETWORKS[type(self.shape)]
        model = ModelSpec(network, self.shape, initial=Initial(initialiser), pretrained=self.pretrained, is_filled=True)
        return {"model": model}

    def new_modules(self) -> tuple[str, ...]:
        """Return the prefixes of parameters that are not pretrained: the head, and the pooler if the encoder was pretrained
        with a masked-language-model head only."""
        from bottega.models.text_classifier.pretrained import lacks_pooler

        has_new_pooler = self.pretrained is not None and lacks_pooler(self.pretrained)
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
        logits, spikes = self._forward(models, batch, rng if models["model"].training else None)
        logits = logits.float()
        labels = batch["labels"].float() if self.multi_label else batch["label"].long()
        losses = (
            self._compute_multi_label_loss(logits, labels)
            if self.multi_label
            else self._compute_single_label_loss(logits, labels)
        )
        is_counted = batch["weight"] > 0 if "weight" in batch else torch.ones_like(losses, dtype=torch.bool)
        # Select instead of multiplying: padding rows may have any value, and 0 times infinity is not a number.
        total = torch.where(is_counted, losses, 0.0).sum()
        outputs = logits.detach()
        if self.multi_label:
            is_correct = (outputs >= 0) == (labels > 0)
            correct = {"exact_match": is_correct.all(1), "label_accuracy": is_correct.float().mean(1)}
            rows = {"probability": outputs.sigmoid(), "labels": labels}
        else:
            correct = {"accuracy": outputs.argmax(dim=1) == labels}
            rows = {"probability": outputs.softmax(dim=1), "label": labels}
        if self.has_modified_loss and not models["model"].training:
            metrics = self._compute_evaluation_metrics(outputs, labels, is_counted, correct, total)
        else:
            metrics = _sum_counted(correct, is_counted)
        out = Loss(terms={"loss": (total, 1.0)}, metrics=metrics, rows=rows)
        return self._add_firing_rate(out, spikes, is_counted) if spikes else out

    def _add_firing_rate(self, out: Loss, spikes: tuple[Tensor, ...], is_counted: Tensor) -> Loss:
        """Add the firing rate, its loss term, and for each unit whether it is dead or saturated."""
        assert isinstance(self.shape, SpikingNetShape)
        spike_trains = torch.cat(spikes, dim=2)
        terms, metrics = (
            dict(out.terms),
            {**out.metrics, "firing_rate": sum_activity(spike_trains, is_counted)["firing_rate"]},
        )
        if self.has_firing_rate_target:
            assert self.firing_rate is not None
            penalties = torch.stack([firing_rate_penalties(layer, self.firing_rate) for layer in spikes]).mean(0)
            terms["firing"] = (torch.where(is_counted, penalties, 0.0).sum(), self.firing_rate_weight)
        return Loss(terms, metrics, {**out.rows, "units": unit_activity(spike_trains, self.shape.neuron.highest_rate)})

    @property
    def has_firing_rate_target(self) -> bool:
        """Whether a loss term pulls the firing rate towards `firing_rate`."""
        return self.firing_rate is not None and self.firing_rate_weight > 0

    @property
    def has_modified_loss(self) -> bool:
        """Whether the minimised loss differs from plain cross-entropy."""
        return not self._loss.is_cross_entropy or self.class_weights is not None

    @property
    def _loss(self) -> ClassificationLoss:
        return find_loss(self.objective)(gamma=self.gamma, label_smoothing=self.label_smoothing)

    def _compute_evaluation_metrics(
        self, logits: Tensor, labels: Tensor, is_counted: Tensor, correct: Mapping[str, Tensor], total: Tensor
    ) -> Sums:
        """Return the metrics of an evaluation if the loss is modified.

        `loss` is plain cross-entropy in nats, so that runs can be compared; the minimised value is `objective`. (A metric
        takes precedence over the loss term of the same name.)
        """
        if self.multi_label:
            cross_entropy = F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(1)
        else:
            cross_entropy = F.cross_entropy(logits, labels, reduction="none")
        weights = is_counted.float()
        if self.class_weights is not None and not self.multi_label:
            weights = weights * _copy_weights(self.class_weights, logits.device)[labels]
        return {
            **_sum_counted({**correct, "loss": cross_entropy}, is_counted),
            "objective": (total.detach(), weights.sum()),
        }

    def predict(self, models: Models, batch: Batch) -> Tensor:
        """Return logits, (batch, classes)."""
        return self._forward(models, batch, None)[0]

    def score(self, rows: Rows) -> dict[str, float]:
        metrics = classification.classification_metrics(
            rows["probability"], rows["labels" if self.multi_label else "label"]
        )
        return metrics | unit_activity_metrics(rows["units"]) if "units" in rows else metrics

    def _forward(self, models: Models, batch: Batch, rng: Noise | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the logits, and for a spiking network the spikes of each layer.

        With `rng`, in training, words are dropped and pixels become spikes at random; without, the result is deterministic.
        """
        model = models["model"]
        if isinstance(self.shape, SpikingNetShape):
            inputs: dict[str, Tensor] = {}
            if rng is not None and self.shape.coding == "rate":
                inputs["draws"] = rng.uniform("rate_code", (self.shape.neuron.time_steps, self.shape.num_inputs))
            logits, spikes = model(batch[self.key], **inputs)
            return logits, spikes
        return self._compute_logits(model, batch, rng), ()

    def _compute_logits(self, model: Any, batch: Batch, rng: Noise | None) -> Tensor:
        if self.key != "text":
            return model(batch[self.key])
        ngrams = (batch["ngram_ids"].long(), batch["ngram_weights"]) if "ngram_ids" in batch else ()
        if isinstance(self.shape, NgramShape):
            return model(*ngrams)
        ids, mask = batch["input_ids"].long(), batch["attention_mask"] > 0
        if self.word_dropout and rng is not None:
            assert self.unknown is not None
            length = ids.shape[1]
            draws = rng.uniform("word_dropout", (-(-length // DRAWS_MULTIPLE) * DRAWS_MULTIPLE,))[:, :length]
            ids = torch.where((draws < self.word_dropout) & mask, self.unknown, ids)
        return model(ids, mask, *ngrams)

    def _compute_single_label_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each example times the weight of its class, (batch,)."""
        losses = self._loss.per_example(logits, labels)
        return (
            losses if self.class_weights is None else losses * _copy_weights(self.class_weights, logits.device)[labels]
        )

    def _compute_multi_label_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the weighted mean of each example's losses over the classes, (batch,)."""
        losses = self._loss.per_label(logits, labels)
        if self.class_weights is None:
            return losses.mean(1)
        weights = _copy_weights(self.class_weights, logits.device)
        return (losses * weights).sum(1) / weights.sum()


def _sum_counted(values: Mapping[str, Tensor], is_counted: Tensor) -> Sums:
    count = is_counted.float().sum()
    return {name: (torch.where(is_counted, value, 0).float().sum(), count) for name, value in values.items()}


@lru_cache(maxsize=16)
def _copy_weights(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Class weights on `device`, cached because copying them makes the host wait."""
    return torch.tensor(values, device=device)
