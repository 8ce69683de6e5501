"""Classification: which class, or which of several, a text, a picture, a sound or a video is of."""

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
from bottega.models.spiking.units import activity_sums, firing_rate_penalties, unit_activity, unit_activity_metrics
from bottega.models.text_classifier.config import EncoderShape, KimShape, PretrainedShape, TextClassifierShape
from bottega.tasks.classify.losses import LossName, find_loss
from bottega.tasks.classify.losses.base import ClassificationLoss
from bottega.tasks.measures import classification

DRAWN_AT_ONCE = 64
"""Draws of a text are asked for in multiples of this: on a GPU each number of them is compiled anew, and the first of
them are the same however many there are."""

NETWORKS: dict[type, tuple[str, str]] = {
    ConvNetShape: ("bottega.models.convnet.torch:ConvNet", "bottega.models.convnet.torch:initialise_convnet"),
    SpikingNetShape: (
        "bottega.models.spiking.network:SpikingNet",
        "bottega.models.spiking.network:initialise_spiking",
    ),
    KimShape: ("bottega.models.text_classifier.kim:Kim", "bottega.models.text_classifier.kim:initialise_kim"),
    EncoderShape: (
        "bottega.models.text_classifier.encoder:TextClassifier",
        "bottega.models.text_classifier.encoder:initialise_encoder",
    ),
}
"""Shape -> its network and the rule of its initial values."""


