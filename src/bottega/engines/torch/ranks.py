"""Process group and collectives: joining, sums of host numbers, gathered rows, and votes."""

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

_group_numbers = itertools.count()
"""Numbers the process groups that this process joins; all ranks join the same groups in the same order."""


_data_groups: dict[int, Any] = {}
_data_group: Any = None
"""The data-parallel group of the mesh that was joined last; None is all processes."""


def get_data_group() -> Any:
    """Return the data-parallel group, over which samples are summed."""
    return _data_group


def join_group(device: torch.device, world: World) -> World:
    """Join the process group, if there are several processes; return `world`, with rank 0 for a single process."""
    global _data_group
    _data_group = None
    if world.size == 1:
        return replace(world, rank=0)
    missing = list_missing_variables()
    if missing:
        raise UsageError(
            f"WORLD_SIZE is {world.size}, but these variables are not set: {', '.join(missing)}; start the processes with torchrun"
        )
    if not dist.is_initialized():
        # torchrun's store outlives a group, so each training uses its own key prefix: with the keys of an earlier one,
        # ranks would connect to addresses that no longer exist.
        store, _, _ = next(dist.rendezvous("env://"))
        # Host numbers use gloo and gradients NCCL, in one group.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        group_store = dist.PrefixStore(f"bottega-{next(_group_numbers)}", store)
        dist.init_process_group(backend, store=group_store, rank=world.rank, world_size=world.size)
        _data_groups.clear()
    if world.data_size < world.size:
        stride = world.size // world.data_size
        if stride not in _data_groups:  # every process creates all groups, in the same order
            members = [replace(world, rank=first).data_ranks for first in range(stride)]
            groups = {ranks: dist.new_group(list(ranks)) for ranks in members}
            _data_groups[stride] = groups[world.data_ranks]
        _data_group = _data_groups[stride]
    return world


def is_lost_peer(error: BaseException) -> bool:
    """Return whether a collective failed because another rank is gone. Gloo reports this only in its message."""
    phrases = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in phrases)


def sum_over_ranks(numbers: Mapping[str, float]) -> dict[str, float]:
    """Sum host numbers over data-parallel ranks, by gloo, so without waiting for a device."""
    if not dist.is_initialized():
        return {name: float(n) for name, n in numbers.items()}
    total = torch.tensor([float(n) for n in numbers.values()], dtype=torch.float64)
    dist.all_reduce(total, group=_data_group)
    return dict(zip(numbers, total.tolist(), strict=True))


def gather_examples(values: Tensor) -> Tensor:
    """Concatenate equally long parts `(examples, ...)` of a batch in the order of ranks."""
    if not dist.is_initialized():
        return values
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(_data_group))]
    dist.all_gather(parts, values.contiguous(), group=_data_group)
    return torch.cat(parts)


def gather_rows(rows: Mapping[str, Tensor], weight: Tensor | None) -> dict[str, Tensor]:
    """Gather the rows of all ranks in the order of the examples, without padding examples, whose weight is 0."""
    if not rows:
        return {}
    gathered = {name: gather_examples(values.detach()) for name, values in rows.items()}
    if weight is None:
        return gathered
    is_counted = gather_examples(weight) > 0
    return {name: values[is_counted] for name, values in gathered.items()}


def any_rank(flag: bool) -> bool:
    """Return True on all ranks if `flag` is true on any rank of the whole world."""
    if not dist.is_initialized():
        return flag
    votes = torch.tensor([float(flag)], dtype=torch.float64)
    dist.all_reduce(votes)
    return bool(votes > 0)


def all_ranks_equal(text: str) -> bool:
    """Return whether `text` is the same on every rank."""
    if not dist.is_initialized():
        return True
    lowest = torch.tensor([derive_seed(text)])
    highest = lowest.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return bool((lowest == highest).all())
