"""Recovery from a non-finite loss or gradient: save the batch for inspection, then halt, skip or roll back."""

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
from bottega.redaction import redact_values

MAX_SKIPPED_UPDATES = 100
MAX_ROLLBACKS = 3


class ReplayableLoader(Protocol):
    """A loader that can return the batch of any step again."""

    def indices(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the sample indices of the global batch of a step, and the epoch of each."""

    def batch(self, step: int) -> Batch:
        """Return the batch of a step."""


class NonfiniteRecovery:
    """Handles a step whose loss or gradient was not finite, by the policy halt, skip or rollback.

    The failure can be reproduced: the engine has skipped every update since the bad step, so the weights are those before
    it, and its batch is a function of the step.
    """

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
        self._num_skipped = self._num_rollbacks = 0

    def __call__(self, progress: Progress, bad_step: int) -> int:
        """Handle the first non-finite step, counted from 0, and return the step to continue from."""
        if self.policy == "skip":
            self._num_skipped += progress.step - bad_step
            self.engine.reset_bad_steps()
            self.warn(
                f"skipped {progress.step - bad_step} updates up to step {progress.step}: the loss or a gradient was not finite"
            )
            if self._num_skipped > MAX_SKIPPED_UPDATES:
                raise Diverged(
                    f"{self._num_skipped} updates were skipped, so training has diverged; lower {self._list_divergence_keys()}"
                )
            return progress.step
        report = self._save_report(bad_step)
        if self.policy == "halt" or self._num_rollbacks >= MAX_ROLLBACKS:
            raise Diverged(
                f"{report}; the update was not applied; lower {self._list_divergence_keys()}, or inspect the batch"
            )
        return self._roll_back(progress, bad_step, report)

    def _list_divergence_keys(self) -> str:
        """Return the recipe keys that can make a loss diverge: the learning rate, and those of techniques."""
        names = ["training.learning_rate"]
        task: Any = self.engine.task
        while task is not None:
            names += [name] if (name := getattr(task, "divergence_key", None)) else []
            task = getattr(task, "inner", None)
        return " or ".join(names)

    def _roll_back(self, progress: Progress, bad_step: int, report: str) -> int:
        self.saver.wait()
        self.engine.any_rank(False)  # a barrier: rank 0 has written before the others read
        newest = checkpoint.find_newest_valid(self.saver.folder, self.warn)
        if newest is None:
            raise Diverged(f"{report}; there is no checkpoint to roll back to")
        path, manifest = newest
        self._num_rollbacks += 1
        self.engine.load(path)
        skip_steps = sorted({*progress.skip_steps, bad_step})
        saved_progress = Progress.from_json(checkpoint.read_progress(path))
        for name, value in vars(saved_progress).items():
            setattr(progress, name, value if name != "total" else progress.total)
        progress.skip_steps = skip_steps
        self.engine.skip_steps = frozenset(skip_steps)
        self.warn(f"{report}; rolled back to step {manifest.step}, and that batch will be skipped")
        return manifest.step

    def _save_report(self, step: int) -> str:
        """Save the batch, the indices of its samples and the first non-finite module; return a one-line summary."""
        indices, epochs = self.loader.indices(step)
        batch = self.loader.batch(step)
        folder = self.folder / f"step-{step + 1:08d}"
        module: str | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            rank = f"-rank-{self.engine.rank}" if self.engine.world_size > 1 else ""
            checkpoint.write_safetensors(folder / f"batch{rank}.safetensors", flatten_batch(batch))
            module = self.engine.find_nonfinite_module(step, batch)
            report = {
                "step": step + 1,
                "samples": indices.tolist(),
                "epochs": epochs.tolist(),
                "first_bad_module": module,
            }
            (folder / f"report{rank}.json").write_text(json.dumps(redact_values(report), indent=1) + "\n")
        except (OSError, OutOfMemory) as error:
            self.warn(f"the report in {folder} is incomplete: {error}")
        samples = ", ".join(map(str, indices[:8])) + (", …" if len(indices) > 8 else "")
        origin = f", first in {module}" if module else ""
        return f"the loss or a gradient was not finite at step {step + 1} (samples {samples}){origin}; see {folder}"


def flatten_batch(batch: Batch, prefix: str = "") -> dict[str, np.ndarray]:
    """Return a nested batch as one dict with dotted names."""
    arrays: dict[str, np.ndarray] = {}
    for name, value in batch.items():
        arrays |= (
            flatten_batch(value, f"{prefix}{name}.")
            if isinstance(value, Mapping)
            else {prefix + name: np.asarray(value)}
        )
    return arrays
