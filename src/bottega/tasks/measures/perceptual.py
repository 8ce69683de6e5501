"""Perceptual distances of pairs of images in bytes, computed in chunks that fit a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

CHUNK = 64


def perceptual_distances(network: Any, a: np.ndarray, b: np.ndarray, *, device: Any, chunk: int = CHUNK) -> np.ndarray:
    """Return the distances (n,) of image pairs, uint8 (n, h, w, 3); `network` is an `Lpips` or a `ClipPerceptual`."""
    assert a.dtype == b.dtype == np.uint8, "expected uint8: the range of floats is unknown"
    assert a.shape == b.shape, f"{a.shape} and {b.shape} are not pairs of images"
    distances = []
    with torch.no_grad():
        for first in range(0, len(a), chunk):
            first_images, second_images = (
                torch.from_numpy(x[first : first + chunk].astype(np.float32) / 127.5 - 1).to(device) for x in (a, b)
            )
            distances.append(network(first_images, second_images).float().cpu().numpy())
    return np.concatenate(distances).astype(np.float64) if distances else np.zeros(0)
