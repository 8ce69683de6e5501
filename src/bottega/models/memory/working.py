"""Working memory: the little that is at hand, fading with every tick.

Strength begins as importance and is multiplied by `decay` at each tick; what is below `floor` is forgotten. When there is
no room, the weakest leaves, be it old or new.

So storing many at once is storing one after the other; with `same`, as long as there is room for all. Where there is none,
what is said again at one tick does not go and come back: all of it is weighed once, as it stands at the end.
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
    """A slot of strength 0 is empty."""

    keys: Tensor
    """[..., S, k], of length 1."""
    values: Tensor
    """[..., S, v]"""
    strength: Tensor
    """[..., S]"""
    time: Tensor
    """[..., S]: the tick that the strength is of. A float holds ticks up to 2**24 exactly."""

    @property
    def valid(self) -> Tensor:
        return self.strength > 0


def empty_working(
    *batch: int, slots: int, key_size: int, value_size: int, device: torch.device | str | None = None
) -> WorkingSlots:
    def zeros(*size: int) -> Tensor:
        return torch.zeros(*batch, slots, *size, device=device)

    return WorkingSlots(zeros(key_size), zeros(value_size), zeros(), zeros())


def decay_working(memory: WorkingSlots, clock: int, *, decay: float, floor: float) -> WorkingSlots:
    """As it is at `clock`: fainter, and without what is too faint. A clock that goes back changes nothing."""
    passed = (clock - memory.time).clamp(min=0)
    strength = memory.strength * decay**passed
    time = torch.where(memory.valid, memory.time.clamp(min=clock), memory.time)
    faded = memory._replace(strength=strength, time=time)
    return mask_slots(faded, strength.detach() >= floor) if floor > 0 else faded


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
    """Add items [..., N]. With `same`, a key that is there already (or comes again) is replaced by the newer one."""
    keys = normalize_keys(keys)
    new = WorkingSlots(keys, values.float(), importance.clamp(min=0), torch.full_like(importance, clock))
    new = mask_slots(new, new.valid)
    old = decay_working(memory, clock, decay=decay, floor=floor)
    if same is not None:
        again = match_keys(old.keys, new.keys, same) & new.valid[..., None, :]
        old = mask_slots(old, ~again.any(-1))
        new = mask_slots(new, ~find_superseded(keys, new.valid, same))
    new = mask_slots(new, new.strength.detach() >= floor)  # after it has replaced what it says anew
    both = concat_slots(reverse_slots(new), old)
    return keep_strongest(both, both.strength, memory.strength.shape[-1])
