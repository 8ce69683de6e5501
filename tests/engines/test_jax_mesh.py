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


def test_an_axis_that_divides_no_parameter_is_refused() -> None:
    import jax

    shapes = {"layers.0.self_attn.q_proj.weight": (16, 16), "norm.weight": (16,)}
    with pytest.raises(UsageError, match=r"distributed.tensor: 5 divides no heads"):
        DeviceMesh(jax.devices()[:1] * 5, {"tensor": 5}).check_parameters(shapes)
    with pytest.raises(UsageError, match=r"distributed.shard: 3 divides no side"):
        DeviceMesh(jax.devices()[:1] * 3, {"shard": 3}).check_parameters(shapes)
    mesh = DeviceMesh(jax.devices()[:1] * 8, {"shard": 4, "tensor": 2})
    mesh.check_parameters(shapes)
    assert mesh.describe() == "8 cpu devices (shard 4 x tensor 2)"
    assert DeviceMesh(jax.devices(), {}).describe() == "cpu"


def test_processes_that_contradict_the_axes_are_refused() -> None:
    from bottega.run.checks import find_problems
    from bottega.tasks.recipes import load_recipe

    recipe = load_recipe(["language", {"engine": "jax", "distributed.processes": 6, "distributed.shard": 2}]).recipe
    assert [str(p) for p in find_problems(recipe)] == [
        "distributed.processes is 6, but replicate x shard x tensor is 2; remove one of them"
    ]
    short = load_recipe(["language", {"distributed.processes": 6, "distributed.strategy": "fsdp"}]).recipe
    assert short.distributed.mesh == {"replicate": 1, "shard": 6, "tensor": 1}


def test_a_classifier_of_texts_is_refused_in_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    from bottega.run.checks import _find_jax_process_problems
    from bottega.tasks.recipes import load_recipe

    recipe = load_recipe(["classify/cnn", {"engine": "jax"}]).recipe
    assert list(_find_jax_process_problems(recipe)) == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    (problem,) = _find_jax_process_problems(recipe)
    assert "pad their texts to different lengths; start one process" in problem
