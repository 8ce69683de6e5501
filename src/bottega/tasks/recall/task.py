"""Associative recall: predict the value of a key that was stated outside the current context."""

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
from bottega.models.losses import IGNORE_INDEX
from bottega.models.memory import torch as memories
from bottega.models.memory.config import MemoryShape, WorkingMemory

ACCURACY = "retrieval_accuracy"
ACCURACY_WITHOUT_MEMORY = f"{ACCURACY}_without_memory"
MEMORY_PREFIX = "memory."
"""Prefix of the buffer names of a lasting memory."""


class Recall(Task):
    """Cross-entropy over the values at each query.

    A batch has `tokens` and `answers` of the same shape, (batch, ...): the number of the correct value at a query, -100
    elsewhere. Optional: `weight` (batch,), 0 for a padding row; `measured` (batch,), whose presence adds metrics of an
    evaluation, among them the accuracy without memory.
    """

    shape: TransformerShape
    num_values: int

    @property
    @abstractmethod
    def has_memory(self) -> bool:
        """Whether the model has a memory beyond its context."""

    @property
    def initial(self) -> Initial:
        return Initial("bottega.models.initial:initialise", {"residual_layers": self.shape.num_layers})

    @abstractmethod
    def predict_scores(self, models: Models, tokens: Tensor, *, with_memory: bool = True) -> Tensor:
        """Return the logits of the values at every token, (..., values)."""

    def counts(self, batch: Batch) -> Mapping[str, float]:
        is_query = np.asarray(batch["answers"]) != IGNORE_INDEX
        if "weight" in batch:
            weight = np.asarray(batch["weight"]) > 0
            is_query = is_query & weight.reshape(-1, *[1] * (is_query.ndim - 1))
        return {"loss": float(is_query.sum())}

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        answers = batch["answers"]
        if "weight" in batch:
            is_counted = (batch["weight"] > 0).view(-1, *[1] * (answers.dim() - 1))
            answers = answers.masked_fill(~is_counted, IGNORE_INDEX)
        scores = self.predict_scores(models, batch["tokens"]).float()
        total = F.cross_entropy(scores.flatten(0, -2), answers.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
        is_query = answers != IGNORE_INDEX
        is_correct = (scores.argmax(-1) == answers) & is_query
        metrics: Sums = {ACCURACY: (is_correct.sum(), is_query.sum())}
        if "measured" in batch:
            metrics |= self.compute_evaluation_sums(is_correct, is_query)
            if self.has_memory:
                with torch.no_grad():
                    predicted = self.predict_scores(models, batch["tokens"], with_memory=False).argmax(-1)
                metrics[ACCURACY_WITHOUT_MEMORY] = (((predicted == answers) & is_query).sum(), is_query.sum())
        return Loss(terms={"loss": (total, 1.0)}, metrics=metrics, rows=self.select_update_rows(batch))

    def compute_evaluation_sums(self, is_correct: Tensor, is_query: Tensor) -> Sums:
        """Return further metrics of an evaluation."""
        return {}

    def select_update_rows(self, batch: Batch) -> dict[str, Tensor]:
        """Return what `update` needs of each example, by the names in `update_inputs`; arrays of (batch, ...)."""
        return {}


class RecallStreams(Recall):
    """Recall within a stream: tokens (batch, segments, length), with a memory carried from segment to segment."""

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

    def compute_evaluation_sums(self, is_correct: Tensor, is_query: Tensor) -> Sums:
        """Return the accuracy, as (correct, total), by the distance in segments of a query from the first, which states the facts."""
        correct, total = is_correct.sum((0, 2)), is_query.sum((0, 2))
        return {f"distance_{d}/{ACCURACY}": (correct[d], total[d]) for d in range(1, len(total))}


class RecallFacts(Recall):
    """Recall across samples: tokens (batch, length), one segment each, in order.

    A batch also has `stated` (batch, pairs, 2), the key and value tokens to store, and `queried` (batch, queries), the key tokens
    that are queried. The memory is part of the model's buffers and changes in `update`.
    """

    update_inputs: ClassVar[tuple[str, ...]] = ("stated", "queried")

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

    def select_update_rows(self, batch: Batch) -> dict[str, Tensor]:
        if self.memory is None or "stated" not in batch:
            return {}
        return {"stated": batch["stated"], "queried": batch["queried"]}

    def update(self, tensors: Mapping[str, Array], batch_stats: Mapping[str, Array], rng: Noise) -> Mapping[str, Array]:
        """Return the memory after a step: record the uses of queried entries, store stated facts, then consolidate.

        `batch_stats` holds the rows named in `update_inputs`, of the global batch.
        """
        if self.memory is None:
            return {}
        codes, shape, step = tensors["codes"], self.memory, rng.step
        memory = memories.unflatten_memory(
            {name.removeprefix(MEMORY_PREFIX): t for name, t in tensors.items() if name.startswith(MEMORY_PREFIX)}
        )
        # `same` is the cosine from which two keys count as the same.
        matches = memories.search(memory, codes[batch_stats["queried"].flatten()], 1, same=shape.same)
        memory = memories.record_use(memory, matches, step, same=shape.same)
        stated = codes[batch_stats["stated"].flatten(0, 1)]
        importance = torch.ones(len(stated), device=codes.device)
        memory = memories.store(memory, stated[:, 0], stated[:, 1], importance, step, shape=shape)
        memory = memories.consolidate(memory, step, shape=shape)
        return {MEMORY_PREFIX + name: tensor for name, tensor in memories.flatten_memory(memory).items()}
