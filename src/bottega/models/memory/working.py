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

from bottega.models.memory.slots import alike, backwards, cleared, directions, joined, overtaken, strongest


class Working(NamedTuple):
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


def empty(*batch: int, slots: int, key_size: int, value_size: int, device: torch.device | str | None = None) -> Working:
    def zeros(*size: int) -> Tensor:
        return torch.zeros(*batch, slots, *size, device=device)

    return Working(zeros(key_size), zeros(value_size), zeros(), zeros())


def tick(memory: Working, clock: int, *, decay: float, floor: float) -> Working:
    """As it is at `clock`: fainter, and without what is too faint. A clock that goes back changes nothing."""
    passed = (clock - memory.time).clamp(min=0)
    strength = memory.strength * decay**passed
    time = torch.where(memory.valid, memory.time.clamp(min=clock), memory.time)
    faded = memory._replace(strength=strength, time=time)
    return cleared(faded, strength.detach() >= floor) if floor > 0 else faded


def store(
    memory: Working,
    keys: Tensor,
    values: Tensor,
    importance: Tensor,
    clock: int,
    *,
    decay: float,
    floor: float,
    same: float | None = None,
) -> Working:
    """Add items [..., N]. With `same`, a key that is there already (or comes again) is replaced by the newer one."""
    keys = directions(keys)
    new = Working(keys, values.float(), importance.clamp(min=0), torch.full_like(importance, clock))
    new = cleared(new, new.valid)
    old = tick(memory, clock, decay=decay, floor=floor)
    if same is not None:
        again = alike(old.keys, new.keys, same) & new.valid[..., None, :]
        old = cleared(old, ~again.any(-1))
        new = cleared(new, ~overtaken(keys, new.valid, same))
    new = cleared(new, new.strength.detach() >= floor)  # after it has replaced what it says anew
    both = joined(backwards(new), old)
    return strongest(both, both.strength, memory.strength.shape[-1])
