"""Cross-entropy over the classes, or binary cross-entropy of each class for multi-label examples."""

from __future__ import annotations

from typing import final

from bottega.core.types import Array
from bottega.tasks.classify.losses.base import ClassificationLoss, Operations


@final
class CrossEntropy(ClassificationLoss):
    """Cross-entropy with label smoothing."""

    @property
    def is_cross_entropy(self) -> bool:
        return self.label_smoothing == 0

    def per_example(self, logits: Array, labels: Array, operations: Operations) -> Array:
        return operations.cross_entropy(logits, labels, self.label_smoothing)

    def per_label(self, logits: Array, labels: Array, operations: Operations) -> Array:
        smoothed_labels = labels * (1 - self.label_smoothing) + self.label_smoothing / 2
        return operations.binary_cross_entropy(logits, smoothed_labels)


LOSS = CrossEntropy
