"""Episodic memory: what was said, when, how much it mattered, and how often it was of use.

Bounded: when there is no room, the entry of least retention leaves, be it old or new:

    retention = importance * decay^(ticks since it was said) + uses * decay^(ticks since it was last used)

A key that is there already is not stored twice. With the same value it is reinforced: said once more, as important as the
more important of the two, its uses kept. With another value it is replaced, and its history begins anew.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bottega.models.memory_slots import (
    ROUNDING,
    agree,
    alike,
    backwards,
    cleared,
    directions,
    joined,
    overtaken,
    picked,
    similarity,
    strongest,
)


class Episodic(NamedTuple):
    """A slot that was said 0 times is empty."""

    keys: Tensor
    """[..., S, k], of length 1."""
    values: Tensor
    """[..., S, v]"""
    importance: Tensor
    """[..., S]"""
    written: Tensor
    """[..., S]: the tick at which it was last said."""
    used: Tensor
    """[..., S]: the tick at which it was last found."""
    uses: Tensor
    """[..., S]: how often it was found."""
    said: Tensor
    """[..., S]: how often it was said."""

    @property
    def valid(self) -> Tensor:
        return self.said > 0


def empty(
    *batch: int, slots: int, key_size: int, value_size: int, device: torch.device | str | None = None
) -> Episodic:
    def zeros(*size: int) -> Tensor:
        return torch.zeros(*batch, slots, *size, device=device)

    return Episodic(zeros(key_size), zeros(value_size), zeros(), zeros(), zeros(), zeros(), zeros())


def retention(memory: Episodic, clock: int, *, decay: float) -> Tensor:
    """How much each slot is worth keeping; that of an empty one is less than that of any other."""
    since_written, since_used = ((clock - time).clamp(min=0) for time in (memory.written, memory.used))
    worth = memory.importance * decay**since_written + memory.uses * decay**since_used
    return torch.where(memory.valid, worth, torch.full_like(worth, -1.0))


def store(
    memory: Episodic, keys: Tensor, values: Tensor, importance: Tensor, clock: int, *, decay: float, same: float
) -> Episodic:
    """Add items [..., N], all said at one tick; of those with one key the last counts."""
    keys, values, valid = directions(keys), values.float(), importance > 0
    now = torch.full_like(importance, float(clock))
    said = _agreeing(keys, values, valid, same)
    new = Episodic(keys, values, importance, now, torch.zeros_like(now), torch.zeros_like(now), said)
    new = cleared(_reinforced(new, memory, same), valid & ~overtaken(keys, valid, same))
    again = alike(memory.keys, keys, same) & valid[..., None, :]
    both = joined(backwards(new), cleared(memory, ~again.any(-1)))
    return strongest(both, retention(both, clock, decay=decay), memory.said.shape[-1])


def use(memory: Episodic, slots: Tensor, clock: int, found: Tensor | None = None) -> Episodic:
    """The memory after `slots` [..., P] were of use; where `found` is false, nothing was."""
    hits = torch.ones_like(slots, dtype=torch.float32) if found is None else found.float()
    times = torch.zeros_like(memory.uses).scatter_add(-1, slots, hits)
    used = torch.where((times > 0) & memory.valid, torch.full_like(memory.used, clock), memory.used)
    return memory._replace(uses=memory.uses + times * memory.valid, used=used)


def _agreeing(keys: Tensor, values: Tensor, valid: Tensor, same: float) -> Tensor:
    """How often each item is said among the new ones, itself included."""
    return (alike(keys, keys, same) & agree(values, values, same) & valid[..., None, :]).sum(-1).float()


def _reinforced(new: Episodic, old: Episodic, same: float) -> Episodic:
    """The new items with the history of the old entry that says the same."""
    near = similarity(new.keys, old.keys).masked_fill(~old.valid[..., None, :], -2.0)
    nearest, where = near.max(-1)
    before = picked(old, where)
    agrees = agree(new.values[..., None, :], before.values[..., None, :], same)[..., 0, 0]
    agrees = agrees & (nearest >= same - ROUNDING)
    return new._replace(
        importance=torch.where(agrees, torch.maximum(new.importance, before.importance), new.importance),
        used=torch.where(agrees, before.used, new.used),
        uses=torch.where(agrees, before.uses, new.uses),
        said=torch.where(agrees, new.said + before.said, new.said),
    )
