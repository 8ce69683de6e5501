"""A pool of training processes, for the folds of crossval and the trials of tune: devices, threads, locks and signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import final

import psutil

from bottega import stop_with_parent
from bottega.core import checkpoint as checkpoints
from bottega.core.errors import DirectoryInUse, UsageError
from bottega.core.rundir import Lock, RunDirectory
from bottega.redaction import redact_text
from bottega.run.dependencies import GRACE_SECONDS, POLL_SECONDS
from bottega.storage.durable import write_atomic
from bottega.tasks import plugins

JOB_MEMORY_BYTES = 2 << 30
"""Bytes reserved per training process: torch takes 0.4 GiB before there is a model, a small model and its data the rest."""

WAIT_SECONDS = POLL_SECONDS / 5
"""Seconds between two looks at the running processes."""

_RANK_EXIT_CODE = re.compile(r"exitcode\s*:\s*(-?\d+)")

LogCallback = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """A run to be trained: its directory, its recipe file, further words of `bottega train`, and its number of processes."""

    run: RunDirectory
    recipe: Path
    arguments: tuple[str, ...] = ()
    num_processes: int = 1

    @property
    def name(self) -> str:
        """The folder name of the run, such as fold-0."""
        return self.run.path.name

    @property
    def step(self) -> int | None:
        """The step of the newest checkpoint; None before there is one."""
        return next((manifest.step for _, manifest in checkpoints.list_checkpoints(self.run.checkpoints)), None)

    @property
    def stderr(self) -> Path:
        """The file that standard error of the process is written to."""
        return self.recipe.with_suffix(".stderr")

    def build_command(self) -> list[str]:
        """Return the command line that trains the run, started by torchrun if it has several processes."""
        # The parent reports on all of them together.
        words = ["train", str(self.recipe), "logging.report=false", *self.arguments, "--quiet"]
        command = plugins.build_bottega_command(words)
        if self.num_processes > 1:
            launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={self.num_processes}", "-m"]
            command = [sys.executable, "-m", *launcher, *command[2:]]
        return stop_with_parent.build_command(command)


def plan_job_environments(
    device: str, jobs: int | str, *, num_runs: int, num_processes: int = 1, strict: bool = False
) -> list[dict[str, str]]:
    """Return the environment variables (visible GPUs, number of threads) of each of the runs that train in parallel.

    A run of several processes gets as many GPUs. `strict` refuses more jobs than the GPUs suffice for.
    """
    if jobs != "auto" and (not str(jobs).isdigit() or int(jobs) < 1):
        raise UsageError(f"--jobs {jobs}: expected auto, or 1 or more")
    gpus = _list_gpus(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_gpu_groups = len(gpus) // num_processes
    if strict and gpus and jobs != "auto" and int(jobs) > num_gpu_groups:
        each = f", and each run uses {num_processes}" if num_processes > 1 else ""
        raise UsageError(
            f"--jobs {jobs}: this machine has {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}{each}; use --jobs "
            f"{max(1, num_gpu_groups)} or fewer, or device=cpu"
        )
    if jobs == "auto":
        max_jobs_in_memory = max(1, psutil.virtual_memory().available // (JOB_MEMORY_BYTES * num_processes))
        max_jobs_on_cpu = min(max(1, cores // (2 * num_processes)), max_jobs_in_memory)
        num_jobs = max(1, num_gpu_groups) if gpus else 1 if device == "mps" else max_jobs_on_cpu
    else:
        num_jobs = int(jobs)
    num_jobs = max(1, min(num_jobs, num_runs))
    # A value set by the user has priority; with it, results do not depend on the number of jobs.
    threads = max(1, cores // (num_jobs * num_processes))
    thread_variables = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads)}
    if not gpus:
        return [dict(thread_variables) for _ in range(num_jobs)]
    groups = [
        [gpus[(index * num_processes + offset) % len(gpus)] for offset in range(min(num_processes, len(gpus)))]
        for index in range(num_jobs)
    ]
    return [{**thread_variables, "CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups]


def _list_gpus(device: str) -> list[str]:
    """Return the identifiers of the GPUs that this process may use."""
    if device in ("cpu", "mps"):
        return []
    import torch

    count = torch.cuda.device_count()
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return (visible or [str(number) for number in range(count)])[:count]


@final
class JobPool:
    """Runs as many training processes at a time as there are environments; a context that ends those still running."""

    def __init__(self, environments: list[dict[str, str]], *, log: LogCallback) -> None:
        self.size = len(environments)
        self.children: list[ChildRun] = []
        """The running processes."""
        self._free_environments = list(environments)
        self._log = log
        self._reported_jobs: set[str] = set()

    def __enter__(self) -> JobPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self.children:
            child.terminate()
        for child in self.children:
            child.wait()

    def start_next(self, waiting_jobs: list[Job]) -> ChildRun | None:
        """Start the first waiting job whose run is not locked, and remove it from the list; None if nothing can start now.

        A process left over from a killed command takes as much memory as our own, so it occupies a place, too.
        """
        if not waiting_jobs or not self._free_environments:
            return None
        locked_jobs = [job for job in waiting_jobs if self._is_locked(job)]
        job = next((job for job in waiting_jobs if job not in locked_jobs), None)
        if job is None or len(self.children) + len(locked_jobs) >= self.size:
            return None
        waiting_jobs.remove(job)
        child = ChildRun(job, self._free_environments.pop(0))
        self.children.append(child)
        return child

    @property
    def num_free(self) -> int:
        """The number of processes that may be started now."""
        return len(self._free_environments)

    def collect_ended(self) -> list[ChildRun]:
        """Remove and return the processes that have ended."""
        ended = [child for child in self.children if child.has_ended()]
        for child in ended:
            self.children.remove(child)
            self._free_environments.append(child.environment)
        return ended

    def forward_signal(self, received: signal.Signals) -> None:
        """Forward a signal of this process to the running ones."""
        for child in self.children:
            child.forward_signal(received)

    def _is_locked(self, job: Job) -> bool:
        """Return whether another process trains the run; such a process survives for a while after its command was killed."""
        if not job.run.path.is_dir():
            return False
        try:
            with Lock(job.run):
                return False
        except DirectoryInUse as error:
            if job.name not in self._reported_jobs:
                self._reported_jobs.add(job.name)
                owner = str(error).partition(" is in use by ")[2].partition(";")[0]
                self._log(f"{job.name}: waiting for {owner}, which trains it")
            return True


@final
class ChildRun:
    """A running `bottega train` process."""

    def __init__(self, job: Job, environment: dict[str, str]) -> None:
        self.job, self.environment = job, environment
        self.start_step = job.step
        """The step that the run is resumed at; None for a new run."""
        self.log_size = job.run.log.stat().st_size if job.run.log.is_file() else 0
        """Bytes of the run's log that an earlier process has written."""
        self.code = 0
        """The exit code, once the process has ended; negative for a signal."""
        self._signalled_at: float | None = None
        self._has_forwarded = False
        # In its own process group, so that Ctrl-C reaches only the parent: a second signal would stop it without saving.
        with job.stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                job.build_command(),
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                process_group=0,
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def has_ended(self) -> bool:
        """Return whether the process has ended; `code` is set then."""
        code = self._process.poll()
        if code is None:
            return False
        self.code = code
        self._redact_stderr()
        if code and self.job.num_processes > 1:
            # torchrun ends with 1 whatever a rank ended with, and prints that in its summary.
            match = _RANK_EXIT_CODE.search(self._read_stderr())
            self.code = int(match[1]) if match is not None else code
        return True

    def describe_error(self) -> str:
        """Return the last line of stderr, or how the process ended."""
        lines = self.read_last_lines(1)
        status = f"ended by {signal.Signals(-self.code).name}" if self.code < 0 else f"ended with {self.code}"
        return lines[-1].removeprefix("bottega: ") if lines and self.code > 0 else status

    def read_last_lines(self, count: int) -> list[str]:
        """Return the last lines of standard error; of a run of several processes those that its ranks printed."""
        lines = self._read_stderr().strip().splitlines()
        if self.job.num_processes > 1:
            lines = [line for line in lines if line.startswith("bottega: ")]
        return lines[-count:]

    def _redact_stderr(self) -> None:
        """Rewrite the file of standard error without secrets, which libraries may have printed by themselves."""
        text = self._read_stderr()
        if (redacted := redact_text(text)) != text:
            write_atomic(self.job.stderr, redacted)

    def _read_stderr(self) -> str:
        return self.job.stderr.read_text(encoding="utf-8", errors="replace")

    def forward_signal(self, received: signal.Signals) -> None:
        """Forward a signal once; SIGTERM only after `GRACE_SECONDS`, since a scheduler may already have sent it to the process.

        A second signal would stop the process before it has saved.
        """
        now = time.monotonic()
        self._signalled_at = now if self._signalled_at is None else self._signalled_at
        if not self._has_forwarded and (received is signal.SIGINT or now - self._signalled_at > GRACE_SECONDS):
            self._has_forwarded = True
            self._process.send_signal(received)

    def terminate(self) -> None:
        """Send SIGTERM once, after which the run saves a checkpoint and ends."""
        if not self._has_forwarded and self._process.poll() is None:
            self._has_forwarded = True
            self._process.terminate()

    def wait(self) -> None:
        """Wait until the process has ended."""
        self.code = self._process.wait()
