"""What changes without a gradient: what the micro-batches and ranks of a step saw together, and the state it leads to.

A forward never changes state: under a split, a retry or recomputed activations it would change more than once. It says what it
saw, and after the optimizer's step the task says, once, what follows from all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bottega.core.task import Task
from bottega.core.types import Loss
from bottega.engines.ranks import joined_rows

WEIGHT = "weight"


class Seen:
    """Filled by the micro-batches of one step."""

    def __init__(self, *, with_rows: bool) -> None:
        self.with_rows = with_rows
        self.clear()

    def clear(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.rows: list[dict[str, Tensor]] = []

    def add(self, out: Loss, weight: Tensor | None) -> None:
        for name, value in out.stats.items():
            value = value.detach().float()  # autocast may have made it coarse
            self.sums[name] = value if name not in self.sums else self.sums[name] + value
        if self.with_rows and out.rows:
            rows = {name: values.detach() for name, values in out.rows.items()}
            self.rows.append(rows if weight is None else {**rows, WEIGHT: weight})

    def whole(self) -> dict[str, Tensor]:
        """Of the whole global batch, the same on all ranks."""
        if self.sums and dist.is_initialized():
            flat = torch.cat([value.flatten() for value in self.sums.values()])
            dist.all_reduce(flat)
            parts = flat.split([value.numel() for value in self.sums.values()])
            self.sums = {n: part.view_as(old) for (n, old), part in zip(self.sums.items(), parts, strict=True)}
        if not self.rows:
            return self.sums
        rows = {name: torch.cat([part[name] for part in self.rows]) for name in self.rows[0]}
        return {**self.sums, **joined_rows(rows, rows.pop(WEIGHT, None))}


@torch.no_grad()
def renew(
    task: Task, model: nn.Module, kept: Mapping[str, Tensor], seen: Mapping[str, Tensor], *, step: int, hold: Tensor
) -> None:
    """Write what the task says, unless the step is held back; a base that only carries an adapter stays as it is."""
    if not seen:
        return
    # By every name that it has: what two parts of a model share, each of them calls by its own.
    every: dict[str, Any] = {"remove_duplicate": False}
    tensors = {**dict(model.named_parameters(**every)), **dict(model.named_buffers(**every)), **kept}
    for name, new in task.update(tensors, seen, step).items():
        if name in kept or task.learns(name):
            old = tensors[name]
            old.copy_(torch.where(hold > 0, old, new.to(old.dtype)))
