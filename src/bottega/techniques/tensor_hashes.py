"""Hashes of frozen weights: the same for the tensors of any framework."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np


def hash_tensor(dtype: str, shape: Sequence[int], values: np.ndarray) -> str:
    """Return the SHA-256 of a tensor: its dtype, as torch names it, its shape and its bytes."""
    digest = hashlib.sha256(f"{dtype} {list(shape)}\n".encode())
    digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def combine_hashes(hashes: Mapping[str, str]) -> str:
    """Return one SHA-256 over hashes and their names."""
    return hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in hashes.items()).encode()).hexdigest()
