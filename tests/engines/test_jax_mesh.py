from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bottega.core.errors import UsageError
from bottega.engines.jax.mesh import DeviceMesh

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def meshes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the results of four_devices.py."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, str(TESTS / "four_devices.py"), str(tmp_path_factory.mktemp("meshes"))]
    process = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert process.returncode == 0, process.stderr[-3000:]
    results: dict[str, dict[str, Any]] = json.loads(process.stdout.splitlines()[-1])
    return results


@pytest.mark.slow
def test_every_mesh_trains_like_one_device(meshes: dict[str, dict[str, Any]]) -> None:
    assert len(meshes) == 5
    for name, result in meshes.items():
        assert result["weights"] < 1e-5, name
        assert result["losses"] < 1e-5, name


@pytest.mark.slow
def test_weights_and_moments_are_split_along_the_axes_of_the_mesh(meshes: dict[str, dict[str, Any]]) -> None:
    axes = {name: result["axes"] for name, result in meshes.items()}
    assert axes == {
        "replicate4": [],
        "shard4": ["shard"],
        "tensor2": ["tensor"],
        "replicate2-shard2": ["shard"],
        "shard2-tensor2": ["tensor", "shard"],
    }
    assert {name: result["moment axes"] for name, result in meshes.items()} == axes
    assert meshes["replicate4"]["shard"] == [16, 16]
    assert sorted(meshes["shard4"]["shard"]) == [4, 16]
    assert meshes["shard2-tensor2"]["shard"] == [8, 8]


def test_a_mesh_of_more_devices_than_there_are_is_refused() -> None:
    import jax

    with pytest.raises(UsageError, match=r"distributed: \{shard: 64\} needs 64 devices, but jax has"):
        DeviceMesh(jax.devices(), {"shard": 64})


def test_a_batch_that_the_devices_do_not_divide_is_refused() -> None:
    import jax

    mesh = DeviceMesh(jax.devices()[:1] * 4, {"replicate": 2, "shard": 2})
    with pytest.raises(UsageError, match=r"training.batch_size: 6 is not divisible by the 4 devices"):
        mesh.check_batch(6, key="training.batch_size")
    mesh.check_batch(8, key="training.batch_size")
