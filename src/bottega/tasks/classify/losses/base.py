"""The interface of a classification loss, for single-label and multi-label examples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ClassificationLoss(ABC):
    """A loss without class weights, which the task applies on top."""

    gamma: float
    label_smoothing: float

    @property
    @abstractmethod
    def is_cross_entropy(self) -> bool:
        """Whether the loss equals plain cross-entropy."""

    @abstractmethod
    def per_example(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each example, (batch,), from logits (batch, classes) and class numbers (batch,)."""

    @abstractmethod
    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each label, (batch, classes), from logits and 0/1 labels, both (batch, classes)."""
