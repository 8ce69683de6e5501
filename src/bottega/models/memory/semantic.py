"""Semantic memory: prototypes of items that were stored or retrieved often enough, without their time.

A prototype is the mean of the episodes that agree with it; an item with its key and another value removes it. When all
slots are full, a new prototype replaces the one with the least evidence if it has more; otherwise it stays an episode.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bottega.models.memory.episodic import EpisodicSlots
from bottega.models.memory.slots import (
    ROUNDING,
    concat_slots,
    gather_slots,
    mask_slots,
    match_keys,
    match_values,
    normalize_keys,
    similarity,
)


class SemanticSlots(NamedTuple):
    """Slots of semantic memory; count 0 is an empty slot. Field names are names of saved buffers."""

    keys: Tensor
    """[..., S, k], of length 1."""
    values: Tensor
    """[..., S, v]"""
    counts: Tensor
    """(..., S): evidence of each prototype."""

    @property
    def valid(self) -> Tensor:
        return self.counts > 0


def empty_semantic(
    *batch: int, slots: int, key_size: int, value_size: int, device: torch.device | str | None = None
) -> SemanticSlots:
    def zeros(*size: int) -> Tensor:
        return torch.zeros(*batch, slots, *size, device=device)

    return SemanticSlots(zeros(key_size), zeros(value_size), zeros())


def consolidate(
    episodic: EpisodicSlots, semantic: SemanticSlots, *, promote_after: float, same: float
) -> tuple[EpisodicSlots, SemanticSlots]:
    """Move episodes stored and retrieved `promote_after` times in total into the prototypes."""
    evidence = episodic.said + episodic.uses
    ripe = episodic.valid & (evidence >= promote_after)
    new = mask_slots(SemanticSlots(episodic.keys, episodic.values, evidence), ripe)
    consistent = drop_contradicted(semantic, new.keys, new.values, new.valid, same=same)
    merged, joins = _merge(consistent, new, same)
    both = concat_slots(merged, mask_slots(new, ~joins))
    number = semantic.counts.shape[-1]
    order = torch.sort(both.counts, dim=-1, descending=True, stable=True).indices[..., :number]
    stays = torch.zeros_like(both.valid).scatter(-1, order, True)[..., number:]
    return mask_slots(episodic, ~(ripe & (joins | stays))), gather_slots(both, order)


def drop_contradicted(
    memory: SemanticSlots, keys: Tensor, values: Tensor, valid: Tensor, *, same: float
) -> SemanticSlots:
    """Remove the prototypes whose key was stored with another value; keys (..., N, k) are of length 1."""
    other = match_keys(memory.keys, keys, same) & ~match_values(memory.values, values, same)
    return mask_slots(memory, ~(other & valid[..., None, :]).any(-1))


def _merge(old: SemanticSlots, new: SemanticSlots, same: float) -> tuple[SemanticSlots, Tensor]:
    """Return the prototypes after merging new ones with the same keys, and which new ones were merged."""
    near = similarity(new.keys, old.keys).masked_fill(~old.valid[..., None, :], -2.0)
    nearest, where = near.max(-1)
    joins = (nearest >= same - ROUNDING) & new.valid
    share = torch.zeros_like(near).scatter(-1, where[..., None], (joins * new.counts)[..., None])  # [..., N, S]
    added = share.sum(-2)
    weight = (added / (old.counts + added).clamp(min=1e-12))[..., None]
    fresh = [share.transpose(-1, -2) @ one / added.clamp(min=1e-12)[..., None] for one in (new.keys, new.values)]
    keys = normalize_keys(old.keys + weight * (fresh[0] - old.keys))
    values = old.values + weight * (fresh[1] - old.values)
    keys = torch.where(weight > 0, keys, old.keys)  # normalising again would change unchanged keys
    return SemanticSlots(keys, values, old.counts + added), joins
