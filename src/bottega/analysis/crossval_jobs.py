"""Train the folds of a cross-validation in a pool of processes, with progress read from their logs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import final

from bottega.core.errors import Interrupted
from bottega.run.dependencies import ChildProcessFailed
from bottega.run.job_pool import WAIT_SECONDS, ChildRun, Job, JobPool, LogCallback
from bottega.signals import StopSignals

_STEP_LINE = re.compile(r" step +(\d+)/(\d+) ")
_EVALUATION_LINE = re.compile(r" (step \d+  validation  .*)")

ProgressCallback = Callable[[str, int, int], None]


def train_folds(
    jobs: Sequence[Job],
    environments: list[dict[str, str]],
    *,
    num_trained: int = 0,
    log: LogCallback,
    report_progress: ProgressCallback,
) -> None:
    """Train `jobs`, as many at a time as there are `environments`; a failed job does not stop the others.

    `num_trained` folds are already trained. Raises `Interrupted` after a signal, `ChildProcessFailed` if a job failed.
    """
    waiting_jobs = list(jobs)
    logs: dict[str, _LogTail] = {}
    failures: list[tuple[ChildRun, str]] = []
    with StopSignals() as stop, JobPool(environments, log=log) as pool:
        while pool.children or (waiting_jobs and stop.received is None):
            while stop.received is None and (child := pool.start_next(waiting_jobs)) is not None:
                logs[child.job.name] = _LogTail(child)
                is_resumed = child.start_step is not None
                log(f"{child.job.name}: " + (f"resumed at step {child.start_step}" if is_resumed else "training"))
            time.sleep(WAIT_SECONDS)
            if stop.received is not None:
                pool.forward_signal(stop.received)
            ended = pool.collect_ended()
            for child in (*pool.children, *ended):
                logs[child.job.name].report_progress(log, report_progress)
            for child in ended:
                if child.code and stop.received is None:
                    failures.append((child, child.describe_error()))
                    log(f"{child.job.name}: {failures[-1][1]}")
    if stop.received is not None:
        raise Interrupted(
            f"stopped by {stop.received.name}; each fold has saved a checkpoint, and the same command resumes them",
            stop.exit_code,
        )
    if failures:
        child, text = failures[0]
        more_text = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        others_text = "; the other folds are saved" if num_trained + len(jobs) > len(failures) else ""
        raise ChildProcessFailed(f"{child.job.run.path}: {text}{more_text}{others_text}", child.code)


@final
class _LogTail:
    """The lines that a fold adds to its log."""

    def __init__(self, child: ChildRun) -> None:
        self._name, self._log = child.job.name, child.job.run.log
        self._offset = child.log_size

    def report_progress(self, log: LogCallback, report_progress: ProgressCallback) -> None:
        """Report the steps and evaluations in new lines."""
        for line in self._read_new_lines():
            evaluation, step = _EVALUATION_LINE.search(line), _STEP_LINE.search(line)
            if step:
                report_progress(self._name, int(step[1]), int(step[2]))
            if evaluation:
                log(f"{self._name}: {evaluation[1]}")

    def _read_new_lines(self) -> list[str]:
        try:
            with self._log.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        lines = data[: data.rfind(b"\n") + 1]
        self._offset += len(lines)
        return lines.decode("utf-8", "replace").splitlines()
