"""What a loss of classification decides: what each example costs, with one class and with any number of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ClassificationLoss(ABC):
    """Weights of classes come on top, and are the task's."""

    gamma: float
    label_smoothing: float

    @property
    @abstractmethod
    def is_cross_entropy(self) -> bool:
        """Whether it is the same number as the cross-entropy."""

    @abstractmethod
    def per_example(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cost of each example [b], from logits [b, K] and numbers of classes [b]."""

    @abstractmethod
    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cost of each question [b, K], from logits [b, K] and labels of 0 and 1 [b, K]."""
