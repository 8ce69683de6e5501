"""The training loop with a counting engine: callbacks, cadences, signals and resuming."""

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
from bottega.core.callback import Callback, Histogram, Progress
from bottega.core.engine import EvaluationOutput, Inspection, Snapshot
from bottega.core.errors import DataError, Diverged, Interrupted
from bottega.core.saver import Saver
from bottega.core.trainer import BestMetric, Cadences, Trainer
from bottega.core.types import Batch, Tensors
from bottega.signals import WaitInterrupted
from fake_engine import FakeEngine


class WeightSnapshot(Snapshot):
    def __init__(self, value: float) -> None:
        self.value = value

    def files(self) -> Mapping[str, Tensors]:
        return {"model.safetensors": {"w": np.array([self.value])}}


class CountingEngine(FakeEngine):
    """An engine whose weight is a sum of rates, which shows wrong rates and extra steps. `losses` maps a step to the loss of its evaluation."""

    def __init__(self, losses: Mapping[int, float] | None = None, *, events: list[str] | None = None) -> None:
        self.weight, self.losses, self.step = 0.0, losses or {}, 0
        self.events = events if events is not None else []
        self.bad: set[int] = set()
        self.signal_at: tuple[int, signal.Signals] | None = None

    def train_step(self, step: int, batch: Batch, **options: Any) -> dict[str, Any]:
        self.events.append(f"step {step}")
        assert int(batch["x"][0]) == step
        self.weight += self.learning_rate_scale * (step + 1)
        self.step = step + 1
        if self.signal_at is not None and self.signal_at[0] == self.step:
            os.kill(os.getpid(), self.signal_at[1])
        return {"loss": self.weight, "bad_steps": float(step in self.bad), "units": 3.0}

    def eval_step(self, batch: Batch, **options: Any) -> EvaluationOutput:
        return EvaluationOutput({"loss": (self.losses.get(self.step, 1.0) * len(batch["x"]), len(batch["x"]))})

    def fetch(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        self.events.append("fetch")
        return {name: float(value) for name, value in metrics.items()}

    def snapshot(self) -> Snapshot:
        self.events.append("snapshot")
        return WeightSnapshot(self.weight)

    def load(self, folder: Path) -> None:
        self.weight = float(load_file(folder / "model.safetensors")["w"][0])


class NumberBatches:
    def samples_before(self, step: int) -> int:
        return 4 * step

    def __init__(self, stop: int = 10_000) -> None:
        self.stop = stop

    def __call__(self, step: int) -> Iterator[Batch]:
        return ({"x": np.full(4, s)} for s in range(step, self.stop))


class EventCallback(Callback):
    name = "events"

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


def make_trainer(
    folder: Path, engine: CountingEngine, *callbacks: Callback, cadences: Cadences, total: int = 6, **options: Any
) -> Trainer:
    """Return a trainer for `folder`, resumed from its newest checkpoint."""
    progress = Progress(total=total)
    if (newest := checkpoint.find_newest_valid(folder, pytest.fail)) is not None:
        progress = Progress.from_json(checkpoint.read_progress(newest[0]))
        progress.total = total
        engine.load(newest[0])
        engine.step = progress.step
    # Announcements arrive at some later step, so that tests of the order read the disk instead.
    saver = Saver(folder, keep=9, fingerprint={}, announce=lambda p, path: None, warn=pytest.fail)
    options.setdefault("validation", lambda: iter([{"x": np.zeros(3)}, {"x": np.zeros(1)}]))
    return Trainer(
        engine=engine,
        batches=NumberBatches(),
        progress=progress,
        cadences=cadences,
        saver=saver,
        callbacks=callbacks,
        **options,
    )


def list_saved_steps(folder: Path) -> list[int]:
    return sorted(manifest.step for _, manifest in checkpoint.list_checkpoints(folder))


def test_callbacks_are_called_in_order(tmp_path: Path) -> None:
    events: list[str] = []
    engine = CountingEngine({2: 0.5, 4: 0.7, 6: 0.6}, events=events)
    cadences = Cadences(log=3, evaluate=2, save=4, sample=4)
    make_trainer(tmp_path, engine, EventCallback(events), cadences=cadences, sample=lambda p: tmp_path).run()
    calls = [e for e in events if e not in ("fetch",)]
    assert calls == [
        "start",
        "step 0",
        "step 1",
        *("logged 2", "evaluated 2", "snapshot"),  # the best so far is saved
        "step 2",
        "logged 3",
        "step 3",
        *("logged 4", "evaluated 4", "snapshot", "sampled 4"),
        "step 4",
        "step 5",
        *("logged 6", "evaluated 6", "snapshot", "sampled 6"),
        "finish well",
    ]
    assert list_saved_steps(tmp_path) == [2, 4, 6]
    assert checkpoint.read_link(tmp_path, "best") == tmp_path / "step-00000002"


class InspectingEngine(CountingEngine):
    """An engine that inspects every selected step but the one named in `unaffordable`."""

    unaffordable = 4

    def train_step(
        self, step: int, batch: Batch, *, module_statistics: bool = False, histograms: bool = False
    ) -> dict[str, Any]:
        is_affordable = module_statistics and step + 1 != self.unaffordable
        self.results = Inspection(
            {"head": {"step": step + 1.0}} if is_affordable else {},
            {"weights/head": Histogram((0.0, 1.0), (step + 1,))} if histograms else {},
        )
        return super().train_step(step, batch)

    def fetch_inspection(self) -> Inspection:
        return self.results


def test_inspections_are_announced_before_the_log_of_their_step(tmp_path: Path) -> None:
    events: list[str] = []

    class Record(EventCallback):
        def after_inspect(self, progress: Progress, modules: Any) -> None:
            events.append(f"inspected {progress.step} {modules['head']['step']:.0f}")

        def after_histograms(self, progress: Progress, histograms: Any) -> None:
            events.append(f"histograms {progress.step} {histograms['weights/head'].counts[0]}")

    make_trainer(
        tmp_path, InspectingEngine(), Record(events), cadences=Cadences(log=2, module_statistics=2, histograms=3)
    ).run()
    assert events[1:-1] == [
        *("inspected 2 2", "logged 2"),
        *("histograms 3 3", "logged 3"),
        "logged 4",
        *("inspected 6 6", "histograms 6 6", "logged 6"),
    ]


def test_metrics_are_fetched_on_log_steps_only(tmp_path: Path) -> None:
    engine = CountingEngine()
    make_trainer(tmp_path, engine, cadences=Cadences(log=5), total=20).run()
    assert engine.events.count("fetch") == 4


def test_callbacks_finish_when_a_run_fails(tmp_path: Path) -> None:
    events: list[str] = []
    short = make_trainer(tmp_path, CountingEngine(events=events), EventCallback(events), cadences=Cadences())
    short.batches = NumberBatches(stop=3)
    with pytest.raises(DataError, match="the data ended at step 3 of 6"):
        short.run()
    assert events[-1] == "finish DataError"

    class Broken(Callback):
        def start(self, progress: Progress) -> None:
            raise Diverged("no")

    events.clear()
    with pytest.raises(Diverged):
        make_trainer(
            tmp_path / "b", CountingEngine(events=events), EventCallback(events), Broken(), cadences=Cadences()
        ).run()
    assert events == ["start", "finish Diverged"], "a started callback was not finished"


def test_failed_sample_does_not_prevent_the_checkpoint(tmp_path: Path) -> None:
    def fail(progress: Progress) -> Path:
        raise DataError("cannot be sampled")

    with pytest.raises(DataError, match="cannot be sampled"):
        make_trainer(tmp_path, CountingEngine(), cadences=Cadences(save=0, sample=6), sample=fail).run()
    assert list_saved_steps(tmp_path) == [6]


def test_log_line_has_consistent_throughput(tmp_path: Path) -> None:
    rows: list[dict[str, float]] = []

    class Record(Callback):
        def after_step(self, progress: Progress, metrics: dict[str, float]) -> None:
            rows.append(metrics)
            assert progress.samples == 4 * progress.step

    make_trainer(tmp_path, CountingEngine(), Record(), cadences=Cadences(log=3)).run()
    for row in rows:
        assert row["units_per_second"] == pytest.approx(row["samples_per_second"] * 3 / 4)
        assert row["step_seconds"] * row["samples_per_second"] == pytest.approx(4)
        assert 0 <= row["data_wait"] <= 1
        assert "bad_steps" not in row


def test_unknown_best_metric_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"evaluation\.metric: 'f1' is not measured; choose from loss"):
        make_trainer(tmp_path, CountingEngine(), cadences=Cadences(evaluate=2), best_metric=BestMetric("f1")).run()


