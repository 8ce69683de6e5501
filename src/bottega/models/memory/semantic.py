"""Semantic memory: prototypes of what was said or used often enough, without when and where.

A prototype is the mean of the episodes that agree with it. What has its key and not its value contradicts it, and it goes.
Bounded: where there is no room, a new one takes the place of the prototype that rests on least, if it rests on more itself;
else it stays an episode.
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
    """A slot of count 0 is empty."""

    keys: Tensor
    """[..., S, k], of length 1."""
    values: Tensor
    """[..., S, v]"""
    counts: Tensor
    """[..., S]: how much it rests on."""

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
    """What was said and used `promote_after` times together moves from the episodes into the prototypes."""
    evidence = episodic.said + episodic.uses
    ripe = episodic.valid & (evidence >= promote_after)
    new = mask_slots(SemanticSlots(episodic.keys, episodic.values, evidence), ripe)
    kept = drop_contradicted(semantic, new.keys, new.values, new.valid, same=same)
    met, joins = _met(kept, new, same)
    both = concat_slots(met, mask_slots(new, ~joins))
    number = semantic.counts.shape[-1]
    order = torch.sort(both.counts, dim=-1, descending=True, stable=True).indices[..., :number]
    stays = torch.zeros_like(both.valid).scatter(-1, order, True)[..., number:]
    return mask_slots(episodic, ~(ripe & (joins | stays))), gather_slots(both, order)


def drop_contradicted(
    memory: SemanticSlots, keys: Tensor, values: Tensor, valid: Tensor, *, same: float
) -> SemanticSlots:
    """Without the prototypes whose key was given another value; keys [..., N, k] are of length 1."""
    other = match_keys(memory.keys, keys, same) & ~match_values(memory.values, values, same)
    return mask_slots(memory, ~(other & valid[..., None, :]).any(-1))


def _met(old: SemanticSlots, new: SemanticSlots, same: float) -> tuple[SemanticSlots, Tensor]:
    """The prototypes after those new ones joined them whose keys they have, and which these are."""
    near = similarity(new.keys, old.keys).masked_fill(~old.valid[..., None, :], -2.0)
    nearest, where = near.max(-1)
    joins = (nearest >= same - ROUNDING) & new.valid
    share = torch.zeros_like(near).scatter(-1, where[..., None], (joins * new.counts)[..., None])  # [..., N, S]
    added = share.sum(-2)
    weight = (added / (old.counts + added).clamp(min=1e-12))[..., None]
    fresh = [share.transpose(-1, -2) @ one / added.clamp(min=1e-12)[..., None] for one in (new.keys, new.values)]
    keys = normalize_keys(old.keys + weight * (fresh[0] - old.keys))
    values = old.values + weight * (fresh[1] - old.values)
    keys = torch.where(weight > 0, keys, old.keys)  # to bring it to length 1 again would move what nobody touched
    return SemanticSlots(keys, values, old.counts + added), joins
