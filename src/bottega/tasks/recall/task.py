"""Recall: tell the value of a key that was stated when it was still in sight."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bottega.core.model_spec import Initial, ModelSpec
from bottega.core.noise import Noise
from bottega.core.task import Task
from bottega.core.types import Array, Batch, Loss, Models, Sums
from bottega.models.decoder.config import TransformerShape
from bottega.models.losses.token_loss import IGNORE_INDEX
from bottega.models.memory import torch as memories
from bottega.models.memory.config import MemoryShape, WorkingMemory

ACCURACY = "retrieval_accuracy"
ACCURACY_WITHOUT_MEMORY = f"{ACCURACY}_without_memory"
MEMORY_PREFIX = "memory."
"""What the buffers of a lasting memory begin with."""


class Recall(Task):
    """A batch holds `tokens` and `answers`, [b, ...] alike: the number of the value that is to be told, -100 elsewhere.

    Optional: `weight` [b], where 0 marks a row that counts nowhere; `measured` [b], with which the same weights are also asked
    without their memory.
    """

    shape: TransformerShape
    num_values: int

    @property
    @abstractmethod
    def has_memory(self) -> bool: ...

    @property
    def initial(self) -> Initial:
        return Initial("bottega.models.initial:initialise", {"residual_layers": self.shape.num_layers})

    @abstractmethod
    def predict_scores(self, models: Models, tokens: Tensor, *, with_memory: bool = True) -> Tensor:
        """Scores of the values at every token."""

    def counts(self, batch: Batch) -> Mapping[str, float]:
        asked = np.asarray(batch["answers"]) != IGNORE_INDEX
        if "weight" in batch:
            weight = np.asarray(batch["weight"]) > 0
            asked = asked & weight.reshape(-1, *[1] * (asked.ndim - 1))
        return {"loss": float(asked.sum())}

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        answers = batch["answers"]
        if "weight" in batch:
            counted = (batch["weight"] > 0).view(-1, *[1] * (answers.dim() - 1))
            answers = answers.masked_fill(~counted, IGNORE_INDEX)
        scores = self.predict_scores(models, batch["tokens"]).float()
        total = F.cross_entropy(scores.flatten(0, -2), answers.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
        asked = answers != IGNORE_INDEX
        right = (scores.argmax(-1) == answers) & asked
        metrics: Sums = {ACCURACY: (right.sum(), asked.sum())}
        if "measured" in batch:
            metrics |= self.evaluation_sums(right, asked)
            if self.has_memory:
                with torch.no_grad():
                    alone = self.predict_scores(models, batch["tokens"], with_memory=False).argmax(-1)
                metrics[ACCURACY_WITHOUT_MEMORY] = (((alone == answers) & asked).sum(), asked.sum())
        return Loss(terms={"loss": (total, 1.0)}, metrics=metrics, rows=self.update_rows(batch))

    def evaluation_sums(self, right: Tensor, asked: Tensor) -> Sums:
        """What an evaluation says besides."""
        return {}

    def update_rows(self, batch: Batch) -> dict[str, Tensor]:
        """What the update learns from each example."""
        return {}


class RecallStreams(Recall):
    """Tokens [b, segments, T]; a memory goes from segment to segment and from nowhere else."""

    memory: WorkingMemory | None

    @property
    def has_memory(self) -> bool:
        return self.memory is not None

    def specs(self) -> dict[str, ModelSpec]:
        options = {"num_values": self.num_values, "memory": self.memory}
        model = ModelSpec("bottega.models.recall.torch:StreamRecall", self.shape, options, initial=self.initial)
        return {"model": model}

    def predict_scores(self, models: Models, tokens: Tensor, *, with_memory: bool = True) -> Tensor:
        scores: Tensor = models["model"](tokens, with_memory=with_memory)[0]
        return scores

    def evaluation_sums(self, right: Tensor, asked: Tensor) -> Sums:
        """By how many segments lie between a fact and the question for it."""
        right, asked = right.sum((0, 2)), asked.sum((0, 2))
        return {f"distance_{d}/{ACCURACY}": (right[d], asked[d]) for d in range(1, len(asked))}


class RecallFacts(Recall):
    """Tokens [b, T], one segment each, in order; with `stated` [b, p, 2], the tokens of keys and values that are to be
    remembered, and `asked` [b, q], those of the keys that were asked for. The memory is part of the model's buffers."""

    update_inputs: ClassVar[tuple[str, ...]] = ("stated", "asked")

    memory: MemoryShape | None
    temperature: float = 0.1

    @property
    def has_memory(self) -> bool:
        return self.memory is not None

    def specs(self) -> dict[str, ModelSpec]:
        options = {"num_values": self.num_values, "temperature": self.temperature, "memory": self.memory}
        architecture = "bottega.models.recall.torch:LastingRecall"
        return {"model": ModelSpec(architecture, self.shape, options, initial=self.initial, is_seeded=True)}

    def predict_scores(self, models: Models, tokens: Tensor, *, with_memory: bool = True) -> Tensor:
        scores: Tensor = models["model"](tokens, with_memory=with_memory)
        return scores

    def update_rows(self, batch: Batch) -> dict[str, Tensor]:
        if self.memory is None or "stated" not in batch:
            return {}
        return {"stated": batch["stated"], "asked": batch["asked"]}

    def update(self, tensors: Mapping[str, Array], seen: Mapping[str, Array], rng: Noise) -> Mapping[str, Array]:
        """What was asked for was of use; then what was stated is stored, and what is ripe becomes a prototype."""
        if self.memory is None:
            return {}
        codes, shape, step = tensors["codes"], self.memory, rng.step
        memory = memories.unflatten_memory(
            {name.removeprefix(MEMORY_PREFIX): t for name, t in tensors.items() if name.startswith(MEMORY_PREFIX)}
        )
        found = memories.search(memory, codes[seen["asked"].flatten()], 1, same=shape.same)
        memory = memories.record_use(memory, found, step, same=shape.same)
        stated = codes[seen["stated"].flatten(0, 1)]
        importance = torch.ones(len(stated), device=codes.device)
        memory = memories.store(memory, stated[:, 0], stated[:, 1], importance, step, shape=shape)
        memory = memories.consolidate(memory, step, shape=shape)
        return {MEMORY_PREFIX + name: tensor for name, tensor in memories.flatten_memory(memory).items()}
