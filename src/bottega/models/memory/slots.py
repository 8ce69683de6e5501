"""What the levels of a memory have in common: slots of fixed number, of which the strongest stay.

... any axes in front (a batch, or none)   S slots   N new items   Q queries   k key size   v value size

Everything here is a pure function of tensors: nothing is changed in place, so a memory may be an argument and a result of a
forward, or a buffer that is renewed after a step.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bottega.core.errors import UsageError

Slots = TypeVar("Slots", bound=tuple[Tensor, ...])
ROUNDING = 1e-5
"""A key is not quite of length 1, and so its cosine with itself not quite 1."""


def normalize_keys(keys: Tensor) -> Tensor:
    """Keys at length 1, in float32 or better: what is compared is where they point."""
    return F.normalize(keys.to(torch.promote_types(keys.dtype, torch.float32)), dim=-1)


def similarity(a: Tensor, b: Tensor) -> Tensor:
    """Cosines [..., A, B] of directions [..., A, k] and [..., B, k]."""
    return a @ b.transpose(-1, -2)


def match_keys(a: Tensor, b: Tensor, same: float) -> Tensor:
    """Which directions [..., A, k] and [..., B, k] are the same key: [..., A, B]."""
    return similarity(a, b) >= same - ROUNDING


def match_values(a: Tensor, b: Tensor, same: float) -> Tensor:
    """Which values [..., A, v] and [..., B, v] are the same: as near as two of one length at that cosine. Their length
    counts as well, because 1 and 2 are two values."""
    squares = (a.square().sum(-1)[..., :, None], b.square().sum(-1)[..., None, :])
    apart = squares[0] + squares[1] - 2 * similarity(a, b)
    return apart <= (2 - 2 * same + ROUNDING) * torch.maximum(*squares)


def concat_slots(first: Slots, second: Slots) -> Slots:
    """The slots of both, side by side. A field [..., S] is one number a slot, a field [..., S, k] a vector."""
    axis = _axis(first)
    return type(first)(*(torch.cat(pair, dim=axis) for pair in zip(first, second, strict=True)))


def keep_strongest(slots: Slots, strength: Tensor, number: int) -> Slots:
    """So many of the slots, the strongest first; of equals, those that stand first."""
    order = torch.sort(strength.detach(), dim=-1, descending=True, stable=True).indices[..., :number]
    return gather_slots(slots, order)


def gather_slots(slots: Slots, order: Tensor) -> Slots:
    """The slots at these places [..., P]."""
    return type(slots)(*(gather_field(field, order) for field in slots))


def mask_slots(slots: Slots, keep: Tensor) -> Slots:
    """Zeros where `keep` [..., S] is false."""
    return type(slots)(*(field * _beside(keep, field) for field in slots))


def reverse_slots(slots: Slots) -> Slots:
    """The last one first: of equals it is the newest that stays."""
    axis = _axis(slots)
    return type(slots)(*(field.flip(axis) for field in slots))


def find_superseded(keys: Tensor, valid: Tensor, same: float) -> Tensor:
    """Which of the items [..., N] are said again by a later one."""
    later = torch.ones(keys.shape[-2], keys.shape[-2], dtype=torch.bool, device=keys.device).triu(1)
    return (match_keys(keys, keys, same) & later & valid[..., None, :]).any(-1)


def check_items(keys: Tensor, values: Tensor, *, key_size: int, value_size: int) -> None:
    """What is stored must fit into the slots."""
    for word, tensor, size in (("keys", keys, key_size), ("values", values, value_size)):
        if tensor.dim() < 2 or tensor.shape[-1] != size:
            raise UsageError(f"memory: expected {word} [..., n, {size}], got {list(tensor.shape)}")
    if keys.shape[:-1] != values.shape[:-1]:
        raise UsageError(f"memory: {list(keys.shape[:-1])} keys and {list(values.shape[:-1])} values; give one each")


def broadcast_importance(importance: Tensor, keys: Tensor) -> Tensor:
    """One number for each item, or one for all; where it is 0 or less, the item is not stored."""
    if importance.dim() and importance.shape != keys.shape[:-1]:
        raise UsageError(
            f"memory: {list(importance.shape)} importances of {list(keys.shape[:-1])} keys; give one each, or one number"
        )
    return importance.expand(keys.shape[:-1])


def _axis(slots: tuple[Tensor, ...]) -> int:
    """Of the slots, counted from the front: a field of one number a slot ends with it."""
    return min(field.dim() for field in slots) - 1


def gather_field(field: Tensor, order: Tensor) -> Tensor:
    """What stands at these places [..., P] of a field [..., S] or [..., S, k]."""
    if field.dim() == order.dim():
        return field.gather(-1, order)
    return field.gather(-2, order[..., None].expand(*order.shape, field.shape[-1]))


def _beside(one: Tensor, field: Tensor) -> Tensor:
    return one.to(field.dtype) if field.dim() == one.dim() else one[..., None].to(field.dtype)
