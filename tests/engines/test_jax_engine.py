"""The JAX engine: no torch in its process, one program for all steps, checkpoints, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bottega.core.errors import BottegaError, UsageError
from bottega.engines.backend import open_backend
from small_run import SMALL, settings, write_text

WITHOUT_TORCH = """
import sys, json
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is imported in a run of JAX")
sys.meta_path.insert(0, Refuse())
from pathlib import Path
import bottega
values = json.loads(sys.argv[1])
run = bottega.train("language/shakespeare", values, quiet=True)
saved = bottega.load(run.path)
text = saved.generate("alpha", max_tokens=5)
folder = saved.export(Path(values["output_dir"]) / "exported")
print(json.dumps({"text": text, "metrics": saved.evaluate(), "files": sorted(p.name for p in folder.iterdir())}))
"""


def build(folder: Path, **changes: Any) -> Any:
    """Return engine and loader of a small language recipe."""
    from bottega.run.compose import build_engine, build_loader, build_training_plan, set_learning_rate_schedule
    from bottega.tasks import registry
    from bottega.tasks.recipes import load_recipe

    text = write_text(folder / "text.txt")
    recipe = load_recipe(["language/shakespeare", settings(folder, text, engine="jax", **changes)]).recipe
    plan = build_training_plan(recipe, registry.open_workload(recipe, progress=lambda stage, done, total: None))
    engine = build_engine(recipe, plan.task)
    loader = build_loader(recipe, plan.training, engine, plan.order)
    set_learning_rate_schedule(recipe, engine, total=8, steps_per_epoch=10)
    return engine, loader


def test_a_run_trains_generates_and_exports_without_torch(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    values = {
        **SMALL,
        "engine": "jax",
        "training.max_steps": 2,
        "output_dir": str(tmp_path),
        "data.train.path": str(text),
    }
    command = [sys.executable, "-c", WITHOUT_TORCH, json.dumps(values)]
    process = subprocess.run(command, capture_output=True, text=True, env={**os.environ}, timeout=200)
    assert process.returncode == 0, process.stderr[-3000:]
    result = json.loads(process.stdout.splitlines()[-1])
    assert result["text"][0].startswith("alpha")
    assert 2 < result["metrics"]["loss"] < 4
    assert {"config.json", "model.safetensors", "README.md"} <= set(result["files"])


def test_an_export_of_jax_opens_in_transformers_and_agrees(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from bottega.models.folders.pretrained import export_transformers

    engine, _ = build(tmp_path)
    with engine.sampling() as models:
        export_transformers(models["model"].state_dict(), models["model"].shape, tmp_path / "out")
        tokens = np.arange(12)[None] % 17
        expected = np.asarray(models["model"](tokens))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        np.testing.assert_allclose(model(torch.tensor(tokens)).logits.numpy(), expected, atol=1e-5)


def test_all_steps_run_one_program(tmp_path: Path) -> None:
    """Rate, counts, noise and dropout are arguments; a changed placement of the state would compile again."""
    engine, loader = build(tmp_path, **{"model.dropout": 0.1, "training.ema": 0.9})
    stream = loader(0)
    for step in range(4):
        engine.train_step(step, next(stream), module_statistics=step == 2)
        engine.snapshot()
    (step_function,) = engine._steps.values()
    assert step_function._cache_size() == 1


def test_dropout_differs_between_steps_and_is_off_in_evaluations(tmp_path: Path) -> None:
    engine, loader = build(tmp_path, **{"model.dropout": 0.5, "training.weight_decay": 0.0})
    batch = next(loader(0))
    engine.rate = lambda step: 0.0
    losses = [engine.fetch(engine.train_step(step, batch))["loss"] for step in (0, 1, 0)]
    assert losses[0] == losses[2] != losses[1]
    sums = [engine.fetch({"loss": engine.eval_step(batch).sums["loss"][0]}) for _ in range(2)]
    assert sums[0] == sums[1]


def test_a_step_that_is_not_finite_changes_nothing_until_it_is_handled(tmp_path: Path) -> None:
    engine, loader = build(tmp_path, **{"training.max_grad_norm": None})
    stream = loader(0)
    engine.train_step(0, next(stream))
    before = {name: np.array(value) for name, value in engine.state.parameters.items()}
    engine.rate = lambda step: float("inf")  # the update is infinite, the gradients are not
    engine.train_step(1, next(stream))
    broken = engine.fetch(engine.train_step(2, next(stream)))
    assert broken["bad_steps"] == 1.0
    assert engine.find_nonfinite_module(2, next(stream)) == "model.embed_tokens"
    engine.reset_bad_steps()
    assert set(before) == set(engine.state.parameters)


def test_module_statistics_and_histograms_are_those_of_the_step(tmp_path: Path) -> None:
    engine, loader = build(tmp_path)
    stream = loader(0)
    before = {name: np.array(value) for name, value in engine.state.parameters.items()}
    engine.fetch(engine.train_step(0, next(stream), module_statistics=True, histograms=True))
    inspection = engine.fetch_inspection()
    name = "model.norm.weight"
    change = np.linalg.norm(np.asarray(engine.state.parameters[name]) - before[name])
    ratio = change / np.linalg.norm(before[name])
    assert inspection.modules["norm"]["update_ratio"] == pytest.approx(ratio, rel=1e-4)
    assert inspection.modules["layers.0"]["dead_fraction"] == 0.0
    histogram = inspection.histograms[f"weights/{name}"]
    assert sum(histogram.counts) == before[name].size
    assert any(key.startswith("gradients/") for key in inspection.histograms)
    assert engine.fetch_inspection().modules == {}


def test_fp16_is_refused_with_the_alternative(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"fp16 is not available with engine=jax; use bf16"):
        build(tmp_path, **{"training.mixed_precision": "fp16"})


def test_a_missing_jax_is_named_with_the_command_that_installs_it() -> None:
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "from bottega.core.errors import describe_error\n"
        "from bottega.engines.backend import open_backend\n"
        "try: open_backend('jax')\n"
        "except Exception as error: print(*describe_error(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("5 engine: jax needs jax 0.10"), done.stderr
    assert "pip install 'bottega[jax]'" in done.stdout


@pytest.mark.parametrize("name", ["mps", "tpu", "cuda"])
def test_a_device_that_jax_does_not_have_is_an_error(name: str) -> None:
    with pytest.raises(BottegaError) as error:
        open_backend("jax").device_type(name)
    assert error.value.code == (5 if name == "cuda" else 2)
    assert "device:" in str(error.value)


def test_memory_and_parts_of_a_plan_are_those_of_torch() -> None:
    from bottega.models.decoder.config import shape_for_size
    from bottega.tasks.language.task import Language
    from bottega.tasks.recipes import load_recipe

    training = load_recipe(["language/verse", {"data.train.path": "x"}]).recipe.training
    task = Language(shape=shape_for_size("verse", vocab_size=50304))
    plans = [
        (backend.estimate_memory(task, training, seed=0), backend.list_parts(task, training, seed=0))
        for backend in (open_backend("torch"), open_backend("jax"))
    ]
    # The rotary tables are constants of a program in JAX, and buffers of the model in torch.
    (theirs, parts), (ours, our_parts) = plans
    assert ours == theirs._replace(weights=ours.weights, optimizer=ours.optimizer)
    assert ours.optimizer == pytest.approx(theirs.optimizer, rel=1e-6)  # it has the step counts too
    assert our_parts == parts


def test_auto_halves_the_micro_batch_until_the_compiled_step_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bottega.engines.jax import micro_batches

    engine, loader = build(tmp_path, **{"training.micro_batch_size": "auto", "training.batch_size": 8})
    batch = next(loader(0))
    whole = micro_batches.count_bytes(engine.analyse_step(batch))
    monkeypatch.setattr(micro_batches, "find_memory_limit", lambda engine: whole)  # 5 % too little
    engine.train_step(0, batch)
    assert engine.micro_batch_size == 4
    unlimited, _ = build(tmp_path, **{"training.micro_batch_size": "auto", "training.batch_size": 8})
    monkeypatch.setattr(micro_batches, "find_memory_limit", lambda engine: None)
    unlimited.train_step(0, batch)
    assert unlimited.micro_batch_size is None


def test_memory_errors_of_jax_have_their_exit_code() -> None:
    from bottega.core.errors import describe_error

    error = RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes.")
    assert describe_error(error)[0] == 7


def test_rows_of_padding_examples_are_left_out_whichever_batch_has_them() -> None:
    from bottega.engines.jax.sums import sort_rows

    rows = {"value": np.array([3.0, 1.0, 9.0]), "index": np.array([2, 0, 0]), "weight": np.array([1.0, 1.0, 0.0])}
    assert sort_rows(rows)["value"].tolist() == [1.0, 3.0]
