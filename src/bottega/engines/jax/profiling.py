"""Profile of training steps with JAX's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from bottega.measurements import StepProfile, StepProfiler


class JaxProfiler(StepProfiler):
    """Names the steps in traces of JAX's own profiler; `profile.steps` is not available yet."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def record(
        self, first: int, last: int, *, write: Callable[[StepProfile], None], warn: Callable[[str], None]
    ) -> None:
        warn("profile.steps has no effect with engine=jax; use jax.profiler, in whose traces the steps are named")

    def finish(self) -> None:
        pass

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Context of one training step, whose number is counted from 0."""
        with jax.profiler.StepTraceAnnotation("train", step_num=step + 1):
            yield
