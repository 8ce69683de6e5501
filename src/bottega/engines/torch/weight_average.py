"""Averaged weights: a running mean of those that learn, and the model as it is with them in place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class WeightAverage:
    """Of no weights where none are averaged: everything here then does nothing."""

    def __init__(self, model: nn.Module, *, enabled: bool) -> None:
        self.model = model
        learning = {name: p for name, p in model.named_parameters() if p.requires_grad} if enabled else {}
        self.tensors: dict[str, Tensor] = {name: p.detach().clone() for name, p in learning.items()}
        self._is_in_place = False

    def reset(self) -> None:
        """Begin at the present weights."""
        named = dict(self.model.named_parameters())
        for name, average in self.tensors.items():
            average.copy_(named[name].detach())

    def update(self, parameters: list[nn.Parameter], decay: float) -> None:
        with torch.no_grad():  # or each average would remember all the weights it was made of
            torch._foreach_lerp_(list(self.tensors.values()), list(parameters), 1 - decay)

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """The weights that count: the averaged ones where there are any. Costly, so the outermost does it for all."""
        if not self.tensors or self._is_in_place:
            yield
            return
        named = dict(self.model.named_parameters())
        with torch.no_grad():
            own = {name: named[name].detach().clone() for name in self.tensors}
            try:
                self._is_in_place = True
                for name, average in self.tensors.items():
                    named[name].copy_(average)
                yield
            finally:
                self._is_in_place = False
                for name, value in own.items():
                    named[name].copy_(value)
