"""The search loop: propose trials, train them as child runs, follow their evaluations, prune, and record how they end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import final

from bottega.core.errors import UsageError
from bottega.core.rundir import Lock
from bottega.plots.study import label_key
from bottega.run.job_pool import ChildRun, Job, JobPool, LogCallback
from bottega.signals import REQUEUE_EXIT_CODE, StopSignals
from bottega.tuning.plan import StudyPlan
from bottega.tuning.study import Study, TrialRecord
from bottega.tuning.study_folder import StudyFolder
from bottega.tuning.trial_run import TrialRun, describe_failure, get_trial_name, to_progress

POLL_SECONDS = 0.25
"""Seconds between two looks at the trials."""
ERROR_LINES = 6
"""Lines of a failed trial that are shown."""


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
        folder: StudyFolder,
        environments: list[dict[str, str]],
        *,
        log: LogCallback,
        show: Callable[[SearchStatus], None],
    ) -> None:
        self._plan, self._study, self._folder, self._log, self._show = plan, study, folder, log, show
        self._environments = environments
        self._active: dict[str, TrialRun] = {}
        """Trials of this process, running or waiting for a place, by the name of the run."""
        self._pruned: set[str] = set()
        self._waiting: list[Job] = []
        self._status = SearchStatus(started_at=time.monotonic())
        self.is_finished = False
        """Whether the search ended by itself, not by its time limit or a signal."""

    def run(self) -> StopSignals:
        """Search until all trials are done, the time is up or a signal arrives; return the signals received.

        Trials that run then are stopped; they save a checkpoint and go on from it when the study is continued.
        """
        timeout = self._plan.options.timeout
        deadline = time.monotonic() + timeout.amount if timeout is not None else float("inf")
        self._update_status()
        with StopSignals() as stop, JobPool(self._environments, log=self._log) as pool:
            self._adopt_trials()
            while stop.received is None or pool.children:
                if time.monotonic() > deadline:
                    self._log("the time is up; trials that run are saved, and the same command continues them")
                    break
                if stop.received is not None:
                    pool.forward_signal(stop.received)
                elif not self._start_trials(pool) and not self._active:
                    self.is_finished = True
                    break
                self._show(self._status)
                time.sleep(POLL_SECONDS)
                ended = pool.collect_ended()
                for child in pool.children:
                    self._follow(child)
                for child in ended:
                    self._finish(child, is_stopping=stop.received is not None)
        for trial in self._active.values():  # after the pool has waited for its processes
            self._release(trial)
        return stop

    def _adopt_trials(self) -> None:
        """Continue the trials of this folder whose process has died."""
        with self._folder.hold_asking():
            for record in self._study.list_trials():
                is_ours = record.attributes.get("owner") == self._folder.owner
                if record.is_finished or not is_ours or get_trial_name(record.number) in self._active:
                    continue
                lock = self._folder.try_lock_trial(record.number)
                if lock is None:
                    continue  # another process in this folder works on it
                if not record.attributes.get("proposed"):
                    record = self._study.complete_proposal(record.number)
                self._add_trial(record, lock)

    def _start_trials(self, pool: JobPool) -> bool:
        """Start trials on free places; return whether there may be more to come."""
        while pool.num_free:
            child = pool.start_next(self._waiting)
            if child is not None:
                trial = self._active[child.job.name]
                if child.start_step is not None:
                    self._log(f"trial {trial.number}: resumed at step {child.start_step}")
                continue
            if self._waiting:
                return True  # they wait for a process of an earlier command that still saves
            if self._is_exhausted() or not self._propose_trial():
                self._adopt_trials()  # another process of this study may have died meanwhile
                if not self._waiting:
                    return False
            elif not self._waiting:
                return True  # its result was known; look at signals and the clock before the next
        return True

    def _is_exhausted(self) -> bool:
        """Return whether every point of a finite space has been tried."""
        if self._num_points is None:
            return False
        tried = {json.dumps(trial.keys, sort_keys=True) for trial in self._study.list_trials() if trial.is_finished}
        return len(tried) >= self._num_points

    @cached_property
    def _num_points(self) -> int | None:
        return self._plan.num_points

    def _propose_trial(self) -> bool:
        """Create a trial and queue it; return whether the study may have another one."""
        with self._folder.hold_asking():
            record = self._study.ask(limit=self._plan.num_trials, owner=self._folder.owner)
            if record is None:
                return False
            lock = self._folder.try_lock_trial(record.number)
            assert lock is not None, "locks are taken under the same lock"
        self._add_trial(record, lock)
        return True

    def _add_trial(self, record: TrialRecord, lock: Lock) -> None:
        """Queue a trial, or record its result at once if it is already known."""
        number, name = record.number, get_trial_name(record.number)
        is_new = not (self._folder.path / "trials" / name).exists()
        twin = self._find_finished_twin(record) if is_new else None
        if twin is not None:
            self._copy_result(number, twin)
            lock.__exit__(None, None, None)
            return
        try:
            recipe = self._plan.build_trial_recipe(record.keys, name=name)
        except UsageError as error:  # values that are valid one by one, but not together
            self._fail(number, str(error).splitlines()[0].removeprefix("tune: "))
            lock.__exit__(None, None, None)
            return
        trial = TrialRun.create(self._folder.path, number, record.keys, recipe)
        trial.lock = lock
        self._study.set_attributes(number, run=str(trial.job.run.path))
        self._active[name] = self._status.active[number] = trial
        if trial.is_finished():
            self._record_end(trial)
            return
        self._waiting.append(trial.job)
        if is_new:
            self._log(f"trial {number}: {format_keys(record.keys)}")

    def _find_finished_twin(self, record: TrialRecord) -> TrialRecord | None:
        """Return a finished trial with the same keys: a run is determined by its recipe, so it would have the same result."""
        finished = (trial for trial in self._study.list_trials() if trial.state in ("complete", "pruned"))
        return next((trial for trial in finished if trial.keys == record.keys), None)

    def _copy_result(self, number: int, twin: TrialRecord) -> None:
        self._study.set_attributes(number, same_as=twin.number, run=twin.attributes.get("run"))
        for progress, value in twin.curve.items():
            self._study.report(number, progress, value)
        if twin.values is not None:
            self._study.finish(number, twin.values)
        else:
            self._study.prune(number)
        self._log(f"trial {number}: the same keys as trial {twin.number}, whose result is taken")
        self._update_status()

    def _follow(self, child: ChildRun) -> None:
        """Report new evaluations of a running trial, and end it if the pruner says so."""
        trial = self._active[child.job.name]
        if self._report(trial) and self._plan.options.pruner != "none" and child.job.name not in self._pruned:
            self._pruned.add(child.job.name)
            child.terminate()

    def _report(self, trial: TrialRun) -> bool:
        """Report evaluations that were written since the last time; return whether the trial should be pruned."""
        objective, should_prune = self._plan.objectives[0], False
        rows = trial.rows.read()
        total = trial.read_total_steps() if rows else None
        for row in rows:
            value = row.get(objective.name)
            if value is not None:
                is_behind = self._study.report(trial.number, to_progress(row["step"], total), value)
                should_prune = should_prune or (is_behind and row["step"] != total)  # at its end nothing is saved
        return should_prune

    def _finish(self, child: ChildRun, *, is_stopping: bool) -> None:
        """Record how the process of a trial ended."""
        trial = self._active[child.job.name]
        self._report(trial)
        if trial.is_finished():
            self._record_end(trial)
        elif child.job.name in self._pruned:
            self._study.set_attributes(trial.number, **self._describe_length(trial))
            self._study.prune(trial.number)
            self._update_status()
            name, rows = self._plan.objectives[0].name, trial.rows.evaluations
            value = f" with {name} {rows[-1][name]:.4f}" if rows and rows[-1].get(name) is not None else ""
            self._log(f"trial {trial.number}: pruned at step {trial.rows.step}{value}")
            self._forget(trial)
        elif is_stopping:
            return  # saved; the study continues it
        elif child.code == REQUEUE_EXIT_CODE:  # stopped by somebody else, and saved: go on
            self._waiting.append(child.job)
        else:
            lines = child.read_last_lines(ERROR_LINES)
            self._study.set_attributes(trial.number, **self._describe_length(trial), lines=lines, code=child.code)
            self._fail(trial.number, describe_failure(child))
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
            self._update_status()
            is_best = self._status.best is not None and self._status.best.number == trial.number
            self._log(f"trial {trial.number}: {metrics}{'  best so far' if is_best else ''}")
        self._forget(trial)

    def _describe_length(self, trial: TrialRun) -> dict[str, int | None]:
        return {"step": trial.rows.step, "steps": trial.read_total_steps()}

    def _fail(self, number: int, reason: str) -> None:
        self._study.fail(number, reason)
        self._update_status()
        self._log(f"trial {number}: failed: {reason}")

    def _forget(self, trial: TrialRun) -> None:
        self._release(trial)
        del self._active[trial.job.name]
        self._status.active.pop(trial.number, None)
        self._status.num_ended_here += 1

    def _release(self, trial: TrialRun) -> None:
        if trial.lock is not None:
            trial.lock.__exit__(None, None, None)

    def _update_status(self) -> None:
        self._status.trials = self._study.list_trials()
        self._status.best = find_best_trial(self._status.trials, self._plan.objectives[0].mode)


def find_best_trial(trials: list[TrialRecord], mode: str) -> TrialRecord | None:
    """Return the complete trial with the best value of the first objective; of equal ones the first."""
    sign = -1.0 if mode == "max" else 1.0
    complete = [trial for trial in trials if trial.values is not None]
    return min(complete, key=lambda trial: (sign * trial.values[0], trial.number), default=None)  # type: ignore[index]


def format_keys(keys: dict[str, object]) -> str:
    """Return the keys of a trial in one line, by the last part of each name."""
    return ", ".join(f"{label_key(key)} {format_value(value)}" for key, value in keys.items())


def format_value(value: object) -> str:
    """Return a value with four significant digits, as a recipe writes it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
