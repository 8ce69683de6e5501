"""Hierarchical memory of three levels (working, episodic, semantic): pure functions, and a class that holds a state.

A `MemoryState` is a tuple of tensors of fixed size, and the functions return a new one. The clock is an integer that the
caller passes and that never decreases, such as the training step.

A newer level hides older ones: if working memory holds a key, the episodes and prototypes of that key are not searched, and
an episode hides a prototype. So no key is found twice, and a value that was replaced is never found.
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
"""Accepted types of a table of numbers; a memory stores float32."""


class MemoryState(NamedTuple):
    """The slots of the three levels."""

    working: WorkingSlots
    episodic: EpisodicSlots
    semantic: SemanticSlots

    @property
    def keys(self) -> Tensor:
        """Keys of all levels, (..., slots, k)."""
        return torch.cat([level.keys for level in self], dim=-2)

    @property
    def values(self) -> Tensor:
        """Values of all levels, (..., slots, v)."""
        return torch.cat([level.values for level in self], dim=-2)


def empty_memory(shape: MemoryShape, *batch: int, device: torch.device | str | None = None) -> MemoryState:
    """Return a memory with empty slots only."""
    sizes = {"key_size": shape.key_size, "value_size": shape.value_size}
    return MemoryState(
        memory_working.empty_working(*batch, slots=shape.working_slots, **sizes, device=device),
        memory_episodic.empty_episodic(*batch, slots=shape.episodic_slots, **sizes, device=device),
        memory_semantic.empty_semantic(*batch, slots=shape.semantic_slots, **sizes, device=device),
    )


def store(
    memory: MemoryState, keys: Tensor, values: Tensor, importance: Tensor, clock: int, *, shape: MemoryShape
) -> MemoryState:
    """Store items (..., N) of one tick in working and episodic memory, except those of importance 0 or less.

    Prototypes with the key of an item and another value are removed.
    """
    check_items(keys, values, key_size=shape.key_size, value_size=shape.value_size)
    decay_options = {"decay": shape.working_decay, "floor": shape.working_floor}
    working = memory_working.store(memory.working, keys, values, importance, clock, **decay_options, same=shape.same)
    episodic = memory_episodic.store(
        memory.episodic, keys, values, importance, clock, decay=shape.episodic_decay, same=shape.same
    )
    semantic = memory_semantic.drop_contradicted(
        memory.semantic, normalize_keys(keys), values.float(), importance > 0, same=shape.same
    )
    return MemoryState(working, episodic, semantic)


def consolidate(memory: MemoryState, clock: int, *, shape: MemoryShape) -> MemoryState:
    """Decay working memory, and move episodes that were stored and retrieved often enough to the prototypes."""
    working = memory_working.decay_working(memory.working, clock, decay=shape.working_decay, floor=shape.working_floor)
    episodic, semantic = memory_semantic.consolidate(
        memory.episodic, memory.semantic, promote_after=shape.promote_after, same=shape.same
    )
    return MemoryState(working, episodic, semantic)


def find_visible_slots(memory: MemoryState, *, same: float) -> Tensor:
    """Return which slots of all levels are searched, bool (..., slots): valid ones that no newer level hides."""
    working, episodic, semantic = memory

    def find_hidden(older_keys: Tensor, newer_keys: Tensor, is_newer_valid: Tensor) -> Tensor:
        return (match_keys(older_keys, newer_keys, same) & is_newer_valid[..., None, :]).any(-1)

    is_hidden_by_working = find_hidden(episodic.keys, working.keys, working.valid)
    newer_levels = torch.cat((working.keys, episodic.keys), dim=-2), torch.cat((working.valid, episodic.valid), dim=-1)
    return torch.cat(
        (
            working.valid,
            episodic.valid & ~is_hidden_by_working,
            semantic.valid & ~find_hidden(semantic.keys, *newer_levels),
        ),
        dim=-1,
    )


def search(memory: MemoryState, queries: Tensor, top_k: int, *, same: float) -> SearchResult:
    """Return the `top_k` nearest items of all levels for each query (..., Q, k)."""
    return search_exact(memory.keys, memory.values, find_visible_slots(memory, same=same), queries, top_k)


def record_use(memory: MemoryState, result: SearchResult, clock: int, *, same: float) -> MemoryState:
    """Return the memory after `result` was used: counts a use of each item's episode, also if working memory holds it."""
    num_working = memory.working.strength.shape[-1]
    num_episodic = memory.episodic.said.shape[-1]
    slot_indices = result.slot_indices.flatten(-2)
    keys = gather_field(memory.keys, slot_indices.clamp(min=0))
    similarities = similarity(keys, memory.episodic.keys).masked_fill(~memory.episodic.valid[..., None, :], -2.0)
    nearest_episode = similarities.argmax(-1)
    is_episode = (slot_indices >= num_working) & (slot_indices < num_working + num_episodic)
    is_in_working = (slot_indices >= 0) & (slot_indices < num_working) & (similarities.amax(-1) >= same - ROUNDING)
    slots = torch.where(is_episode, slot_indices - num_working, nearest_episode)
    return memory._replace(
        episodic=memory_episodic.record_use(memory.episodic, slots, clock, is_episode | is_in_working)
    )


