"""Interface of an engine: the owner of weights, optimizer state, devices and ranks. The trainer owns everything else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bottega.core.callback import Histogram
from bottega.core.task import Task
from bottega.core.types import Array, Batch, Models, Rows, Sums, Tensors
from bottega.measurements import MemoryReport, MemoryUse, StepProfiler

BeforeStepHook = Callable[[int, Batch], None]
"""`hook(step, batch)`: called with the host batch before the gradients of a step are computed."""


class Snapshot(ABC):
    """A copy of the training state, taken between two steps and written to disk while the next ones run."""

    @abstractmethod
    def files(self) -> Mapping[str, Tensors]:
        """Return the tensors by file name. Waits for the copy to reach the host, so only the writer thread calls it."""


class Inspection(NamedTuple):
    """What was inspected in a step: statistics by module and name, and histograms of the parameters; empty if not requested."""

    modules: Mapping[str, Mapping[str, float]] = {}
    histograms: Mapping[str, Histogram] = {}


class EvaluationOutput(NamedTuple):
    """Sums and rows of one evaluation batch, reduced over ranks and still on the device."""

    sums: Sums
    rows: dict[str, Array] = {}  # noqa: RUF012  (a default of a NamedTuple, never changed)
    """Values per example of all ranks, in the order of the examples, without padding examples."""


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter of the trained model."""

    shape: tuple[int, ...]
    is_trainable: bool
    """Whether it is trained at some step of the run."""

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


