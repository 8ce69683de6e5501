"""Episodic memory: stored items with their time, importance and number of uses.

When all slots are full, the item of least retention is dropped, old or new:

    retention = importance * decay^(ticks since stored) + uses * decay^(ticks since last use)

A key is stored once. Storing it with the same value reinforces it: its count grows, the larger importance is kept, and its
uses are kept. If it is stored with another value, it is replaced, and its history starts again.

While there are free slots, storing many items at once equals storing them one after the other. Otherwise items of one tick
are compared once, in their final state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bottega.models.memory.slots import (
    ROUNDING,
    concat_slots,
    find_superseded,
    gather_slots,
    keep_strongest,
    mask_slots,
    match_keys,
    match_values,
    normalize_keys,
    reverse_slots,
    similarity,
)


class EpisodicSlots(NamedTuple):
    """Slots of episodic memory; a slot with `said` 0 is empty. Field names are names of saved buffers."""

    keys: Tensor
    """(..., S, k), of length 1."""
    values: Tensor
    """(..., S, v)"""
    importance: Tensor
    """(..., S)"""
    written: Tensor
    """(..., S): the tick at which it was last stored."""
    used: Tensor
    """(..., S): the tick at which it was last retrieved."""
    uses: Tensor
    """(..., S): how often it was retrieved."""
    said: Tensor
    """(..., S): how often it was stored."""

    @property
    def valid(self) -> Tensor:
        """(..., S): whether the slot holds an episode."""
        return self.said > 0


def empty_episodic(
    *batch: int, slots: int, key_size: int, value_size: int, device: torch.device | str | None = None
) -> EpisodicSlots:
    """Return episodic memory with `slots` empty slots."""

    def zeros(*size: int) -> Tensor:
        return torch.zeros(*batch, slots, *size, device=device)

    return EpisodicSlots(zeros(key_size), zeros(value_size), zeros(), zeros(), zeros(), zeros(), zeros())


def compute_retention(memory: EpisodicSlots, clock: int, *, decay: float) -> Tensor:
    """Return the retention of each slot (..., S); empty slots have the least."""
    since_written, since_used = ((clock - time).clamp(min=0) for time in (memory.written, memory.used))
    score = memory.importance * decay**since_written + memory.uses * decay**since_used
    return torch.where(memory.valid, score, torch.full_like(score, -1.0))


def store(
    memory: EpisodicSlots, keys: Tensor, values: Tensor, importance: Tensor, clock: int, *, decay: float, same: float
) -> EpisodicSlots:
    """Add items (..., N) of one tick, in order; among items with the same key, the last is kept."""
    keys, values, valid = normalize_keys(keys), values.float(), importance > 0
    store_clock, zeros = torch.full_like(importance, float(clock)), torch.zeros_like(importance)
    new = mask_slots(EpisodicSlots(keys, values, importance, store_clock, zeros, zeros, torch.ones_like(zeros)), valid)
    new = mask_slots(_reinforce(new, memory, same), valid & ~find_superseded(keys, valid, same))
    is_restored = match_keys(memory.keys, keys, same) & valid[..., None, :]
    candidates = concat_slots(reverse_slots(new), mask_slots(memory, ~is_restored.any(-1)))
    return keep_strongest(candidates, compute_retention(candidates, clock, decay=decay), memory.said.shape[-1])


def record_use(memory: EpisodicSlots, slots: Tensor, clock: int, valid: Tensor | None = None) -> EpisodicSlots:
    """Return the memory after `slots` (..., P) were retrieved; entries where `valid` is false are ignored."""
    hits = torch.ones_like(slots, dtype=torch.float32) if valid is None else valid.float()
    new_uses = torch.zeros_like(memory.uses).scatter_add(-1, slots, hits)
    used = torch.where((new_uses > 0) & memory.valid, torch.full_like(memory.used, clock), memory.used)
    return memory._replace(uses=memory.uses + new_uses * memory.valid, used=used)


def _reinforce(new: EpisodicSlots, old: EpisodicSlots, same: float) -> EpisodicSlots:
    """Return the new items, each with the history of the entry that it replaces if their values are the same.

    The replaced entry is an old slot, or an earlier new item together with its own history.
    """
    count, valid = new.said.shape[-1], new.valid
    if not count:
        return new  # argmax needs at least one item
    item_matches = (match_keys(new.keys, new.keys, same) & valid[..., None, :] & valid[..., :, None]).float()
    slot_matches = (match_keys(old.keys, new.keys, same) & valid[..., None, :]).float()
    later = torch.ones(count, count, device=item_matches.device).triu(1)
    # (..., item, entry): whether an entry still exists when the item is stored, not replaced in between.
    item_survives = (item_matches * later) @ later == 0
    item_exists = item_survives.transpose(-1, -2) & (later.transpose(-1, -2) > 0) & valid[..., None, :]
    slot_exists = ((slot_matches @ later) == 0).transpose(-1, -2) & old.valid[..., None, :]
    similarities = torch.cat((similarity(new.keys, new.keys), similarity(new.keys, old.keys)), dim=-1)
    max_similarity, nearest_index = similarities.masked_fill(~torch.cat((item_exists, slot_exists), dim=-1), -2.0).max(
        -1
    )
    predecessor = gather_slots(concat_slots(new, old), nearest_index)
    is_same = match_values(new.values[..., None, :], predecessor.values[..., None, :], same)[..., 0, 0]
    is_same = is_same & (max_similarity >= same - ROUNDING) & valid
    chain = _link_predecessors(
        torch.where(is_same & (nearest_index < count), nearest_index, torch.full_like(nearest_index, count))
    )
    chain_start = chain.long().argmax(-1)  # where the history begins; it may continue the history of an old slot
    continues_slot = (is_same & (nearest_index >= count)).gather(-1, chain_start)
    slot = gather_slots(old, (nearest_index.gather(-1, chain_start) - count).clamp(min=0))
    max_importance = (new.importance[..., None, :] * chain).amax(-1)
    return new._replace(
        importance=torch.where(continues_slot, torch.maximum(max_importance, slot.importance), max_importance),
        used=torch.where(continues_slot, slot.used, new.used),
        uses=torch.where(continues_slot, slot.uses, new.uses),
        said=chain.sum(-1).float() + slot.said * continues_slot,
    )


def _link_predecessors(predecessor: Tensor) -> Tensor:
    """Return (..., N, N): each item with all its predecessors.

    `predecessor` (..., N) is the index of the direct predecessor of each item, or N if it has none.
    """
    count = predecessor.shape[-1]
    reached = torch.eye(count, device=predecessor.device).expand(*predecessor.shape, count)
    jump = torch.nn.functional.one_hot(predecessor, count + 1)[..., :count].float()
    for _ in range(max(1, (count - 1).bit_length())):  # each pass reaches twice as far
        reached, jump = reached + reached @ jump, jump @ jump
    return reached > 0
