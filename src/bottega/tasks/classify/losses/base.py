"""The interface of a classification loss, for single-label and multi-label examples, in torch and in JAX."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bottega.core.types import Array


@dataclass(frozen=True)
class Operations:
    """Operations on logits that torch and JAX spell differently; a loss that uses only these and operators works in both."""

    softmax: Callable[[Array], Array]
    """Of logits (batch, classes), over the classes."""
    sigmoid: Callable[[Array], Array]
    where: Callable[..., Array]
    select_class: Callable[[Array, Array], Array]
    """Value (batch,) of each example's class, from values (batch, classes) and class numbers (batch,)."""
    cross_entropy: Callable[[Array, Array, float], Array]
    """(batch,), from logits (batch, classes), class numbers (batch,) and the label smoothing."""
    binary_cross_entropy: Callable[[Array, Array], Array]
    """(batch, classes), from logits and target probabilities, both (batch, classes)."""


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
    def per_example(self, logits: Any, labels: Any, operations: Operations) -> Any:
        """Return the loss of each example, (batch,), from logits (batch, classes) and class numbers (batch,)."""

    @abstractmethod
    def per_label(self, logits: Any, labels: Any, operations: Operations) -> Any:
        """Return the loss of each label, (batch, classes), from logits and 0/1 labels, both (batch, classes)."""