class Engine(ABC):
    """The complete interface that trainer, session, techniques and commands use; none of them knows a concrete engine."""

    task: Task
    model: Any
    """The trained model, an object of the framework."""
    device: Any
    """The device of the weights, an object of the framework."""
    device_type: str
    """cpu, cuda or mps."""
    precision: str
    """The dtype of the forward pass, such as float32 or bfloat16."""
    rank: int = 0
    world_size: int = 1
    """Rank and number of processes; rank 0 writes files and prints."""
    data_rank: int = 0
    data_size: int = 1
    """Data-parallel rank and size, which decide the samples, noise positions and counts of this process."""
    rate: Callable[[int], float]
    """The learning rate at each step (not a factor), before `learning_rate_scale`."""
    micro_batch_size: int | None = None
    """Examples in one forward pass; None while undecided. The size that `auto` finds is saved in the checkpoint's `Progress`."""
    is_compiled: bool = False
    compile_error: str | None = None
    """Whether the next step runs a compiled model, and the error of a compiler that failed, after which none does."""
    skip_steps: frozenset[int] = frozenset()
    """Steps whose update is not applied, because the rollback policy found their batch to be bad."""
    learning_rate_scale: float = 1.0
    """Factor of `rate`; the plateau schedule lowers it."""
    profiler: StepProfiler
    """Records the operations of some training steps."""

    # Steps

    @abstractmethod
    def train_step(
        self, step: int, batch: Batch, *, module_statistics: bool = False, histograms: bool = False
    ) -> dict[str, Any]:
        """Run one optimizer step over this rank's part of the global batch; return its metrics, still on the device.

        `module_statistics` and `histograms` select what `fetch_inspection` returns.
        """

    @abstractmethod
    def eval_step(self, batch: Batch, *, with_rows: bool = True, task: Task | None = None) -> EvaluationOutput:
        """Evaluate one batch, with the loss of `task` if given, else of the engine's own task.

        Gathering rows from all ranks is expensive; `with_rows=False` skips it.
        """

    @abstractmethod
    def fetch(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Convert device scalars to floats. Only this and `fetch_rows` wait for the device."""

    def fetch_inspection(self) -> Inspection:
        """Return what was inspected in the last `train_step`; call `fetch` first."""
        return Inspection()

    def fetch_rows(self, batch_rows: Sequence[Mapping[str, Any]]) -> Rows:
        """Concatenate the rows of several batches on the host."""
        return {name: np.concatenate([np.asarray(rows[name]) for rows in batch_rows]) for name in batch_rows[0]}

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context around a whole evaluation, for setup that is too expensive to repeat for each batch."""
        yield

    @abstractmethod
    def set_schedule(self, rate: Callable[[int], float], *, total: int, steps_per_epoch: int) -> None:
        """Set the learning rate by step and the steps at which parameters are unfrozen, once the run's length is known."""

    @abstractmethod
    def add_hook(self, before_step: BeforeStepHook) -> None:
        """Call `before_step` before each step, after the hooks that were added earlier."""

    @abstractmethod
    def remove_hooks(self) -> None:
        """Remove all hooks; they may hold references to the engine."""

    @abstractmethod
    def reset_bad_steps(self) -> None:
        """Clear the record of non-finite steps after the trainer has handled them, so that updates are applied again."""

    # State

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Return a copy of the training state, so that a checkpoint can be written while training continues."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Load the training state from a verified checkpoint; names, shapes and dtypes must match exactly."""

    @abstractmethod
    def load_weights(self, files: Mapping[str, Mapping[str, Array]], folder: Path) -> None:
        """Load the tensors of `files`, by file name, as read from the checkpoint `folder`; averaged weights replace the trained ones."""

    @abstractmethod
    def checkpoint_bytes(self) -> int:
        """Return the size of a checkpoint in bytes. Allocates the optimizer state, copies nothing."""

    @abstractmethod
    def task_state(self) -> Mapping[str, Array]:
        """Return the tensors that the task keeps beside the weights, by name, on the device."""

    @abstractmethod
    def write_task_state(self, values: Mapping[str, Array]) -> None:
        """Overwrite some tensors of the task state."""

    @abstractmethod
    def reset_weight_average(self) -> None:
        """Restart the weight average at the current weights, after weights were loaded into a built engine."""

    # The models

    @abstractmethod
    def sampling(self) -> AbstractContextManager[Models]:
        """Context that yields all models in evaluation mode, with averaged weights if there are any: for samples and export."""

    @abstractmethod
    def parameters(self) -> dict[str, ParameterInfo]:
        """Return every parameter of the trained model by name, in the model's order."""

    @abstractmethod
    def num_active_parameters(self) -> int:
        """Return the number of parameters active for one token, which is less than all in a mixture of experts."""

    # Measurements

    @abstractmethod
    def inspect(self, batch: Batch) -> dict[str, Any]:
        """Return `loss` of a batch and `modules`: kind, size, devices, dtypes and gradient norm of each module."""

    def measure_compute(self, batch: Batch) -> dict[str, float]:
        """Return `flops_per_sample` of training on a batch and the `matmul_rate` of the device, if they can be measured."""
        return {}

    @abstractmethod
    def find_nonfinite_module(self, step: int, batch: Batch) -> str | None:
        """Repeat a step without its update and return the first module or gradient that is not finite."""

    @abstractmethod
    def fisher_diagonal(
        self, examples: Iterable[tuple[int, Batch]], *, count: int, names: Sequence[str]
    ) -> dict[str, Array]:
        """Return the diagonal of the empirical Fisher information of the parameters `names`.

        It is the mean over `count` examples of the squared gradient of one example's loss. `examples` are the
        examples of this rank, each with its index among the examples of all ranks.
        """

    @abstractmethod
    def measure_memory(
        self, make_batch: Callable[[int], Batch], *, max_micro_batch: int, report_progress: Callable[[int, int], None]
    ) -> MemoryReport:
        """Train with micro-batches of 1, 2, 4, ... up to `max_micro_batch` until one does not fit. Changes the weights."""

    @abstractmethod
    def memory_use(self, *, at_peak: bool = True) -> MemoryUse:
        """Return the memory of this process by category: at the peak of training, or at this moment."""

    # Ranks

    def any_rank(self, flag: bool) -> bool:
        """Return True on all ranks if `flag` is true on any. A collective: it also serves as a barrier."""
        return flag

    def all_ranks_equal(self, text: str) -> bool:
        """Return whether `text` is the same on all ranks."""
        return True

    def close(self) -> None:  # noqa: B027  (most engines hold nothing)
        """Release devices and process groups."""
