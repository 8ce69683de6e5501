"""What ranks tell each other: who they are, sums of host numbers, and whether they agree."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bottega.core.errors import UsageError
from bottega.core.noise import derive_seed
from bottega.world import World, list_missing_variables

_groups = itertools.count()
"""Numbers the groups that this process joins, one after the other; all ranks join the same ones."""


_data_groups: dict[int, Any] = {}
_data_group: Any = None
"""The processes that have one share of a batch each; None is all of them. Of the mesh that was joined last."""


def data_group() -> Any:
    """The group that sums over samples are taken in."""
    return _data_group


def join_group(device: torch.device, world: World) -> World:
    """Meet the other processes of the world; returns this one's place in it."""
    global _data_group
    _data_group = None
    if world.size == 1:
        return replace(world, rank=0)
    unset = list_missing_variables()
    if unset:
        raise UsageError(
            f"WORLD_SIZE is {world.size} and {', '.join(unset)} not set; start the processes with torchrun"
        )
    if not dist.is_initialized():
        # torchrun's store outlives a group, so each training of a process has keys of its own in it: with those of an
        # earlier one, ranks would connect to addresses that are gone.
        store, _, _ = next(dist.rendezvous("env://"))
        # Host numbers travel over gloo and gradients over NCCL, in one group.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        own = dist.PrefixStore(f"bottega-{next(_groups)}", store)
        dist.init_process_group(backend, store=own, rank=world.rank, world_size=world.size)
        _data_groups.clear()
    if world.data_size < world.size:
        stride = world.size // world.data_size
        if stride not in _data_groups:  # every process makes all groups, in the same order
            each = [replace(world, rank=first).data_ranks for first in range(stride)]
            made = {ranks: dist.new_group(list(ranks)) for ranks in each}
            _data_groups[stride] = made[world.data_ranks]
        _data_group = _data_groups[stride]
    return world


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone. Gloo says so in words only."""
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


def sum_over_ranks(numbers: Mapping[str, float]) -> dict[str, float]:
    """Host numbers added up over the shares of a batch; they travel over gloo, so nobody waits for a device."""
    if not dist.is_initialized():
        return {name: float(n) for name, n in numbers.items()}
    total = torch.tensor([float(n) for n in numbers.values()], dtype=torch.float64)
    dist.all_reduce(total, group=_data_group)
    return dict(zip(numbers, total.tolist(), strict=True))


def gather_examples(values: Tensor) -> Tensor:
    """Equal shares [b, ...] of a batch, one after the other."""
    if not dist.is_initialized():
        return values
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(_data_group))]
    dist.all_gather(parts, values.contiguous(), group=_data_group)
    return torch.cat(parts)


def gather_rows(rows: Mapping[str, Tensor], weight: Tensor | None) -> dict[str, Tensor]:
    """The rows of all ranks in the order of the examples, without those of weight 0, which only fill up a share."""
    if not rows:
        return {}
    found = {name: gather_examples(values.detach()) for name, values in rows.items()}
    if weight is None:
        return found
    counted = gather_examples(weight) > 0
    return {name: values[counted] for name, values in found.items()}


def any_rank(flag: bool) -> bool:
    """Whether any rank says so, whatever samples it sees."""
    if not dist.is_initialized():
        return flag
    votes = torch.tensor([float(flag)], dtype=torch.float64)
    dist.all_reduce(votes)
    return bool(votes > 0)


def all_ranks_equal(text: str) -> bool:
    """Whether every rank says the same."""
    if not dist.is_initialized():
        return True
    lowest = torch.tensor([derive_seed(text)])
    highest = lowest.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return bool((lowest == highest).all())
