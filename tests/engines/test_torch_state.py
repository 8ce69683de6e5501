"""What travels in a checkpoint: a resumed engine is the uninterrupted one bit for bit, and a wrong state is refused."""

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
from small_run import different
from toy_task import Toy, advance, engine, loader, save, state, training

OPTIMIZERS = list(OPTIMIZER_SPECS)


def everything(**changes: Any) -> TorchEngine:
    """Dropout, accumulation, clipping, averaged weights."""
    options = training(**{"ema": 0.9, "max_grad_norm": 0.5, **changes})
    return engine(options, task=Toy(dropout=0.3), micro=3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resuming_is_bit_exact(tmp_path: Path, name: str) -> None:
    options = {"optimizer": {"name": name}}
    straight = everything(**options)
    reports = advance(straight, loader(of=straight), 0, 7)
    first = everything(**options)
    advance(first, loader(of=first), 0, 3)
    path = save(first, tmp_path, 3)
    resumed = everything(**options)
    # Anything a process may have done before must not matter.
    torch.rand(7)
    advance(resumed, loader(of=resumed), 0, 1)
    resumed.load(path)
    assert different(state(first), state(resumed)) == []
    assert advance(resumed, loader(of=resumed), 3, 7) == reports[3:]
    assert different(state(straight), state(resumed)) == []


def test_resuming_with_loader_workers_is_bit_exact(tmp_path: Path) -> None:
    straight = everything()
    advance(straight, loader(of=straight), 0, 5)
    first = everything()
    advance(first, loader(of=first, workers=1), 0, 2)
    resumed = everything()
    resumed.load(save(first, tmp_path, 2))
    advance(resumed, loader(of=resumed, workers=2), 2, 5)
    assert different(state(straight), state(resumed)) == []


def test_a_snapshot_is_the_state_of_its_moment(tmp_path: Path) -> None:
    one = everything()
    advance(one, loader(of=one), 0, 2)
    before, snapshot = state(one), one.snapshot()
    advance(one, loader(of=one), 2, 4)
    files = snapshot.files()
    taken = {f"{file}/{name}": array for file, arrays in files.items() for name, array in arrays.items()}
    assert different(before, taken) == []
    assert different(before, state(one)) != []


def test_optimizer_state_is_whole_from_the_first_step_and_absent_before() -> None:
    one = everything()
    assert one.state()["optimizer.safetensors"] == {}, "evaluating costs no optimizer memory"
    before = {name: p.detach().clone() for name, p in one.model.named_parameters()}
    one._ensure_state()
    assert all(torch.equal(p, before[name]) for name, p in one.model.named_parameters())
    assert all((t == 0).all() for t in one.state()["optimizer.safetensors"].values())
    assert all(p.grad is None for p in one.model.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_making_the_state_beforehand_changes_no_number(name: str) -> None:
    """Against the same optimizer left to itself."""
    ours, theirs = (engine(training(optimizer={"name": name})) for _ in range(2))
    theirs._has_state = True  # so that nothing is made beforehand
    for one in (ours, theirs):
        advance(one, loader(of=one), 0, 3)
    assert different(state(ours), state(theirs)) == []


def altered(path: Path, change: Any) -> Path:
    """The same checkpoint, whole and sealed, with other tensors in it."""
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
        (no_average, r"ema\.safetensors is missing"),
        (drop_moment, r"optimizer\.safetensors .* first\.weight/exp_avg_sq is missing"),
        (drop_parameter, r"second\.weight/exp_avg is missing"),
        (reshape_moment, r"first\.weight/exp_avg is torch\.float32 \(8,\)"),
        (add_moment, r"first\.weight/momentum_buffer is not in the model"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_name(tmp_path: Path, change: Any, message: str) -> None:
    one = everything()
    advance(one, loader(of=one), 0, 1)
    path = altered(save(one, tmp_path, 1), change)
    checkpoint.verify(path)  # whole, and still wrong
    with pytest.raises(CheckpointError, match=message) as caught:
        everything().load(path)
    assert caught.value.code == 4
    assert "\n" not in str(caught.value)


def test_the_first_ten_differences_are_listed(tmp_path: Path) -> None:
    one = engine()
    advance(one, loader(of=one), 0, 1)

    def rename(files: Any) -> None:
        files["model.safetensors"] = {f"module.{name}": a for name, a in files["model.safetensors"].items()}

    with pytest.raises(CheckpointError, match="and 6 more") as caught:
        engine().load(altered(save(one, tmp_path, 1), rename))
    assert str(caught.value).count(";") == 9


@pytest.mark.parametrize("other", [name for name in OPTIMIZERS if name != "adamw"])
def test_another_optimizers_state_is_refused(tmp_path: Path, other: str) -> None:
    one = everything()
    advance(one, loader(of=one), 0, 1)
    path = save(one, tmp_path, 1)
    if other == "adam":  # it keeps what AdamW keeps
        everything(optimizer={"name": other}).load(path)
        return
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors does not fit"):
        everything(optimizer={"name": other}).load(path)


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "boom",))

    one = engine()
    advance(one, loader(of=one), 0, 1)
    path = save(one, tmp_path, 1)
    torch.save({"first.weight": Bomb()}, path / "model.safetensors")
    with pytest.raises(CheckpointError):
        checkpoint.verify(path)
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        engine().load(path)
    assert not (tmp_path / "boom").exists()


def test_a_run_may_change_to_half_precision_and_back(tmp_path: Path) -> None:
    """The loss scale of fp16 is in its checkpoints only; here it is switched on by hand, because fp16 needs a GPU."""
    plain = engine()
    advance(plain, loader(of=plain), 0, 1)
    scaled = engine()
    scaled._guard.scale, scaled._guard.growth = torch.tensor(2.0**16), torch.zeros((), dtype=torch.int32)
    scaled.load(save(plain, tmp_path / "a", 1))
    assert scaled._guard.scale.item() == 2.0**16
    advance(scaled, loader(of=scaled), 1, 2)
    scaled._guard.scale.fill_(512.0)
    path = save(scaled, tmp_path / "b", 2)
    back = engine()
    back._guard.scale, back._guard.growth = torch.tensor(1.0), torch.zeros((), dtype=torch.int32)
    back.load(path)
    assert back._guard.scale.item() == 512.0
    engine().load(path)


def test_weights_that_are_not_finite_are_not_trained_on(tmp_path: Path) -> None:
    one = engine()
    with torch.no_grad():
        one.model.second.weight[0, 0] = torch.nan
    folder = save(one, tmp_path, 0)
    with pytest.raises(CheckpointError, match=r"second\.weight contains values that are not finite"):
        engine().load(folder)