def test_best_is_minimal_or_maximal_and_never_nan(tmp_path: Path) -> None:
    losses = {1: 0.5, 2: math.nan, 3: 0.9, 4: 0.2, 5: math.inf, 6: 0.3}
    low = make_trainer(tmp_path / "a", CountingEngine(losses), cadences=Cadences(evaluate=1)).run()
    assert (low.best, low.best_step) == (0.2, 4)
    high = make_trainer(
        tmp_path / "b",
        CountingEngine(losses),
        cadences=Cadences(evaluate=1),
        best_metric=BestMetric("loss", maximise=True),
    ).run()
    assert (high.best, high.best_step) == (0.9, 3)
    assert checkpoint.read_link(tmp_path / "b", "best") == tmp_path / "b" / "step-00000003"


def run_until_signal(
    folder: Path,
    engine: CountingEngine,
    at: int,
    *callbacks: Callback,
    kind: signal.Signals = signal.SIGTERM,
    **options: Any,
) -> Interrupted:
    engine.signal_at = (at, kind)
    with pytest.raises(Interrupted) as caught:
        make_trainer(folder, engine, *callbacks, **options).run()
    return caught.value


@pytest.mark.parametrize(("kind", "code"), [(signal.SIGTERM, 85), (signal.SIGUSR1, 85), (signal.SIGINT, 130)])
def test_a_signal_saves_at_the_end_of_its_step(tmp_path: Path, kind: signal.Signals, code: int) -> None:
    before = signal.getsignal(kind)
    stopped = run_until_signal(tmp_path, CountingEngine(), 3, cadences=Cadences(), kind=kind)
    assert stopped.code == code
    assert str(stopped) == f"stopped by {kind.name} at step 3; the state is saved, run the same command to continue"
    assert list_saved_steps(tmp_path) == [3]
    assert signal.getsignal(kind) is before, "the signal handler was not restored"
    assert make_trainer(tmp_path, engine := CountingEngine(), cadences=Cadences()).run().step == 6
    assert engine.weight == sum(range(1, 7))


