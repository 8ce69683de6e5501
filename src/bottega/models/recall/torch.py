"""Two models with an external memory: one within a stream, one across the steps of a training.

Both encode a segment with the layers of a language model, query a memory, and predict a value from the hidden states and
the result of the query.

B batch   S segments   T tokens of a segment   D hidden size   k width of a key   V values
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from bottega.core.noise import numpy_generator
from bottega.models.decoder.config import TransformerShape
from bottega.models.decoder.torch import Transformer
from bottega.models.memory import torch as memories
from bottega.models.memory import working as memory_working
from bottega.models.memory.config import MemoryShape, WorkingMemory
from bottega.models.memory.torch import MemoryState
from bottega.models.memory.working import WorkingSlots


@final
class Temperature(nn.Module):
    """The learned temperature of memory reads, stored as a logarithm so that it stays above 0."""

    def __init__(self, initial_temperature: float) -> None:
        super().__init__()
        self.logarithm = nn.Parameter(torch.zeros(()))
        self.initial_temperature = initial_temperature

    def initial_value(self, kind: str, name: str, seed: int) -> np.ndarray:
        return np.asarray(math.log(self.initial_temperature), np.float32)

    def forward(self) -> Tensor:
        """Return the temperature, which is positive."""
        return self.logarithm.float().exp()


@final
class QueryProjection(nn.Module):
    """Linear map of token codes to queries, initialised as the identity."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, size))

    def initial_value(self, kind: str, name: str, seed: int) -> np.ndarray:
        return np.eye(len(self.weight), dtype=np.float32)

    def forward(self, codes: Tensor) -> Tensor:
        return codes @ self.weight


@final
class StreamRecall(Transformer):
    """Encodes a stream segment by segment; only a working memory passes to the next segment, with learned writes."""

    def __init__(self, shape: TransformerShape, *, num_values: int, memory: WorkingMemory | None) -> None:
        super().__init__(shape)
        width = shape.hidden_size
        self.options = memory
        if memory is not None:
            self.memory_query = nn.Linear(width, width, bias=False)
            self.memory_key = nn.Linear(2 * width, width, bias=False)
            self.memory_value = nn.Linear(width, width, bias=False)
            self.memory_importance = nn.Linear(width, 1)
            self.memory_output = nn.Linear(width, width, bias=False)
            self.memory_temperature = Temperature(memory.temperature)
        self.head = nn.Linear(width, num_values, bias=False)

    def forward(  # type: ignore[override]
        self, tokens: Tensor, memory: WorkingSlots | None = None, *, clock: int = 0, with_memory: bool = True
    ) -> tuple[Tensor, WorkingSlots | None]:
        """Return scores of the values (B, S, T, V) for tokens (B, S, T), and the memory after the last segment.

        `memory` is the memory of earlier segments, None for an empty one; `clock` is the number of earlier segments.
        """
        batch, segments = tokens.shape[:2]
        # No segment sees another, so all of them go through the trunk at once.
        hidden = self.hidden(tokens.flatten(0, 1)).unflatten(0, (batch, segments))
        if self.options is None or not with_memory:
            return self.head(hidden), memory
        with _disable_autocast(hidden):
            return self._predict_with_memory(hidden.float(), memory, clock)

    def _predict_with_memory(
        self, hidden: Tensor, memory: WorkingSlots | None, clock: int
    ) -> tuple[Tensor, WorkingSlots]:
        assert self.options is not None, "checked by forward"
        width = hidden.shape[-1]
        if memory is None:
            sizes = {"slots": self.options.working_slots, "key_size": width, "value_size": width}
            memory = memory_working.empty_working(len(hidden), **sizes, device=hidden.device)
        queries, values = self.memory_query(hidden), self.memory_value(hidden)
        # The key of a value is often the token before it, which the layers alone are slow to learn.
        previous_hidden = torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :, :-1]
        keys = self.memory_key(torch.cat((hidden, previous_hidden), dim=-1))
        importance = torch.sigmoid(self.memory_importance(hidden)).squeeze(-1)
        decay_options = {"decay": self.options.working_decay, "floor": self.options.working_floor}
        recalled = []
        for segment in range(hidden.shape[1]):
            recalled.append(read_working(memory, queries[:, segment], self.memory_temperature()))
            memory = memory_working.store(
                memory, keys[:, segment], values[:, segment], importance[:, segment], clock + segment, **decay_options
            )
        return self.head(hidden + self.memory_output(torch.stack(recalled, dim=1))), memory


def read_working(memory: WorkingSlots, queries: Tensor, temperature: Tensor) -> Tensor:
    """Read a working memory with queries (B, T, k); weights grow with strength, which gives strength a gradient."""
    bias = torch.log(torch.where(memory.valid, memory.strength, torch.ones_like(memory.strength)))
    return memories.read_memory(memory.keys, memory.values, memory.valid, queries, temperature, bias=bias)


@final
class MemoryBuffers(nn.Module):
    """A memory as buffers, saved with the weights; the task's state update writes them, a forward only reads."""

    def __init__(self, shape: MemoryShape) -> None:
        super().__init__()
        for name, tensor in memories.flatten_memory(memories.empty_memory(shape)).items():
            self.register_buffer(name, tensor)

    def state(self) -> MemoryState:
        """Return the buffers as a memory."""
        return memories.unflatten_memory(dict(self.named_buffers()))


@final
class LastingRecall(Transformer):
    """Encodes one segment and queries a memory that persists across steps.

    Keys and values are fixed random codes of tokens: learned codes would drift away from what was stored with them earlier.
    """

    codes: Tensor
    """(vocabulary, k): a function of the seed, and therefore not in the state dict."""

    def __init__(
        self, shape: TransformerShape, *, num_values: int, memory: MemoryShape | None, temperature: float, seed: int
    ) -> None:
        super().__init__(shape)
        self.memory_shape = memory
        if memory is not None:
            codes = numpy_generator(seed, "codes").standard_normal(
                (shape.vocab_size, memory.key_size), dtype=np.float32
            )
            codes /= np.linalg.norm(codes, axis=1, keepdims=True)
            self.register_buffer("codes", torch.from_numpy(codes), persistent=False)
            self.memory = MemoryBuffers(memory)
            self.memory_query = QueryProjection(memory.key_size)
            self.memory_output = nn.Linear(memory.value_size, shape.hidden_size, bias=False)
            self.memory_temperature = Temperature(temperature)
        self.head = nn.Linear(shape.hidden_size, num_values, bias=False)

    def forward(self, tokens: Tensor, *, with_memory: bool = True) -> Tensor:  # type: ignore[override]
        """Return scores of the values (B, T, V) for tokens (B, T)."""
        hidden = self.hidden(tokens)
        if self.memory_shape is None or not with_memory:
            return self.head(hidden)
        with _disable_autocast(hidden):
            memory = self.memory.state()
            visible = memories.find_visible_slots(memory, same=self.memory_shape.same)
            queries = self.memory_query(self.codes[tokens]).flatten(0, 1)
            recalled = memories.read_memory(memory.keys, memory.values, visible, queries, self.memory_temperature())
            return self.head(hidden.float() + self.memory_output(recalled.unflatten(0, tokens.shape)))


def _disable_autocast(x: Tensor) -> Any:
    """Disable autocast: half precision would confuse keys that are close to each other."""
    is_autocast = torch.is_autocast_enabled(x.device.type)
    return torch.autocast(x.device.type, enabled=False) if is_autocast else contextlib.nullcontext()
