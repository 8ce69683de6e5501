"""Interface of a framework: devices, memory estimates and ranks before an engine exists, and `build_engine`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from bottega.config.training import Training
from bottega.core.engine import Engine
from bottega.core.errors import BottegaError
from bottega.core.task import Task
from bottega.core.types import Batch
from bottega.measurements import MemoryPrediction

BACKENDS = {"torch": "bottega.engines.torch.backend:TorchBackend", "jax": "bottega.engines.jax.backend:JaxBackend"}


class MemoryEstimate(NamedTuple):
    """Bytes that training needs whatever the batch size, by what they hold, and the number of parameters."""

    num_parameters: int
    weights: int
    gradients: int = 0
    optimizer: int = 0
    average: int = 0
    saved_weights: int = 0
    """Bytes of the weights that a checkpoint has: all that the task trains, whether or not the recipe freezes them."""

    @property
    def total(self) -> int:
        """Bytes of weights, gradients, optimizer state and weight average together."""
        return self.weights + self.gradients + self.optimizer + self.average

    @property
    def checkpoint(self) -> int:
        """Bytes of one checkpoint."""
        return self.saved_weights + self.optimizer + self.average


def resolve_precision(training: Training, device_type: str) -> str:
    """Return fp32, bf16 or fp16: `auto` is bf16 on a GPU."""
    if training.mixed_precision != "auto":
        return training.mixed_precision
    return "bf16" if device_type == "cuda" else "fp32"


class ModelPart(NamedTuple):
    """Parameters of a model, or of one of its parts. The fields are keys of `parts` in `bottega plan --json`."""

    model: str
    """Name of the model; the trained one is "model"."""
    part: str | None
    """Path of the module, such as "layers"; None for the whole model."""
    parameters: int
    trainable: int


class Backend(ABC):
    """A framework such as torch."""

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
        mesh: Mapping[str, int] | None = None,
    ) -> Engine:
        """Build the engine with the models of the task; `mesh` is the number of devices along each axis."""

    @abstractmethod
    def read_tensors(self, path: Path) -> Mapping[str, Any]:
        """Return all tensors of a safetensors file, by name, for `Engine.load_weights`; raise CheckpointError if it is damaged."""

    # This machine

    @abstractmethod
    def device_type(self, device: str) -> str:
        """Return cpu, cuda or mps; raise if the machine does not have the device."""

    @abstractmethod
    def check_precision(self, precision: str, device: str) -> None:
        """Raise if the device does not support the precision."""

    @abstractmethod
    def count_gpus(self) -> int:
        """Return the number of GPUs visible to this process."""

    @abstractmethod
    def limit_threads(self, count: int | None) -> None:
        """Set the number of CPU threads; None keeps the framework's default."""

    @abstractmethod
    def measure_matmul_rate(self, device: str, precision: str) -> float:
        """Return the floating-point operations per second of large matrix products in fp32, bf16 or fp16."""

    # Estimates from the shape of a model, for which nothing is allocated or computed

    @abstractmethod
    def find_model_problems(self, task: Task, training: Training, *, seed: int) -> list[BottegaError]:
        """Return the settings of the recipe that the model does not support."""

    @abstractmethod
    def describe_optimizer(self, task: Task, training: Training, *, seed: int) -> list[str]:
        """Return notes for the user on choices that depend on the parameters' shapes, such as which optimizer trains them."""

    @abstractmethod
    def estimate_memory(self, task: Task, training: Training, *, seed: int, is_frozen: bool = False) -> MemoryEstimate:
        """Return the least memory that training needs; only the weights if `is_frozen`, or if only the model's files are known."""

    @abstractmethod
    def check_memory(self, estimate: MemoryEstimate, device: str) -> None:
        """Raise OutOfMemory if the model does not fit on the device."""

    @abstractmethod
    def list_parts(self, task: Task, training: Training, *, seed: int) -> list[ModelPart]:
        """Return each model of a task, and its parts below it; nothing if only the model's files are known."""

    @abstractmethod
    def predict_memory(
        self,
        task: Task,
        training: Training,
        batch: Batch,
        *,
        seed: int,
        device_type: str,
        micro_batch_size: int | None = None,
    ) -> MemoryPrediction:
        """Return the memory of training at its peak, activations included, on a device that need not be here.

        Raises PredictionUnavailable if it cannot be predicted.
        """

    @abstractmethod
    def find_available_memory(self, device: str) -> int | None:
        """Return the bytes that are free on a device; None if this machine does not have it."""

    # Ranks

    @abstractmethod
    def join_ranks(self, device: str) -> int:
        """Join the process group, if there are several processes, and return the rank."""

    @abstractmethod
    def any_rank(self, flag: bool) -> bool:
        """Return True on all ranks if `flag` is true on any."""

    @abstractmethod
    def watch_ranks(self, log: Path) -> AbstractContextManager[object]:
        """Context that monitors the other ranks and ends this process if one is lost."""

    @abstractmethod
    def describe_lost_rank(self, error: BaseException) -> str | None:
        """Return which rank was lost if that is why a collective failed, else None."""


def open_backend(name: str) -> Backend:
    """Import and return the framework of a recipe (`engine:`).

    An unknown name gives torch, so that the name can be refused together with the other problems of the recipe.
    """
    module, _, class_name = BACKENDS.get(name, BACKENDS["torch"]).partition(":")
    backend: Backend = getattr(import_module(module), class_name)()
    return backend
