"""Updates of tensors that change without a gradient: statistics of the global batch, and the task's update from them.

A forward pass never changes state: with micro-batches, a retry or recomputed activations it would change more than once.
It returns statistics, and after the optimizer step the task computes the new values from their sum, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bottega.core.noise import Noise
from bottega.core.task import Task
from bottega.core.types import Loss
from bottega.engines.torch.ranks import gather_rows, get_data_group

WEIGHT = "weight"


class BatchStats:
    """Statistics of one step, accumulated over micro-batches: all `Loss.stats`, and the `Loss.rows` in `names`."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = names
        self.clear()

    def clear(self) -> None:
        """Start a new step."""
        self.sums: dict[str, Tensor] = {}
        self.rows: list[dict[str, Tensor]] = []
        self._reduced: dict[str, Tensor] | None = None

    def add(self, out: Loss, weight: Tensor | None) -> None:
        """Add the statistics of one micro-batch; `weight` is 0 for padding examples."""
        for name, value in out.stats.items():
            value = value.detach().float()  # autocast may have given a lower precision
            self.sums[name] = value if name not in self.sums else self.sums[name] + value
        rows = {name: out.rows[name].detach() for name in self.names if name in out.rows}
        if rows:
            self.rows.append(rows if weight is None else {**rows, WEIGHT: weight})

    def reduce(self) -> dict[str, Tensor]:
        """Return the statistics of the global batch, the same on all ranks. Nothing may be added afterwards."""
        if self._reduced is None:
            self._reduced = self._reduce_over_ranks()
        return self._reduced

    def _reduce_over_ranks(self) -> dict[str, Tensor]:
        if self.sums and dist.is_initialized():
            flat = torch.cat([value.flatten() for value in self.sums.values()])
            dist.all_reduce(flat, group=get_data_group())
            totals = flat.split([value.numel() for value in self.sums.values()])
            self.sums = {n: total.view_as(local) for (n, local), total in zip(self.sums.items(), totals, strict=True)}
        if not self.rows:
            return self.sums
        rows = {name: torch.cat([micro_batch_rows[name] for micro_batch_rows in self.rows]) for name in self.rows[0]}
        return {**self.sums, **gather_rows(rows, rows.pop(WEIGHT, None))}


@torch.no_grad()
def apply_state_update(
    task: Task,
    model: nn.Module,
    state: Mapping[str, Tensor],
    batch_stats: Mapping[str, Tensor],
    *,
    rng: Noise,
    skip_update: Tensor,
) -> None:
    """Write the values of `Task.update`, unless the step is skipped.

    Frozen weights, those not unfrozen yet, and the base model under an adapter stay as they are.
    """
    if not batch_stats:
        return
    # Tensors shared by two modules are listed under both names.
    options: dict[str, Any] = {"remove_duplicate": False}
    tensors = {**dict(model.named_parameters(**options)), **dict(model.named_buffers(**options)), **state}
    for name, new in task.update(tensors, batch_stats, rng).items():
        if name in state or (task.is_trainable(name) and not is_frozen(model, name)):
            old = tensors[name]
            old.copy_(torch.where(skip_update > 0, old, new.to(old.dtype)))


def is_frozen(model: nn.Module, name: str) -> bool:
    """Return whether the layer of a tensor is frozen: the nearest enclosing module that has parameters."""
    path, _, tensor_name = name.rpartition(".")
    weight = model.get_submodule(path)._parameters.get(tensor_name)
    if weight is not None:
        return not weight.requires_grad
    while True:
        weights = list(model.get_submodule(path).parameters())
        if weights or not path:
            return bool(weights) and not any(weight.requires_grad for weight in weights)
        path = path.rpartition(".")[0]
