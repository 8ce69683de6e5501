"""Memory estimates: training memory follows from the model's shapes, and a model too large is never allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import small_texts
from bottega import cli
from bottega.core.errors import OutOfMemory
from bottega.engines import host_memory
from bottega.engines.backend import MemoryEstimate
from bottega.engines.torch import micro_batches, sizing
from bottega.engines.torch.memory import count_optimizer_bytes, measure_weights
from bottega.engines.torch.sizing import check_memory, estimate_memory
from bottega.run.compose import build_engine
from bottega.tasks import registry
from bottega.tasks.recipes import load_recipe
from small_media import image
from small_run import settings, train_arguments, write_text
from toy_task import Toy, engine, loader, train_steps, training

OPTIMIZERS = ("adamw", "adam", "sgd", "lion", "muon", "adafactor")
SMALL: dict[str, Any] = {
    "language/shakespeare": lambda folder: settings(folder, write_text(folder / "text.txt")),
    "image": image,
    "classify": small_texts.settings,
    "routing": lambda folder: {"output_dir": str(folder), "data.num_samples": 256, "training.max_steps": 2},
}


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("language/shakespeare", optimizer) for optimizer in OPTIMIZERS] + [(name, "adamw") for name in SMALL],
)
def test_memory_estimate_matches_the_built_engine(name: str, optimizer: str, tmp_path: Path) -> None:
    check_estimate(name, {**SMALL[name](tmp_path), "training.optimizer.name": optimizer, "device": "cpu"})


@pytest.mark.parametrize(
    "changes",
    [
        {"training.freeze": ["experts"]},
        {"training.groups": [{"pattern": "experts.*", "scale": None}, {"pattern": ".*"}]},
    ],
)
def test_memory_estimate_of_a_model_that_the_recipe_freezes_in_part(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Frozen weights are saved, but have neither gradients nor optimizer state nor an average."""
    values = {**SMALL["routing"](tmp_path), "device": "cpu", "training.ema": 0.9, **changes}
    recipe, task = check_estimate("routing", values)
    model, *_ = sizing.list_parts(task, recipe.training, seed=0)
    assert 0 < model.trainable < model.parameters


def check_estimate(name: str, values: dict[str, Any]) -> tuple[Any, Any]:
    recipe = load_recipe([name, values]).recipe
    workload = registry.open_workload(recipe, progress=lambda stage, done, total: None)
    estimate = estimate_memory(workload.task, recipe.training, seed=0)
    torch_engine = build_engine(recipe, workload.task)
    torch_engine._ensure_optimizer_state()
    assert estimate.weights == sum(model.bytes for model in measure_weights(torch_engine))
    assert estimate.num_parameters == sum(p.numel() for p in torch_engine.model.parameters())
    assert estimate.gradients == sum(p.numel() * 4 for p in torch_engine.model.parameters() if p.requires_grad)
    counters = 8 * sum(
        len(optimizer.state) for optimizer in torch_engine.optimizers
    )  # how often each parameter was updated
    assert estimate.optimizer <= count_optimizer_bytes(torch_engine) <= estimate.optimizer + 2 * counters
    assert estimate.checkpoint == pytest.approx(torch_engine.checkpoint_bytes(), rel=0.01)
    return recipe, workload.task


