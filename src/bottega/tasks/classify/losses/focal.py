"""The focal loss (Lin et al., 2017): cross-entropy that down-weights examples which are already classified well."""

from __future__ import annotations

from functools import cached_property
from typing import final

from bottega.core.types import Array
from bottega.tasks.classify.losses.base import ClassificationLoss, Operations
from bottega.tasks.classify.losses.cross_entropy import CrossEntropy

MIN_ERROR_PROBABILITY = 1e-7
"""Lower bound of 1 - p: at 0, the gradient would be infinite for a gamma below 1."""


@final
class Focal(ClassificationLoss):
    """Cross-entropy times (1 - p) ** gamma, where p is the probability of the correct class."""

    @cached_property
    def _cross_entropy(self) -> CrossEntropy:
        return CrossEntropy(gamma=self.gamma, label_smoothing=self.label_smoothing)

    @property
    def is_cross_entropy(self) -> bool:
        return self.gamma == 0 and self._cross_entropy.is_cross_entropy

    def per_example(self, logits: Array, labels: Array, operations: Operations) -> Array:
        error_probability = 1 - operations.select_class(operations.softmax(logits), labels)
        cross_entropy = self._cross_entropy.per_example(logits, labels, operations)
        return cross_entropy * self._compute_factor(error_probability)

    def per_label(self, logits: Array, labels: Array, operations: Operations) -> Array:
        error_probability = operations.sigmoid(operations.where(labels > 0, -logits, logits))
        cross_entropy = self._cross_entropy.per_label(logits, labels, operations)
        return cross_entropy * self._compute_factor(error_probability)

    def _compute_factor(self, error_probability: Array) -> Array:
        return error_probability.clip(min=MIN_ERROR_PROBABILITY) ** self.gamma


LOSS = Focal
