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
from bottega.run.dependencies import GRACE, POLL, DependencyFailed
from bottega.signals import StopSignals
from bottega.tasks import plugins

JOB_MEMORY = 2 << 30
"""Memory that a training is given: torch takes 0.4 GiB before there is a model, and a small one with its data the rest."""
_STEP = re.compile(r" step +(\d+)/(\d+) ")
_MEASURED = re.compile(r" (step \d+  validation  .*)")

LogCallback = Callable[[str], None]
ProgressCallback = Callable[[str, int, int], None]


@dataclass(frozen=True)
class FoldJob:
    """A run to be trained, and the recipe file that says how."""

    run: RunDirectory
    recipe: Path

    @property
    def name(self) -> str:
        return self.run.path.name

    @property
    def step(self) -> int | None:
        """Where its newest checkpoint stands; None before there is one."""
        return next((manifest.step for _, manifest in checkpoints.list_checkpoints(self.run.checkpoints)), None)


def plan_job_environments(device: str, jobs: int | str, *, num_folds: int) -> list[dict[str, str]]:
    """One set of environment variables for each training that runs at a time: which GPU it sees, how many threads it has."""
    if jobs != "auto" and (not str(jobs).isdigit() or int(jobs) < 1):
        raise UsageError(f"--jobs {jobs}: expected auto, or 1 or more")
    gpus = _gpus(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if jobs == "auto":
        room = max(1, psutil.virtual_memory().available // JOB_MEMORY)
        number = len(gpus) if gpus else 1 if device == "mps" else min(max(1, cores // 2), room)
    else:
        number = int(jobs)
    number = min(number, num_folds)
    # One that is set was set by somebody who knows; with it, any number of jobs gives the same bits.
    threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(max(1, cores // max(1, number)))}
    seen = [{"CUDA_VISIBLE_DEVICES": gpus[place % len(gpus)]} if gpus else {} for place in range(number)]
    return [{**threads, **one} for one in seen]


def _gpus(device: str) -> list[str]:
    """The names of the GPUs that this process may use."""
    if device in ("cpu", "mps"):
        return []
    import torch

    count = torch.cuda.device_count()
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return (named or [str(number) for number in range(count)])[:count]


def train_folds(
    jobs: Sequence[FoldJob],
    environments: list[dict[str, str]],
    *,
    num_trained: int = 0,
    log: LogCallback,
    report_progress: ProgressCallback,
) -> None:
    """Trains them, as many at a time as there are places. One that fails stops none of the others, nor the `trained`."""
    waiting, free = list(jobs), list(environments)
    running: list[_Child] = []
    failed: list[tuple[_Child, str]] = []
    told: set[str] = set()
    with StopSignals() as stop:
        try:
            while running or (waiting and stop.received is None):
                while waiting and free and stop.received is None:
                    taken = [one for one in waiting if _is_taken(one, told, log)]
                    work = next((one for one in waiting if one not in taken), None)
                    # Who trains for a command that was killed needs as much room as our own do.
                    if work is None or len(running) + len(taken) >= len(environments):
                        break
                    waiting.remove(work)
                    step = work.step
                    running.append(_Child(work, free.pop(0)))
                    log(f"{work.name}: resumed at step {step}" if step is not None else f"{work.name}: training")
                time.sleep(POLL / 5)
                if stop.received is not None:
                    for child in running:
                        child.pass_on(stop.received)
                for child in [one for one in running if one.follow(log, report_progress)]:
                    running.remove(child)
                    free.append(child.place)
                    if child.code and stop.received is None:
                        failed.append((child, child.error()))
                        log(f"{child.work.name}: {failed[-1][1]}")
        finally:
            for child in running:
                child.end()
    if stop.received is not None:
        raise Interrupted(
            f"stopped by {stop.received.name}; each fold has saved where it was, and the same command goes on from there",
            stop.exit_code,
        )
    if failed:
        child, text = failed[0]
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        kept = "; the other folds are kept" if num_trained + len(jobs) > len(failed) else ""
        raise DependencyFailed(f"{child.work.run.path}: {text}{more}{kept}", child.code)


def _is_taken(work: FoldJob, told: set[str], say: LogCallback) -> bool:
    """Whether somebody else trains it: a fold lives on for a while when the command that started it was killed."""
    if not work.run.path.is_dir():
        return False
    try:
        with Lock(work.run):
            return False
    except DirectoryInUse as error:
        if work.name not in told:
            told.add(work.name)
            who = str(error).partition(" is in use by ")[2].partition(";")[0]
            say(f"{work.name}: waiting for {who}, which trains it")
        return True


@final
class _Child:
    """A `bottega train` under way."""

    def __init__(self, work: FoldJob, place: dict[str, str]) -> None:
        self.work, self.place = work, place
        self.code = 0
        self._log = work.run.log
        self._read = self._log.stat().st_size if self._log.is_file() else 0
        self._heard: float | None = None
        self._is_told = False
        self._said = work.recipe.with_suffix(".stderr")
        # In a group of its own, so that Ctrl-C in a terminal reaches us alone: told twice, it would stop without saving.
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                plugins.bottega_command(["train", str(work.recipe), "--quiet"]),
                env={**os.environ, **place},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
                process_group=0,
            )

    def follow(self, say: LogCallback, bar: ProgressCallback) -> bool:
        """Passes on what it has written to its log since; whether it has ended."""
        code = self._process.poll()
        for line in self._new_lines():
            measured, step = _MEASURED.search(line), _STEP.search(line)
            if step:
                bar(self.work.name, int(step[1]), int(step[2]))
            if measured:
                say(f"{self.work.name}: {measured[1]}")
        if code is None:
            return False
        self.code = code
        return True

    def _new_lines(self) -> list[str]:
        try:
            with self._log.open("rb") as file:
                file.seek(self._read)
                raw = file.read()
        except OSError:
            return []
        whole = raw[: raw.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.decode("utf-8", "replace").splitlines()

    def error(self) -> str:
        """The line that a failed command ends with."""
        lines = self._said.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        how = f"ended by {signal.Signals(-self.code).name}" if self.code < 0 else f"ended with {self.code}"
        return lines[-1].removeprefix("bottega: ") if lines and self.code > 0 else how

    def pass_on(self, received: signal.Signals) -> None:
        """Once. A scheduler may have told it as well, and what it hears twice stops it before it has saved."""
        now = time.monotonic()
        self._heard = now if self._heard is None else self._heard
        if not self._is_told and (received is signal.SIGINT or now - self._heard > GRACE):
            self._is_told = True
            self._process.send_signal(received)

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
