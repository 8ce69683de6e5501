"""Where it happens: the owner of weights, optimizer state, devices and ranks. The loop owns everything else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bottega.core.task import Task
from bottega.core.types import Array, Batch, Models, Rows, Sums, Tensors

BeforeStepHook = Callable[[int, Batch], None]
"""`hook(step, batch)`, called with the host batch before the gradients of a step are computed."""


class Snapshot(ABC):
    """A copy of the state on its way to the host. Taken between two steps, written while the next ones run."""

    @abstractmethod
    def files(self) -> Mapping[str, Tensors]:
        """File name -> tensors. Waits for the copy, so only the writer calls it."""


class EvaluationOutput(NamedTuple):
    """What one batch gave, reduced over ranks and still on the device."""

    sums: Sums
    rows: dict[str, Array] = {}  # noqa: RUF012  (a default of a NamedTuple, never changed)
    """Of all ranks' examples, in their order, without those that only fill up the batch."""


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter of the trained model."""

    shape: tuple[int, ...]
    is_trainable: bool
    """Whether it learns at some step of the run."""

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


class ModelMemory(NamedTuple):
    """What one model of a task takes."""

    name: str
    parameters: int
    learning: int
    bytes: int
    kind: str
    """The type most of it has."""


class StepMemory(NamedTuple):
    """What a step with so many examples in a forward takes."""

    micro_batch: int
    peak: int
    """Bytes: of the whole step on a GPU; elsewhere of what is kept for backward."""
    reserved: int
    """Bytes the allocator held for it, pieces that nothing fits in among them; 0 elsewhere."""
    samples_per_second: float


class MemoryReport(NamedTuple):
    """What training takes: by what it is for, and by examples in a forward."""

    device: str
    """The device as its maker calls it."""
    models: list[ModelMemory]
    """The one that learns first."""
    gradients: int
    optimizer: int
    steps: list[StepMemory]


class Engine(ABC):
    """Everything that is asked of an engine, by whoever asks: loop, session, techniques, verbs. Nobody knows more."""

    task: Task
    model: Any
    """The trained model as its framework has it, for device code and for those who open a run as a library."""
    device: Any
    """Where the weights are, as the framework says it; `str(device)` is for people."""
    device_type: str
    """cpu, cuda or mps."""
    precision: str
    """The type that a forward computes in, such as float32 or bfloat16."""
    rank: int = 0
    world: int = 1
    """Processes: who writes files and speaks is decided by these."""
    data_rank: int = 0
    data_size: int = 1
    """Shares of a global batch, and this process's: samples, positions of noise and counts follow these."""
    rate: Callable[[int], float]
    """The learning rate as a function of the step, in absolute numbers."""
    micro_batch_size: int | None = None
    """Examples in one forward; None while it has not been decided. What `auto` found travels in the progress."""
    skip_steps: frozenset[int] = frozenset()
    """Steps whose update is not applied: the rollback policy puts a poisoned batch here."""
    rate_scale: float = 1.0
    """The one factor of the learning rate that is not a function of the step; the plateau rule sets it."""

    # Steps

    @abstractmethod
    def train_step(self, step: int, batch: Batch) -> dict[str, Any]:
        """One optimizer step over this rank's share of the global batch. Does not wait for the device."""

    @abstractmethod
    def eval_step(self, batch: Batch, *, with_rows: bool = True, task: Task | None = None) -> EvaluationOutput:
        """Rows are gathered from all ranks, which is dear where nobody looks at them. `task` measures in place of the
        engine's own, with the same models."""

    @abstractmethod
    def fetch(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Device scalars to floats: the only place that waits for the device."""

    def fetch_rows(self, parts: Sequence[Mapping[str, Any]]) -> Rows:
        """The rows of several batches to the host, one after the other."""
        return {name: np.concatenate([np.asarray(part[name]) for part in parts]) for name in parts[0]}

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around a whole evaluation: what is costly to set up is set up once."""
        yield

    @abstractmethod
    def set_schedule(self, rate: Callable[[int], float], *, total: int, steps_per_epoch: int) -> None:
        """What depends on the length of the run: the rate at each step, and when parameters begin to learn."""

    @abstractmethod
    def add_hook(self, before_step: BeforeStepHook) -> None:
        """Call `before_step` before each step, after those that were added before it."""

    @abstractmethod
    def remove_hooks(self) -> None:
        """Forget all hooks, which may hold the engine itself."""

    @abstractmethod
    def reset_bad_steps(self) -> None:
        """The loop has dealt with the steps that were not finite."""

    # State

    @abstractmethod
    def snapshot(self) -> Snapshot: ...

    @abstractmethod
    def load(self, folder: Path) -> None:
        """The state back from a verified checkpoint folder; names, shapes and types must agree exactly."""

    @abstractmethod
    def load_weights(self, files: Mapping[str, Mapping[str, Array]], folder: Path) -> None:
        """The weights that were read from a checkpoint, file by file: plain ones first, averaged ones over them."""

    @abstractmethod
    def checkpoint_bytes(self) -> int:
        """The size of a checkpoint; its tensors are made for it, and none is copied to be counted."""

    @abstractmethod
    def task_state(self) -> Mapping[str, Array]:
        """What the task keeps beside the weights, by name, on the device."""

    @abstractmethod
    def write_task_state(self, values: Mapping[str, Array]) -> None:
        """Replace some of it."""

    @abstractmethod
    def reset_weight_average(self) -> None:
        """Averages of the weights begin at the present ones: somebody has written these after the engine was built."""

    # The models

    @abstractmethod
    def sampling(self) -> AbstractContextManager[Models]:
        """All models in evaluation mode with the weights that count, for samples and export."""

    @abstractmethod
    def parameters(self) -> dict[str, ParameterInfo]:
        """Every parameter of the trained model, in its order."""

    @abstractmethod
    def num_active_parameters(self) -> int:
        """Parameters that one token goes through: fewer than there are where experts share the work."""

    # What is measured besides

    @abstractmethod
    def inspect(self, batch: Batch) -> dict[str, Any]:
        """`loss` of a batch, and `modules`: of each its kind, size, devices, types and the norm of its gradient."""

    @abstractmethod
    def find_nonfinite_module(self, step: int, batch: Batch) -> str | None:
        """Go through a step again, without an update, and name what first gave a value that is not finite."""

    @abstractmethod
    def fisher_diagonal(
        self, examples: Iterable[tuple[int, Batch]], *, count: int, names: Sequence[str]
    ) -> dict[str, Array]:
        """For each of the parameters `names` the mean over `count` examples of the squared gradient of an example's loss:
        the diagonal of the empirical Fisher information. `examples` are this rank's, each with its number among all."""

    @abstractmethod
    def measure_memory(
        self, make_batch: Callable[[int], Batch], *, max_micro_batch: int, report_progress: Callable[[int, int], None]
    ) -> MemoryReport:
        """Train with 1, 2, 4, ... up to `most` examples in a forward until one does not fit. The engine has learnt from
        them after that."""

    # Ranks

    def any_rank(self, flag: bool) -> bool:
        """True on all ranks if true on any, so that all stop at the same step."""
        return flag

    def all_ranks_equal(self, text: str) -> bool:
        """Whether all ranks say the same."""
        return True

    def close(self) -> None:  # noqa: B027  (most engines hold nothing)
        """Let go of devices and process groups."""
