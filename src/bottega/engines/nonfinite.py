"""What happens after a loss or gradient that is not a number: keep the evidence, then halt, skip or roll back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bottega.core import checkpoint
from bottega.core.callback import Progress
from bottega.core.engine import Engine
from bottega.core.errors import Diverged, OutOfMemory
from bottega.core.saver import Saver
from bottega.core.types import Batch

MAX_SKIPS = 100
MAX_ROLLBACKS = 3


class ReplayableLoader(Protocol):
    """The loader, as far as evidence needs it."""

    def indices(self, step: int) -> tuple[np.ndarray, np.ndarray]: ...
    def batch(self, step: int) -> Batch: ...


class NonfiniteRecovery:
    """The loop's answer to a bad step. The engine has held every update back since, so the weights are still those the
    bad step met, and its batch is a function of its number: the accident can be watched again."""

    def __init__(
        self,
        *,
        engine: Engine,
        loader: ReplayableLoader,
        saver: Saver,
        policy: str,
        folder: Path,
        warn: Callable[[str], None],
    ) -> None:
        self.engine, self.loader, self.saver = engine, loader, saver
        self.policy, self.folder, self.warn = policy, folder, warn
        self._skipped = self._rollbacks = 0

    def __call__(self, progress: Progress, first: int) -> int:
        """`first` is the number of the bad step, counted from 0. Returns the step to go on from."""
        if self.policy == "skip":
            self._skipped += progress.step - first
            self.engine.reset_bad_steps()
            self.warn(
                f"{progress.step - first} updates skipped by step {progress.step}: the loss or a gradient was not finite"
            )
            if self._skipped > MAX_SKIPS:
                raise Diverged(
                    f"{self._skipped} updates were skipped; the training has diverged, lower {self._rates()}"
                )
            return progress.step
        story = self._record(first)
        if self.policy == "halt" or self._rollbacks >= MAX_ROLLBACKS:
            raise Diverged(f"{story}; the update was not applied, lower {self._rates()}, or look at the batch")
        return self._roll_back(progress, first, story)

    def _rates(self) -> str:
        """What a loss may have grown too large by: the learning rate, and what a technique has of its own."""
        names = ["training.learning_rate"]
        task: Any = self.engine.task
        while task is not None:
            names += [name] if (name := getattr(task, "overflows_by", None)) else []
            task = getattr(task, "inner", None)
        return " or ".join(names)

    def _roll_back(self, progress: Progress, first: int, story: str) -> int:
        self.saver.wait()
        self.engine.any_rank(False)  # the other ranks look only when rank 0 has written
        good = checkpoint.find_newest_valid(self.saver.folder, self.warn)
        if good is None:
            raise Diverged(f"{story}; there is no checkpoint to roll back to")
        path, manifest = good
        self._rollbacks += 1
        self.engine.load(path)
        skips = sorted({*progress.skip_steps, first})
        saved = Progress.from_json(checkpoint.read_progress(path))
        for name, value in vars(saved).items():
            setattr(progress, name, value if name != "total" else progress.total)
        progress.skip_steps = skips
        self.engine.skip_steps = frozenset(skips)
        self.warn(f"{story}; rolled back to step {manifest.step}, that batch will be passed over")
        return manifest.step

    def _record(self, step: int) -> str:
        """Keep the batch, its sample numbers and the first module that gave a bad value."""
        index, epoch = self.loader.indices(step)
        batch = self.loader.batch(step)
        where = self.folder / f"step-{step + 1:08d}"
        module: str | None = None
        try:
            where.mkdir(parents=True, exist_ok=True)
            rank = f"-rank-{self.engine.rank}" if self.engine.world > 1 else ""
            checkpoint.write_safetensors(where / f"batch{rank}.safetensors", flatten_batch(batch))
            module = self.engine.find_nonfinite_module(step, batch)
            report = {"step": step + 1, "samples": index.tolist(), "epochs": epoch.tolist(), "first_bad_module": module}
            (where / f"report{rank}.json").write_text(json.dumps(report, indent=1) + "\n")
        except (OSError, OutOfMemory) as error:
            self.warn(f"the evidence in {where} is not complete: {error}")
        shown = ", ".join(map(str, index[:8])) + (", …" if len(index) > 8 else "")
        culprit = f"; first seen in {module}" if module else ""
        return f"the loss or a gradient was not finite at step {step + 1} (samples {shown}){culprit}; kept in {where}"


def flatten_batch(batch: Batch, prefix: str = "") -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for name, value in batch.items():
        found |= (
            flatten_batch(value, f"{prefix}{name}.")
            if isinstance(value, Mapping)
            else {prefix + name: np.asarray(value)}
        )
    return found
