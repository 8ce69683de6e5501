"""Operations on memory slots, shared by all levels: a fixed number of slots, of which the strongest are kept.

... any axes in front (a batch, or none)   S slots   N new items   Q queries   P selected slots   k key size   v value size

`same` is the least cosine of two keys that count as the same key (see `MemoryShape.same`).
All functions are pure and change nothing in place, so a memory may be an argument and a result of a forward, or a buffer
that is updated after a step.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bottega.core.errors import UsageError

Slots = TypeVar("Slots", bound=tuple[Tensor, ...])
ROUNDING = 1e-5
"""Tolerance of cosines: a normalised key's cosine with itself is not exactly 1."""


def normalize_keys(keys: Tensor) -> Tensor:
    """Return keys of length 1, in float32 or better; keys are compared by cosine."""
    return F.normalize(keys.to(torch.promote_types(keys.dtype, torch.float32)), dim=-1)


def similarity(a: Tensor, b: Tensor) -> Tensor:
    """Return cosines (..., A, B) of normalised keys (..., A, k) and (..., B, k)."""
    return a @ b.transpose(-1, -2)


def match_keys(a: Tensor, b: Tensor, same: float) -> Tensor:
    """Return which normalised keys (..., A, k) and (..., B, k) are the same key, (..., A, B)."""
    return similarity(a, b) >= same - ROUNDING


def match_values(a: Tensor, b: Tensor, same: float) -> Tensor:
    """Return which values (..., A, v) and (..., B, v) are the same, (..., A, B).

    They are compared by distance, because unlike for keys the length matters. The largest distance of values that are the
    same is that of two vectors of equal length at cosine `same`.
    """
    squares = (a.square().sum(-1)[..., :, None], b.square().sum(-1)[..., None, :])
    distance = squares[0] + squares[1] - 2 * similarity(a, b)
    return distance <= (2 - 2 * same + ROUNDING) * torch.maximum(*squares)


def concat_slots(first: Slots, second: Slots) -> Slots:
    """Concatenate the slots of both. A field (..., S) has one number per slot, a field (..., S, k) a vector."""
    axis = _find_slot_axis(first)
    return type(first)(*(torch.cat(pair, dim=axis) for pair in zip(first, second, strict=True)))


def keep_strongest(slots: Slots, strength: Tensor, num_slots: int) -> Slots:
    """Return the `num_slots` strongest slots, strongest first; ties keep their order."""
    order = torch.sort(strength.detach(), dim=-1, descending=True, stable=True).indices[..., :num_slots]
    return gather_slots(slots, order)


def gather_slots(slots: Slots, indices: Tensor) -> Slots:
    """Return the slots at `indices` (..., P)."""
    return type(slots)(*(gather_field(field, indices) for field in slots))


def mask_slots(slots: Slots, keep: Tensor) -> Slots:
    """Zero the slots where `keep` (..., S) is false."""
    return type(slots)(*(field * _expand_like(keep, field) for field in slots))


def reverse_slots(slots: Slots) -> Slots:
    """Reverse the slots, so that among ties the newest is kept."""
    axis = _find_slot_axis(slots)
    return type(slots)(*(field.flip(axis) for field in slots))


def find_superseded(keys: Tensor, valid: Tensor, same: float) -> Tensor:
    """Return which of the items (..., N) have the key of a later item."""
    later = torch.ones(keys.shape[-2], keys.shape[-2], dtype=torch.bool, device=keys.device).triu(1)
    return (match_keys(keys, keys, same) & later & valid[..., None, :]).any(-1)


def check_items(keys: Tensor, values: Tensor, *, key_size: int, value_size: int) -> None:
    """Raise UsageError if keys and values do not have the sizes of the slots."""
    for name, tensor, size in (("keys", keys, key_size), ("values", values, value_size)):
        if tensor.dim() < 2 or tensor.shape[-1] != size:
            raise UsageError(f"memory: expected {name} [..., n, {size}], got {list(tensor.shape)}")
    if keys.shape[:-1] != values.shape[:-1]:
        raise UsageError(
            f"memory: there are {list(keys.shape[:-1])} keys but {list(values.shape[:-1])} values; "
            "give one value for each key"
        )


def broadcast_importance(importance: Tensor, keys: Tensor) -> Tensor:
    """Expand importance to one number per item; items of importance 0 or less are not stored."""
    if importance.dim() and importance.shape != keys.shape[:-1]:
        raise UsageError(
            f"memory: {list(importance.shape)} importances for {list(keys.shape[:-1])} keys; "
            "give one for each, or a single number"
        )
    return importance.expand(keys.shape[:-1])


def _find_slot_axis(slots: tuple[Tensor, ...]) -> int:
    """Return the axis of the slots, counted from the front: the last axis of fields with one number per slot."""
    return min(field.dim() for field in slots) - 1


def gather_field(field: Tensor, indices: Tensor) -> Tensor:
    """Return a field (..., S) or (..., S, k) at `indices` (..., P)."""
    if field.dim() == indices.dim():
        return field.gather(-1, indices)
    return field.gather(-2, indices[..., None].expand(*indices.shape, field.shape[-1]))


def _expand_like(values: Tensor, field: Tensor) -> Tensor:
    """Return one number per slot, with the axes and dtype of a field."""
    return values.to(field.dtype) if field.dim() == values.dim() else values[..., None].to(field.dtype)
