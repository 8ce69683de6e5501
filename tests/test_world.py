"""Which of how many processes this one is: what a launcher says, in any combination, and without one."""

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
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_without_a_launcher_there_is_one_process() -> None:
    assert World.from_environment() == World(rank=0, size=1, local_rank=0, local_size=1)
    assert World.from_environment().is_main
    assert not is_launched()
    assert list_missing_variables() == ["RANK", "MASTER_ADDR", "MASTER_PORT"]


def test_what_a_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    world = World.from_environment()
    assert world == World(rank=5, size=8, local_rank=1, local_size=4)
    assert not world.is_main
    assert is_launched()
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert World.from_environment().local_size == 8, "one machine, unless it says otherwise"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("KEPT", "y")
    ours = get_standalone_environment()
    assert not [name for name in ours if name in LAUNCH_VARIABLES or name.startswith("TORCHELASTIC")]
    assert ours["KEPT"] == "y"


@pytest.mark.parametrize("text", ["", "abc", "-1", "²", "1.5", "9" * 5000])
def test_what_is_no_number_waits_for_the_check_of_the_command(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", text)
    monkeypatch.setenv("RANK", text)
    assert World.from_environment() == World()
    assert read_rank({"RANK": "3"}) == 3
    assert read_rank({}) is None


def test_nobody_else_reads_the_variables() -> None:
    """Two files: the one that reads them, and the one that refuses what they cannot be."""
    folder = Path(bottega.__file__).parent
    named = re.compile(r"""["'](RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE)["']""")
    readers = {p.relative_to(folder).as_posix() for p in folder.rglob("*.py") if named.search(p.read_text())}
    assert readers == {"world.py", "config/launch.py"}


MESHES = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))


def worlds(replicate: int, shard: int, tensor: int) -> list[World]:
    size, mesh = replicate * shard * tensor, {"replicate": replicate, "shard": shard, "tensor": tensor}
    return [World(rank, size, mesh=mesh) for rank in range(size)]


def test_by_default_every_process_has_samples_of_its_own() -> None:
    for rank in range(6):
        world = World(rank, 6)
        assert world.mesh == {"replicate": 6}
        assert (world.data_rank, world.data_size) == (rank, 6)
        assert world.data_ranks == tuple(range(6))
    assert World(1, 2) == World(1, 2, mesh={"replicate": 2})


@given(MESHES)
def test_tensor_ranks_share_a_data_coordinate(sizes: tuple[int, int, int]) -> None:
    everybody = worlds(*sizes)
    replicate, shard, tensor = sizes
    for world in everybody:
        assert world.data_size == replicate * shard
        assert [other.data_rank for other in everybody].count(world.data_rank) == tensor
        group = [everybody[rank] for rank in world.data_ranks]
        assert world in group
        assert [other.data_rank for other in group] == list(range(world.data_size)), "each share once, in its order"
        assert all(other.data_ranks == world.data_ranks for other in group), "the groups are the same for all of them"


def test_the_mesh_is_handed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    world = World.from_environment({"tensor": 2, "replicate": 4})
    assert list(world.mesh.items()) == [("replicate", 4), ("tensor", 2)]
    assert (world.data_rank, world.data_size, world.data_ranks) == (2, 4, (1, 3, 5, 7))


@pytest.mark.parametrize("mesh", [{"replicate": 3}, {"tensor": 0, "shard": 4}, {"expert": 4}, {"replicate": 4, "x": 1}])
def test_a_mesh_has_known_axes_and_as_many_processes_as_there_are(mesh: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="a mesh "):
        World(0, 4, mesh=mesh)


class Watched(Toy):
    """Tells where in the global batch each example of a micro-batch stands. Nobody wraps a model that is rebound, so the
    ranks of a large world can be looked at one after the other."""

    needs_unwrapped_model: ClassVar[bool] = True
    drawn: ClassVar[list[tuple[list[int], torch.Tensor, torch.Tensor]]] = []

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        mask = torch.nn.functional.dropout(torch.ones(16), 0.5)  # a draw that is not ours
        self.drawn.append((rng.positions.tolist(), rng.normal("x", (3,)), mask))
        return super().loss(models, batch, rng)


def watch(world: World, micro: int) -> tuple[list[int], list[int], torch.Tensor, list[torch.Tensor]]:
    """Of one step: the samples a rank sees, their positions, the noise drawn for them, and its dropout."""
    Watched.drawn.clear()
    one = engine(training(optimizer={"name": "sgd"}), task=Watched(), micro=micro, world=world)
    numbered = ArraySource({**source(samples=216).arrays, "number": np.arange(216)})
    batches = loader(numbered, of=one, batch_size=72)
    seen = batches.batch(2)["number"].tolist()
    one.train_step(2, batches.batch(2))
    positions = [place for part, _, _ in Watched.drawn for place in part]
    noise = torch.cat([part for _, part, _ in Watched.drawn])
    return seen, positions, noise, [mask for _, _, mask in Watched.drawn]


@settings(max_examples=12)
@given(sizes=MESHES, micro=st.integers(1, 5))
def test_samples_and_noise_follow_the_data_coordinate(sizes: tuple[int, int, int], micro: int) -> None:
    """Ranks along `tensor` see the same samples with the same noise; replicate x shard splits as plain ranks do."""
    everybody = worlds(*sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "join_group", lambda device, world: world)
        plain = [watch(World(rank, everybody[0].data_size), micro) for rank in range(everybody[0].data_size)]
        for world in everybody:
            seen, positions, noise, dropout = watch(world, micro)
            expected = plain[world.data_rank]
            assert (seen, positions) == expected[:2]
            assert torch.equal(noise, expected[2])
            assert all(map(torch.equal, dropout, expected[3]))
    assert [place for _, positions, _, _ in plain for place in positions] == list(range(72)), "each position once"
    assert len({number for seen, *_ in plain for number in seen}) == 72


def test_a_run_takes_its_share_by_the_data_coordinate() -> None:
    """Rank 3 of 4 processes that are two shares of two: the second half of every batch, in training and evaluation."""
    recipe = load_recipe(["language", {"training.batch_size": 8, "evaluation.batch_size": 8}]).recipe
    third: Any = SimpleNamespace(
        rank=3, world=4, data_rank=1, data_size=2, device=torch.device("cpu"), device_type="cpu"
    )
    samples = source(samples=40)
    found = build_loader(recipe, samples, third)
    assert (found.data_rank, found.data_size) == (1, 2)
    assert len(found.batch(0)["x"]) == 4
    first = next(iter(make_validation_batches(recipe, samples, found)()))
    assert first["index"].tolist() == [4, 5, 6, 7]
