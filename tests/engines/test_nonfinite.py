"""A loss that is not a number: nothing moves, the evidence is kept, and each policy does what it says."""

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
from bottega.core import checkpoint
from bottega.core.callback import Callback, Progress
from bottega.core.errors import Diverged
from bottega.core.rundir import read_metrics
from bottega.core.saver import Saver
from bottega.core.trainer import BestMetric, Cadences, Trainer
from bottega.data.loading.loader import iter_eval_batches
from bottega.engines.nonfinite import MAX_SKIPS, NonfiniteRecovery
from bottega.engines.torch import optimizers
from bottega.techniques.ewc.torch import Ewc
from small_run import different
from toy_task import Toy, advance, engine, loader, source, state, training

OPTIMIZERS = ["adamw", "adam", "sgd", "muon", "lion", "adafactor"]
BAD = 11


def bad_step(data: Any = None) -> int:
    """The step, counted from 0, in which the bad sample is seen."""
    batches = loader(source(bad=BAD), of=engine())
    return next(step for step in range(5) if BAD in batches.indices(step)[0])


class Trial:
    """A run of ten steps over data with one bad sample."""

    def __init__(
        self, folder: Path, policy: str, *, log: int = 1, save: int = 2, total: int = 10, **changes: Any
    ) -> None:
        self.folder = folder
        self.engine = engine(training(on_nonfinite=policy, **changes), task=Toy(dropout=0.2), micro=4)
        self.loader = loader(source(bad=BAD), of=self.engine)
        self.warned: list[str] = []
        self.saver = Saver(
            folder / "checkpoints", keep=3, fingerprint={}, announce=lambda p, path: None, warn=self.warned.append
        )
        self.recovery = NonfiniteRecovery(
            engine=self.engine,
            loader=self.loader,
            saver=self.saver,
            policy=policy,
            folder=folder / "nonfinite",
            warn=self.warned.append,
        )
        self.progress = Progress(total=total)
        self.every = Cadences(log=log, save=save)

    def run(self, *callbacks: Callback, **more: Any) -> Progress:
        return Trainer(
            engine=self.engine,
            batches=self.loader,
            progress=self.progress,
            cadences=self.every,
            saver=self.saver,
            callbacks=callbacks,
            recover=self.recovery,
            **more,
        ).run()


