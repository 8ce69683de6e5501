"""Files hashed while they are written: plain bytes, and tensors in the safetensors format."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

CHUNK_BYTES = 16 << 20
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Write a safetensors file and return its size and SHA-256. It is hashed while it is written: no second pass, no copy."""
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    header: dict[str, Any] = {}
    offset = 0
    # With the widest types first, every tensor is aligned to its own item size.
    order = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    for name in order:
        array = arrays[name]
        end = offset + array.nbytes
        header[name] = {"dtype": DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0) as file:
        data = (arrays[name].reshape(-1).view(np.uint8).data for name in order if arrays[name].size)
        for view in (memoryview(len(head).to_bytes(8, "little")), memoryview(head), *data):
            for start in range(0, len(view), CHUNK_BYTES):
                _write_all(file, view[start : start + CHUNK_BYTES], digest)
        os.fsync(file.fileno())
    return {"size": 8 + len(head) + offset, "sha256": digest.hexdigest()}


def write_bytes(path: Path, data: bytes) -> dict[str, Any]:
    """Write a file and return its size and SHA-256."""
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0) as file:
        _write_all(file, memoryview(data), digest)
        os.fsync(file.fileno())
    return {"size": len(data), "sha256": digest.hexdigest()}


def _write_all(file: Any, view: memoryview, digest: Any) -> None:
    digest.update(view)
    while view:
        view = view[file.write(view) :]
