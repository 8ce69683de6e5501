"""Train folds in parallel, one process each: devices and threads, progress from their logs, and signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import psutil

from bottega.core import checkpoint as checkpoints
from bottega.core.errors import DirectoryInUse, Interrupted, UsageError
from bottega.core.rundir import Lock, RunDirectory
from bottega.run.dependencies import GRACE_SECONDS, POLL_SECONDS, DependencyFailed
from bottega.signals import StopSignals
from bottega.tasks import plugins

JOB_MEMORY_BYTES = 2 << 30
"""Bytes reserved per training process: torch takes 0.4 GiB before there is a model, a small model and its data the rest."""
_STEP_LINE = re.compile(r" step +(\d+)/(\d+) ")
_EVALUATION_LINE = re.compile(r" (step \d+  validation  .*)")

LogCallback = Callable[[str], None]
ProgressCallback = Callable[[str, int, int], None]


@dataclass(frozen=True)
class FoldJob:
    """A run to be trained, and its recipe file."""

    run: RunDirectory
    recipe: Path

    @property
    def name(self) -> str:
        """The folder name of the run, such as fold-0."""
        return self.run.path.name

    @property
    def step(self) -> int | None:
        """The step of the newest checkpoint; None before there is one."""
        return next((manifest.step for _, manifest in checkpoints.list_checkpoints(self.run.checkpoints)), None)


def plan_job_environments(device: str, jobs: int | str, *, num_folds: int) -> list[dict[str, str]]:
    """Return the environment variables (visible GPU, number of threads) of each of the processes that train in parallel."""
    if jobs != "auto" and (not str(jobs).isdigit() or int(jobs) < 1):
        raise UsageError(f"--jobs {jobs}: expected auto, or 1 or more")
    gpus = _list_gpus(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if jobs == "auto":
        max_jobs_in_memory = max(1, psutil.virtual_memory().available // JOB_MEMORY_BYTES)
        num_jobs = len(gpus) if gpus else 1 if device == "mps" else min(max(1, cores // 2), max_jobs_in_memory)
    else:
        num_jobs = int(jobs)
    num_jobs = min(num_jobs, num_folds)
    # A value set by the user has priority; with it, results do not depend on the number of jobs.
    threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(max(1, cores // max(1, num_jobs)))}
    visible_devices = [{"CUDA_VISIBLE_DEVICES": gpus[index % len(gpus)]} if gpus else {} for index in range(num_jobs)]
    return [{**threads, **devices} for devices in visible_devices]


def _list_gpus(device: str) -> list[str]:
    """Return the identifiers of the GPUs that this process may use."""
    if device in ("cpu", "mps"):
        return []
    import torch

    count = torch.cuda.device_count()
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return (visible or [str(number) for number in range(count)])[:count]


def train_folds(
    jobs: Sequence[FoldJob],
    environments: list[dict[str, str]],
    *,
    num_trained: int = 0,
    log: LogCallback,
    report_progress: ProgressCallback,
) -> None:
    """Train `jobs`, as many at a time as there are `environments`; a failed job does not stop the others.

    `num_trained` folds are already trained. Raises `Interrupted` after a signal, `DependencyFailed` if a job failed.
    """
    waiting_jobs, free_environments = list(jobs), list(environments)
    running_children: list[_Child] = []
    failures: list[tuple[_Child, str]] = []
    reported_jobs: set[str] = set()
    with StopSignals() as stop:
        try:
            while running_children or (waiting_jobs and stop.received is None):
                while waiting_jobs and free_environments and stop.received is None:
                    locked_jobs = [job for job in waiting_jobs if _is_locked(job, reported_jobs, log)]
                    next_job = next((job for job in waiting_jobs if job not in locked_jobs), None)
                    # A process left over from a killed command takes as much memory as our own.
                    if next_job is None or len(running_children) + len(locked_jobs) >= len(environments):
                        break
                    waiting_jobs.remove(next_job)
                    step = next_job.step
                    running_children.append(_Child(next_job, free_environments.pop(0)))
                    log(f"{next_job.name}: " + (f"resumed at step {step}" if step is not None else "training"))
                time.sleep(POLL_SECONDS / 5)
                if stop.received is not None:
                    for child in running_children:
                        child.forward_signal(stop.received)
                for child in [child for child in running_children if child.follow(log, report_progress)]:
                    running_children.remove(child)
                    free_environments.append(child.environment)
                    if child.code and stop.received is None:
                        failures.append((child, child.describe_error()))
                        log(f"{child.job.name}: {failures[-1][1]}")
        finally:
            for child in running_children:
                child.end()
    if stop.received is not None:
        raise Interrupted(
            f"stopped by {stop.received.name}; each fold has saved a checkpoint, and the same command resumes them",
            stop.exit_code,
        )
    if failures:
        child, text = failures[0]
        more_text = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        others_text = "; the other folds are saved" if num_trained + len(jobs) > len(failures) else ""
        raise DependencyFailed(f"{child.job.run.path}: {text}{more_text}{others_text}", child.code)


def _is_locked(job: FoldJob, reported_jobs: set[str], log: LogCallback) -> bool:
    """Return whether another process trains the fold; such a process survives for a while after its command was killed."""
    if not job.run.path.is_dir():
        return False
    try:
        with Lock(job.run):
            return False
    except DirectoryInUse as error:
        if job.name not in reported_jobs:
            reported_jobs.add(job.name)
            owner = str(error).partition(" is in use by ")[2].partition(";")[0]
            log(f"{job.name}: waiting for {owner}, which trains it")
        return True


@final
class _Child:
    """A running `bottega train` process."""

    def __init__(self, job: FoldJob, environment: dict[str, str]) -> None:
        self.job, self.environment = job, environment
        self.code = 0
        self._log = job.run.log
        self._offset = self._log.stat().st_size if self._log.is_file() else 0
        self._signalled_at: float | None = None
        self._has_forwarded = False
        self._stderr_file = job.recipe.with_suffix(".stderr")
        # In its own process group, so that Ctrl-C reaches only the parent: a second signal would stop it without saving.
        with self._stderr_file.open("wb") as stderr:
            self._process = subprocess.Popen(
                plugins.build_bottega_command(["train", str(job.recipe), "--quiet"]),
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                process_group=0,
            )

    def follow(self, log: LogCallback, report_progress: ProgressCallback) -> bool:
        """Report new progress from its log; return whether it has ended."""
        code = self._process.poll()
        for line in self._read_new_lines():
            evaluation, step = _EVALUATION_LINE.search(line), _STEP_LINE.search(line)
            if step:
                report_progress(self.job.name, int(step[1]), int(step[2]))
            if evaluation:
                log(f"{self.job.name}: {evaluation[1]}")
        if code is None:
            return False
        self.code = code
        return True

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

    def describe_error(self) -> str:
        """Return the last line of stderr, or how the process ended."""
        lines = self._stderr_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        status = f"ended by {signal.Signals(-self.code).name}" if self.code < 0 else f"ended with {self.code}"
        return lines[-1].removeprefix("bottega: ") if lines and self.code > 0 else status

    def forward_signal(self, received: signal.Signals) -> None:
        """Forward a signal once; SIGTERM only after `GRACE` seconds, since a scheduler may already have sent it to the process.

        A second signal would stop the process before it has saved.
        """
        now = time.monotonic()
        self._signalled_at = now if self._signalled_at is None else self._signalled_at
        if not self._has_forwarded and (received is signal.SIGINT or now - self._signalled_at > GRACE_SECONDS):
            self._has_forwarded = True
            self._process.send_signal(received)

    def end(self) -> None:
        """Terminate the process and wait for it."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
