"""`training.compile: auto` on a GPU: short runs start at once, long ones compile, and a switch keeps losses and resumes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bottega
import small_media
import small_multitask
import small_texts
from bottega.engines import compile_choice
from bottega.engines.compile_choice import CompileCost
from bottega.engines.torch.engine import TorchEngine
from bottega.run.auto_compile import MIN_TIMED_STEPS
from bottega.run.train import train_command
from fake_compiler import FakeCompiler, use_compiler
from small_run import differing_tensors, read_tensors, settings, write_text
from toy_task import Toy, loader, save_checkpoint, train_steps, training

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

RECIPES: dict[str, Any] = {
    "language/shakespeare": lambda folder: settings(folder, write_text(folder / "text.txt")),
    "image": small_media.image,
    "audio": small_media.audio,
    "video": small_media.video,
    "classify": small_texts.settings,
    "multitask": small_multitask.settings,
}
NUM_EAGER = 1 + MIN_TIMED_STEPS
"""Steps before the first compiled one, if any measured time is enough to compile."""


def list_values(recipe: str, folder: Path, **changes: Any) -> dict[str, Any]:
    values = {**RECIPES[recipe](folder), "output_dir": str(folder), "device": "cuda", "evaluation.every": None}
    return values | {"samples.every": None, "logging.every": 1, "training.max_steps": 10, **changes}


def read_rows(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "train"]


@pytest.fixture
def compiled_once_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the table nothing is saved, by any measured time something is: a run switches as soon as it has timed its steps."""
    cost = CompileCost(compile_seconds=0.0, factor=0.5, step_seconds=0.0)
    monkeypatch.setattr(compile_choice, "COSTS", {"cuda": dict.fromkeys(compile_choice.COSTS["cuda"], cost)})


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_short_run_compiles_nothing(recipe: str, tmp_path: Path) -> None:
    """Neither the model nor noise, attention over documents or frozen models; also not in the evaluation."""
    from torch._dynamo.utils import counters

    counters.clear()
    run = bottega.train(recipe, list_values(recipe, tmp_path, **{"evaluation.every": 5}))
    assert {row["compiled"] for row in read_rows(run.path)} == {0.0}
    assert counters["frames"]["total"] == 0
    assert "training.compile: auto is off for 10 steps" in (run.path / "log.txt").read_text()


def test_a_long_run_is_compiled_from_its_first_step(tmp_path: Path) -> None:
    values = list_values("classify", tmp_path, name="long", **{"training.max_steps": 10**7})
    words = [f"{key}={'null' if value is None else value}" for key, value in values.items()]
    train_command(["classify", *words], fresh=False, resume_from=None, allow_data_change=False, quiet=True, until=2)
    assert [row["compiled"] for row in read_rows(tmp_path / "long")] == [1.0, 1.0]
    assert "training.compile: auto is on for 10,000,000 steps" in (tmp_path / "long" / "log.txt").read_text()


@pytest.mark.usefixtures("compiled_once_timed")
@pytest.mark.parametrize("recipe", ["language/shakespeare", "image", "classify"])
def test_a_switch_keeps_the_losses_of_an_eager_run(recipe: str, tmp_path: Path) -> None:
    options = {"training.mixed_precision": "fp32", "model.dropout": 0.0}
    values = list_values(recipe, tmp_path, **options)
    switched = read_rows(bottega.train(recipe, {**values, "name": "switched"}).path)
    eager = read_rows(bottega.train(recipe, {**values, "name": "eager", "training.compile": False}).path)
    assert [row["compiled"] for row in switched] == [0.0] * NUM_EAGER + [1.0] * (10 - NUM_EAGER)
    assert [row["loss"] for row in switched] == pytest.approx([row["loss"] for row in eager], rel=1e-3)


@pytest.mark.usefixtures("compiled_once_timed")
def test_the_first_loss_resumed_after_a_switch_agrees(tmp_path: Path) -> None:
    """A compiled step in bf16 rounds differently, so the resumed run has to start compiled, though it has timed nothing."""
    values = list_values("language/shakespeare", tmp_path, name="run", **{"checkpoint.every": 1, "checkpoint.keep": 99})
    run = bottega.train("language/shakespeare", values).path
    losses = {row["step"]: row["loss"] for row in read_rows(run)}
    for step in (9, 10):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    bottega.train("language/shakespeare", values)
    rows = {row["step"]: row for row in read_rows(run)}
    assert rows[9]["compiled"] == 1.0
    assert rows[9]["loss"] == pytest.approx(losses[9], rel=1e-6)


def test_deterministic_resume_around_a_switch_is_bit_exact(tmp_path: Path) -> None:
    def build() -> TorchEngine:
        options: dict[str, Any] = {"rate": lambda step: 1e-2, "device": "cuda", "deterministic": True}
        return TorchEngine(Toy(dropout=0.3), training(ema=0.9), **options)

    def train(engine: TorchEngine, start: int, stop: int) -> list[float]:
        losses = []
        for step in range(start, stop):
            engine.is_compiled = 2 <= step < 5
            losses += [report["loss"] for report in train_steps(engine, loader(of=engine), step, step + 1)]
        return losses

    def copy(engine: TorchEngine) -> dict[str, np.ndarray]:
        return {
            f"{file}/{n}": a.copy() for file, arrays in engine.snapshot().files().items() for n, a in arrays.items()
        }

    straight = build()
    losses = train(straight, 0, 7)
    for cut in (1, 2, 3, 5, 6):
        first, second = build(), build()
        assert train(first, 0, cut) == losses[:cut]
        second.load(save_checkpoint(first, tmp_path / str(cut), cut))
        assert train(second, cut, 7) == losses[cut:]
        assert differing_tensors(copy(straight), copy(second)) == [], cut


@pytest.mark.usefixtures("compiled_at_once")
@pytest.mark.parametrize("recipe", ["language/shakespeare", "image"])
def test_a_compiler_that_fails_leaves_an_eager_run(recipe: str, tmp_path: Path) -> None:
    values = list_values(recipe, tmp_path, deterministic=True)
    with use_compiler(FakeCompiler(fails_to_compile=True)):
        failed = bottega.train(recipe, {**values, "name": "failed"}).path
    eager = bottega.train(recipe, {**values, "name": "eager", "training.compile": False}).path
    assert {row["compiled"] for row in read_rows(failed)} == {0.0}
    assert differing_tensors(read_tensors(failed), read_tensors(eager)) == []
    assert (failed / "log.txt").read_text().count("training continues without compiling") == 1


@pytest.mark.usefixtures("compiled_at_once")
def test_a_triton_that_is_broken_leaves_an_eager_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real compiler, which finds nothing to build kernels with."""
    import torch._inductor.codecache as codecache

    def refuse(*args: Any, **options: Any) -> Any:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setattr(codecache.PyCodeCache, "load_by_key_path", refuse)
    torch._inductor.config.force_disable_caches = True
    try:
        run = bottega.train("classify", list_values("classify", tmp_path, name="broken")).path
    finally:
        torch._inductor.config.force_disable_caches = False
    assert {row["compiled"] for row in read_rows(run)} == {0.0}
    assert "Failed to find C compiler" in (run / "log.txt").read_text()
