"""Sums of loss terms and metrics over micro-batches and ranks; means are taken last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bottega.core.types import Rows, Sums
from bottega.engines.torch.ranks import get_data_group

SAMPLE_INDEX = "index"
"""Field of an evaluation batch: the number of each sample in its data set."""


@dataclass(frozen=True)
class LocalSum:
    """This rank's part of a sum, or of a mean if it has a count; `fetch` sums over ranks."""

    value: Tensor
    count: Any = None


def sum_terms(terms: Mapping[str, tuple[Tensor, float]], counts: Mapping[str, float]) -> Tensor:
    """Return the loss: the sum over terms of weight * total / count."""
    losses = [total * (weight / max(counts[name], 1e-12)) for name, (total, weight) in terms.items()]
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def sum_terms_by_task(terms: Mapping[str, tuple[Tensor, float]], counts: Mapping[str, float]) -> dict[str, Tensor]:
    """Return the loss of each task, whose terms are named `task` or `task/term`; PCGrad compares these losses' gradients."""
    tasks: dict[str, dict[str, tuple[Tensor, float]]] = {}
    for name, term in terms.items():
        tasks.setdefault(name.partition("/")[0], {})[name] = term
    return {task: sum_terms(task_terms, counts) for task, task_terms in tasks.items()}


def accumulate_sums(sums: dict[str, tuple[Tensor, Any]], new_sums: Mapping[str, tuple[Tensor, Any]]) -> None:
    """Add the sums of one more micro-batch in place; a value without a count is already divided by it."""
    for name, (value, count) in new_sums.items():
        previous = sums.get(name)
        sums[name] = (
            (value, count)
            if previous is None
            else (previous[0] + value, None if count is None else previous[1] + count)
        )


def reduce_sums(sums: Sums, device: torch.device) -> Sums:
    """Return the sums added over all ranks."""
    if not dist.is_initialized():
        return sums
    flat = torch.stack([torch.as_tensor(x, dtype=torch.float64, device=device) for pair in sums.values() for x in pair])
    dist.all_reduce(flat, group=get_data_group())
    return {name: (flat[2 * i], flat[2 * i + 1]) for i, name in enumerate(sums)}


def fetch_metrics(metrics: Mapping[str, Any], device: torch.device) -> dict[str, float]:
    """Return all metrics as floats, waiting for the device once. Means over nothing are left out."""
    values_by_name = dict(metrics)
    local_sums = {name: metric for name, metric in metrics.items() if isinstance(metric, LocalSum)}
    counts: dict[str, Tensor] = {}
    if local_sums:
        pairs = torch.stack([_stack_value_and_count(local_sum, device) for local_sum in local_sums.values()])
        if dist.is_initialized():
            dist.all_reduce(pairs, group=get_data_group())
        for (name, local_sum), (value, count) in zip(local_sums.items(), pairs, strict=True):
            values_by_name[name] = value if local_sum.count is None else value / count
            if local_sum.count is not None:
                counts[name] = count
    tensors = {name: value for name, value in values_by_name.items() if torch.is_tensor(value)}
    scalars = [t.double() for t in (*tensors.values(), *counts.values())]
    values = torch.stack(scalars).tolist() if scalars else []
    result = {name: float(value) for name, value in values_by_name.items() if name not in tensors}
    result |= dict(zip(tensors, values, strict=False))
    empty_means = {name for name, count in zip(counts, values[len(tensors) :], strict=True) if not count}
    return {name: value for name, value in result.items() if name not in empty_means}


def sort_rows(rows: Rows) -> Rows:
    """Return the rows in the order of the data set, whatever order it was read in."""
    rows = dict(rows)
    indices = rows.pop(SAMPLE_INDEX, None)
    return rows if indices is None else {name: values[np.argsort(indices)] for name, values in rows.items()}


def _stack_value_and_count(local_sum: LocalSum, device: torch.device) -> Tensor:
    """Return a tensor (value, count), to be summed over ranks."""
    count = 0.0 if local_sum.count is None else local_sum.count
    return torch.stack([torch.as_tensor(x, dtype=torch.float64, device=device) for x in (local_sum.value, count)])
