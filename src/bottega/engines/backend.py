"""What a framework offers before there is an engine: devices, memory by shape, ranks; and the engine itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from bottega.config.training import Training
from bottega.core.engine import Engine
from bottega.core.errors import BottegaError
from bottega.core.task import Task

BACKENDS = {"torch": "bottega.engines.torch.backend:TorchBackend"}


class MemoryEstimate(NamedTuple):
    """Bytes that are there at every step, whatever the batch."""

    parameters: int
    """How many there are; not bytes."""
    weights: int
    gradients: int = 0
    optimizer: int = 0
    average: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.average


class Backend(ABC):
    @abstractmethod
    def build_engine(
        self,
        task: Task,
        training: Training,
        *,
        rate: Callable[[int], float] = lambda step: 0.0,
        seed: int = 0,
        device: str = "auto",
        deterministic: bool = False,
        micro_batch_size: int | None = None,
        pin_memory: bool = True,
    ) -> Engine:
        """The engine with the models of the task built."""

    # This machine

    @abstractmethod
    def device_type(self, device: str) -> str:
        """Return cpu, cuda or mps; refuse a device that is not here."""

    @abstractmethod
    def check_precision(self, precision: str, device: str) -> None:
        """Refuse a precision that the device does not compute in."""

    @abstractmethod
    def count_gpus(self) -> int:
        """Return the number of GPUs that this process sees."""

    @abstractmethod
    def limit_threads(self, count: int | None) -> None:
        """Compute on so many threads of the CPU; None leaves it to the framework."""

    # A model by its shape: nothing is allocated or computed

    @abstractmethod
    def find_model_problems(self, task: Task, training: Training, *, seed: int) -> list[BottegaError]:
        """Return what the model cannot do that the recipe asks for."""

    @abstractmethod
    def describe_optimizer(self, task: Task, training: Training, *, seed: int) -> list[str]:
        """Return a line for each choice that the optimizer makes by the shape of parameters."""

    @abstractmethod
    def estimate_memory(self, task: Task, training: Training, *, seed: int, is_frozen: bool = False) -> MemoryEstimate:
        """Return what training takes at least; of a base that `is_frozen`, and of models known by their files, the weights."""

    @abstractmethod
    def check_memory(self, footprint: MemoryEstimate, device: str) -> None:
        """Refuse a model that has no room where it would be trained."""

    # Ranks

    @abstractmethod
    def join_ranks(self, device: str) -> int:
        """Join the other processes of this training, if there are any, and return the rank among them."""

    @abstractmethod
    def any_rank(self, flag: bool) -> bool:
        """True on all ranks if true on any."""

    @abstractmethod
    def watch_ranks(self, log: Path) -> AbstractContextManager[object]:
        """While inside, see whether the other ranks live, and end this process where one is lost."""

    @abstractmethod
    def describe_lost_rank(self, error: BaseException) -> str | None:
        """Return which rank was lost, where that is why a collective failed; None where it is not."""


def open_backend(name: str) -> Backend:
    """The framework of a recipe (`engine:`), imported only now.

    One that is not built yet is refused together with all that is wrong with a recipe; to find that, torch looks at the machine.
    """
    module, _, kind = BACKENDS.get(name, BACKENDS["torch"]).partition(":")
    backend: Backend = getattr(import_module(module), kind)()
    return backend
