"""Engine state in checkpoints: resuming is bit-exact, and a state that does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bottega.config.optimizers import OPTIMIZER_SPECS
from bottega.core import checkpoint
from bottega.core.errors import CheckpointError
from bottega.engines.torch.engine import TorchEngine
from small_run import differing_tensors
from toy_task import Toy, copy_state, engine, loader, save_checkpoint, train_steps, training

OPTIMIZERS = list(OPTIMIZER_SPECS)


def build_engine(**changes: Any) -> TorchEngine:
    """Return an engine with dropout, gradient accumulation, clipping and averaged weights."""
    options = training(**{"ema": 0.9, "max_grad_norm": 0.5, **changes})
    return engine(options, task=Toy(dropout=0.3), micro=3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resuming_is_bit_exact(tmp_path: Path, name: str) -> None:
    options = {"optimizer": {"name": name}}
    straight = build_engine(**options)
    reports = train_steps(straight, loader(of=straight), 0, 7)
    first = build_engine(**options)
    train_steps(first, loader(of=first), 0, 3)
    path = save_checkpoint(first, tmp_path, 3)
    resumed = build_engine(**options)
    # Earlier work of the process must not matter.
    torch.rand(7)
    train_steps(resumed, loader(of=resumed), 0, 1)
    resumed.load(path)
    assert differing_tensors(copy_state(first), copy_state(resumed)) == []
    assert train_steps(resumed, loader(of=resumed), 3, 7) == reports[3:]
    assert differing_tensors(copy_state(straight), copy_state(resumed)) == []


def test_resuming_with_loader_workers_is_bit_exact(tmp_path: Path) -> None:
    straight = build_engine()
    train_steps(straight, loader(of=straight), 0, 5)
    first = build_engine()
    train_steps(first, loader(of=first, workers=1), 0, 2)
    resumed = build_engine()
    resumed.load(save_checkpoint(first, tmp_path, 2))
    train_steps(resumed, loader(of=resumed, workers=2), 2, 5)
    assert differing_tensors(copy_state(straight), copy_state(resumed)) == []


def test_snapshot_is_unchanged_by_later_steps(tmp_path: Path) -> None:
    torch_engine = build_engine()
    train_steps(torch_engine, loader(of=torch_engine), 0, 2)
    before, snapshot = copy_state(torch_engine), torch_engine.snapshot()
    train_steps(torch_engine, loader(of=torch_engine), 2, 4)
    files = snapshot.files()
    arrays_by_name = {f"{file}/{name}": array for file, arrays in files.items() for name, array in arrays.items()}
    assert differing_tensors(before, arrays_by_name) == []
    assert differing_tensors(before, copy_state(torch_engine)) != []


def test_optimizer_state_is_created_at_zero_and_absent_before_the_first_step() -> None:
    torch_engine = build_engine()
    assert torch_engine.state()["optimizer.safetensors"] == {}, "evaluation must not allocate optimizer state"
    before = {name: p.detach().clone() for name, p in torch_engine.model.named_parameters()}
    torch_engine._ensure_optimizer_state()
    assert all(torch.equal(p, before[name]) for name, p in torch_engine.model.named_parameters())
    assert all((t == 0).all() for t in torch_engine.state()["optimizer.safetensors"].values())
    assert all(p.grad is None for p in torch_engine.model.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_creating_optimizer_state_in_advance_changes_no_number(name: str) -> None:
    """The reference creates its state in its first step."""
    eager, lazy = (engine(training(optimizer={"name": name})) for _ in range(2))
    lazy._has_optimizer_state = True  # so that no state is created in advance
    for torch_engine in (eager, lazy):
        train_steps(torch_engine, loader(of=torch_engine), 0, 3)
    assert differing_tensors(copy_state(eager), copy_state(lazy)) == []


def alter_checkpoint(path: Path, change: Any) -> Path:
    """Write a valid checkpoint with the tensors of `path` after `change`."""
    names = [name for name in checkpoint.verify(path).files if name.endswith(".safetensors")]
    files = {name: {key: t.numpy() for key, t in load_file(path / name).items()} for name in names}
    change(files)
    return checkpoint.write(path.parent, step=9, files=files, progress={"step": 9}, fingerprint={})


def reshape(files: Any) -> None:
    files["model.safetensors"]["first.weight"] = np.zeros((8, 5), np.float32)


def recast(files: Any) -> None:
    files["model.safetensors"]["first.weight"] = files["model.safetensors"]["first.weight"].astype(np.float16)


def drop(files: Any) -> None:
    del files["model.safetensors"]["head.bias"]


def add(files: Any) -> None:
    files["model.safetensors"]["extra.weight"] = np.zeros(3, np.float32)


def drop_average(files: Any) -> None:
    del files["ema.safetensors"]["norm.bias"]


def no_average(files: Any) -> None:
    del files["ema.safetensors"]


def drop_moment(files: Any) -> None:
    del files["optimizer.safetensors"]["first.weight/exp_avg_sq"]


def drop_parameter(files: Any) -> None:
    moments = files["optimizer.safetensors"]
    files["optimizer.safetensors"] = {name: a for name, a in moments.items() if not name.startswith("second.weight/")}


def reshape_moment(files: Any) -> None:
    files["optimizer.safetensors"]["first.weight/exp_avg"] = np.zeros(8, np.float32)


def add_moment(files: Any) -> None:
    files["optimizer.safetensors"]["first.weight/momentum_buffer"] = np.zeros((8, 4), np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            reshape,
            r"model\.safetensors .* first\.weight is torch\.float32 \(8, 5\), the model has torch\.float32 \(8, 4\)",
        ),
        (recast, r"first\.weight is torch\.float16 \(8, 4\), the model has torch\.float32"),
        (drop, r"head\.bias is missing"),
        (add, r"extra\.weight is not in the model"),
        (drop_average, r"ema\.safetensors .* norm\.bias is missing"),
        (no_average, r"ema\.safetensors does not exist"),
        (drop_moment, r"optimizer\.safetensors .* first\.weight/exp_avg_sq is missing"),
        (drop_parameter, r"second\.weight/exp_avg is missing"),
        (reshape_moment, r"first\.weight/exp_avg is torch\.float32 \(8,\)"),
        (add_moment, r"first\.weight/momentum_buffer is not in the model"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_name(tmp_path: Path, change: Any, message: str) -> None:
    torch_engine = build_engine()
    train_steps(torch_engine, loader(of=torch_engine), 0, 1)
    path = alter_checkpoint(save_checkpoint(torch_engine, tmp_path, 1), change)
    checkpoint.verify(path)  # the checksums are right
    with pytest.raises(CheckpointError, match=message) as caught:
        build_engine().load(path)
    assert caught.value.code == 4
    assert "\n" not in str(caught.value)


def test_the_first_ten_differences_are_listed(tmp_path: Path) -> None:
    torch_engine = engine()
    train_steps(torch_engine, loader(of=torch_engine), 0, 1)

    def rename(files: Any) -> None:
        files["model.safetensors"] = {f"module.{name}": a for name, a in files["model.safetensors"].items()}

    with pytest.raises(CheckpointError, match="and 6 more") as caught:
        engine().load(alter_checkpoint(save_checkpoint(torch_engine, tmp_path, 1), rename))
    assert str(caught.value).count(";") == 9


@pytest.mark.parametrize("other", [name for name in OPTIMIZERS if name != "adamw"])
def test_state_of_a_different_optimizer_is_refused(tmp_path: Path, other: str) -> None:
    torch_engine = build_engine()
    train_steps(torch_engine, loader(of=torch_engine), 0, 1)
    path = save_checkpoint(torch_engine, tmp_path, 1)
    if other == "adam":  # same state as AdamW
        build_engine(optimizer={"name": other}).load(path)
        return
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors does not fit"):
        build_engine(optimizer={"name": other}).load(path)


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "boom",))

    torch_engine = engine()
    train_steps(torch_engine, loader(of=torch_engine), 0, 1)
    path = save_checkpoint(torch_engine, tmp_path, 1)
    torch.save({"first.weight": Bomb()}, path / "model.safetensors")
    with pytest.raises(CheckpointError):
        checkpoint.verify(path)
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        engine().load(path)
    assert not (tmp_path / "boom").exists()


def test_run_can_change_to_half_precision_and_back(tmp_path: Path) -> None:
    """The loss scale of fp16 is in its checkpoints only; here the test enables it, because fp16 needs a GPU."""
    plain = engine()
    train_steps(plain, loader(of=plain), 0, 1)
    scaled = engine()
    scaled._guard.scale, scaled._guard.growth = torch.tensor(2.0**16), torch.zeros((), dtype=torch.int32)
    scaled.load(save_checkpoint(plain, tmp_path / "a", 1))
    assert scaled._guard.scale.item() == 2.0**16
    train_steps(scaled, loader(of=scaled), 1, 2)
    scaled._guard.scale.fill_(512.0)
    path = save_checkpoint(scaled, tmp_path / "b", 2)
    back = engine()
    back._guard.scale, back._guard.growth = torch.tensor(1.0), torch.zeros((), dtype=torch.int32)
    back.load(path)
    assert back._guard.scale.item() == 512.0
    engine().load(path)


def test_checkpoint_with_nonfinite_weights_is_refused(tmp_path: Path) -> None:
    torch_engine = engine()
    with torch.no_grad():
        torch_engine.model.second.weight[0, 0] = torch.nan
    folder = save_checkpoint(torch_engine, tmp_path, 0)
    with pytest.raises(CheckpointError, match=r"second\.weight contains values that are not finite"):
        engine().load(folder)
