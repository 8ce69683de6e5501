"""The only training loop. Everything it does is a function of the step and of `Progress`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

from bottega.core.callback import Callback, Progress
from bottega.core.engine import Engine
from bottega.core.errors import DataError, Diverged, Interrupted
from bottega.core.saver import Saver
from bottega.core.types import Batch, Rows, Sums
from bottega.signals import StopSignals, WaitInterrupted


class Batches(Protocol):
    """A data loader whose whole state is the step: `batches(step)` yields the batches from `step` on."""

    def samples_before(self, step: int) -> int:
        """Return the number of samples in all earlier steps; the batch size may differ between curriculum stages."""

    def __call__(self, step: int) -> Iterator[Batch]: ...


@dataclass(frozen=True)
class Cadences:
    """Steps between two logs, evaluations, checkpoints, samples, module statistics and histograms (0 = never).

    `save_seconds` saves by the clock. `evaluate_at` are further steps to evaluate at, such as the ends of sources in a sequence.
    """

    log: int = 10
    evaluate: int = 0
    evaluate_at: frozenset[int] = frozenset()
    save: int = 0
    sample: int = 0
    save_seconds: float | None = None
    module_statistics: int = 0
    histograms: int = 0


@dataclass(frozen=True)
class BestMetric:
    """The evaluation metric that decides which checkpoint is the best, and whether it is maximised."""

    metric: str = "loss"
    maximise: bool = False

    def is_better(self, value: float, than: float | None) -> bool:
        """Return whether `value` is better than `than`; any value is better than None."""
        return than is None or (value > than if self.maximise else value < than)


@dataclass(kw_only=True)
class Trainer:
    """The training loop with everything it works on; `run()` trains to the end.

    `recover(progress, step)` handles a step whose loss or gradient was not finite: it returns the step to continue from
    (rollback), or raises. `score` and `summarise` add evaluation metrics that are not means over examples: the first
    from the rows (F1), the second from the means (perplexity). `sample` writes samples and returns their folder.
    """

    engine: Engine
    batches: Batches
    progress: Progress
    cadences: Cadences
    best_metric: BestMetric = BestMetric()
    validation: Callable[[], Iterator[Batch]] | None = None
    score: Callable[[Rows], dict[str, float]] | None = None
    summarise: Callable[[dict[str, float]], dict[str, float]] = lambda metrics: metrics
    sample: Callable[[Progress], Path] | None = None
    has_sample: Callable[[Progress], bool] | None = None
    saver: Saver | None = None
    callbacks: Sequence[Callback] = ()
    recover: Callable[[Progress, int], int] | None = None
    pause_at: int | None = None
    signals: StopSignals = field(default_factory=StopSignals)

    def run(self) -> Progress:
        """Train to the last step, an early stop or an error; return the progress."""
        progress = self.progress
        error: BaseException | None = None
        try:
            for callback in self.callbacks:
                callback.load_state_dict(progress.callback_states.get(callback.name, {}))
                callback.start(progress)
            with self.signals:
                self._train()
                if self.saver:
                    self.saver.wait(final=True)
        except BaseException as caught:
            error = caught
            if self.saver:
                self.saver.wait_after_failure()
            raise
        finally:
            for callback in self.callbacks:
                callback.finish(progress, error)
        return progress

    def _train(self) -> None:
        progress, engine, cadences = self.progress, self.engine, self.cadences
        engine.learning_rate_scale = progress.learning_rate_scale
        self._log_start = self._saved_at = time.perf_counter()
        self._wait_seconds, self._num_units, self._num_steps = 0.0, 0.0, 0
        if self._is_evaluation_due() and progress.evaluated_step < progress.step:
            self._evaluate()  # a signal ended the previous process between its checkpoint and this evaluation
            self._save()
            if self._is_stop_requested():
                self._raise_interrupted()
        is_sample_due = progress.step > 0 and self._is_sample_due()
        if self.sample and self.has_sample and is_sample_due and not self.has_sample(progress):
            self._notify("after_sample", self.sample(progress))  # the previous process ended before this sample
        stream = self.batches(progress.step)
        metrics: dict[str, Any] = {}
        end = min(progress.total, self.pause_at or progress.total)
        while progress.step < end and progress.stop is None:
            wait_start = time.perf_counter()
            try:
                batch = next(stream, None)
            except WaitInterrupted:
                if self._num_steps:  # these steps are unchecked; one that was not finite must not be saved
                    self._log(metrics)
                self._save()
                self._raise_interrupted()
            self._wait_seconds += time.perf_counter() - wait_start
            if batch is None:
                raise DataError(f"the data ended at step {progress.step} of {progress.total}")
            has_statistics = self._is_due(cadences.module_statistics, progress.step + 1)
            has_histograms = self._is_due(cadences.histograms, progress.step + 1)
            metrics = engine.train_step(
                progress.step, batch, module_statistics=has_statistics, histograms=has_histograms
            )
            progress.step += 1
            progress.samples = self.batches.samples_before(progress.step)
            self._num_units += metrics.pop("units", 0.0)
            self._num_steps += 1
            if self.saver:
                self.saver.poll()
            is_stopping = self._is_stop_requested()
            is_last = progress.step >= end
            is_evaluation_due = self._is_evaluation_due()
            is_save_due = self._is_due(cadences.save, progress.step) or is_last or is_stopping or self._is_save_time()
            is_sample_due = self._is_sample_due()
            step = progress.step
            is_log_due = has_statistics or has_histograms or self._is_due(cadences.log, step)
            if is_log_due or is_last or is_evaluation_due or is_save_due or is_sample_due:
                self._log(metrics)
                if progress.step != step:  # rolled back
                    stream = self.batches(progress.step)
                    continue
            if is_evaluation_due and not is_stopping:
                is_save_due = self._evaluate() or is_save_due
                is_stopping = self._is_stop_requested()
                is_save_due = is_save_due or is_stopping
            if is_save_due or progress.stop is not None:
                self._save()
            if is_stopping:
                self._raise_interrupted()
            if is_sample_due and self.sample:  # last, so that a failing sample never costs a checkpoint
                self._notify("after_sample", self.sample(progress))

    def _is_sample_due(self) -> bool:
        progress, every = self.progress, self.cadences.sample
        return self._is_due(every, progress.step) or (progress.step >= progress.total and every > 0)

    def _is_stop_requested(self) -> bool:
        return self.engine.any_rank(self.signals.received is not None)

    def _is_due(self, every: int, step: int) -> bool:
        return every > 0 and step > 0 and step % every == 0

    def _is_evaluation_due(self) -> bool:
        step, every, extra_steps = self.progress.step, self.cadences.evaluate, self.cadences.evaluate_at
        return self._is_due(every, step) or (every > 0 and (step >= self.progress.total or step in extra_steps))

    def _is_save_time(self) -> bool:
        limit = self.cadences.save_seconds
        return limit is not None and self.engine.any_rank(time.perf_counter() - self._saved_at >= limit)

    def _log(self, metrics: dict[str, Any]) -> None:
        """Fetch the metrics, which waits for the device; handle non-finite steps; call the callbacks."""
        progress = self.progress
        values = self.engine.fetch(metrics)
        inspection = self.engine.fetch_inspection()
        values["skipped_steps"] = values.pop("bad_steps", 0.0)
        if num_bad_steps := int(values["skipped_steps"]):
            first_bad_step = progress.step - num_bad_steps
            if self.recover is None:
                raise Diverged(f"the loss or a gradient was not finite at step {first_bad_step + 1}")
            progress.step = self.recover(progress, first_bad_step)
            if progress.step <= first_bad_step:
                self._rewind()
                return
        seconds = max(time.perf_counter() - self._log_start, 1e-9)
        first_step, samples_before = progress.step - self._num_steps, self.batches.samples_before
        values["samples_per_second"] = (samples_before(progress.step) - samples_before(first_step)) / seconds
        values["units_per_second"] = self._num_units / seconds
        values["data_wait"] = min(1.0, self._wait_seconds / seconds)
        values["step_seconds"] = seconds / max(1, self._num_steps)
        self._reset_clock()
        if inspection.modules:
            self._notify("after_inspect", inspection.modules)
        if inspection.histograms:
            self._notify("after_histograms", inspection.histograms)
        self._notify("after_step", values)

    def _rewind(self) -> None:
        """Restore the state of engine and callbacks from the rolled-back progress, as a resume would."""
        progress = self.progress
        self.engine.learning_rate_scale = progress.learning_rate_scale
        for callback in self.callbacks:
            callback.load_state_dict(progress.callback_states.get(callback.name, {}))
            callback.rewind(progress)
        self._reset_clock()

    def _reset_clock(self) -> None:
        self._log_start = time.perf_counter()
        self._wait_seconds, self._num_units, self._num_steps = 0.0, 0.0, 0

    def _evaluate(self) -> bool:
        """Evaluate, call the callbacks, and return whether this is the best result so far and so worth saving."""
        assert self.validation is not None, "an evaluation cadence needs validation data"
        progress = self.progress
        try:
            with self.engine.evaluating():
                batches = self._yield_until_stopped(self.validation())
                metrics = self.summarise(evaluate(self.engine, batches, score=self.score))
        except _Stopped:
            return False
        if self.best_metric.metric not in metrics:
            raise DataError(
                f"evaluation.metric: {self.best_metric.metric!r} is not measured; choose from {', '.join(metrics)}"
            )
        value = metrics[self.best_metric.metric]
        has_improved = math.isfinite(value) and self.best_metric.is_better(value, progress.best)
        if has_improved:
            progress.best, progress.best_step = value, progress.step
        progress.evaluated_step = progress.step
        self._notify("after_eval", metrics)
        self.engine.learning_rate_scale = progress.learning_rate_scale
        self._reset_clock()
        return has_improved

    def _yield_until_stopped(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield batches until a stop is requested; the next start of the run repeats the evaluation, which may take minutes."""
        for batch in batches:
            if self._is_stop_requested():
                raise _Stopped
            yield batch

    def _notify(self, event: str, value: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self.progress, value)

    def _save(self) -> None:
        if self.saver is None:
            return
        progress = self.progress
        self.saver.wait()  # the engine may reuse the buffers of the last snapshot
        progress.callback_states = {c.name: state for c in self.callbacks if (state := c.state_dict())}
        progress.micro_batch_size = self.engine.micro_batch_size
        snapshot = self.engine.snapshot()
        if self.engine.rank == 0:
            self.saver.save(snapshot, progress)
        self._saved_at = time.perf_counter()

    def _raise_interrupted(self) -> NoReturn:
        if self.saver:
            self.saver.wait(final=True)
        # A launcher ends all ranks as soon as one has exited, so none exits before rank 0 has written.
        self.engine.any_rank(False)
        name = self.signals.received.name if self.signals.received else "a signal on another rank"
        raise Interrupted(
            f"stopped by {name} at step {self.progress.step}; the state is saved, run the same command to continue",
            self.signals.exit_code,
        )


