"""Working memory: a few slots whose strength decays with every tick.

Strength starts as importance and is multiplied by `decay` at each tick; slots below `floor` are forgotten. When all slots
are full, the weakest item is dropped, old or new.

Storing many items at once equals storing them one after the other; with `same` this is so only while there are free slots.
After that, items of one tick are compared once, in their final state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bottega.models.memory.slots import (
    concat_slots,
    find_superseded,
    keep_strongest,
    mask_slots,
    match_keys,
    normalize_keys,
    reverse_slots,
)


class WorkingSlots(NamedTuple):
    """Slots of working memory; strength 0 is an empty slot. Field names are names of saved buffers."""

    keys: Tensor
    """(..., S, k), of length 1."""
    values: Tensor
    """(..., S, v)"""
    strength: Tensor
    """(..., S)"""
    time: Tensor
    """(..., S): the tick at which the strength was computed. A float holds ticks up to 2**24 exactly."""

    @property
    def valid(self) -> Tensor:
        """(..., S): whether the slot holds an item."""
        return self.strength > 0


def empty_working(
    *batch: int, slots: int, key_size: int, value_size: int, device: torch.device | str | None = None
) -> WorkingSlots:
    """Return working memory with `slots` empty slots."""

    def zeros(*size: int) -> Tensor:
        return torch.zeros(*batch, slots, *size, device=device)

    return WorkingSlots(zeros(key_size), zeros(value_size), zeros(), zeros())


def decay_working(memory: WorkingSlots, clock: int, *, decay: float, floor: float) -> WorkingSlots:
    """Return the memory at `clock`, with decayed strengths and without slots below `floor`; an earlier clock is ignored."""
    elapsed = (clock - memory.time).clamp(min=0)
    strength = memory.strength * decay**elapsed
    time = torch.where(memory.valid, memory.time.clamp(min=clock), memory.time)
    decayed = memory._replace(strength=strength, time=time)
    return mask_slots(decayed, strength.detach() >= floor) if floor > 0 else decayed


def store(
    memory: WorkingSlots,
    keys: Tensor,
    values: Tensor,
    importance: Tensor,
    clock: int,
    *,
    decay: float,
    floor: float,
    same: float | None = None,
) -> WorkingSlots:
    """Add items (..., N). With `same`, an item replaces older ones with the same key."""
    keys = normalize_keys(keys)
    new = WorkingSlots(keys, values.float(), importance.clamp(min=0), torch.full_like(importance, clock))
    new = mask_slots(new, new.valid)
    old = decay_working(memory, clock, decay=decay, floor=floor)
    if same is not None:
        is_replaced = match_keys(old.keys, new.keys, same) & new.valid[..., None, :]
        old = mask_slots(old, ~is_replaced.any(-1))
        new = mask_slots(new, ~find_superseded(keys, new.valid, same))
    new = mask_slots(new, new.strength.detach() >= floor)  # only after it has replaced older items
    candidates = concat_slots(reverse_slots(new), old)
    return keep_strongest(candidates, candidates.strength, memory.strength.shape[-1])