@pytest.mark.parametrize("log", [1, 4, 10], ids=["seen at once", "seen later", "seen at the end"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_halt_leaves_the_weights_as_the_bad_step_met_them(tmp_path: Path, name: str, log: int) -> None:
    step = bad_step()
    assert step > 0
    before = Trial(tmp_path / "before", "halt", optimizer={"name": name})
    advance(before.engine, before.loader, 0, step)
    trial = Trial(tmp_path, "halt", log=log, save=0, optimizer={"name": name})
    with pytest.raises(Diverged, match=f"not finite at step {step + 1} ") as caught:
        trial.run()
    assert caught.value.code == 6
    assert different(state(before.engine), state(trial.engine)) == []
    assert checkpoint.list_checkpoints(tmp_path / "checkpoints") == [], (
        "a checkpoint after the accident is never written"
    )


def test_the_evidence_names_step_samples_and_module_and_keeps_the_batch(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "halt", log=4)
    step = bad_step()
    with pytest.raises(Diverged) as caught:
        trial.run()
    samples = trial.loader.indices(step)[0].tolist()
    assert str(BAD) in str(caught.value).partition("(samples ")[2].partition(")")[0].split(", ")
    assert ", first in first;" in str(caught.value), "the first layer met the infinity"
    assert "\n" not in str(caught.value)
    where = tmp_path / "nonfinite" / f"step-{step + 1:08d}"
    report = json.loads((where / "report.json").read_text())
    assert report == {"step": step + 1, "samples": samples, "epochs": [0] * 8, "first_bad_module": "first"}
    kept, made = load_file(where / "batch.safetensors"), trial.loader.batch(step)
    assert {name: array.tobytes() for name, array in kept.items()} == {
        name: array.tobytes() for name, array in made.items()
    }


class Explosive(Toy):
    """Finite outputs, gradients that are not."""

    def loss(self, models: Any, batch: Any, rng: Any) -> Any:
        out = super().loss(models, batch, rng)
        total, weight = out.terms["error"]
        return out._replace(terms={**out.terms, "error": (total + torch.sqrt(total * 0.0), weight)})


def test_a_bad_gradient_behind_finite_outputs_is_named(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "halt", total=1)
    trial.engine.task = Explosive()
    with pytest.raises(Diverged, match=r"first in the gradient of first\.weight"):
        trial.run()
    assert all(p.grad is None for p in trial.engine.model.parameters())


@pytest.mark.parametrize("log", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skip_passes_over_the_bad_update_and_applies_all_others(tmp_path: Path, name: str, log: int) -> None:
    trial = Trial(tmp_path, "skip", log=log, optimizer={"name": name})
    trial.run()
    bad = [step for step in range(10) if BAD in trial.loader.indices(step)[0]]
    assert len(bad) == 2, "ten steps are two epochs"
    by_hand = Trial(tmp_path / "by hand", "skip", optimizer={"name": name})
    by_hand.engine.skip_steps = frozenset(bad)
    advance(by_hand.engine, by_hand.loader, 0, 10)
    assert different(state(by_hand.engine), state(trial.engine)) == []
    assert all(np.isfinite(array).all() for array in state(trial.engine).values())
    assert sum(text.startswith("skipped ") for text in trial.warned) == 2
    assert trial.progress.step == 10


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bad_first_step_leaves_no_trace(tmp_path: Path, name: str) -> None:
    """Before the first update there is no optimizer state to keep, which is where a fused one could keep rubbish."""
    one, other = (engine(training(optimizer={"name": name}, on_nonfinite="skip")) for _ in range(2))
    batch = dict(loader(of=one).batch(0))
    batch["x"] = np.full_like(batch["x"], np.nan)
    one.train_step(0, batch)
    assert all(np.isfinite(array).all() for array in state(one).values())
    for engine_ in (one, other):
        advance(engine_, loader(of=engine_), 1, 3)
    assert different(state(one), state(other)) == []


def test_techniques_that_can_make_a_loss_grow_are_named(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "halt")
    trial.engine.task = Ewc(inner=Ewc(inner=trial.engine.task, strength=1.0), strength=1.0)
    twice = (
        r"lower training\.learning_rate or techniques\.ewc\.strength or techniques\.ewc\.strength, or inspect the batch"
    )
    with pytest.raises(Diverged, match=twice):
        trial.recovery(trial.progress, 0)


def test_too_many_skips_are_a_divergence(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "skip", total=MAX_SKIPS + 10, log=10, save=0, learning_rate=1e30, max_grad_norm=None)
    with pytest.raises(Diverged, match=r"has diverged; lower training\.learning_rate$"):
        trial.run()


@pytest.mark.parametrize("log", [1, 2])
def test_rollback_goes_back_and_passes_over_the_batch(tmp_path: Path, log: int) -> None:
    trial = Trial(tmp_path, "rollback", log=log)
    rows = JsonLines(tmp_path / "metrics.jsonl", trial.warned.append)
    trial.run(rows)
    bad = [step for step in range(10) if BAD in trial.loader.indices(step)[0]]
    assert trial.progress.step == 10
    assert trial.progress.skip_steps == bad
    by_hand = Trial(tmp_path / "by hand", "rollback")
    by_hand.engine.skip_steps = frozenset(bad)
    advance(by_hand.engine, by_hand.loader, 0, 10)
    assert different(state(by_hand.engine), state(trial.engine)) == [], "as if the batch had never been"
    assert all(np.isfinite(array).all() for array in state(trial.engine).values())
    assert sum("rolled back" in text for text in trial.warned) == len(bad)
    logged = [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert logged == list(range(log, 11, log)), "each step once, although some were taken twice"


def test_what_rollback_skips_travels_in_the_checkpoint(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "rollback")
    trial.run()
    last = checkpoint.read_link(tmp_path / "checkpoints", "last")
    assert last is not None
    assert Progress.from_json(checkpoint.read_progress(last)).skip_steps == trial.progress.skip_steps


def test_rollback_gives_callbacks_their_memory_back(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "rollback", total=6)
    stop = EarlyStopping(metric="error", maximise=False, patience=50, threshold=0.0)
    seen: list[tuple[int, int]] = []

    class Watch(Callback):
        name = "watch"

        def rewind(self, progress: Progress) -> None:
            seen.append((progress.step, stop.counter.waited))

    trial.every = Cadences(log=1, save=2, evaluate=1)
    step = bad_step()
    # Evaluations that never improve: the patience counts them, one for each step.
    stop.counter.best = -1.0
    trial.progress.notes = {"early_stop": {"best": -1.0, "waited": 0}}
    trial.progress.best = 1e9  # and none is worth a checkpoint of its own
    trial.run(
        stop, Watch(), validation=lambda: iter_eval_batches(source(), 8), best_metric=BestMetric("error", maximise=True)
    )
    back = step // 2 * 2
    assert seen == [(back, back)]
    assert stop.counter.waited == 6


def test_rollback_without_a_checkpoint_is_a_divergence(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "rollback", save=0)
    with pytest.raises(Diverged, match="no checkpoint to roll back to"):
        trial.run()


def test_rollback_gives_up_when_it_is_no_accident(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "rollback", save=1, total=20)
    trial.loader.source.arrays["x"][:] = np.nan  # type: ignore[attr-defined]
    trial.saver.save(trial.engine.snapshot(), trial.progress)
    with pytest.raises(Diverged, match=r"lower training\.learning_rate"):
        trial.run()
    assert sum("rolled back" in text for text in trial.warned) == 3


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_is_held_back_by_the_flag_alone(name: str) -> None:
    one = engine(training(optimizer={"name": name}))
    advance(one, loader(of=one), 0, 2)
    before = state(one)
    for p in one._params:
        p.grad = torch.ones_like(p)
    optimizers.step_optimizers(one.optimizers, divisor=torch.tensor(2.0), skip_update=torch.tensor(1.0))
    assert different(before, state(one)) == []
    for p in one._params:
        p.grad = torch.ones_like(p)
    optimizers.step_optimizers(one.optimizers, divisor=torch.tensor(2.0), skip_update=torch.tensor(0.0))
    assert {name for name in different(before, state(one)) if name.startswith("model")} == {
        f"model.safetensors/{name}" for name, _ in one.model.named_parameters()
    }