class _Stopped(Exception):
    """A signal arrived during an evaluation."""


def evaluate(
    engine: Engine, batches: Iterator[Batch], *, score: Callable[[Rows], dict[str, float]] | None = None
) -> dict[str, float]:
    """Return the mean metrics over a data set, with the metrics that `score` computes from its rows."""
    means, rows = evaluate_with_rows(engine, batches)
    return {**means, **(score(rows) if score is not None and rows else {})}


def evaluate_with_rows(engine: Engine, batches: Iterator[Batch]) -> tuple[dict[str, float], Rows]:
    """Return the mean metrics over a data set and its rows. Both stay on the device until the last batch."""
    totals: Sums = {}
    batch_rows: list[dict[str, Any]] = []
    for batch in batches:
        sums, rows = engine.eval_step(batch)
        for name, (value, count) in sums.items():
            previous = totals.get(name, (0.0, 0.0))
            totals[name] = (previous[0] + value, previous[1] + count)
        if rows:
            batch_rows.append(rows)
    if not totals:
        raise DataError("the validation data has no samples; add data or remove data.validation")
    values = engine.fetch({f"{name}/{i}": value for name, pair in totals.items() for i, value in enumerate(pair)})
    means = {name: values[f"{name}/0"] / count if (count := values[f"{name}/1"]) else math.nan for name in totals}
    return means, engine.fetch_rows(batch_rows) if batch_rows else {}
