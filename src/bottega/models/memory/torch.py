"""Hierarchical memory: working, episodic and semantic, as one value and as a friendly object.

A `Memory` is a tuple of tensors of fixed size, and everything here is a function from one to the next. Time is what the
caller says it is: an integer that grows, such as the step of a training.

What is nearer to now hides what is deeper: where working memory holds a key, the episodes and prototypes of that key are not
looked at, and an episode hides a prototype. So nothing is found twice, and nothing that was said anew is found as it was.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bottega.core.errors import CheckpointError, UsageError
from bottega.models.memory import episodic as memory_episodic
from bottega.models.memory import semantic as memory_semantic
from bottega.models.memory import working as memory_working
from bottega.models.memory.config import MemoryShape
from bottega.models.memory.episodic import EpisodicSlots
from bottega.models.memory.search import SearchResult, search_exact, search_faiss
from bottega.models.memory.semantic import SemanticSlots
from bottega.models.memory.slots import (
    ROUNDING,
    broadcast_importance,
    check_items,
    gather_field,
    match_keys,
    normalize_keys,
    similarity,
)
from bottega.models.memory.working import WorkingSlots

LEVELS = ("working", "episodic", "semantic")
Numbers = Tensor | np.ndarray | list[Any]
"""What is taken for a table of numbers; in a memory they are float32."""


class MemoryState(NamedTuple):
    working: WorkingSlots
    episodic: EpisodicSlots
    semantic: SemanticSlots

    @property
    def keys(self) -> Tensor:
        """Of all levels, [..., slots, k]."""
        return torch.cat([level.keys for level in self], dim=-2)

    @property
    def values(self) -> Tensor:
        return torch.cat([level.values for level in self], dim=-2)


def empty_memory(shape: MemoryShape, *batch: int, device: torch.device | str | None = None) -> MemoryState:
    sizes = {"key_size": shape.key_size, "value_size": shape.value_size}
    return MemoryState(
        memory_working.empty_working(*batch, slots=shape.working_slots, **sizes, device=device),
        memory_episodic.empty_episodic(*batch, slots=shape.episodic_slots, **sizes, device=device),
        memory_semantic.empty_semantic(*batch, slots=shape.semantic_slots, **sizes, device=device),
    )


def store(
    memory: MemoryState, keys: Tensor, values: Tensor, importance: Tensor, clock: int, *, shape: MemoryShape
) -> MemoryState:
    """Items [..., N] said at one tick go to working and episodic memory; where importance is 0 or less, nowhere. A prototype
    that they contradict is forgotten."""
    check_items(keys, values, key_size=shape.key_size, value_size=shape.value_size)
    fading = {"decay": shape.working_decay, "floor": shape.working_floor}
    working = memory_working.store(memory.working, keys, values, importance, clock, **fading, same=shape.same)
    episodic = memory_episodic.store(
        memory.episodic, keys, values, importance, clock, decay=shape.episodic_decay, same=shape.same
    )
    semantic = memory_semantic.drop_contradicted(
        memory.semantic, normalize_keys(keys), values.float(), importance > 0, same=shape.same
    )
    return MemoryState(working, episodic, semantic)


def consolidate(memory: MemoryState, clock: int, *, shape: MemoryShape) -> MemoryState:
    """What time does: working memory fades, and what was said and used often enough moves to the prototypes."""
    working = memory_working.decay_working(memory.working, clock, decay=shape.working_decay, floor=shape.working_floor)
    episodic, semantic = memory_semantic.consolidate(
        memory.episodic, memory.semantic, promote_after=shape.promote_after, same=shape.same
    )
    return MemoryState(working, episodic, semantic)


def visible_slots(memory: MemoryState, *, same: float) -> Tensor:
    """Which slots of all levels are looked at [..., slots]: those that hold something nearer levels do not hide."""
    working, episodic, semantic = memory

    def hidden(below: Tensor, above: Tensor, valid: Tensor) -> Tensor:
        return (match_keys(below, above, same) & valid[..., None, :]).any(-1)

    by_working = hidden(episodic.keys, working.keys, working.valid)
    nearer = torch.cat((working.keys, episodic.keys), dim=-2), torch.cat((working.valid, episodic.valid), dim=-1)
    return torch.cat(
        (working.valid, episodic.valid & ~by_working, semantic.valid & ~hidden(semantic.keys, *nearer)), dim=-1
    )


def search(memory: MemoryState, queries: Tensor, top_k: int, *, same: float) -> SearchResult:
    """The `top_k` nearest of all levels for each query [..., Q, k]."""
    return search_exact(memory.keys, memory.values, visible_slots(memory, same=same), queries, top_k)


def record_use(memory: MemoryState, found: SearchResult, clock: int, *, same: float) -> MemoryState:
    """The memory after what was found was of use, which its episode remembers, also where it was still at hand."""
    first = memory.working.strength.shape[-1]
    number = memory.episodic.said.shape[-1]
    where = found.where.flatten(-2)
    keys = gather_field(memory.keys, where.clamp(min=0))
    near = similarity(keys, memory.episodic.keys).masked_fill(~memory.episodic.valid[..., None, :], -2.0)
    behind = near.argmax(-1)
    is_episode = (where >= first) & (where < first + number)
    is_at_hand = (where >= 0) & (where < first) & (near.amax(-1) >= same - ROUNDING)
    slots = torch.where(is_episode, where - first, behind)
    return memory._replace(episodic=memory_episodic.record_use(memory.episodic, slots, clock, is_episode | is_at_hand))


def read_memory(
    keys: Tensor,
    values: Tensor,
    valid: Tensor,
    queries: Tensor,
    temperature: Tensor | float,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """What the memory says to each query [..., Q, k]: the mean of the values [..., S, v] by softmax(cosine / temperature +
    bias), differentiable in all of them. An empty memory says zeros."""
    scores = similarity(normalize_keys(queries), keys) / temperature
    if bias is not None:
        scores = scores + bias[..., None, :]
    scores = scores.masked_fill(~valid[..., None, :], float("-inf"))
    highest = scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    weights = torch.exp(scores - highest)
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
    return weights @ values


def flatten_memory(memory: MemoryState) -> dict[str, Tensor]:
    """By names such as `episodic_keys`: what is saved, or the buffers of a model."""
    return {f"{name}_{field}": tensor for name in LEVELS for field, tensor in getattr(memory, name)._asdict().items()}


def unflatten_memory(tensors: Mapping[str, Tensor]) -> MemoryState:
    def level(name: str) -> dict[str, Tensor]:
        return {key.removeprefix(f"{name}_"): t for key, t in tensors.items() if key.startswith(f"{name}_")}

    return MemoryState(
        WorkingSlots(**level("working")), EpisodicSlots(**level("episodic")), SemanticSlots(**level("semantic"))
    )


class HierarchicalMemory:
    """A memory to hold on to: the functions above over one value that is replaced, never changed in place.

    >>> memory = HierarchicalMemory(MemoryShape(key_size=2, value_size=1))
    >>> memory.store(torch.eye(2), torch.tensor([[1.0], [2.0]]), clock=0)
    >>> memory.search(torch.tensor([[0.0, 1.0]]), top_k=1).values.flatten().tolist()
    [2.0]
    """

    def __init__(self, shape: MemoryShape, *, device: torch.device | str | None = None) -> None:
        self.shape = shape
        self.memory = empty_memory(shape, device=device)
        self.clock = 0

    def store(self, keys: Numbers, values: Numbers, importance: Numbers | float = 1.0, *, clock: int) -> None:
        """Keys [n, k] and values [n, v], each with an importance; one number is that of all."""
        keys, values = (
            self._table("keys", keys, self.shape.key_size),
            self._table("values", values, self.shape.value_size),
        )
        given = broadcast_importance(self._numbers("importances", importance), keys)
        check_items(keys, values, key_size=self.shape.key_size, value_size=self.shape.value_size)
        self.memory = store(self.memory, keys, values, given, self._at(clock), shape=self.shape)

    def search(
        self,
        queries: Numbers,
        top_k: int,
        *,
        clock: int | None = None,
        by: Literal["exact", "faiss"] = "exact",
    ) -> SearchResult:
        """The nearest of all levels. With a clock, what was found counts as used, and is kept the longer for it."""
        queries = self._table("queries", queries, self.shape.key_size)
        if by not in ("exact", "faiss"):
            raise UsageError(f"memory: by must be exact or faiss, got {by!r}")
        seen = visible_slots(self.memory, same=self.shape.same)
        way = search_exact if by == "exact" else search_faiss
        found = way(self.memory.keys, self.memory.values, seen, queries, top_k)
        if clock is not None:
            self.memory = record_use(self.memory, found, self._at(clock), same=self.shape.same)
        return found

    def read(self, queries: Numbers, temperature: float = 0.1) -> Tensor:
        """The softly weighted mean of what is stored, [Q, v]."""
        queries = self._table("queries", queries, self.shape.key_size)
        if not temperature > 0:
            raise UsageError(f"memory: temperature {temperature}: give one greater than 0; the nearest alone is search")
        seen = visible_slots(self.memory, same=self.shape.same)
        return read_memory(self.memory.keys, self.memory.values, seen, queries, temperature)

    def consolidate(self, clock: int) -> None:
        self.memory = consolidate(self.memory, self._at(clock), shape=self.shape)

    def level_of(self, where: int) -> str:
        """The level that a slot of `Found.where` belongs to."""
        ends = (self.shape.working_slots, self.shape.working_slots + self.shape.episodic_slots, self.shape.slots)
        if not 0 <= where < self.shape.slots:
            raise UsageError(f"memory: slot {where} is none of {self.shape.slots}")
        return next(name for name, end in zip(LEVELS, ends, strict=True) if where < end)

    def __len__(self) -> int:
        """How many facts can be found."""
        return int(visible_slots(self.memory, same=self.shape.same).sum())

    def state_dict(self) -> dict[str, Tensor]:
        return {**flatten_memory(self.memory), "clock": torch.tensor(self.clock)}

    def load_state_dict(self, state: Mapping[str, Tensor], *, origin: str = "memory") -> None:
        """Fewer slots than this shape has are filled up with empty ones; what does not fit is refused."""
        wanted = self.state_dict()
        for name in sorted(wanted.keys() | state.keys()):
            if name not in state or name not in wanted:
                raise CheckpointError(
                    f"{origin}: {name} {'is missing' if name in wanted else 'is not part of a memory'}"
                )
        if any(state[f"{level}_{field}"].dim() != 2 for level in LEVELS for field in ("keys", "values")):
            raise CheckpointError(f"{origin}: keys and values must be tables [slots, size]; it is not a saved memory")
        _check_sizes(state, self.shape, origin)
        memory = {name: _filled_up(tensor, wanted[name]) for name, tensor in state.items() if name != "clock"}
        self.memory, self.clock = unflatten_memory(memory), int(state["clock"])

    def save(self, path: str | Path) -> None:
        try:
            save_file({name: tensor.contiguous().cpu() for name, tensor in self.state_dict().items()}, path)
        except (OSError, SafetensorError) as error:
            folder = Path(path).parent
            why = str(error) if folder.is_dir() else f"there is no folder {folder}; make it first"
            raise UsageError(f"{path}: the memory cannot be saved: {why}") from None

    def load(self, path: str | Path) -> None:
        try:
            state = load_file(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be read as a memory: {error}") from None
        self.load_state_dict(state, origin=str(path))

    def _at(self, clock: int) -> int:
        """Time goes forward: two callers with two clocks would undo each other's ages."""
        try:
            clock = operator.index(clock)
        except TypeError:
            raise UsageError(
                f"memory: clock {clock!r} is not an integer; use one, such as the step of a training"
            ) from None
        if clock < self.clock:
            raise UsageError(f"memory: clock {clock} is before {self.clock}, which was already; give times that grow")
        self.clock = clock
        return clock

    def _table(self, word: str, given: Numbers, size: int) -> Tensor:
        """[n, size]."""
        found = self._numbers(word, given)
        if found.dim() != 2 or found.shape[-1] != size:
            raise UsageError(f"memory: expected {word} [n, {size}], got {list(found.shape)}")
        return found

    def _numbers(self, word: str, given: Numbers | float) -> Tensor:
        """Finite ones. One that is not would be like nothing, and yet in every mean."""
        try:
            found = torch.as_tensor(given, dtype=torch.float32, device=self.memory.working.keys.device)
        except (TypeError, ValueError, RuntimeError) as error:
            why = str(error).partition("\n")[0]
            raise UsageError(f"memory: {word} cannot be read as a table of numbers: {why}") from None
        if not found.isfinite().all():
            raise UsageError(f"memory: {word} have numbers that are not finite (nan or inf); leave those rows out")
        return found


