"""Listening to a model while a task calls it: what it was asked, what it answered, what its blocks said on the way.

B batch   T tokens   N positions   D width   V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from bottega.models.decoder.torch import Block
from bottega.models.losses.token_loss import IGNORE_INDEX, token_cross_entropy
from bottega.models.spiking.units import SpikingLayer

OWN = ("draws",)
"""What is asked by these names is a model's own affair: by which chances its pixels become spikes."""


@dataclass(frozen=True)
class ModelCall:
    """What a model was asked, and its answer."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Tensor
    target_mask: Tensor | None = None
    """Bool [B, T]: of tokens, those that are predicted."""

    def replay_on(self, other: Any) -> Tensor:
        """The same question to somebody else: the very tensors, so noise, times and dropped words are the same too."""
        return _said(other(*self.args, **{name: value for name, value in self.kwargs.items() if name not in OWN}))[0]


@final
class CallRecorder:
    """Stands in for a model, calls it, and remembers. Everything else about it is the model's own.

    With `tokens` it is called as the transformer is, with inputs and targets, for the sum of their negative log
    likelihood: it asks for logits in their place and makes the sum of them.
    """

    def __init__(self, model: Any, *, tokens: bool) -> None:
        self.model, self.tokens = model, tokens
        self.calls: list[ModelCall] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.tokens:
            found = self.model(*args, **kwargs)
            self.calls.append(ModelCall(args, kwargs, _said(found)[0]))
            return found
        inputs, targets = args
        logits, more = _said(self.model(inputs, **kwargs))
        self.calls.append(ModelCall((inputs,), kwargs, logits, targets != IGNORE_INDEX))
        total = token_cross_entropy(logits, targets)
        return (total, *more) if more else total

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @property
    def single_call(self) -> ModelCall:
        assert len(self.calls) == 1, f"a model that is called {len(self.calls)} times has no one answer"
        return self.calls[0]


def _said(found: Any) -> tuple[Tensor, tuple[Any, ...]]:
    """The answer, and what a model may tell besides: how it went through its experts."""
    return (found[0], found[1:]) if isinstance(found, tuple) else (found, ())


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The numbered parts that a sample goes through one after the other; none where there are no such parts.

    Those of the backbone, where the model has one: what reads its condition has blocks too. Filters side by side, which
    have no parts of their own, are not meant.
    """
    backbone = getattr(model, "backbone", None)
    inside = backbone if isinstance(backbone, nn.Module) else model
    rows = [list(module) for module in inside.modules() if isinstance(module, nn.ModuleList)]
    rows = [row for row in rows if row and all(len(list(block.children())) for block in row)]
    return max(rows, key=len, default=[])


def match_blocks(own: Sequence[nn.Module], theirs: Sequence[nn.Module]) -> list[tuple[nn.Module, nn.Module]]:
    """Blocks of two models at the same depth, as many as the shallower one has; the last with the last."""
    count = min(len(own), len(theirs))
    return [(own[len(own) * i // count - 1], theirs[len(theirs) * i // count - 1]) for i in range(1, count + 1)]


@contextmanager
def record_activations(blocks: Sequence[nn.Module]) -> Iterator[dict[int, Tensor]]:
    """Number of the block -> its state [B, N, D], once it was called.

    Only inside: activations that are computed again for the backward pass are nobody's business.
    """
    heard: dict[int, Tensor] = {}

    def hook(number: int) -> Any:
        def remember(block: nn.Module, inputs: Any, output: Any) -> None:
            heard[number] = _state(block, output)

        return remember

    hooks = [block.register_forward_hook(hook(number)) for number, block in enumerate(blocks)]
    try:
        yield heard
    finally:
        for one in hooks:
            one.remove()


def _state(block: nn.Module, output: Any) -> Tensor:
    """[B, N, D], whatever the block gives: grids [B, D, ...] have their channels second."""
    if isinstance(block, Block):  # the stream, and what the next block is to add to it
        output = output[0] + output[1]
    if isinstance(block, SpikingLayer):  # its positions are in time
        output = output.transpose(0, 1)
    state: Tensor = output[0] if isinstance(output, tuple) else output
    return state if state.ndim == 3 else state.flatten(2).transpose(1, 2)
