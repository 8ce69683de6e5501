"""Sums that become means last: over the terms of a loss, and over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Local:
    """This rank's part of a sum, or of a mean where there is a count; `fetch` adds the ranks up."""

    value: Tensor
    count: Any = None


def sum_terms(terms: Mapping[str, tuple[Tensor, float]], counts: Mapping[str, float]) -> Tensor:
    parts = [total * (weight / max(counts[name], 1e-12)) for name, (total, weight) in terms.items()]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def pair_of(m: Local, device: torch.device) -> Tensor:
    """[value, count], for a sum over ranks."""
    count = 0.0 if m.count is None else m.count
    return torch.stack([torch.as_tensor(x, dtype=torch.float64, device=device) for x in (m.value, count)])
