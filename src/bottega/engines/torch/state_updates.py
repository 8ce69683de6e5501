"""What changes without a gradient: what the micro-batches and ranks of a step saw together, and the state it leads to.

A forward never changes state: under a split, a retry or recomputed activations it would change more than once. It says what it
saw, and after the optimizer's step the task says, once, what follows from all of it.
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
from bottega.engines.torch.ranks import data_group, gather_rows

WEIGHT = "weight"


class BatchStats:
    """Filled by the micro-batches of one step; of rows, with those of these names."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = names
        self.clear()

    def clear(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.rows: list[dict[str, Tensor]] = []
        self._whole: dict[str, Tensor] | None = None

    def add(self, out: Loss, weight: Tensor | None) -> None:
        for name, value in out.stats.items():
            value = value.detach().float()  # autocast may have made it coarse
            self.sums[name] = value if name not in self.sums else self.sums[name] + value
        rows = {name: out.rows[name].detach() for name in self.names if name in out.rows}
        if rows:
            self.rows.append(rows if weight is None else {**rows, WEIGHT: weight})

    def reduce(self) -> dict[str, Tensor]:
        """Of the whole global batch, the same on all ranks; nothing is added any more."""
        if self._whole is None:
            self._whole = self._joined()
        return self._whole

    def _joined(self) -> dict[str, Tensor]:
        if self.sums and dist.is_initialized():
            flat = torch.cat([value.flatten() for value in self.sums.values()])
            dist.all_reduce(flat, group=data_group())
            parts = flat.split([value.numel() for value in self.sums.values()])
            self.sums = {n: part.view_as(old) for (n, old), part in zip(self.sums.items(), parts, strict=True)}
        if not self.rows:
            return self.sums
        rows = {name: torch.cat([part[name] for part in self.rows]) for name in self.rows[0]}
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
    """Write what the task says, unless the step is held back. What is frozen, or not thawed yet, stays as it is, and so does a
    base that only carries an adapter."""
    if not batch_stats:
        return
    # By every name that it has: what two parts of a model share, each of them calls by its own.
    every: dict[str, Any] = {"remove_duplicate": False}
    tensors = {**dict(model.named_parameters(**every)), **dict(model.named_buffers(**every)), **state}
    for name, new in task.update(tensors, batch_stats, rng).items():
        if name in state or (task.is_trainable(name) and not is_frozen(model, name)):
            old = tensors[name]
            old.copy_(torch.where(skip_update > 0, old, new.to(old.dtype)))


def is_frozen(model: nn.Module, name: str) -> bool:
    """Whether no weight learns of the layer that a tensor belongs to: the nearest around it that has weights at all."""
    path, _, own = name.rpartition(".")
    weight = model.get_submodule(path)._parameters.get(own)
    if weight is not None:
        return not weight.requires_grad
    while True:
        weights = list(model.get_submodule(path).parameters())
        if weights or not path:
            return bool(weights) and not any(one.requires_grad for one in weights)
        path = path.rpartition(".")[0]
