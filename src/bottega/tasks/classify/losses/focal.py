"""The focal loss (Lin et al., 2017): cross-entropy that down-weights examples which are already classified well."""

from __future__ import annotations

from functools import cached_property
from typing import final

import torch
from torch import Tensor

from bottega.tasks.classify.losses.base import ClassificationLoss
from bottega.tasks.classify.losses.cross_entropy import CrossEntropy

SMALLEST_MISS = 1e-7
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

    def per_example(self, logits: Tensor, labels: Tensor) -> Tensor:
        missed = 1 - logits.softmax(dim=1).gather(1, labels[:, None])[:, 0]
        return self._cross_entropy.per_example(logits, labels) * self._factor(missed)

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        missed = torch.where(labels > 0, -logits, logits).sigmoid()
        return self._cross_entropy.per_label(logits, labels) * self._factor(missed)

    def _factor(self, missed: Tensor) -> Tensor:
        return missed.clamp(min=SMALLEST_MISS) ** self.gamma


LOSS = Focal
