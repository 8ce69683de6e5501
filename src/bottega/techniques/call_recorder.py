"""Recording of a model's call: its inputs, its output, and the activations of its blocks.

B batch   T tokens   N positions   D width   V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from bottega.models.decoder.torch import Block
from bottega.models.losses import IGNORE_INDEX
from bottega.models.losses.token_loss import token_cross_entropy
from bottega.models.spiking.units import SpikingLayer

MODEL_SPECIFIC_ARGUMENTS = ("draws",)
"""Arguments that are not passed on to another model: the random numbers that turn pixels into spikes."""


@dataclass(frozen=True)
class ModelCall:
    """Arguments and output of one call of a model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Tensor
    target_mask: Tensor | None = None
    """Bool `(B, T)`: the tokens that are predicted."""

    def replay_on(self, model: Any) -> Tensor:
        """Call another model with the same arguments, so that noise, timesteps and dropped conditions are the same."""
        return _split_output(
            model(
                *self.args,
                **{name: value for name, value in self.kwargs.items() if name not in MODEL_SPECIFIC_ARGUMENTS},
            )
        )[0]


@final
class CallRecorder:
    """Proxy of a model that records its calls; every other attribute is the model's own.

    With `computes_token_loss`, it is called like the transformer, with inputs and targets, and returns the summed negative
    log likelihood: it calls the model for logits and computes the sum from them.
    """

    def __init__(self, model: Any, *, computes_token_loss: bool) -> None:
        self.model, self.computes_token_loss = model, computes_token_loss
        self.calls: list[ModelCall] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.computes_token_loss:
            output = self.model(*args, **kwargs)
            self.calls.append(ModelCall(args, kwargs, _split_output(output)[0]))
            return output
        inputs, targets = args
        logits, extra = _split_output(self.model(inputs, **kwargs))
        self.calls.append(ModelCall((inputs,), kwargs, logits, targets != IGNORE_INDEX))
        total = token_cross_entropy(logits, targets)
        return (total, *extra) if extra else total

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @property
    def single_call(self) -> ModelCall:
        """The recorded call; there must be exactly one."""
        assert len(self.calls) == 1, f"the model was called {len(self.calls)} times"
        return self.calls[0]


def _split_output(output: Any) -> tuple[Tensor, tuple[Any, ...]]:
    """Split a model's output into its first tensor and the rest, such as the routing of experts."""
    return (output[0], output[1:]) if isinstance(output, tuple) else (output, ())


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the numbered blocks that a sample passes one after the other; empty if the model has none.

    They are the blocks of the backbone if there is one, since a condition encoder has blocks too. Parallel filters, which
    have no submodules, are not blocks.
    """
    backbone = getattr(model, "backbone", None)
    root = backbone if isinstance(backbone, nn.Module) else model
    block_lists = [list(module) for module in root.modules() if isinstance(module, nn.ModuleList)]
    block_lists = [blocks for blocks in block_lists if blocks and all(len(list(block.children())) for block in blocks)]
    return max(block_lists, key=len, default=[])


def match_blocks(first: Sequence[nn.Module], second: Sequence[nn.Module]) -> list[tuple[nn.Module, nn.Module]]:
    """Pair the blocks of two models at the same relative depth, as many as the shallower one has."""
    count = min(len(first), len(second))
    return [(first[len(first) * i // count - 1], second[len(second) * i // count - 1]) for i in range(1, count + 1)]


@contextmanager
def record_activations(blocks: Sequence[nn.Module]) -> Iterator[dict[int, Tensor]]:
    """Context that yields the hidden states `(B, N, D)` of blocks by their number, filled when they are called.

    The hooks are removed at its end, so activations that are recomputed in the backward pass are not recorded again.
    """
    states: dict[int, Tensor] = {}

    def make_hook(number: int) -> Any:
        def record(block: nn.Module, inputs: Any, output: Any) -> None:
            states[number] = _extract_hidden_state(block, output)

        return record

    handles = [block.register_forward_hook(make_hook(number)) for number, block in enumerate(blocks)]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def _extract_hidden_state(block: nn.Module, output: Any) -> Tensor:
    """Return the output of a block as `(B, N, D)`; grids `(B, D, ...)` have their channels second."""
    if isinstance(block, Block):  # the residual stream, and what the next block adds to it
        output = output[0] + output[1]
    if isinstance(block, SpikingLayer):  # its positions are in time
        output = output.transpose(0, 1)
    state: Tensor = output[0] if isinstance(output, tuple) else output
    return state if state.ndim == 3 else state.flatten(2).transpose(1, 2)
