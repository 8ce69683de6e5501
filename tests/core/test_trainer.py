"""The loop, with an engine that only counts: who is told what and when, and what a resume makes up for."""

from __future__ import annotations

import itertools
import math
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from bottega.callbacks.early_stopping import EarlyStopping, ReduceOnPlateau
from bottega.core import checkpoint
from bottega.core.callback import Callback, Progress
from bottega.core.engine import EvaluationOutput, Snapshot
from bottega.core.errors import DataError, Diverged, Interrupted
from bottega.core.saver import Saver
from bottega.core.trainer import BestMetric, Cadences, Trainer
from bottega.core.types import Batch, Tensors
from bottega.signals import WaitInterrupted
from fake_engine import FakeEngine


class Values(Snapshot):
    def __init__(self, value: float) -> None:
        self.value = value

    def files(self) -> Mapping[str, Tensors]:
        return {"model.safetensors": {"w": np.array([self.value])}}


class Counter(FakeEngine):
    """Its weight is a sum of rates, so that a wrong rate or a step too many shows. `losses` are its evaluations."""

    def __init__(self, losses: Mapping[int, float] | None = None, *, events: list[str] | None = None) -> None:
        self.weight, self.losses, self.at = 0.0, losses or {}, 0
        self.events = events if events is not None else []
        self.bad: set[int] = set()
        self.signal_at: tuple[int, signal.Signals] | None = None

    def train_step(self, step: int, batch: Batch) -> dict[str, Any]:
        self.events.append(f"step {step}")
        assert int(batch["x"][0]) == step
        self.weight += self.rate_scale * (step + 1)
        self.at = step + 1
        if self.signal_at is not None and self.signal_at[0] == self.at:
            os.kill(os.getpid(), self.signal_at[1])
        return {"loss": self.weight, "bad_steps": float(step in self.bad), "units": 3.0}

    def eval_step(self, batch: Batch, **options: Any) -> EvaluationOutput:
        return EvaluationOutput({"loss": (self.losses.get(self.at, 1.0) * len(batch["x"]), len(batch["x"]))})

    def fetch(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        self.events.append("fetch")
        return {name: float(value) for name, value in metrics.items()}

    def snapshot(self) -> Snapshot:
        self.events.append("snapshot")
        return Values(self.weight)

    def load(self, folder: Path) -> None:
        self.weight = float(load_file(folder / "model.safetensors")["w"][0])


class Numbers:
    def samples_before(self, step: int) -> int:
        return 4 * step

    def __init__(self, stop: int = 10_000) -> None:
        self.stop = stop

    def __call__(self, step: int) -> Iterator[Batch]:
        return ({"x": np.full(4, s)} for s in range(step, self.stop))


class Diary(Callback):
    name = "diary"

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def start(self, progress: Progress) -> None:
        self.events.append("start")

    def after_step(self, progress: Progress, metrics: dict[str, float]) -> None:
        self.events.append(f"logged {progress.step}")

    def after_eval(self, progress: Progress, metrics: dict[str, float]) -> None:
        self.events.append(f"evaluated {progress.step}")

    def after_sample(self, progress: Progress, folder: Path) -> None:
        self.events.append(f"sampled {progress.step}")

    def after_save(self, progress: Progress, folder: Path) -> None:
        self.events.append(f"saved {progress.step}")

    def finish(self, progress: Progress, error: BaseException | None) -> None:
        self.events.append(f"finish {type(error).__name__ if error else 'well'}")


def fit(folder: Path, engine: Counter, *callbacks: Callback, every: Cadences, total: int = 6, **more: Any) -> Trainer:
    """A run in `folder`, resumed where it stood."""
    progress = Progress(total=total)
    if (good := checkpoint.find_newest_valid(folder, pytest.fail)) is not None:
        progress = Progress.from_json(checkpoint.read_progress(good[0]))
        progress.total = total
        engine.load(good[0])
        engine.at = progress.step
    # What is announced is known at some later step, so tests that look at the order ask the disk instead.
    saver = Saver(folder, keep=9, fingerprint={}, announce=lambda p, path: None, warn=pytest.fail)
    more.setdefault("validation", lambda: iter([{"x": np.zeros(3)}, {"x": np.zeros(1)}]))
    return Trainer(
        engine=engine, batches=Numbers(), progress=progress, cadences=every, saver=saver, callbacks=callbacks, **more
    )


def saved(folder: Path) -> list[int]:
    return sorted(manifest.step for _, manifest in checkpoint.list_checkpoints(folder))


def test_everybody_is_told_in_order(tmp_path: Path) -> None:
    events: list[str] = []
    engine = Counter({2: 0.5, 4: 0.7, 6: 0.6}, events=events)
    every = Cadences(log=3, evaluate=2, save=4, sample=4)
    fit(tmp_path, engine, Diary(events), every=every, sample=lambda p: tmp_path).run()
    told = [e for e in events if e not in ("fetch",)]
    assert told == [
        "start",
        "step 0",
        "step 1",
        *("logged 2", "evaluated 2", "snapshot"),  # the best so far is worth a checkpoint
        "step 2",
        "logged 3",
        "step 3",
        *("logged 4", "evaluated 4", "snapshot", "sampled 4"),
        "step 4",
        "step 5",
        *("logged 6", "evaluated 6", "snapshot", "sampled 6"),
        "finish well",
    ]
    assert saved(tmp_path) == [2, 4, 6]
    assert checkpoint.read_link(tmp_path, "best") == tmp_path / "step-00000002"


def test_the_device_is_waited_for_on_log_steps_only(tmp_path: Path) -> None:
    engine = Counter()
    fit(tmp_path, engine, every=Cadences(log=5), total=20).run()
    assert engine.events.count("fetch") == 4


def test_a_run_that_ends_early_or_badly_finishes_its_callbacks(tmp_path: Path) -> None:
    events: list[str] = []
    short = fit(tmp_path, Counter(events=events), Diary(events), every=Cadences())
    short.batches = Numbers(stop=3)
    with pytest.raises(DataError, match="the data ended at step 3 of 6"):
        short.run()
    assert events[-1] == "finish DataError"

    class Broken(Callback):
        def start(self, progress: Progress) -> None:
            raise Diverged("no")

    events.clear()
    with pytest.raises(Diverged):
        fit(tmp_path / "b", Counter(events=events), Diary(events), Broken(), every=Cadences()).run()
    assert events == ["start", "finish Diverged"], "whoever was started is told of the end"


def test_a_sample_that_fails_costs_no_checkpoint(tmp_path: Path) -> None:
    def fail(progress: Progress) -> Path:
        raise DataError("cannot be sampled")

    with pytest.raises(DataError, match="cannot be sampled"):
        fit(tmp_path, Counter(), every=Cadences(save=0, sample=6), sample=fail).run()
    assert saved(tmp_path) == [6]


def test_rates_and_counts_of_a_log_line(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []

    class See(Callback):
        def after_step(self, progress: Progress, metrics: dict[str, float]) -> None:
            seen.append(metrics)
            assert progress.samples == 4 * progress.step

    fit(tmp_path, Counter(), See(), every=Cadences(log=3)).run()
    for row in seen:
        assert row["units_per_second"] == pytest.approx(row["samples_per_second"] * 3 / 4)
        assert row["step_seconds"] * row["samples_per_second"] == pytest.approx(4)
        assert 0 <= row["data_wait"] <= 1
        assert "bad_steps" not in row


def test_a_metric_that_is_not_measured_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"evaluation\.metric: 'f1' is not measured; choose from loss"):
        fit(tmp_path, Counter(), every=Cadences(evaluate=2), best_metric=BestMetric("f1")).run()


def test_the_best_is_the_best_whichever_way_and_never_a_nan(tmp_path: Path) -> None:
    losses = {1: 0.5, 2: math.nan, 3: 0.9, 4: 0.2, 5: math.inf, 6: 0.3}
    low = fit(tmp_path / "a", Counter(losses), every=Cadences(evaluate=1)).run()
    assert (low.best, low.best_step) == (0.2, 4)
    high = fit(
        tmp_path / "b", Counter(losses), every=Cadences(evaluate=1), best_metric=BestMetric("loss", maximise=True)
    ).run()
    assert (high.best, high.best_step) == (0.9, 3)
    assert checkpoint.read_link(tmp_path / "b", "best") == tmp_path / "b" / "step-00000003"


def interrupted(
    folder: Path, engine: Counter, at: int, *callbacks: Callback, kind: signal.Signals = signal.SIGTERM, **more: Any
) -> Interrupted:
    engine.signal_at = (at, kind)
    with pytest.raises(Interrupted) as caught:
        fit(folder, engine, *callbacks, **more).run()
    return caught.value


@pytest.mark.parametrize(("kind", "code"), [(signal.SIGTERM, 85), (signal.SIGUSR1, 85), (signal.SIGINT, 130)])
def test_a_signal_saves_at_the_end_of_its_step(tmp_path: Path, kind: signal.Signals, code: int) -> None:
    before = signal.getsignal(kind)
    stopped = interrupted(tmp_path, Counter(), 3, every=Cadences(), kind=kind)
    assert stopped.code == code
    assert str(stopped) == f"stopped by {kind.name} at step 3; the state is saved, run the same command to continue"
    assert saved(tmp_path) == [3]
    assert signal.getsignal(kind) is before, "afterwards signals mean what they meant"
    assert fit(tmp_path, engine := Counter(), every=Cadences()).run().step == 6
    assert engine.weight == sum(range(1, 7))


@pytest.mark.parametrize("at", [4, 6, 7], ids=["on the cadence", "at another", "at the very last step"])
def test_an_evaluation_the_signal_prevented_is_made_up_for(tmp_path: Path, at: int) -> None:
    losses = {2: 0.9, 4: 0.5, 6: 0.4, 7: 0.3}
    every = Cadences(log=1, evaluate=2)
    straight = fit(tmp_path / "straight", Counter(losses), every=every, total=7).run()
    interrupted(tmp_path / "cut", Counter(losses), at, every=every, total=7)
    events: list[str] = []
    resumed = fit(tmp_path / "cut", Counter(losses, events=events), Diary(events), every=every, total=7).run()
    assert events[:3] == ["start", "fetch", f"evaluated {at}"]
    assert (resumed.best, resumed.best_step, resumed.evaluated) == (
        straight.best,
        straight.best_step,
        straight.evaluated,
    )
    for which in ("best", "last"):
        kept = [checkpoint.read_link(tmp_path / name / "", which) for name in ("straight", "cut")]
        assert kept[0] is not None
        assert kept[1] is not None
        assert kept[0].name == kept[1].name
    # Made up for once, it is in the checkpoint, and a third start has nothing to do.
    events.clear()
    fit(tmp_path / "cut", Counter(losses, events=events), Diary(events), every=every, total=7).run()
    assert events == ["start", "finish well"]


@pytest.mark.parametrize("resumed", [False, True], ids=["on the way", "while it is made up for"])
def test_a_signal_in_a_long_evaluation_does_not_wait_for_its_end(tmp_path: Path, resumed: bool) -> None:
    class Slow(Counter):
        evaluated = 0

        def eval_step(self, batch: Batch, **options: Any) -> EvaluationOutput:
            self.evaluated += 1
            if self.evaluated == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().eval_step(batch)

    def long() -> Iterator[Batch]:
        return ({"x": np.zeros(1)} for _ in range(1000))

    every = Cadences(log=1, evaluate=4)
    if resumed:
        interrupted(tmp_path, Counter(), 4, every=every, validation=long)
    engine = Slow()
    with pytest.raises(Interrupted, match="at step 4; the state is saved"):
        fit(tmp_path, engine, every=every, validation=long).run()
    assert engine.evaluated == 3
    assert saved(tmp_path) == [4]
    events: list[str] = []
    done = fit(tmp_path, Counter(events=events), Diary(events), every=every, validation=long).run()
    assert events[:3] == ["start", "fetch", "evaluated 4"]
    assert done.best_step == 4


def test_saving_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the clock is a second later, and a step reads it a few times."""
    now = [0.0]

    def tick() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(time, "perf_counter", tick)
    fit(tmp_path, Counter(), every=Cadences(log=100, save_seconds=20.0), total=30).run()
    steps = saved(tmp_path)
    assert 3 <= len(steps) < 15
    assert steps[-1] == 30


def test_early_stopping_survives_a_resume_and_stays(tmp_path: Path) -> None:
    losses = {1: 0.5, 2: 0.6, 3: 0.7, 4: 0.8}
    every = Cadences(log=1, evaluate=1)

    def rule() -> EarlyStopping:
        return EarlyStopping(metric="loss", maximise=False, patience=3, threshold=0.0)

    straight = fit(tmp_path / "straight", Counter(losses), rule(), every=every).run()
    assert straight.step == 4
    assert straight.stop is not None
    assert "has not improved on 0.5000 for 3 evaluations" in straight.stop
    interrupted(tmp_path / "cut", Counter(losses), 3, rule(), every=every)
    assert fit(tmp_path / "cut", Counter(losses), rule(), every=every).run().step == 4
    assert saved(tmp_path / "cut")[-1] == 4
    again = fit(tmp_path / "cut", Counter(losses), rule(), every=every).run()
    assert again.step == 4, "the same command does not train on"
    assert again.stop == straight.stop


def test_a_plateau_lowers_the_rate_and_a_resume_keeps_it_low(tmp_path: Path) -> None:
    losses = {2: 0.5, 4: 0.6, 6: 0.7, 8: 0.8, 10: 0.9}
    every = Cadences(log=1, evaluate=2)

    def rule() -> ReduceOnPlateau:
        return ReduceOnPlateau(metric="loss", maximise=False, patience=2, threshold=0.0, factor=0.1, floor=0.05)

    straight = Counter(losses)
    assert fit(tmp_path / "straight", straight, rule(), every=every, total=12).run().rate_scale == pytest.approx(0.05)
    assert straight.weight == pytest.approx(sum(range(1, 7)) + 0.1 * sum(range(7, 11)) + 0.05 * sum(range(11, 13)))
    for at in (5, 6, 7, 9):
        folder = tmp_path / f"cut at {at}"
        interrupted(folder, Counter(losses), at, rule(), every=every, total=12)
        resumed = Counter(losses)
        fit(folder, resumed, rule(), every=every, total=12).run()
        assert resumed.weight == pytest.approx(straight.weight), f"cut at step {at}"


def test_a_bad_step_without_a_policy_is_a_divergence(tmp_path: Path) -> None:
    engine = Counter()
    engine.bad = {3}
    with pytest.raises(Diverged, match="not finite at step 4"):
        fit(tmp_path, engine, every=Cadences(log=1, save=1)).run()
    assert saved(tmp_path) == [1, 2, 3], "what is not finite is never saved, and a save in flight is waited for"


def test_progress_comes_back_from_its_file_and_refuses_nonsense() -> None:
    from bottega.core.errors import CheckpointError

    progress = Progress(step=3, samples=12, best=0.5, skip_steps=[1], notes={"a": {"b": None}}, stop="enough")
    again = Progress.from_json(progress.to_json())
    assert again == Progress(step=3, samples=12, best=0.5, skip_steps=[1], notes={"a": {"b": None}})
    again.skip_steps.append(2)
    assert progress.skip_steps == [1], "a copy shares nothing"
    for wrong in ({"step": "x"}, {"notes": 3}, {"best": [1]}, {"skip_steps": {"a": 1}}):
        with pytest.raises(CheckpointError, match=rf"progress\.json: {next(iter(wrong))}"):
            Progress.from_json(wrong)


def test_a_sample_that_a_killed_process_still_owed_is_drawn(tmp_path: Path) -> None:
    """A checkpoint is saved before the sample of its step; whoever goes on from there draws it, and draws none twice."""
    drawn: list[int] = []

    def sample(progress: Progress) -> Path:
        if progress.step == 4 and 4 not in drawn:
            drawn.append(0)
            if drawn.count(0) == 1:
                raise DataError("killed")
        drawn.append(progress.step)
        return tmp_path

    def run() -> None:
        options = {"sample": sample, "has_sample": lambda progress: progress.step in drawn}
        fit(tmp_path, Counter(), every=Cadences(save=2, sample=2), **options).run()

    with pytest.raises(DataError, match="killed"):
        run()
    run()
    assert [step for step in drawn if step] == [2, 4, 6]
    run()
    assert [step for step in drawn if step] == [2, 4, 6], "a finished run draws nothing again"


def test_a_stop_while_a_batch_is_waited_for_saves_nothing_that_is_not_finite(tmp_path: Path) -> None:
    class Stalled(Numbers):
        def __call__(self, step: int) -> Iterator[Batch]:
            yield from itertools.islice(super().__call__(step), 2)
            raise WaitInterrupted

    engine = Counter()
    engine.bad = {1}
    stalled = fit(tmp_path, engine, every=Cadences(log=100, save=100))
    stalled.batches = Stalled()
    with pytest.raises(Diverged, match="not finite at step 2"):
        stalled.run()
    assert saved(tmp_path) == []
