"""The search loop: propose trials, train them as child runs, follow their evaluations, prune, and record how they end."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

from bottega.core.errors import DirectoryInUse, UsageError
from bottega.core.rundir import Lock, RunDirectory
from bottega.run.job_pool import ChildRun, Job, JobPool
from bottega.signals import REQUEUE_EXIT_CODE, StopSignals
from bottega.tuning.plan import StudyPlan
from bottega.tuning.study import Study, TrialRecord
from bottega.tuning.trial_run import EXIT_REASONS, TrialRun, find_best_row, get_trial_name, to_progress

POLL_SECONDS = 0.25
"""Seconds between two looks at the trials."""
ERROR_LINES = 6
"""Lines of a failed trial that are shown."""

LogCallback = Callable[[str], None]


@dataclass
class SearchStatus:
    """The present state of a search, for the display."""

    trials: list[TrialRecord] = field(default_factory=list)
    active: dict[int, TrialRun] = field(default_factory=dict)
    best: TrialRecord | None = None
    started_at: float = 0.0
    num_ended_here: int = 0


@final
class Search:
    """One process's part in a study."""

    def __init__(
        self,
        plan: StudyPlan,
        study: Study,
        environments: list[dict[str, str]],
        *,
        log: LogCallback,
        show: Callable[[SearchStatus], None],
    ) -> None:
        self._plan, self._study, self._log, self._show = plan, study, log, show
        self._environments = environments
        self._active: dict[str, TrialRun] = {}
        """Trials of this process, running or waiting for a place, by the name of the run."""
        self._pruned: set[str] = set()
        self._waiting: list[Job] = []
        self._status = SearchStatus(started_at=time.monotonic())

    def run(self) -> StopSignals:
        """Search until all trials are done, the time is up or a signal arrives; return the signals received.

        Trials that run then are stopped; they save a checkpoint and go on from it when the study is continued.
        """
        timeout = self._plan.options.timeout
        deadline = time.monotonic() + timeout.amount if timeout is not None else float("inf")
        with StopSignals() as stop, JobPool(self._environments, log=self._log) as pool:
            self._adopt_trials()
            has_more = True
            while self._active or has_more:
                if time.monotonic() > deadline:
                    self._log("the time is up; trials that run are saved, and the same command continues them")
                    break
                if stop.received is not None:
                    pool.forward_signal(stop.received)
                else:
                    has_more = self._start_trials(pool)
                if not self._active and not has_more:
                    break
                self._show(self._status)
                time.sleep(POLL_SECONDS)
                ended = pool.collect_ended()
                for child in pool.children:
                    self._follow(child)
                for child in ended:
                    self._finish(child, is_stopping=stop.received is not None)
                if stop.received is not None and not pool.children:
                    break
            for trial in self._active.values():
                self._release(trial)
        return stop

    def _adopt_trials(self) -> None:
        """Continue the trials of this folder whose process has died."""
        for record in self._study.list_trials():
            if record.state != "running" or get_trial_name(record.number) in self._active:
                continue
            is_here = record.attributes.get("host", socket.gethostname()) == socket.gethostname()
            folder = self._plan.folder / "trials" / get_trial_name(record.number)
            if not is_here and not folder.is_dir():
                continue  # another machine works on it
            lock = self._try_lock(record.number)
            if lock is None:
                continue  # another process on this machine does
            if not self._study.get_trial(record.number).is_finished:
                if not record.attributes.get("proposed"):
                    record = self._study.complete_proposal(record.number)
                self._add_trial(record, lock, is_new=False)
            else:
                lock.__exit__(None, None, None)

    def _start_trials(self, pool: JobPool) -> bool:
        """Start trials on free places; return whether there are more to come."""
        while pool.num_free:
            child = pool.start_next(self._waiting)
            if child is not None:
                trial = self._active[child.job.name]
                if child.start_step is not None:
                    self._log(f"trial {trial.number}: resumed at step {child.start_step}")
                continue
            if self._waiting:
                return True  # they wait for a process of an earlier command that still saves
            record = self._study.ask(limit=self._plan.num_trials)
            if record is None:
                self._adopt_trials()  # another process of this study may have died meanwhile
                if not self._waiting:
                    return False
                continue
            lock = self._try_lock(record.number)
            assert lock is not None, "a new trial has no owner"
            self._add_trial(record, lock, is_new=True)
        return True

    def _try_lock(self, number: int) -> Lock | None:
        """Return the held lock of a trial; None if another process has it. The kernel releases it when its holder dies."""
        lock = Lock(RunDirectory(self._plan.folder / "locks" / get_trial_name(number)))
        try:
            return lock.__enter__()
        except DirectoryInUse:
            return None

    def _add_trial(self, record: TrialRecord, lock: Lock, *, is_new: bool) -> None:
        """Queue a trial, or record its result at once if it is already known."""
        number = record.number
        same = self._find_same_keys(record) if is_new else None
        if same is not None:
            self._copy_result(number, same)
            lock.__exit__(None, None, None)
            return
        try:
            recipe = self._plan.build_trial_recipe(record.keys, name=get_trial_name(number))
        except UsageError as error:  # values that are valid one by one, but not together
            self._fail(number, str(error).splitlines()[0].removeprefix("tune: "))
            lock.__exit__(None, None, None)
            return
        trial = TrialRun.create(self._plan.folder, number, record.keys, recipe)
        trial.lock = lock
        self._study.set_attributes(number, run=str(trial.job.run.path), host=socket.gethostname())
        self._active[trial.job.name] = self._status.active[number] = trial
        if trial.is_finished():
            self._record_end(trial)
            return
        self._waiting.append(trial.job)
        if is_new:
            self._log(f"trial {number}: {format_keys(record.keys)}")

    def _find_same_keys(self, record: TrialRecord) -> TrialRecord | None:
        """Return a finished trial with the same keys: a run is determined by its recipe, so it would have the same result."""
        finished = (trial for trial in self._study.list_trials() if trial.state in ("complete", "pruned"))
        return next((trial for trial in finished if trial.keys == record.keys), None)

    def _copy_result(self, number: int, same: TrialRecord) -> None:
        self._study.set_attributes(number, same_as=same.number, run=same.attributes.get("run"))
        for progress, value in same.curve.items():
            self._study.report(number, progress, value)
        if same.values is not None:
            self._study.finish(number, same.values)
        else:
            self._study.prune(number)
        self._log(f"trial {number}: the same keys as trial {same.number}, whose result is taken")
        self._update_best()

    def _follow(self, child: ChildRun) -> None:
        """Report new evaluations of a running trial, and end it if it is bad."""
        trial = self._active[child.job.name]
        if not trial.rows.read() or child.job.name in self._pruned:
            return
        if self._report(trial) and self._plan.options.pruner != "none":
            self._pruned.add(child.job.name)
            child.terminate()

    def _report(self, trial: TrialRun) -> bool:
        """Report evaluations; return whether the trial should be pruned."""
        objective, total = self._plan.objectives[0], trial.read_total_steps()
        is_bad = False
        for row in trial.rows.evaluations:
            value = row.get(objective.name)
            if value is not None:
                is_worse = self._study.report(trial.number, to_progress(row["step"], total), value)
                is_bad = is_bad or (is_worse and row["step"] != total)  # nothing is saved by ending it at its end
        return is_bad

    def _finish(self, child: ChildRun, *, is_stopping: bool) -> None:
        """Record how the process of a trial ended."""
        trial = self._active[child.job.name]
        trial.rows.read()
        if trial.is_finished():
            self._record_end(trial)
        elif child.job.name in self._pruned:
            self._study.set_attributes(trial.number, **self._describe_length(trial))
            self._study.prune(trial.number)
            best = find_best_row(trial.rows.evaluations, self._plan.objectives[0])
            value = f" at {self._plan.objectives[0].name} {best[self._plan.objectives[0].name]:.4f}" if best else ""
            self._log(f"trial {trial.number}: pruned at step {trial.rows.step}{value}")
            self._forget(trial)
        elif is_stopping:
            return  # saved; the study continues it
        elif child.code == REQUEUE_EXIT_CODE:  # stopped by somebody else, and saved: go on
            self._waiting.append(child.job)
        else:
            lines = child.read_last_lines(ERROR_LINES)
            kind = EXIT_REASONS.get(child.code)
            reason = child.describe_error()
            self._study.set_attributes(trial.number, **self._describe_length(trial), lines=lines)
            self._fail(trial.number, f"{kind}: {reason}" if kind is not None else reason)
            for line in lines[:-1]:
                self._log(f"  {line}")
            self._forget(trial)

    def _record_end(self, trial: TrialRun) -> None:
        """Record the values of a finished run."""
        self._report(trial)
        values = trial.compute_values(self._plan.objectives)
        if values is None or not all(value == value for value in values):
            self._fail(trial.number, f"{self._plan.objectives[0].name} was never measured, or is not a number")
        else:
            self._study.set_attributes(trial.number, **self._describe_length(trial))
            self._study.finish(trial.number, values)
            metrics = "  ".join(
                f"{objective.name} {value:.6g}" for objective, value in zip(self._plan.objectives, values, strict=True)
            )
            is_best = self._update_best()
            self._log(f"trial {trial.number}: {metrics}{'  best so far' if is_best else ''}")
        self._forget(trial)

    def _describe_length(self, trial: TrialRun) -> dict[str, int | None]:
        return {"step": trial.rows.step, "steps": trial.read_total_steps()}

    def _fail(self, number: int, reason: str) -> None:
        self._study.fail(number, reason)
        self._log(f"trial {number}: failed: {reason}")

    def _forget(self, trial: TrialRun) -> None:
        self._release(trial)
        del self._active[trial.job.name]
        self._status.active.pop(trial.number, None)
        self._status.num_ended_here += 1

    def _release(self, trial: TrialRun) -> None:
        if trial.lock is not None:
            trial.lock.__exit__(None, None, None)

    def _update_best(self) -> bool:
        """Find the best trial; return whether it is a new one."""
        previous = self._status.best
        self._status.trials = self._study.list_trials()
        self._status.best = find_best_trial(self._status.trials, self._plan.objectives[0].mode)
        return self._status.best is not None and (previous is None or previous.number != self._status.best.number)


def find_best_trial(trials: list[TrialRecord], mode: str) -> TrialRecord | None:
    """Return the complete trial with the best value of the first objective; of equal ones the first."""
    sign = -1.0 if mode == "max" else 1.0
    complete = [trial for trial in trials if trial.values is not None]
    return min(complete, key=lambda trial: (sign * trial.values[0], trial.number), default=None)  # type: ignore[index]


def format_keys(keys: dict[str, object]) -> str:
    """Return the keys of a trial in one line, by the last part of each name."""
    return ", ".join(f"{key.rpartition('.')[2]} {format_value(value)}" for key, value in keys.items())


def format_value(value: object) -> str:
    """Return a value with four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