@pytest.mark.parametrize("at", [4, 6, 7], ids=["on the cadence", "between", "at the last step"])
def test_evaluation_prevented_by_a_signal_runs_after_resume(tmp_path: Path, at: int) -> None:
    losses = {2: 0.9, 4: 0.5, 6: 0.4, 7: 0.3}
    cadences = Cadences(log=1, evaluate=2)
    straight = make_trainer(tmp_path / "straight", CountingEngine(losses), cadences=cadences, total=7).run()
    run_until_signal(tmp_path / "cut", CountingEngine(losses), at, cadences=cadences, total=7)
    events: list[str] = []
    resumed = make_trainer(
        tmp_path / "cut", CountingEngine(losses, events=events), EventCallback(events), cadences=cadences, total=7
    ).run()
    assert events[:3] == ["start", "fetch", f"evaluated {at}"]
    assert (resumed.best, resumed.best_step, resumed.evaluated_step) == (
        straight.best,
        straight.best_step,
        straight.evaluated_step,
    )
    for link in ("best", "last"):
        links = [checkpoint.read_link(tmp_path / name / "", link) for name in ("straight", "cut")]
        assert links[0] is not None
        assert links[1] is not None
        assert links[0].name == links[1].name
    # The evaluation is then in the checkpoint, and a third start has nothing to do.
    events.clear()
    make_trainer(
        tmp_path / "cut", CountingEngine(losses, events=events), EventCallback(events), cadences=cadences, total=7
    ).run()
    assert events == ["start", "finish well"]


@pytest.mark.parametrize("resumed", [False, True], ids=["in training", "after resume"])
def test_signal_interrupts_a_long_evaluation(tmp_path: Path, resumed: bool) -> None:
    class Slow(CountingEngine):
        num_batches = 0

        def eval_step(self, batch: Batch, **options: Any) -> EvaluationOutput:
            self.num_batches += 1
            if self.num_batches == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().eval_step(batch)

    def long_validation() -> Iterator[Batch]:
        return ({"x": np.zeros(1)} for _ in range(1000))

    cadences = Cadences(log=1, evaluate=4)
    if resumed:
        run_until_signal(tmp_path, CountingEngine(), 4, cadences=cadences, validation=long_validation)
    engine = Slow()
    with pytest.raises(Interrupted, match="at step 4; the state is saved"):
        make_trainer(tmp_path, engine, cadences=cadences, validation=long_validation).run()
    assert engine.num_batches == 3
    assert list_saved_steps(tmp_path) == [4]
    events: list[str] = []
    progress = make_trainer(
        tmp_path, CountingEngine(events=events), EventCallback(events), cadences=cadences, validation=long_validation
    ).run()
    assert events[:3] == ["start", "fetch", "evaluated 4"]
    assert progress.best_step == 4


