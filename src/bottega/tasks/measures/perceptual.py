"""A perceptual distance over pictures as they are kept: bytes in, one number a pair, in parts that fit a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

CHUNK = 64


def perceptual_distances(network: Any, a: np.ndarray, b: np.ndarray, *, device: Any, chunk: int = CHUNK) -> np.ndarray:
    """[n] of uint8 [n, h, w, 3] and the same again; `network` is an `Lpips` or a `ClipPerceptual`."""
    assert a.dtype == b.dtype == np.uint8, "bytes: floats would have to say their range"
    assert a.shape == b.shape, f"{a.shape} and {b.shape} are no pairs of pictures"
    found = []
    with torch.no_grad():
        for first in range(0, len(a), chunk):
            one, other = (
                torch.from_numpy(x[first : first + chunk].astype(np.float32) / 127.5 - 1).to(device) for x in (a, b)
            )
            found.append(network(one, other).float().cpu().numpy())
    return np.concatenate(found).astype(np.float64) if found else np.zeros(0)
