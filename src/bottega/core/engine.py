"""Where it happens: the owner of weights, optimizer state, devices and ranks. The loop owns everything else."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bottega.core.types import Array, Batch, Rows, Sums, Tensors


class Snapshot(ABC):
    """A copy of the state on its way to the host. Taken between two steps, written while the next ones run."""

    @abstractmethod
    def files(self) -> Mapping[str, Tensors]:
        """File name -> tensors. Waits for the copy, so only the writer calls it."""


class Evaluated(NamedTuple):
    """What one batch gave, reduced over ranks and still on the device."""

    sums: Sums
    rows: dict[str, Array] = {}  # noqa: RUF012  (a default of a NamedTuple, never changed)
    """Of all ranks' examples, in their order, without those that only fill up the batch."""


class Engine(ABC):
    rank: int = 0
    world: int = 1
    """Processes: who writes files and speaks is decided by these."""
    data_rank: int = 0
    data_size: int = 1
    """Shares of a global batch, and this process's: samples, positions of noise and counts follow these."""
    micro_batch_size: int | None = None
    """Examples in one forward; None while it has not been decided. What `auto` found travels in the progress."""
    skip_steps: frozenset[int] = frozenset()
    """Steps whose update is not applied: the rollback policy puts a poisoned batch here."""
    rate_scale: float = 1.0
    """The one factor of the learning rate that is not a function of the step; the plateau rule sets it."""

    @abstractmethod
    def train_step(self, step: int, batch: Batch) -> dict[str, Any]:
        """One optimizer step over this rank's share of the global batch. Does not wait for the device."""

    @abstractmethod
    def eval_step(self, batch: Batch) -> Evaluated: ...

    @abstractmethod
    def fetch(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Device scalars to floats: the only place that waits for the device."""

    def fetch_rows(self, parts: Sequence[Mapping[str, Any]]) -> Rows:
        """The rows of several batches to the host, one after the other."""
        return {name: np.concatenate([np.asarray(part[name]) for part in parts]) for name in parts[0]}

    @abstractmethod
    def snapshot(self) -> Snapshot: ...

    @abstractmethod
    def load(self, folder: Path) -> None:
        """The state back from a verified checkpoint folder; names, shapes and types must agree exactly."""

    def agree(self, flag: bool) -> bool:
        """True on all ranks if true on any, so that all stop at the same step."""
        return flag

    def same(self, text: str) -> bool:
        """Whether all ranks say the same."""
        return True

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around a whole evaluation: what is costly to set up is set up once."""
        yield

    def close(self) -> None:  # noqa: B027  (most engines hold nothing)
        """Let go of devices and process groups."""
