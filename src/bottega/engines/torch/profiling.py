"""Profile of training steps with torch.profiler: a trace with named regions, and the operations that take most time."""

from __future__ import annotations

import functools
import gzip
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bottega.core.errors import first_line
from bottega.core.types import Batch
from bottega.engines.torch.devices import describe_device
from bottega.engines.torch.operation_costs import rank_operations
from bottega.measurements import StepProfile, StepProfiler

if TYPE_CHECKING:
    from bottega.engines.torch.engine import TorchEngine

NUM_OPERATIONS = 10
"""Operations in the summary of a profile."""
BETWEEN_STEPS = "between steps"
"""The region from the end of a step to the start of the next: waiting for data, logging, evaluation, checkpoints."""

TrainStep = TypeVar("TrainStep", bound=Callable[..., dict[str, Any]])


def profile_step(train_step: TrainStep) -> TrainStep:
    """Decorate an engine's `train_step`, so that its profiler sees where each step begins and ends."""

    @functools.wraps(train_step)
    def train_profiled_step(engine: TorchEngine, step: int, batch: Batch, **options: bool) -> dict[str, Any]:
        with engine.profiler.step(step):
            return train_step(engine, step, batch, **options)

    return cast(TrainStep, train_profiled_step)


class TorchProfiler(StepProfiler):
    """Records from the start of the first step to the end of the last; costs nothing in all other steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._window: tuple[int, int] | None = None
        """First and last step to record, counted from 1; None if there is nothing left to record."""
        self._write: Callable[[StepProfile], None] = lambda steps: None
        self._warn: Callable[[str], None] = lambda text: None
        self._profile: profile | None = None
        self._region: record_function | None = None
        """The step, or the time between two steps, that is being recorded."""
        self._start_seconds = self._end_seconds = 0.0
        self._first_step = self._last_step = 0

    def record(
        self, first: int, last: int, *, write: Callable[[StepProfile], None], warn: Callable[[str], None]
    ) -> None:
        self._window, self._write, self._warn = (first, last), write, warn

    def finish(self) -> None:
        recording, self._window = self._profile, None
        if recording is not None:
            self._attempt(lambda: self._stop(recording))

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Context of one training step, whose number is counted from 0."""
        if self._window is None or not self._window[0] <= step + 1 <= self._window[1]:
            yield
            return
        self._attempt(lambda: self._begin_step(step + 1))
        try:
            yield
        finally:
            self._attempt(lambda: self._end_step(step + 1))
        if self._window is not None and step + 1 == self._window[1]:
            self.finish()

    def region(self, name: str) -> AbstractContextManager[Any]:
        """Context that is shown as a region of the trace, if a step is being recorded."""
        return nullcontext() if self._profile is None else record_function(name)

    def _attempt(self, action: Callable[[], None]) -> None:
        """Run a part of the recording; if it fails, warn and record nothing more."""
        try:
            action()
        except Exception as error:
            if self._profile is not None:
                _stop_silently(self._profile)
            self._window = self._profile = self._region = None
            self._warn(
                f"profile.steps: the profiler failed ({first_line(error)}); training continues without a profile"
            )

    def _begin_step(self, number: int) -> None:
        if self._profile is None:
            os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # the tracer prints its own progress to standard error
            activities = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            # Assigned after it has started, because regions may only be recorded in a running profile.
            # There is one cycle, so `acc_events` changes nothing but a warning that earlier cycles are dropped.
            recording = profile(activities=activities, record_shapes=True, with_flops=True, acc_events=True)
            try:
                recording.start()
            except Exception:
                _stop_silently(recording)
                raise
            self._profile, self._first_step = recording, number
            self._start_seconds = time.perf_counter()
        self._enter_region(f"step {number}")

    def _end_step(self, number: int) -> None:
        if self._profile is None:
            return
        self._last_step, self._end_seconds = number, time.perf_counter()
        self._enter_region(BETWEEN_STEPS)

    def _enter_region(self, name: str | None) -> None:
        """End the current region, and begin another if it has a name."""
        if self._region is not None:
            self._region.__exit__(None, None, None)
        self._region = record_function(name) if name is not None else None
        if self._region is not None:
            self._region.__enter__()

    def _stop(self, recording: profile) -> None:
        self._enter_region(None)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # kernels of the last step may still run
            self._end_seconds = time.perf_counter()
        recording.stop()
        self._profile = None
        operations, total_ms = rank_operations(recording.events(), count=NUM_OPERATIONS)
        self._write(
            StepProfile(
                steps=(self._first_step, self._last_step),
                device=describe_device(self._device),
                wall_ms=1000 * (self._end_seconds - self._start_seconds),
                total_ms=total_ms,
                operations=operations,
                write_trace=lambda path: _write_trace(recording, path),
            )
        )


def _stop_silently(recording: profile) -> None:
    """Stop a profiler that has failed; a running one would slow down all later steps and refuse the next."""
    with suppress(Exception):
        recording.stop()


def _write_trace(recording: profile, path: Path) -> None:
    """Write the trace, compressed. Not by torch, which would first write it to the system's temporary folder."""
    plain = path.with_suffix("")
    recording.export_chrome_trace(str(plain))
    with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=6) as target:
        shutil.copyfileobj(source, target)
    plain.unlink()
