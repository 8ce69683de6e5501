"""Cross-entropy over the classes, or binary cross-entropy of each class for multi-label examples."""

from __future__ import annotations

from typing import final

import torch.nn.functional as F
from torch import Tensor

from bottega.tasks.classify.losses.base import ClassificationLoss


@final
class CrossEntropy(ClassificationLoss):
    """Cross-entropy with label smoothing."""

    @property
    def is_cross_entropy(self) -> bool:
        return self.label_smoothing == 0

    def per_example(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, reduction="none", label_smoothing=self.label_smoothing)

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        smoothed_labels = labels * (1 - self.label_smoothing) + self.label_smoothing / 2
        return F.binary_cross_entropy_with_logits(logits, smoothed_labels, reduction="none")


LOSS = CrossEntropy
