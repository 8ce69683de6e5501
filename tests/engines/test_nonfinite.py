"""Losses that are not finite: weights stay unchanged, a report is written, and each policy is followed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from bottega.callbacks.early_stopping import EarlyStopping
from bottega.callbacks.jsonl import JsonLines
from bottega.callbacks.stability import Stability
from bottega.core import checkpoint
from bottega.core.callback import Callback, Progress
from bottega.core.errors import Diverged
from bottega.core.trainer import BestMetric, Cadences
from bottega.data.loading.loader import iter_eval_batches
from bottega.engines.nonfinite import MAX_SKIPPED_UPDATES
from bottega.engines.torch import optimizers
from bottega.metrics_log import read_metrics
from bottega.techniques.ewc.task import Ewc
from nonfinite_trial import BAD, Trial, bad_step
from small_run import differing_tensors
from toy_task import Toy, copy_state, engine, loader, source, train_steps, training

OPTIMIZERS = ["adamw", "adam", "sgd", "muon", "lion", "adafactor"]


@pytest.mark.parametrize("log", [1, 4, 10], ids=["detected at once", "detected later", "detected at the end"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_halt_keeps_the_weights_from_before_the_bad_step(tmp_path: Path, name: str, log: int) -> None:
    step = bad_step()
    assert step > 0
    before = Trial(tmp_path / "before", "halt", optimizer={"name": name})
    train_steps(before.engine, before.loader, 0, step)
    trial = Trial(tmp_path, "halt", log=log, save=0, optimizer={"name": name})
    with pytest.raises(Diverged, match=f"not finite at step {step + 1} ") as caught:
        trial.run()
    assert caught.value.code == 6
    assert differing_tensors(copy_state(before.engine), copy_state(trial.engine)) == []
    assert checkpoint.list_checkpoints(tmp_path / "checkpoints") == [], "a checkpoint was written after the bad step"


def test_report_names_step_samples_and_module_and_saves_the_batch(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "halt", log=4)
    step = bad_step()
    with pytest.raises(Diverged) as caught:
        trial.run()
    samples = trial.loader.indices(step)[0].tolist()
    assert str(BAD) in str(caught.value).partition("(samples ")[2].partition(")")[0].split(", ")
    assert ", first in first;" in str(caught.value), "the first layer receives the infinity"
    assert "\n" not in str(caught.value)
    folder = tmp_path / "nonfinite" / f"step-{step + 1:08d}"
    report = json.loads((folder / "report.json").read_text())
    assert report == {"step": step + 1, "samples": samples, "epochs": [0] * 8, "first_bad_module": "first"}
    saved, batch = load_file(folder / "batch.safetensors"), trial.loader.batch(step)
    assert {name: array.tobytes() for name, array in saved.items()} == {
        name: array.tobytes() for name, array in batch.items()
    }


class NonfiniteGradient(Toy):
    """Finite outputs with non-finite gradients."""

    def loss(self, models: Any, batch: Any, rng: Any) -> Any:
        loss = super().loss(models, batch, rng)
        total, weight = loss.terms["error"]
        return loss._replace(terms={**loss.terms, "error": (total + torch.sqrt(total * 0.0), weight)})


def test_a_bad_gradient_behind_finite_outputs_is_named(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "halt", total=1)
    trial.engine.task = NonfiniteGradient()
    with pytest.raises(Diverged, match=r"first in the gradient of first\.weight"):
        trial.run()
    assert all(p.grad is None for p in trial.engine.model.parameters())


@pytest.mark.parametrize("log", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skip_omits_the_bad_update_and_applies_all_others(tmp_path: Path, name: str, log: int) -> None:
    trial = Trial(tmp_path, "skip", log=log, optimizer={"name": name})
    trial.run()
    bad_steps = [step for step in range(10) if BAD in trial.loader.indices(step)[0]]
    assert len(bad_steps) == 2, "ten steps are two epochs"
    expected = Trial(tmp_path / "expected", "skip", optimizer={"name": name})
    expected.engine.skip_steps = frozenset(bad_steps)
    train_steps(expected.engine, expected.loader, 0, 10)
    assert differing_tensors(copy_state(expected.engine), copy_state(trial.engine)) == []
    assert all(np.isfinite(array).all() for array in copy_state(trial.engine).values())
    assert sum(text.startswith("skipped ") for text in trial.warned) == 2
    assert trial.progress.step == 10


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nonfinite_first_step_leaves_no_trace(tmp_path: Path, name: str) -> None:
    """There is no optimizer state yet before the first update, and a fused optimizer could create a non-finite one."""
    skipped, expected = (engine(training(optimizer={"name": name}, on_nonfinite="skip")) for _ in range(2))
    batch = dict(loader(of=skipped).batch(0))
    batch["x"] = np.full_like(batch["x"], np.nan)
    skipped.train_step(0, batch)
    assert all(np.isfinite(array).all() for array in copy_state(skipped).values())
    for torch_engine in (skipped, expected):
        train_steps(torch_engine, loader(of=torch_engine), 1, 3)
    assert differing_tensors(copy_state(skipped), copy_state(expected)) == []


def test_divergence_message_names_technique_strengths(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "halt")
    trial.engine.task = Ewc(inner=Ewc(inner=trial.engine.task, strength=1.0), strength=1.0)
    message = (
        r"lower training\.learning_rate or techniques\.ewc\.strength or techniques\.ewc\.strength, or inspect the batch"
    )
    with pytest.raises(Diverged, match=message):
        trial.recovery(trial.progress, 0)


def test_too_many_skips_are_a_divergence(tmp_path: Path) -> None:
    trial = Trial(
        tmp_path, "skip", total=MAX_SKIPPED_UPDATES + 10, log=10, save=0, learning_rate=1e30, max_grad_norm=None
    )
    with pytest.raises(Diverged, match=r"has diverged; lower training\.learning_rate$"):
        trial.run()


@pytest.mark.parametrize("log", [1, 2])
def test_rollback_skips_the_bad_batch(tmp_path: Path, log: int) -> None:
    trial = Trial(tmp_path, "rollback", log=log)
    rows = JsonLines(tmp_path / "metrics.jsonl", trial.warned.append)
    trial.run(rows)
    bad_steps = [step for step in range(10) if BAD in trial.loader.indices(step)[0]]
    assert trial.progress.step == 10
    assert trial.progress.skip_steps == bad_steps
    expected = Trial(tmp_path / "expected", "rollback")
    expected.engine.skip_steps = frozenset(bad_steps)
    train_steps(expected.engine, expected.loader, 0, 10)
    assert differing_tensors(copy_state(expected.engine), copy_state(trial.engine)) == [], (
        "the skipped batch had an effect"
    )
    assert all(np.isfinite(array).all() for array in copy_state(trial.engine).values())
    assert sum("rolled back" in text for text in trial.warned) == len(bad_steps)
    logged = [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert logged == list(range(log, 11, log)), "each step once, although some ran twice"


@pytest.mark.parametrize("policy", ["skip", "rollback"])
@pytest.mark.parametrize("log", [1, 2, 5])
def test_skipped_steps_are_in_the_metrics(tmp_path: Path, policy: str, log: int) -> None:
    trial = Trial(tmp_path, policy, log=log)
    trial.run(Stability(), JsonLines(tmp_path / "metrics.jsonl", trial.warned.append))
    bad_steps = [step for step in range(10) if BAD in trial.loader.indices(step)[0]]
    for row in read_metrics(tmp_path / "metrics.jsonl"):
        assert row["skipped_steps"] == sum(step < row["step"] for step in bad_steps)


def test_skipped_steps_are_saved_in_the_checkpoint(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "rollback")
    trial.run()
    last = checkpoint.read_link(tmp_path / "checkpoints", "last")
    assert last is not None
    assert Progress.from_json(checkpoint.read_progress(last)).skip_steps == trial.progress.skip_steps


def test_rollback_restores_callback_state(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "rollback", total=6)
    stop = EarlyStopping(metric="error", maximise=False, patience=50, threshold=0.0)
    rewinds: list[tuple[int, int]] = []

    class Watch(Callback):
        name = "watch"

        def rewind(self, progress: Progress) -> None:
            rewinds.append((progress.step, stop.counter.num_waited))

    trial.cadences = Cadences(log=1, save=2, evaluate=1)
    step = bad_step()
    # Evaluations that never improve: the patience counts them, one for each step.
    stop.counter.best = -1.0
    trial.progress.callback_states = {"early_stop": {"best": -1.0, "waited": 0}}
    trial.progress.best = 1e9  # so that none is saved as the best
    trial.run(
        stop, Watch(), validation=lambda: iter_eval_batches(source(), 8), best_metric=BestMetric("error", maximise=True)
    )
    last_saved_step = step // 2 * 2
    assert rewinds == [(last_saved_step, last_saved_step)]
    assert stop.counter.num_waited == 6


def test_rollback_without_a_checkpoint_is_a_divergence(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "rollback", save=0)
    with pytest.raises(Diverged, match="no checkpoint to roll back to"):
        trial.run()


def test_rollback_gives_up_after_repeated_failures(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "rollback", save=1, total=20)
    trial.loader.source.arrays["x"][:] = np.nan  # type: ignore[attr-defined]
    trial.saver.save(trial.engine.snapshot(), trial.progress)
    with pytest.raises(Diverged, match=r"lower training\.learning_rate"):
        trial.run()
    assert sum("rolled back" in text for text in trial.warned) == 3


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skip_update_flag_leaves_the_state_unchanged(name: str) -> None:
    torch_engine = engine(training(optimizer={"name": name}))
    train_steps(torch_engine, loader(of=torch_engine), 0, 2)
    before = copy_state(torch_engine)
    for p in torch_engine._params:
        p.grad = torch.ones_like(p)
    optimizers.step_optimizers(torch_engine.optimizers, divisor=torch.tensor(2.0), skip_update=torch.tensor(1.0))
    assert differing_tensors(before, copy_state(torch_engine)) == []
    for p in torch_engine._params:
        p.grad = torch.ones_like(p)
    optimizers.step_optimizers(torch_engine.optimizers, divisor=torch.tensor(2.0), skip_update=torch.tensor(0.0))
    assert {name for name in differing_tensors(before, copy_state(torch_engine)) if name.startswith("model")} == {
        f"model.safetensors/{name}" for name, _ in torch_engine.model.named_parameters()
    }