class Classification(Task):
    """A batch of texts holds `input_ids` and `attention_mask` [b, T], where 0 fills up a row at its end; any other holds
    the samples under `key`, [b, *grid, C]. With them comes `label` [b], the number of the class; or, where an example may
    be of several, `labels` [b, K] of 0 and 1.

    Optional: `weight` [b], where 0 marks a padding row that counts nowhere.
    """

    key: Literal["image", "mel", "video", "text"]
    shape: ConvNetShape | SpikingNetShape | TextClassifierShape
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    objective: LossName = "cross_entropy"
    gamma: float = Field(2.0, ge=0)
    """Of the focal loss: by how much examples that are told already count less (Lin et al., 2017)."""
    class_weights: tuple[float, ...] | None = None
    """How much an example of each class counts; with several labels, how much the question for each class does."""
    multi_label: bool = False
    word_dropout: float = Field(0.0, ge=0, lt=1)
    """The share of a text's tokens that training replaces by `unknown`."""
    unknown: int | None = None
    firing_rate: float | None = Field(None, ge=0, le=1)
    """Of a spiking network: the share of the steps in which its units are to fire."""
    firing_rate_weight: float = Field(1.0, ge=0)
    pretrained: str | None = None
    """A folder, or for an encoder of transformers a hub name, whose weights the training starts from."""

    @model_validator(mode="after")
    def _fits_together(self) -> Classification:
        is_text = not isinstance(self.shape, ConvNetShape | SpikingNetShape)
        assert is_text == (self.key == "text"), f"{type(self.shape).__name__} does not read {self.key}"
        weights, count = self.class_weights, self.shape.num_labels
        if weights is not None and len(weights) != count:
            raise UsageError(f"loss.class_weights: {len(weights)} are given, and there are {count} classes")
        if weights is not None and not (min(weights) >= 0 and 0 < sum(weights) < float("inf")):
            raise UsageError(f"loss.class_weights: {list(weights)} must be 0 or more, and not all of them 0")
        if self.word_dropout and (not is_text or self.unknown is None):
            raise UsageError(
                f"model.word_dropout: {self.word_dropout} needs texts, and a token that stands for an unknown word"
            )
        return self

    def specs(self) -> dict[str, ModelSpec]:
        if isinstance(self.shape, PretrainedShape):
            whole = "bottega.models.text_classifier.pretrained:build_pretrained"
            return {
                "model": ModelSpec(whole, self.shape, pretrained=self.pretrained, load=None, is_seeded=True),
            }
        network, rule = NETWORKS[type(self.shape)]
        model = ModelSpec(network, self.shape, initial=Initial(rule), pretrained=self.pretrained, is_filled=True)
        return {"model": model}

    def new_modules(self) -> tuple[str, ...]:
        """The head. An encoder that was trained to fill in words has nothing before it either."""
        from bottega.models.text_classifier.pretrained import lacks_pooler

        is_bare = self.pretrained is not None and lacks_pooler(self.pretrained)
        return ("head", "pooling", *(("backbone.pooler",) if is_bare else ()))

    def counts(self, batch: Batch) -> Mapping[str, float]:
        if self.class_weights is not None and not self.multi_label:
            each = np.asarray(self.class_weights)[np.asarray(batch["label"])]
        else:
            each = np.ones(len(batch["labels" if self.multi_label else "label"]))
        if "weight" in batch:
            each = each[np.asarray(batch["weight"]) > 0]
        return {"loss": float(each.sum()), **({"firing": float(len(each))} if self.has_firing_rate_target else {})}

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        logits, spikes = self._told(models, batch, rng if models["model"].training else None)
        logits = logits.float()
        labels = batch["labels"].float() if self.multi_label else batch["label"].long()
        each = self._several(logits, labels) if self.multi_label else self._single(logits, labels)
        counted = batch["weight"] > 0 if "weight" in batch else torch.ones_like(each, dtype=torch.bool)
        # Selected rather than multiplied: what fills up a batch may be of any value, and 0 times infinity is none.
        total = torch.where(counted, each, 0.0).sum()
        found = logits.detach()
        if self.multi_label:
            is_right = (found >= 0) == (labels > 0)
            right = {"exact_match": is_right.all(1), "label_accuracy": is_right.float().mean(1)}
            rows = {"probability": found.sigmoid(), "labels": labels}
        else:
            right = {"accuracy": found.argmax(dim=1) == labels}
            rows = {"probability": found.softmax(dim=1), "label": labels}
        if self.has_modified_loss and not models["model"].training:
            metrics = self._measured(found, labels, counted, right, total)
        else:
            metrics = _means(right, counted)
        out = Loss(terms={"loss": (total, 1.0)}, metrics=metrics, rows=rows)
        return self._with_firing(out, spikes, counted) if spikes else out

    def _with_firing(self, out: Loss, spikes: tuple[Tensor, ...], counted: Tensor) -> Loss:
        """Also how often units fire, what it costs, and which of them do so never or always."""
        assert isinstance(self.shape, SpikingNetShape)
        trains = torch.cat(spikes, dim=2)
        terms, metrics = dict(out.terms), {**out.metrics, "firing_rate": activity_sums(trains, counted)["firing_rate"]}
        if self.has_firing_rate_target:
            assert self.firing_rate is not None
            each = torch.stack([firing_rate_penalties(one, self.firing_rate) for one in spikes]).mean(0)
            terms["firing"] = (torch.where(counted, each, 0.0).sum(), self.firing_rate_weight)
        return Loss(terms, metrics, {**out.rows, "units": unit_activity(trains, self.shape.neuron.highest_rate)})

    @property
    def has_firing_rate_target(self) -> bool:
        """Whether units are held to a rate."""
        return self.firing_rate is not None and self.firing_rate_weight > 0

    @property
    def has_modified_loss(self) -> bool:
        """Whether what is minimised is another number than the cross-entropy."""
        return not self._rule.is_cross_entropy or self.class_weights is not None

    @property
    def _rule(self) -> ClassificationLoss:
        return find_loss(self.objective)(gamma=self.gamma, label_smoothing=self.label_smoothing)

    def _measured(
        self, logits: Tensor, labels: Tensor, counted: Tensor, right: Mapping[str, Tensor], total: Tensor
    ) -> Sums:
        """An evaluation calls `loss` what it is in every run, so that runs can be compared: nats. A metric stands before
        the term of the same name, which is called `objective`."""
        if self.multi_label:
            plain = F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(1)
        else:
            plain = F.cross_entropy(logits, labels, reduction="none")
        weights = counted.float()
        if self.class_weights is not None and not self.multi_label:
            weights = weights * _weights(self.class_weights, logits.device)[labels]
        return {**_means({**right, "loss": plain}, counted), "objective": (total.detach(), weights.sum())}

    def predict(self, models: Models, batch: Batch) -> Tensor:
        """Logits [b, K]."""
        return self._told(models, batch, None)[0]

    def score(self, rows: Rows) -> dict[str, float]:
        found = classification.classification_metrics(
            rows["probability"], rows["labels" if self.multi_label else "label"]
        )
        return found | unit_activity_metrics(rows["units"]) if "units" in rows else found

    def _told(self, models: Models, batch: Batch, rng: Noise | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Logits, and of a spiking network the spikes of each layer. `rng` where training is to be noisy: words are dropped,
        and pixels become spikes by chance. An answer is the same every time."""
        model = models["model"]
        if isinstance(self.shape, SpikingNetShape):
            drawn: dict[str, Tensor] = {}
            if rng is not None and self.shape.coding == "rate":
                drawn["draws"] = rng.uniform("rate_code", (self.shape.neuron.time_steps, self.shape.num_inputs))
            logits, spikes = model(batch[self.key], **drawn)
            return logits, spikes
        return self._logits(model, batch, rng), ()

    def _logits(self, model: Any, batch: Batch, rng: Noise | None) -> Tensor:
        if self.key != "text":
            return model(batch[self.key])
        ids, mask = batch["input_ids"].long(), batch["attention_mask"] > 0
        if self.word_dropout and rng is not None:
            assert self.unknown is not None
            length = ids.shape[1]
            drawn = rng.uniform("word_dropout", (-(-length // DRAWN_AT_ONCE) * DRAWN_AT_ONCE,))[:, :length]
            ids = torch.where((drawn < self.word_dropout) & mask, self.unknown, ids)
        return model(ids, mask)

    def _single(self, logits: Tensor, labels: Tensor) -> Tensor:
        """[b]: of each example, with the weight of its class."""
        each = self._rule.per_example(logits, labels)
        return each if self.class_weights is None else each * _weights(self.class_weights, logits.device)[labels]

    def _several(self, logits: Tensor, labels: Tensor) -> Tensor:
        """[b]: of each example the mean over its K questions, by the weights of their classes."""
        each = self._rule.per_label(logits, labels)
        if self.class_weights is None:
            return each.mean(1)
        weights = _weights(self.class_weights, logits.device)
        return (each * weights).sum(1) / weights.sum()


def _means(values: Mapping[str, Tensor], counted: Tensor) -> Sums:
    number = counted.float().sum()
    return {name: (torch.where(counted, each, 0).float().sum(), number) for name, each in values.items()}


@lru_cache(maxsize=16)
def _weights(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Once for each device: the host would wait for the copy."""
    return torch.tensor(values, device=device)
