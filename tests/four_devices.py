"""Trains a small recipe in JAX on each mesh of four virtual devices; prints the largest difference from one device as JSON.

Run in a process of its own, because the number of devices is fixed when JAX starts: `python four_devices.py FOLDER`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import numpy as np

MESHES: list[dict[str, int]] = [
    {"replicate": 4},
    {"shard": 4},
    {"tensor": 2},
    {"replicate": 2, "shard": 2},
    {"shard": 2, "tensor": 2},
]


def compare_meshes(folder: Path) -> dict[str, dict[str, Any]]:
    """Return for each mesh the differences of weights and losses from one device, and where a weight is placed."""
    sys.path.insert(0, str(Path(__file__).parent / "contract"))
    from cases import Case, build, language

    case = Case("jax", "language", "language/shakespeare", language)
    # Dropout too: its masks are those of one device.
    options = {"model.dropout": 0.1, "training.ema": 0.9, "training.batch_size": 8}
    alone = build(case, folder, **options)
    expected = alone.advance(0, 4)
    results = {}
    for mesh in MESHES:
        subject = build(case, folder, **options, **{f"distributed.{axis}": size for axis, size in mesh.items()})
        reports = subject.advance(0, 4)
        ours, theirs = subject.state(), alone.state()
        weight = subject.engine.state.parameters["model.layers.0.self_attn.q_proj.weight"]
        moment = subject.engine.state.optimizer["model.layers.0.self_attn.q_proj.weight"]["exp_avg"]
        results["-".join(f"{axis}{size}" for axis, size in mesh.items())] = {
            "weights": max(float(np.abs(ours[name] - theirs[name]).max()) for name in theirs),
            "losses": max(abs(a["loss"] - b["loss"]) for a, b in zip(expected, reports, strict=True)),
            "axes": [axis for axis in weight.sharding.spec if axis is not None],
            "moment axes": [axis for axis in moment.sharding.spec if axis is not None],
            "shard": list(weight.addressable_shards[0].data.shape),
        }
    return results


if __name__ == "__main__":
    sys.stdout.write(json.dumps(compare_meshes(Path(sys.argv[1]))) + "\n")
