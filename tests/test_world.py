"""The world of processes: rank, size and device mesh, with and without a launcher."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bottega
from bottega.core.noise import Noise
from bottega.core.types import Batch, Loss, Models
from bottega.data.sources.source import ArraySource
from bottega.engines.torch import ranks
from bottega.run.compose import build_loader, make_validation_batches
from bottega.tasks.recipes import load_recipe
from bottega.world import (
    LAUNCH_VARIABLES,
    World,
    get_standalone_environment,
    is_launched,
    list_missing_variables,
    read_rank,
)
from toy_task import Toy, engine, loader, source, training


@pytest.fixture(autouse=True)
def without_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_without_a_launcher_there_is_one_process() -> None:
    assert World.from_environment() == World(rank=0, size=1, local_rank=0, local_size=1)
    assert World.from_environment().is_main
    assert not is_launched()
    assert list_missing_variables() == ["RANK", "MASTER_ADDR", "MASTER_PORT"]


def test_world_is_read_from_launcher_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    world = World.from_environment()
    assert world == World(rank=5, size=8, local_rank=1, local_size=4)
    assert not world.is_main
    assert is_launched()
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert World.from_environment().local_size == 8, "a single machine by default"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("KEPT", "y")
    standalone = get_standalone_environment()
    assert not [name for name in standalone if name in LAUNCH_VARIABLES or name.startswith("TORCHELASTIC")]
    assert standalone["KEPT"] == "y"


@pytest.mark.parametrize("text", ["", "abc", "-1", "²", "1.5", "9" * 5000])
def test_invalid_variables_are_ignored_here(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", text)
    monkeypatch.setenv("RANK", text)
    assert World.from_environment() == World()
    assert read_rank({"RANK": "3"}) == 3
    assert read_rank({}) is None


def test_launcher_variables_are_read_in_two_modules_only() -> None:
    """Only the module that reads the variables and the one that validates them."""
    folder = Path(bottega.__file__).parent
    named = re.compile(r"""["'](RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE)["']""")
    readers = {p.relative_to(folder).as_posix() for p in folder.rglob("*.py") if named.search(p.read_text())}
    assert readers == {"world.py", "config/launch.py"}


MESHES = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))


def make_worlds(replicate: int, shard: int, tensor: int) -> list[World]:
    size, mesh = replicate * shard * tensor, {"replicate": replicate, "shard": shard, "tensor": tensor}
    return [World(rank, size, mesh=mesh) for rank in range(size)]


def test_default_mesh_is_data_parallel() -> None:
    for rank in range(6):
        world = World(rank, 6)
        assert world.mesh == {"replicate": 6}
        assert (world.data_rank, world.data_size) == (rank, 6)
        assert world.data_ranks == tuple(range(6))
    assert World(1, 2) == World(1, 2, mesh={"replicate": 2})


@given(MESHES)
def test_tensor_ranks_share_a_data_coordinate(sizes: tuple[int, int, int]) -> None:
    all_ranks = make_worlds(*sizes)
    replicate, shard, tensor = sizes
    for world in all_ranks:
        assert world.data_size == replicate * shard
        assert [other.data_rank for other in all_ranks].count(world.data_rank) == tensor
        group = [all_ranks[rank] for rank in world.data_ranks]
        assert world in group
        assert [other.data_rank for other in group] == list(range(world.data_size)), "each data rank once, in order"
        assert all(other.data_ranks == world.data_ranks for other in group), "all members have the same group"


def test_mesh_is_passed_to_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    world = World.from_environment({"tensor": 2, "replicate": 4})
    assert list(world.mesh.items()) == [("replicate", 4), ("tensor", 2)]
    assert (world.data_rank, world.data_size, world.data_ranks) == (2, 4, (1, 3, 5, 7))


@pytest.mark.parametrize("mesh", [{"replicate": 3}, {"tensor": 0, "shard": 4}, {"expert": 4}, {"replicate": 4, "x": 1}])
def test_invalid_mesh_is_refused(mesh: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="a mesh "):
        World(0, 4, mesh=mesh)


class RecordingTask(Toy):
    """Records positions in the global batch, noise and dropout of each micro-batch.

    Its model is not wrapped, so the ranks of a large world can be simulated one after the other.
    """

    needs_unwrapped_model: ClassVar[bool] = True
    recorded: ClassVar[list[tuple[list[int], torch.Tensor, torch.Tensor]]] = []

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        mask = torch.nn.functional.dropout(torch.ones(16), 0.5)  # from the generator of torch, not from `rng`
        self.recorded.append((rng.positions.tolist(), rng.normal("x", (3,)), mask))
        return super().loss(models, batch, rng)


def run_rank(world: World, micro: int) -> tuple[list[int], list[int], torch.Tensor, list[torch.Tensor]]:
    """Run one step of a rank; return its samples, their positions, their noise, and the dropout masks."""
    RecordingTask.recorded.clear()
    rank_engine = engine(training(optimizer={"name": "sgd"}), task=RecordingTask(), micro=micro, world=world)
    numbered = ArraySource({**source(samples=216).arrays, "number": np.arange(216)})
    batches = loader(numbered, of=rank_engine, batch_size=72)
    samples = batches.batch(2)["number"].tolist()
    rank_engine.train_step(2, batches.batch(2))
    positions = [position for part, _, _ in RecordingTask.recorded for position in part]
    noise = torch.cat([part for _, part, _ in RecordingTask.recorded])
    return samples, positions, noise, [mask for _, _, mask in RecordingTask.recorded]


@settings(max_examples=12)
@given(sizes=MESHES, micro=st.integers(1, 5))
def test_samples_and_noise_follow_the_data_coordinate(sizes: tuple[int, int, int], micro: int) -> None:
    """Ranks along `tensor` have the same samples and noise; replicate x shard splits like data-parallel ranks."""
    all_ranks = make_worlds(*sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "join_group", lambda device, world: world)
        plain = [run_rank(World(rank, all_ranks[0].data_size), micro) for rank in range(all_ranks[0].data_size)]
        for world in all_ranks:
            samples, positions, noise, dropout = run_rank(world, micro)
            expected = plain[world.data_rank]
            assert (samples, positions) == expected[:2]
            assert torch.equal(noise, expected[2])
            assert all(map(torch.equal, dropout, expected[3]))
    assert [position for _, positions, _, _ in plain for position in positions] == list(range(72)), "each once"
    assert len({number for samples, *_ in plain for number in samples}) == 72


def test_loaders_split_batches_by_data_rank() -> None:
    """Rank 3 of 4 with 2 data ranks gets the second half of every batch, in training and evaluation."""
    recipe = load_recipe(["language", {"training.batch_size": 8, "evaluation.batch_size": 8}]).recipe
    rank_3: Any = SimpleNamespace(
        rank=3, world=4, data_rank=1, data_size=2, device=torch.device("cpu"), device_type="cpu"
    )
    samples = source(samples=40)
    batches = build_loader(recipe, samples, rank_3)
    assert (batches.data_rank, batches.data_size) == (1, 2)
    assert len(batches.batch(0)["x"]) == 4
    first = next(iter(make_validation_batches(recipe, samples, batches)()))
    assert first["index"].tolist() == [4, 5, 6, 7]