def test_save_seconds_saves_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances a second at each reading, and a step reads it a few times."""
    now = [0.0]

    def tick() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(time, "perf_counter", tick)
    make_trainer(tmp_path, CountingEngine(), cadences=Cadences(log=100, save_seconds=20.0), total=30).run()
    steps = list_saved_steps(tmp_path)
    assert 3 <= len(steps) < 15
    assert steps[-1] == 30


def test_early_stopping_survives_a_resume(tmp_path: Path) -> None:
    losses = {1: 0.5, 2: 0.6, 3: 0.7, 4: 0.8}
    cadences = Cadences(log=1, evaluate=1)

    def early_stopping() -> EarlyStopping:
        return EarlyStopping(metric="loss", maximise=False, patience=3, threshold=0.0)

    straight = make_trainer(tmp_path / "straight", CountingEngine(losses), early_stopping(), cadences=cadences).run()
    assert straight.step == 4
    assert straight.stop is not None
    assert "has not improved on 0.5000 for 3 evaluations" in straight.stop
    run_until_signal(tmp_path / "cut", CountingEngine(losses), 3, early_stopping(), cadences=cadences)
    assert make_trainer(tmp_path / "cut", CountingEngine(losses), early_stopping(), cadences=cadences).run().step == 4
    assert list_saved_steps(tmp_path / "cut")[-1] == 4
    rerun = make_trainer(tmp_path / "cut", CountingEngine(losses), early_stopping(), cadences=cadences).run()
    assert rerun.step == 4, "the same command trained further"
    assert rerun.stop == straight.stop


def test_plateau_lowers_the_rate_and_survives_a_resume(tmp_path: Path) -> None:
    losses = {2: 0.5, 4: 0.6, 6: 0.7, 8: 0.8, 10: 0.9}
    cadences = Cadences(log=1, evaluate=2)

    def reduce_on_plateau() -> ReduceOnPlateau:
        return ReduceOnPlateau(metric="loss", maximise=False, patience=2, threshold=0.0, factor=0.1, floor=0.05)

    straight = CountingEngine(losses)
    assert make_trainer(
        tmp_path / "straight", straight, reduce_on_plateau(), cadences=cadences, total=12
    ).run().learning_rate_scale == pytest.approx(0.05)
    assert straight.weight == pytest.approx(sum(range(1, 7)) + 0.1 * sum(range(7, 11)) + 0.05 * sum(range(11, 13)))
    for at in (5, 6, 7, 9):
        folder = tmp_path / f"cut at {at}"
        run_until_signal(folder, CountingEngine(losses), at, reduce_on_plateau(), cadences=cadences, total=12)
        resumed = CountingEngine(losses)
        make_trainer(folder, resumed, reduce_on_plateau(), cadences=cadences, total=12).run()
        assert resumed.weight == pytest.approx(straight.weight), f"cut at step {at}"


def test_nonfinite_step_without_recovery_is_a_divergence(tmp_path: Path) -> None:
    engine = CountingEngine()
    engine.bad = {3}
    with pytest.raises(Diverged, match="not finite at step 4"):
        make_trainer(tmp_path, engine, cadences=Cadences(log=1, save=1)).run()
    assert list_saved_steps(tmp_path) == [1, 2, 3], "a state that is not finite was saved, or a pending save was lost"


def test_progress_json_round_trip_and_validation() -> None:
    from bottega.core.errors import CheckpointError

    progress = Progress(step=3, samples=12, best=0.5, skip_steps=[1], callback_states={"a": {"b": None}}, stop="enough")
    assert {"evaluated", "rate_scale", "notes"} < set(progress.to_json()), "keys that all versions write"
    loaded = Progress.from_json(progress.to_json())
    assert loaded == Progress(step=3, samples=12, best=0.5, skip_steps=[1], callback_states={"a": {"b": None}})
    loaded.skip_steps.append(2)
    assert progress.skip_steps == [1], "the copy shares a list"
    for wrong in ({"step": "x"}, {"notes": 3}, {"best": [1]}, {"skip_steps": {"a": 1}}):
        with pytest.raises(CheckpointError, match=rf"progress\.json: {next(iter(wrong))}"):
            Progress.from_json(wrong)


def test_sample_missed_by_a_killed_process_is_drawn_on_resume(tmp_path: Path) -> None:
    """A checkpoint is saved before the sample of its step; a resumed run draws the missing sample once."""
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
        make_trainer(tmp_path, CountingEngine(), cadences=Cadences(save=2, sample=2), **options).run()

    with pytest.raises(DataError, match="killed"):
        run()
    run()
    assert [step for step in drawn if step] == [2, 4, 6]
    run()
    assert [step for step in drawn if step] == [2, 4, 6], "a finished run drew a sample again"


def test_stop_while_waiting_for_a_batch_saves_no_nonfinite_state(tmp_path: Path) -> None:
    class Stalled(NumberBatches):
        def __call__(self, step: int) -> Iterator[Batch]:
            yield from itertools.islice(super().__call__(step), 2)
            raise WaitInterrupted

    engine = CountingEngine()
    engine.bad = {1}
    stalled = make_trainer(tmp_path, engine, cadences=Cadences(log=100, save=100))
    stalled.batches = Stalled()
    with pytest.raises(Diverged, match="not finite at step 2"):
        stalled.run()
    assert list_saved_steps(tmp_path) == []
