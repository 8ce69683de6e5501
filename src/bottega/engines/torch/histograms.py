"""Histograms of tensors, computed on the device without waiting for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bottega.core.callback import Histogram

NUM_BINS = 64
CHUNK_SIZE = 1 << 20
"""Elements that are binned at once; their bins take 8 bytes each."""


class DeviceHistogram(NamedTuple):
    """Smallest and largest finite value, and the counts of the equal bins between them, on the device."""

    limits: Tensor
    counts: Tensor


@torch.no_grad()
def compute_histogram(values: Tensor, *, scale: Tensor | None = None) -> DeviceHistogram:
    """Count the finite elements of `values`, divided by `scale`, in NUM_BINS bins between the smallest and the largest.

    Not by `torch.histc`: it waits for the device, and on a GPU `deterministic: true` refuses it.
    """
    flat = values.detach().flatten()
    chunks = flat.split(CHUNK_SIZE)
    infinity = torch.full((), torch.inf, device=flat.device)
    minima = [torch.where(c.isfinite(), c, infinity).amin().float() for c in chunks]
    maxima = [torch.where(c.isfinite(), c, -infinity).amax().float() for c in chunks]
    low, high = torch.stack(minima).amin(), torch.stack(maxima).amax()
    # In float64, because the difference of two float32 may overflow; MPS has none, and there such a histogram is coarse.
    dtype = torch.float32 if flat.device.type == "mps" else torch.float64
    low, high = low.to(dtype), high.to(dtype)
    margin = torch.where(
        low.eq(high), (low.abs() * 2.0**-20).clamp(min=0.5), 0.0
    )  # a constant needs bins of some width
    low, high = low - margin, high + margin
    counts = torch.zeros(NUM_BINS + 1, dtype=torch.int64, device=flat.device)
    one = counts.new_ones(())
    for chunk in chunks:
        position = ((chunk.to(dtype) - low) / (high - low) * NUM_BINS).nan_to_num(0.0).clamp(0, NUM_BINS - 1)
        bins = torch.where(chunk.isfinite(), position, NUM_BINS).long()
        counts.scatter_add_(0, bins, one.expand_as(bins))
    limits = torch.stack([low, high])
    return DeviceHistogram(limits if scale is None else limits / scale, counts[:NUM_BINS])


def fetch_histograms(histograms: Mapping[str, DeviceHistogram]) -> dict[str, Histogram]:
    """Copy the histograms to the host, which waits for the device. Tensors without a finite value are left out."""
    if not histograms:
        return {}
    limits = torch.stack([h.limits for h in histograms.values()]).tolist()
    counts = torch.stack([h.counts for h in histograms.values()]).tolist()
    return {
        name: Histogram(tuple(np.linspace(low, high, NUM_BINS + 1).tolist()), tuple(bins))
        for name, (low, high), bins in zip(histograms, limits, counts, strict=True)
        if low <= high
    }