def read_memory(
    keys: Tensor,
    values: Tensor,
    valid: Tensor,
    queries: Tensor,
    temperature: Tensor | float,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """Attend over the memory: the mean of the values (..., S, v) by softmax(cosine / temperature + bias), per query (..., Q, k).

    Differentiable in all arguments. An empty memory gives zeros.
    """
    scores = similarity(normalize_keys(queries), keys) / temperature
    if bias is not None:
        scores = scores + bias[..., None, :]
    scores = scores.masked_fill(~valid[..., None, :], float("-inf"))
    highest = scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    weights = torch.exp(scores - highest)
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
    return weights @ values


def flatten_memory(memory: MemoryState) -> dict[str, Tensor]:
    """Return the tensors by names such as `episodic_keys`, for saving or as buffers of a model."""
    return {f"{name}_{field}": tensor for name in LEVELS for field, tensor in getattr(memory, name)._asdict().items()}


def unflatten_memory(tensors: Mapping[str, Tensor]) -> MemoryState:
    """Return the memory of tensors that `flatten_memory` named."""

    def select_level(name: str) -> dict[str, Tensor]:
        return {key.removeprefix(f"{name}_"): t for key, t in tensors.items() if key.startswith(f"{name}_")}

    return MemoryState(
        WorkingSlots(**select_level("working")),
        EpisodicSlots(**select_level("episodic")),
        SemanticSlots(**select_level("semantic")),
    )


class HierarchicalMemory:
    """A stateful memory: the functions above applied to a `MemoryState`, which is replaced and never changed in place.

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
        """Store keys (n, k) with values (n, v); `importance` is one number, or one per item."""
        keys, values = (
            self._to_table("keys", keys, self.shape.key_size),
            self._to_table("values", values, self.shape.value_size),
        )
        importances = broadcast_importance(self._to_tensor("importances", importance), keys)
        check_items(keys, values, key_size=self.shape.key_size, value_size=self.shape.value_size)
        self.memory = store(self.memory, keys, values, importances, self._advance_clock(clock), shape=self.shape)

    def search(
        self,
        queries: Numbers,
        top_k: int,
        *,
        clock: int | None = None,
        by: Literal["exact", "faiss"] = "exact",
    ) -> SearchResult:
        """Return the nearest items of all levels; with a `clock`, they count as used and are retained for longer."""
        queries = self._to_table("queries", queries, self.shape.key_size)
        if by not in ("exact", "faiss"):
            raise UsageError(f"memory: by must be exact or faiss, got {by!r}")
        visible = find_visible_slots(self.memory, same=self.shape.same)
        search_fn = search_exact if by == "exact" else search_faiss
        result = search_fn(self.memory.keys, self.memory.values, visible, queries, top_k)
        if clock is not None:
            self.memory = record_use(self.memory, result, self._advance_clock(clock), same=self.shape.same)
        return result

    def read(self, queries: Numbers, temperature: float = 0.1) -> Tensor:
        """Return the softmax-weighted mean of the stored values, (Q, v)."""
        queries = self._to_table("queries", queries, self.shape.key_size)
        if not temperature > 0:
            raise UsageError(
                f"memory: temperature must be greater than 0, got {temperature}; use search for the nearest item alone"
            )
        visible = find_visible_slots(self.memory, same=self.shape.same)
        return read_memory(self.memory.keys, self.memory.values, visible, queries, temperature)

    def consolidate(self, clock: int) -> None:
        """Decay working memory to tick `clock`, and move episodes that were used often enough to the prototypes."""
        self.memory = consolidate(self.memory, self._advance_clock(clock), shape=self.shape)

    def get_level(self, slot_index: int) -> str:
        """Return the level of an index of `SearchResult.slot_indices`."""
        ends = (self.shape.working_slots, self.shape.working_slots + self.shape.episodic_slots, self.shape.slots)
        if not 0 <= slot_index < self.shape.slots:
            raise UsageError(f"memory: slot {slot_index} is out of range; there are {self.shape.slots}")
        return next(name for name, end in zip(LEVELS, ends, strict=True) if slot_index < end)

    def __len__(self) -> int:
        """Return the number of items that a search can return."""
        return int(find_visible_slots(self.memory, same=self.shape.same).sum())

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors of all levels, and the clock."""
        return {**flatten_memory(self.memory), "clock": torch.tensor(self.clock)}

    def load_state_dict(self, state: Mapping[str, Tensor], *, origin: str = "memory") -> None:
        """Load a saved memory of at most as many slots as this one; raise `CheckpointError` if it does not fit.

        `origin` is the file, for errors.
        """
        expected = self.state_dict()
        for name in sorted(expected.keys() | state.keys()):
            if name not in state or name not in expected:
                raise CheckpointError(
                    f"{origin}: {name} {'is missing' if name in expected else 'is not part of a memory'}; "
                    "give a file that HierarchicalMemory.save wrote"
                )
        if any(state[f"{level}_{field}"].dim() != 2 for level in LEVELS for field in ("keys", "values")):
            raise CheckpointError(f"{origin}: keys and values must be tables [slots, size]; it is not a saved memory")
        _check_sizes(state, self.shape, origin)
        memory = {name: _pad_slots(tensor, expected[name]) for name, tensor in state.items() if name != "clock"}
        self.memory, self.clock = unflatten_memory(memory), int(state["clock"])

    def save(self, path: str | Path) -> None:
        """Write the memory as a safetensors file."""
        try:
            save_file({name: tensor.contiguous().cpu() for name, tensor in self.state_dict().items()}, path)
        except (OSError, SafetensorError) as error:
            folder = Path(path).parent
            reason = str(error) if folder.is_dir() else f"the folder {folder} does not exist; create it first"
            raise UsageError(f"{path}: the memory cannot be saved: {reason}") from None

    def load(self, path: str | Path) -> None:
        """Read a memory that `save` wrote; its sizes must fit."""
        try:
            state = load_file(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path} cannot be read as a memory: {error}; give a file that HierarchicalMemory.save wrote"
            ) from None
        self.load_state_dict(state, origin=str(path))

    def _advance_clock(self, clock: int) -> int:
        """Check and set the clock. It must not decrease: with two clocks, ages would be wrong."""
        try:
            clock = operator.index(clock)
        except TypeError:
            raise UsageError(
                f"memory: clock {clock!r} is not an integer; pass one, such as the training step"
            ) from None
        if clock < self.clock:
            raise UsageError(
                f"memory: clock {clock} is before {self.clock}, the last one; pass clocks that do not decrease"
            )
        self.clock = clock
        return clock

    def _to_table(self, name: str, values: Numbers, size: int) -> Tensor:
        """Return a table (n, size)."""
        table = self._to_tensor(name, values)
        if table.dim() != 2 or table.shape[-1] != size:
            raise UsageError(f"memory: expected {name} [n, {size}], got {list(table.shape)}")
        return table

    def _to_tensor(self, name: str, values: Numbers | float) -> Tensor:
        """Return finite numbers; a NaN would match no key, but spoil every mean."""
        try:
            tensor = torch.as_tensor(values, dtype=torch.float32, device=self.memory.working.keys.device)
        except (TypeError, ValueError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise UsageError(f"memory: {name} cannot be read as a table of numbers: {reason}") from None
        if not tensor.isfinite().all():
            raise UsageError(f"memory: {name} have numbers that are not finite (nan or inf); remove those rows")
        return tensor


def _check_sizes(state: Mapping[str, Tensor], shape: MemoryShape, origin: str) -> None:
    """Raise a `CheckpointError` that names all sizes that do not fit."""
    sizes = {"key_size": state["working_keys"].shape[-1], "value_size": state["working_values"].shape[-1]}
    slots = {f"{level}_slots": state[f"{level}_keys"].shape[0] for level in LEVELS}
    mismatched_keys = [key for key, size in sizes.items() if size != getattr(shape, key)]
    mismatched_keys += [key for key, number in slots.items() if number > getattr(shape, key)]
    if mismatched_keys:
        sizes_text = ", ".join(
            f"{key} {(sizes | slots)[key]} (this memory: {getattr(shape, key)})" for key in mismatched_keys
        )
        raise CheckpointError(f"{origin}: the saved memory has {sizes_text}; create a memory of that size to load it")
    for name, tensor in state.items():
        level, _, field = name.partition("_")
        if level in LEVELS:
            size = {"keys": (shape.key_size,), "values": (shape.value_size,)}.get(field, ())
            if tensor.shape != (slots[f"{level}_slots"], *size):
                raise CheckpointError(
                    f"{origin}: {name} has shape {list(tensor.shape)}, which does not match its level; save the memory again"
                )


def _pad_slots(tensor: Tensor, like: Tensor) -> Tensor:
    """Append empty slots, up to the number of slots of `like`."""
    missing = like.shape[0] - tensor.shape[0]
    return F.pad(tensor.to(like), (0, 0) * (tensor.dim() - 1) + (0, missing)).clone()
