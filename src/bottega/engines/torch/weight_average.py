"""Exponential moving average of the trainable weights, and a context that evaluates the model with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class WeightAverage:
    """Moving average of a model's trainable weights; if not enabled, it is empty and every method does nothing."""

    def __init__(self, model: nn.Module, *, enabled: bool) -> None:
        self.model = model
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad} if enabled else {}
        self.tensors: dict[str, Tensor] = {name: p.detach().clone() for name, p in trainable.items()}
        self._is_swapped_in = False

    def reset(self) -> None:
        """Restart the average at the current weights."""
        parameters = dict(self.model.named_parameters())
        for name, average in self.tensors.items():
            average.copy_(parameters[name].detach())

    def update(self, parameters: list[nn.Parameter], decay: float) -> None:
        """Move the average towards `parameters` by 1 - `decay`."""
        with torch.no_grad():  # otherwise each average would keep the graph of all earlier weights
            torch._foreach_lerp_(list(self.tensors.values()), list(parameters), 1 - decay)

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Context in which the model has the averaged weights. Copying is expensive, so nested contexts do nothing."""
        if not self.tensors or self._is_swapped_in:
            yield
            return
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            original = {name: parameters[name].detach().clone() for name in self.tensors}
            try:
                self._is_swapped_in = True
                for name, average in self.tensors.items():
                    parameters[name].copy_(average)
                yield
            finally:
                self._is_swapped_in = False
                for name, value in original.items():
                    parameters[name].copy_(value)