@pytest.mark.parametrize("verb", ["train", "plan"])
def test_a_model_larger_than_memory_is_refused_before_it_is_built(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hundred billion parameters: allocating them would invoke the kernel's OOM killer."""
    sizes = {"model.hidden_size": 16384, "model.num_layers": 40, "model.intermediate_size": 49152}
    monkeypatch.setattr("bottega.run.session.build_engine", lambda *_: pytest.fail("it was built"))
    command = train_arguments(tmp_path / "runs", write_text(tmp_path / "t.txt"), device="cpu", **sizes)
    assert cli.main([verb, *command[1:]]) == 7
    message = capsys.readouterr().err
    assert "out of memory before the first step: the model has 9" in message
    assert "weights" in message
    assert "gradients" in message
    assert "optimizer" in message
    assert "use a smaller model" in message
    assert not list((tmp_path / "runs").glob("*/checkpoints"))


def test_processes_of_one_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "get_available_memory", lambda: 100 << 30)
    model = MemoryEstimate(1, weights=20 << 30, gradients=20 << 30)
    check_memory(model, torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(
        OutOfMemory, match=r"weights 20\.0 \+ gradients 20\.0 GiB, but 25\.0 GiB .* each of 4 processes"
    ):
        check_memory(model, torch.device("cpu"))


def test_cgroup_limit_bounds_available_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nested groups: the outer has the lower limit, and the page cache does not count as used."""
    free = host_memory.get_available_memory()
    groups, process_cgroups = tmp_path / "cgroup", tmp_path / "self"
    inner = groups / "job" / "step"
    inner.mkdir(parents=True)
    process_cgroups.write_text("0::/job/step\n")
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("5\n")
    (groups / "job" / "memory.max").write_text("1000000\n")
    (groups / "job" / "memory.current").write_text("700000\n")
    (groups / "job" / "memory.stat").write_text("anon 500000\ninactive_file 150000\nactive_file 50000\n")
    monkeypatch.setattr(host_memory, "CGROUP_ROOT", groups)
    monkeypatch.setattr(host_memory, "PROCESS_CGROUPS", process_cgroups)
    assert host_memory.get_available_memory() == 500_000
    process_cgroups.write_text("3:cpu,memory:/job\n1:name=systemd:/\n")
    group = groups / "memory" / "job"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(f"{1 << 62}\n")
    assert host_memory.get_available_memory() == pytest.approx(free, rel=0.2)
    (group / "memory.limit_in_bytes").write_text("400000\n")
    (group / "memory.usage_in_bytes").write_text("300000\n")
    (group / "memory.stat").write_text("total_inactive_file 1000\ntotal_active_file 0\ninactive_file 7\n")
    assert host_memory.get_available_memory() == 101_000


def assert_equal_weights(first: Any, second: Any) -> None:
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


class HostOutOfMemory(Toy):
    """A forward pass of more than `fits` examples raises the error of a failed host allocation."""

    fits: int = 3

    def loss(self, models: Any, batch: Any, rng: Any) -> Any:
        if len(batch["x"]) > self.fits:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried …"
            )
        return super().loss(models, batch, rng)


def test_auto_halves_the_micro_batch_when_host_allocation_fails() -> None:
    options = training(micro_batch_size="auto", optimizer={"name": "sgd"})
    full, halved = engine(options), engine(options, task=HostOutOfMemory(fits=3))
    for torch_engine in (full, halved):
        train_steps(torch_engine, loader(of=torch_engine), 0, 3)
    assert (full.micro_batch_size, halved.micro_batch_size) == (8, 2)
    assert_equal_weights(full, halved)
    fixed = engine(training(micro_batch_size=8), task=HostOutOfMemory(fits=3), micro=8)
    with pytest.raises(
        OutOfMemory, match=r"a micro-batch of 8: .*; lower training\.micro_batch_size or set it to auto"
    ):
        fixed.train_step(0, loader(of=fixed).batch(0))
    # With several processes auto cannot halve in the middle of a step.
    with pytest.raises(OutOfMemory, match=r"a micro-batch of 8: .*; set training\.micro_batch_size to 4 or less"):
        micro_batches.halve_micro_batch(full, 8, MemoryError(), is_allowed=False)


def test_auto_measures_one_example_to_size_the_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The activations that one example saves for backward bound the micro-batch; the weights are the same."""
    options = training(micro_batch_size="auto", optimizer={"name": "sgd"})

    class RecordedMeter(micro_batches.SavedTensorMeter):
        def __init__(self, models: Any) -> None:
            super().__init__(models)
            meters.append(self)

    meters: list[Any] = []
    monkeypatch.setattr(micro_batches, "SavedTensorMeter", RecordedMeter)
    full = engine(options)
    train_steps(full, loader(of=full), 0, 3)
    assert len(meters) == 1, "only before the first step"
    peak = meters[0].peak_bytes
    assert peak > 0
    monkeypatch.setattr(micro_batches, "get_available_memory", lambda: int(peak * 2.9 * micro_batches.OVERHEAD_FACTOR))
    halved = engine(options)
    train_steps(halved, loader(of=halved), 0, 3)
    assert (full.micro_batch_size, halved.micro_batch_size) == (8, 2)
    assert_equal_weights(full, halved)


def test_other_errors_are_not_taken_for_out_of_memory() -> None:
    class Broken(Toy):
        def loss(self, models: Any, batch: Any, rng: Any) -> Any:
            raise RuntimeError("shapes do not match")

    torch_engine = engine(training(micro_batch_size="auto"), task=Broken())
    with pytest.raises(RuntimeError, match="shapes do not match"):
        torch_engine.train_step(0, loader(of=torch_engine).batch(0))
