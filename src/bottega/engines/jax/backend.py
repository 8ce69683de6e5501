"""The JAX backend: what is known before an engine exists, and the engine itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, final

from bottega.config.optimizers import describe_fallback
from bottega.config.parameter_groups import resolve_parameter_settings
from bottega.config.training import Training
from bottega.core.engine import Engine
from bottega.core.errors import BottegaError, EnvironmentProblem, MissingDevice, OutOfMemory, UsageError
from bottega.core.task import Task
from bottega.core.types import Batch
from bottega.engines.backend import Backend, MemoryEstimate, ModelPart
from bottega.engines.host_memory import get_available_memory
from bottega.engines.parts import count_parts
from bottega.measurements import GIB, MemoryPrediction, PredictionUnavailable
from bottega.world import World

try:
    import jax

    from bottega.engines.jax import compute, devices, forms, optimizers, processes
    from bottega.models.jax_build import build_abstract_model
except ImportError as error:
    raise EnvironmentProblem(
        f"engine: jax needs jax 0.10, flax 0.12 and optax 0.2.6 or newer ({error}); pip install 'bottega[jax]', or train with engine=torch"
    ) from None


@final
class JaxBackend(Backend):
    """JAX, on CPU and GPU. Processes join when it is opened, because JAX allows that only before it is first used."""

    def __init__(self) -> None:
        processes.join_processes(World.from_environment())

    def build_engine(self, task: Task, training: Training, **options: Any) -> Engine:
        from bottega.engines.jax.engine import JaxEngine

        return JaxEngine(task, training, **{"rate": lambda step: 0.0, **options})

    def device_type(self, device: str) -> str:
        return devices.get_device_type(devices.choose_devices(device)[0])

    def check_precision(self, precision: str, device: str) -> None:
        devices.choose_precision(precision, devices.choose_devices(device)[0])

    def count_gpus(self) -> int:
        try:
            return len(devices.choose_devices("cuda"))
        except MissingDevice:
            return 0

    def limit_threads(self, count: int | None) -> None:
        """Do nothing: XLA has as many threads as this process may use CPUs."""

    def measure_matmul_rate(self, device: str, precision: str) -> float:
        chosen = devices.choose_devices(device)[0]
        return compute.measure_matmul_rate(chosen, devices.choose_precision(precision, chosen))

    def find_model_problems(self, task: Task, training: Training, *, seed: int) -> list[BottegaError]:
        problem = forms.describe_missing_form(task) or forms.describe_missing_setting(task, training)
        if problem is not None:
            return [UsageError(problem)]
        try:
            resolve_parameter_settings(training, list(_find_shapes(task)["model"]), is_trainable=task.is_trainable)
        except BottegaError as error:
            return [error]
        return []

    def describe_optimizer(self, task: Task, training: Training, *, seed: int) -> list[str]:
        shapes = _find_shapes(task)["model"]
        settings = resolve_parameter_settings(training, list(shapes), is_trainable=task.is_trainable)
        trainable = {name: len(shape) for name, shape in shapes.items() if settings[name].scale is not None}
        return describe_fallback(trainable, training.optimizer.name)

    def estimate_memory(self, task: Task, training: Training, *, seed: int, is_frozen: bool = False) -> MemoryEstimate:
        if forms.describe_missing_form(task) is not None:
            return MemoryEstimate(0, 0)  # refused with the other problems of the model
        shapes = _find_shapes(task)
        sizes = {name: _count_bytes(shape) for name, shape in shapes["model"].items()}
        weights = sum(sizes.values()) + sum(
            _count_bytes(shape) for model, values in shapes.items() if model != "model" for shape in values.values()
        )
        num_parameters = sum(sizes.values()) // 4
        if is_frozen:
            return MemoryEstimate(num_parameters, weights)
        settings = resolve_parameter_settings(training, list(sizes), is_trainable=task.is_trainable)
        assigned = optimizers.assign_optimizers(
            shapes["model"], settings, training.optimizer, weight_decay=training.weight_decay
        )
        abstract = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes["model"].items()}
        states = jax.eval_shape(
            lambda parameters: optimizers.initialise_state(parameters, assigned, training.optimizer), abstract
        )
        gradients = sum(sizes[name] for name in assigned)
        return MemoryEstimate(
            num_parameters,
            weights,
            gradients,
            optimizer=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(states)),
            average=gradients if training.ema is not None else 0,
            saved_weights=sum(size for name, size in sizes.items() if task.is_trainable(name)),
        )

    def check_memory(self, estimate: MemoryEstimate, device: str) -> None:
        free = self.find_available_memory(device)
        if free is None or estimate.total <= free:
            return
        raise OutOfMemory(
            f"out of memory before the first step: the model has {estimate.num_parameters:,} parameters and needs "
            f"{estimate.total / GIB:.1f} GiB for weights, gradients and optimizer, but {free / GIB:.1f} GiB are free; use a "
            "smaller model"
        )

    def list_parts(self, task: Task, training: Training, *, seed: int) -> list[ModelPart]:
        if forms.describe_missing_form(task) is not None:
            return []
        parts: list[ModelPart] = []
        for model, shapes in _find_shapes(task).items():
            counts = {name: _count_bytes(shape) // 4 for name, shape in shapes.items()}
            settings = resolve_parameter_settings(training, list(counts), is_trainable=task.is_trainable)
            is_model = model == "model"
            trainable = {n: size for n, size in counts.items() if is_model and settings[n].scale is not None}
            parts += count_parts(model, counts, trainable)
        return parts

    def predict_memory(self, task: Task, training: Training, batch: Batch, **options: Any) -> MemoryPrediction:
        raise PredictionUnavailable("the memory of engine=jax is known once a step is compiled")

    def find_available_memory(self, device: str) -> int | None:
        try:
            chosen = devices.choose_devices(device)[0]
        except BottegaError:
            return None
        statistics = chosen.memory_stats() if devices.get_device_type(chosen) == "cuda" else None
        if statistics:
            return int(statistics["bytes_limit"] - statistics["bytes_in_use"])
        return get_available_memory()

    def read_tensors(self, path: Path) -> Mapping[str, Any]:
        from bottega.engines.jax.tensors import read_tensors

        return read_tensors(path)

    def join_ranks(self, device: str) -> int:
        return jax.process_index()

    def any_rank(self, flag: bool) -> bool:
        return processes.any_process(flag)

    def watch_ranks(self, log: Path) -> AbstractContextManager[object]:
        return processes.exit_with_lost_process()

    def describe_lost_rank(self, error: BaseException) -> str | None:
        return processes.describe_lost_process(error)


def _find_shapes(task: Task) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shape of each parameter, by model and name."""

    def list_shapes() -> Iterator[tuple[str, dict[str, tuple[int, ...]]]]:
        for name, spec in task.specs().items():
            variables = build_abstract_model(spec).variables()
            yield name, {path: tuple(variable.shape) for path, variable in variables.items()}

    return dict(list_shapes())


def _count_bytes(shape: tuple[int, ...]) -> int:
    size = 4
    for side in shape:
        size *= side
    return size
