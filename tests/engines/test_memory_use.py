"""Memory by category: exact for tensors, a sum that equals the peak, and the categories in the out-of-memory error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bottega.core.errors import OutOfMemory
from bottega.core.noise import Noise
from bottega.engines import host_memory
from bottega.engines.torch import optimizers
from bottega.measurements import CACHED, GIB, MemoryUse, format_categories
from toy_task import Toy, engine, loader, train_steps, training


def count_bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def test_categories_are_exact_for_tensors_and_add_up_to_the_peak() -> None:
    torch_engine = engine(training(ema=0.9, optimizer={"name": "adamw"}))
    train_steps(torch_engine, loader(of=torch_engine), 0, 2)
    memory = torch_engine.memory_use()
    parameters = list(torch_engine.model.parameters())
    assert memory.device == "cpu"
    assert memory.categories["weights"] == memory.categories["gradients"] == count_bytes(parameters)
    assert memory.categories["averaged weights"] == count_bytes(parameters)
    assert memory.categories["optimizer"] >= 2 * count_bytes(parameters)
    assert memory.categories["task state"] == count_bytes(torch_engine.task_state().values())
    assert memory.peak == sum(memory.categories.values())
    assert memory.peak <= memory.total == host_memory.get_total_memory()


def test_frozen_parameters_are_a_category_of_their_own() -> None:
    name, parameter = next(iter(engine().model.named_parameters()))
    torch_engine = engine(training(groups=[{"pattern": name.replace(".", r"\."), "scale": None}, {"pattern": ".*"}]))
    train_steps(torch_engine, loader(of=torch_engine), 0, 1)
    categories = torch_engine.memory_use().categories
    frozen = count_bytes([parameter])
    assert categories["frozen weights"] == frozen + count_bytes(torch_engine.model.buffers())
    assert categories["weights"] == categories["gradients"] == count_bytes(torch_engine.model.parameters()) - frozen


def test_memory_between_steps_has_no_gradients() -> None:
    torch_engine = engine()
    train_steps(torch_engine, loader(of=torch_engine), 0, 1)
    assert torch_engine.memory_use(at_peak=False).categories["gradients"] == 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_the_categories_of_a_failed_step_have_its_gradients(error: Exception) -> None:
    """The second micro-batch fails, when the gradients of the first are in memory."""

    class SecondPassFails(Toy):
        def loss(self, models: Any, batch: Any, rng: Noise) -> Any:
            if int(rng.positions[0]) >= 4:
                raise error
            return super().loss(models, batch, rng)

    torch_engine = engine(training(micro_batch_size=4), task=SecondPassFails(), micro=4)
    with pytest.raises(OutOfMemory, match=r"\(\d+\.\d GiB\) with a micro-batch of 4: .*; lower training") as caught:
        torch_engine.train_step(0, loader(of=torch_engine).batch(0))
    memory = caught.value.memory
    assert memory is not None
    assert memory.categories["gradients"] == count_bytes(torch_engine.model.parameters())
    assert format_categories(memory) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert all(p.grad is None for p in torch_engine.model.parameters())


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_an_evaluation_that_fails_has_the_categories(error: Exception) -> None:
    class Fails(Toy):
        def loss(self, models: Any, batch: Any, rng: Noise) -> Any:
            raise error

    torch_engine = engine(task=Fails())
    with pytest.raises(OutOfMemory, match=r"while evaluating 8 examples: .*; lower evaluation\.batch_size") as caught:
        torch_engine.eval_step(loader(of=torch_engine).batch(0))
    assert caught.value.memory is not None
    assert format_categories(caught.value.memory) in str(caught.value)


def test_another_error_of_an_evaluation_is_not_taken_for_memory() -> None:
    class Fails(Toy):
        def loss(self, models: Any, batch: Any, rng: Noise) -> Any:
            raise RuntimeError("shapes do not match")

    torch_engine = engine(task=Fails())
    with pytest.raises(RuntimeError, match="shapes do not match"):
        torch_engine.eval_step(loader(of=torch_engine).batch(0))


@given(st.dictionaries(st.sampled_from(["weights", "gradients", "optimizer", CACHED]), st.integers(0, 1 << 40)))
def test_sizes_are_given_in_one_unit(categories: dict[str, int]) -> None:
    text = format_categories(MemoryUse("cpu", 0, 0, categories))
    unit = {"GiB": GIB, "MiB": 1 << 20}[text.rpartition(" ")[2]]
    shown = dict(part.rsplit(" ", 1) for part in text.rpartition(" ")[0].split(", ") if part)
    for name, size in categories.items():
        assert float(shown.get(name, 0.0)) == pytest.approx(size / unit, abs=0.051)


def test_the_total_is_the_limit_of_the_container(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / "job"
    group.mkdir()
    (tmp_path / "cgroup").write_text("0::/job\n")
    monkeypatch.setattr(host_memory, "CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(host_memory, "PROCESS_CGROUPS", tmp_path / "cgroup")
    unlimited = host_memory.get_total_memory()
    for name, value in {"memory.max": "400000", "memory.current": "1000", "memory.stat": "inactive_file 0"}.items():
        (group / name).write_text(value + "\n")
    assert host_memory.get_total_memory() == 400_000 < unlimited


def test_the_peak_remains_when_memory_is_freed() -> None:
    before = host_memory.get_resident_memory()
    del [bytearray(b"1") * (256 << 20)][:]  # beyond what earlier tests have left in the peak
    assert host_memory.get_peak_resident_memory() >= before + (250 << 20)


def test_an_optimizer_that_is_not_built_takes_no_memory() -> None:
    torch_engine = engine()
    assert torch_engine.memory_use().categories["optimizer"] == 0
    optimizers.initialise_state(torch_engine.optimizers)
    assert torch_engine.memory_use().categories["optimizer"] > 0