def _check_sizes(state: Mapping[str, Tensor], shape: MemoryShape, origin: str) -> None:
    """Names all that does not fit, at once."""
    sizes = {"key_size": state["working_keys"].shape[-1], "value_size": state["working_values"].shape[-1]}
    slots = {f"{level}_slots": state[f"{level}_keys"].shape[0] for level in LEVELS}
    wrong = [key for key, size in sizes.items() if size != getattr(shape, key)]
    wrong += [key for key, number in slots.items() if number > getattr(shape, key)]
    if wrong:
        said = ", ".join(f"{key} {(sizes | slots)[key]} (declared is {getattr(shape, key)})" for key in wrong)
        raise CheckpointError(f"{origin}: the memory has {said}; declare a memory of that size to read it")
    for name, tensor in state.items():
        level, _, field = name.partition("_")
        if level in LEVELS:
            size = {"keys": (shape.key_size,), "values": (shape.value_size,)}.get(field, ())
            if tensor.shape != (slots[f"{level}_slots"], *size):
                raise CheckpointError(
                    f"{origin}: {name} has the form {list(tensor.shape)}, unlike the rest of its level"
                )


def _filled_up(tensor: Tensor, like: Tensor) -> Tensor:
    """With empty slots behind the others."""
    missing = like.shape[0] - tensor.shape[0]
    return F.pad(tensor.to(like), (0, 0) * (tensor.dim() - 1) + (0, missing)).clone()
