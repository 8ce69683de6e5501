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
    """(..., S, k), of length 1."""
    values: Tensor
    """(..., S, v)"""
    counts: Tensor
    """(..., S): evidence of each prototype."""

    @property
    def valid(self) -> Tensor:
        """(..., S): whether the slot holds a prototype."""
        return self.counts > 0


def empty_semantic(
    *batch: int, slots: int, key_size: int, value_size: int, device: torch.device | str | None = None
) -> SemanticSlots:
    """Return semantic memory with `slots` empty slots."""

    def zeros(*size: int) -> Tensor:
        return torch.zeros(*batch, slots, *size, device=device)

    return SemanticSlots(zeros(key_size), zeros(value_size), zeros())


def consolidate(
    episodic: EpisodicSlots, semantic: SemanticSlots, *, promote_after: float, same: float
) -> tuple[EpisodicSlots, SemanticSlots]:
    """Move episodes stored and retrieved `promote_after` times in total into the prototypes."""
    evidence = episodic.said + episodic.uses
    is_promotable = episodic.valid & (evidence >= promote_after)
    new = mask_slots(SemanticSlots(episodic.keys, episodic.values, evidence), is_promotable)
    consistent = drop_contradicted(semantic, new.keys, new.values, new.valid, same=same)
    merged, is_merged = _merge(consistent, new, same)
    candidates = concat_slots(merged, mask_slots(new, ~is_merged))
    num_slots = semantic.counts.shape[-1]
    order = torch.sort(candidates.counts, dim=-1, descending=True, stable=True).indices[..., :num_slots]
    is_new_prototype = torch.zeros_like(candidates.valid).scatter(-1, order, True)[..., num_slots:]
    return mask_slots(episodic, ~(is_promotable & (is_merged | is_new_prototype))), gather_slots(candidates, order)


def drop_contradicted(
    memory: SemanticSlots, keys: Tensor, values: Tensor, valid: Tensor, *, same: float
) -> SemanticSlots:
    """Remove the prototypes whose key was stored with another value; keys (..., N, k) are of length 1."""
    is_contradicted = match_keys(memory.keys, keys, same) & ~match_values(memory.values, values, same)
    return mask_slots(memory, ~(is_contradicted & valid[..., None, :]).any(-1))


def _merge(old: SemanticSlots, new: SemanticSlots, same: float) -> tuple[SemanticSlots, Tensor]:
    """Return the prototypes after merging new ones with the same keys, and which new ones were merged."""
    similarities = similarity(new.keys, old.keys).masked_fill(~old.valid[..., None, :], -2.0)
    max_similarity, nearest_index = similarities.max(-1)
    is_merged = (max_similarity >= same - ROUNDING) & new.valid
    evidence = torch.zeros_like(similarities).scatter(
        -1, nearest_index[..., None], (is_merged * new.counts)[..., None]
    )  # (..., N, S)
    added_counts = evidence.sum(-2)
    weight = (added_counts / (old.counts + added_counts).clamp(min=1e-12))[..., None]
    new_means = [
        evidence.transpose(-1, -2) @ field / added_counts.clamp(min=1e-12)[..., None]
        for field in (new.keys, new.values)
    ]
    keys = normalize_keys(old.keys + weight * (new_means[0] - old.keys))
    values = old.values + weight * (new_means[1] - old.values)
    keys = torch.where(weight > 0, keys, old.keys)  # normalising again would change unchanged keys
    return SemanticSlots(keys, values, old.counts + added_counts), is_merged
