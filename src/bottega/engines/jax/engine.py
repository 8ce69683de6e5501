"""The JAX engine: a jitted training step whose state lives on the devices, under the names of the torch engine's checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bottega.config.parameter_groups import resolve_parameter_settings
from bottega.config.training import Training
from bottega.core.engine import BeforeStepHook, Engine, EvaluationOutput, Inspection, ParameterInfo
from bottega.core.schedule import ema_decay_at
from bottega.core.task import Task
from bottega.core.types import Batch, Models, Rows
from bottega.engines.checkpoint_layout import check_same_layout
from bottega.engines.host_memory import get_resident_memory
from bottega.engines.jax import evaluation, fisher, inspection, memory, micro_batches
from bottega.engines.jax.compilation_cache import use_compilation_cache
from bottega.engines.jax.compute import measure_compute
from bottega.engines.jax.devices import (
    NamedDevice,
    choose_devices,
    choose_precision,
    configure_computation,
    get_device_type,
    make_deterministic,
)
from bottega.engines.jax.forms import require_jax_form
from bottega.engines.jax.histograms import fetch_histograms
from bottega.engines.jax.inputs import build_inputs
from bottega.engines.jax.mesh import DeviceMesh, resolve_axes
from bottega.engines.jax.module_statistics import ModuleStatistics
from bottega.engines.jax.optimizers import assign_optimizers, initialise_state
from bottega.engines.jax.processes import all_processes_equal, any_process, join_processes
from bottega.engines.jax.profiling import JaxProfiler
from bottega.engines.jax.step import StepBuilder, StepOutputs, TrainState
from bottega.engines.jax.sums import Mean, fetch_metrics, sort_rows
from bottega.engines.jax.tensors import JaxSnapshot, check_finite, read_tensors, take_snapshot
from bottega.measurements import MemoryReport, MemoryUse
from bottega.models.jax_build import build_abstract_model, draw_weights
from bottega.models.jax_layers import Module, bind, forward_context
from bottega.world import World

Array = Any


class JaxEngine(Engine):
    """Engine on JAX. `rate` is the learning rate by step, not a factor of a peak."""

    def __init__(
        self,
        task: Task,
        training: Training,
        *,
        rate: Callable[[int], float],
        seed: int = 0,
        device: str = "auto",
        deterministic: bool = False,
        micro_batch_size: int | None = None,
        pin_memory: bool = True,
        mesh: Mapping[str, int] | None = None,
    ) -> None:
        require_jax_form(task, training)
        world = World.from_environment()
        join_processes(world)
        use_compilation_cache()
        if deterministic:
            make_deterministic()
        self.task, self.training, self.rate, self.seed = task, training, rate, seed
        devices = choose_devices(device)
        self.mesh = DeviceMesh(devices, resolve_axes(mesh or {}, world, len(devices)))
        own = next(device for device in devices if device.process_index == jax.process_index())
        self.device = NamedDevice(own, self.mesh.describe())
        self.rank, self.world_size = jax.process_index(), jax.process_count()
        self.data_rank, self.data_size = self.mesh.data_rank, self.mesh.data_size
        self.mesh.check_batch(micro_batch_size or training.batch_size, key=_name_batch_key(micro_batch_size))
        self.device_type, self.memory_before_model = get_device_type(self.device), get_resident_memory()
        self.dtype = choose_precision(training.mixed_precision, self.device)
        self.precision = jnp.dtype(self.dtype).name
        configure_computation(own, self.dtype)
        self.micro_batch_size, self.is_compiled = micro_batch_size, True
        self.profiler: JaxProfiler = JaxProfiler(self.device)
        self._hooks: list[BeforeStepHook] = []

        specs = task.specs()
        abstract: dict[str, Module] = {name: build_abstract_model(spec) for name, spec in specs.items()}
        weights = {
            name: self.mesh.put_parameters(draw_weights(spec, abstract[name], seed)) for name, spec in specs.items()
        }
        self._abstract = abstract
        self.frozen_weights = {name: values for name, values in weights.items() if name != "model"}
        self.shapes = {name: tuple(value.shape) for name, value in weights["model"].items()}
        self.mesh.check_parameters(self.shapes)
        self.settings = resolve_parameter_settings(training, list(self.shapes), is_trainable=task.is_trainable)
        self.assigned = assign_optimizers(
            self.shapes, self.settings, training.optimizer, weight_decay=training.weight_decay
        )
        self.statistics = ModuleStatistics(abstract["model"])
        self.builder = StepBuilder(
            task,
            abstract["model"],
            {name: model for name, model in abstract.items() if name != "model"},
            training,
            self.assigned,
            self.dtype,
            seed,
            self.statistics,
            self.mesh,
        )
        self._state = self._build_state(weights["model"])
        self._has_optimizer_state = False
        self._steps: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._evaluators: list[tuple[Task, evaluation.Evaluator]] = []
        self._last_names: list[str] = []
        self._last_outputs: StepOutputs | None = None
        self._wants_statistics = False
        self._must_fit_micro_batch = training.micro_batch_size == "auto"

    def _build_state(self, parameters: dict[str, Array]) -> TrainState:
        has_average = self.training.ema is not None
        average = {name: parameters[name].copy() for name in self.assigned} if has_average else {}
        task_state = self._put(self.task.state({name: parameters[name] for name in self.assigned}))
        return TrainState(parameters, {}, average, task_state, self._zero(), self._zero())

    def _zero(self) -> Array:
        # Placed like all of the state: a step would be compiled again for one that is not.
        return self.mesh.put(np.zeros((), np.float32), self.mesh.replicated)

    def _put(self, tensors: Mapping[str, Any]) -> dict[str, Array]:
        """Copy tensors to every device, by name."""
        return {name: self.mesh.put(value, self.mesh.replicated) for name, value in tensors.items()}

    @property
    def model(self) -> Module:
        """The trained model with its current weights."""
        bound: Module = bind(self._abstract["model"], self._state.parameters)
        return bound

    def set_schedule(self, rate: Callable[[int], float], *, total: int, steps_per_epoch: int) -> None:
        self.rate = rate
        self.settings = resolve_parameter_settings(
            self.training,
            list(self.settings),
            total_steps=total,
            steps_per_epoch=steps_per_epoch,
            is_trainable=self.task.is_trainable,
        )

    # One step

    def train_step(
        self, step: int, batch: Batch, *, module_statistics: bool = False, histograms: bool = False
    ) -> dict[str, Any]:
        for before_step in self._hooks:
            before_step(step, batch)
        self._ensure_optimizer_state()
        if self._must_fit_micro_batch:
            self._must_fit_micro_batch = False
            self.micro_batch_size = self.micro_batch_size or micro_batches.fit_micro_batch(self, batch)
        with self.profiler.step(step):
            names = [name for name in self.assigned if self.settings[name].start_step <= step]
            rate = self.rate(step) * self.learning_rate_scale
            decay = ema_decay_at(step, self.training.ema)
            counts = self.task.counts(batch)
            inputs = build_inputs(self, step, batch, counts=counts, rate=rate, average_decay=decay)
            train = self._get_train_step(names, histograms)
            self._state, outputs = train(self._state, self.frozen_weights, inputs)
        self._last_names, self._last_outputs, self._wants_statistics = names, outputs, module_statistics
        return {
            "loss": outputs.loss,
            "grad_norm": outputs.gradient_norm,
            "learning_rate": rate,
            "bad_steps": outputs.bad_steps,
            "units": next(iter(counts.values())) * self.data_size,  # of other processes about as many
            **outputs.means,
            **{name: Mean(value, count) for name, (value, count) in outputs.sums.items()},
            **({} if outputs.penalty is None else {"penalty": outputs.penalty}),
        }

    def _get_train_step(self, names: Sequence[str], histograms: bool) -> Callable[..., Any]:
        key = (tuple(names), histograms)
        if key not in self._steps:
            self._steps = {k: f for k, f in self._steps.items() if k[0] == key[0]}  # an older set does not return
            self._steps[key] = self.builder.build_train_step(names, has_histograms=histograms)
        return self._steps[key]

    def analyse_step(self, batch: Batch) -> Any:
        """Return the memory that the compiled step of a batch reserves; None if the backend does not tell."""
        self._ensure_optimizer_state()
        names = [name for name in self.assigned if self.settings[name].start_step <= 0]
        inputs = build_inputs(self, 0, batch, counts=self.task.counts(batch), rate=0.0, average_decay=0.0)
        step = self._get_train_step(names, False)
        return step.lower(self._state, self.frozen_weights, inputs).compile().memory_analysis()  # type: ignore[attr-defined]

    def _ensure_optimizer_state(self) -> None:
        """Allocate the optimizer state before it is first used; a run that only evaluates never does."""
        if not self._has_optimizer_state:
            shapes = jax.eval_shape(
                lambda parameters: initialise_state(parameters, self.assigned, self.training.optimizer),
                self._state.parameters,
            )
            zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)  # as every state begins
            self._state = self._state._replace(optimizer=self.mesh.put_states(zeros, self.shapes))
            self._has_optimizer_state = True

    # Evaluation, models, measurements

    def get_evaluation_weights(self) -> dict[str, Array]:
        """Return the weights of the model with the averaged ones, if there are any."""
        return {**self._state.parameters, **self._state.average}

    def eval_step(self, batch: Batch, *, with_rows: bool = True, task: Task | None = None) -> EvaluationOutput:
        return evaluation.evaluate_batch(self, batch, task or self.task, with_rows=with_rows)

    def get_evaluator(self, task: Task) -> evaluation.Evaluator:
        """Return the jitted evaluation of a task, compiled once for each shape of a batch."""
        for evaluated_task, evaluator in self._evaluators:
            if evaluated_task is task:
                return evaluator
        self._evaluators.append((task, evaluation.build_evaluator(self, task)))
        return self._evaluators[-1][1]

    def fetch_rows(self, batch_rows: Sequence[Mapping[str, Array]]) -> Rows:
        return sort_rows({n: np.concatenate([np.asarray(rows[n]) for rows in batch_rows]) for n in batch_rows[0]})

    def fetch(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        return fetch_metrics(metrics)

    def fetch_inspection(self) -> Inspection:
        outputs, self._last_outputs = self._last_outputs, None
        if outputs is None:
            return Inspection()
        modules = self.statistics.fetch(self._last_names, outputs.statistics) if self._wants_statistics else {}
        return Inspection(modules, fetch_histograms(outputs.histograms))

    @contextmanager
    def sampling(self) -> Iterator[Models]:
        weights = {**self.frozen_weights, "model": self.get_evaluation_weights()}
        if self.world_size > 1:  # copies on a device of this process, since the others do not sample
            weights = jax.tree.map(lambda value: value.addressable_data(0), self.mesh.gather(weights))
        models = {name: bind(self._abstract[name], values) for name, values in weights.items()}
        with forward_context(dtype=self.dtype):
            yield models

    def add_hook(self, before_step: BeforeStepHook) -> None:
        self._hooks.append(before_step)

    def remove_hooks(self) -> None:
        self._hooks.clear()

    def parameters(self) -> dict[str, ParameterInfo]:
        return {
            name: ParameterInfo(shape, is_trainable=self.settings[name].scale is not None)
            for name, shape in self.shapes.items()
        }

    def num_active_parameters(self) -> int:
        return sum(info.size for info in self.parameters().values())

    def any_rank(self, flag: bool) -> bool:
        return any_process(flag)

    def all_ranks_equal(self, text: str) -> bool:
        return all_processes_equal(text)

    def inspect(self, batch: Batch) -> dict[str, Any]:
        return inspection.inspect_modules(self, batch)

    def measure_compute(self, batch: Batch) -> dict[str, float]:
        return measure_compute(self, batch)

    def find_nonfinite_module(self, step: int, batch: Batch) -> str | None:
        return inspection.find_nonfinite_module(self, step, batch)

    def fisher_diagonal(
        self, examples: Iterable[tuple[int, Batch]], *, count: int, names: Sequence[str]
    ) -> dict[str, Array]:
        return fisher.fisher_diagonal(self, examples, count=count, names=names)

    def measure_memory(
        self, make_batch: Callable[[int], Batch], *, max_micro_batch: int, report_progress: Callable[[int, int], None]
    ) -> MemoryReport:
        return memory.measure_memory(self, make_batch, max_micro_batch=max_micro_batch, report_progress=report_progress)

    def memory_use(self, *, at_peak: bool = True) -> MemoryUse:
        return memory.measure_use(self, at_peak=at_peak)

    # State

    @property
    def state(self) -> TrainState:
        """Everything that a step changes."""
        return self._state

    def list_checkpoint_tensors(self) -> dict[str, dict[str, Array]]:
        """Return the tensors of a checkpoint by file and name, still on the device."""
        state, is_trainable = self._state, self.task.is_trainable
        files = {
            "model.safetensors": {name: value for name, value in state.parameters.items() if is_trainable(name)},
            "optimizer.safetensors": {
                f"{name}/{key}": value for name, tensors in state.optimizer.items() for key, value in tensors.items()
            },
        }
        if state.average:
            files["ema.safetensors"] = dict(state.average)
        if state.task_state:
            files["state.safetensors"] = dict(state.task_state)
        return files

    def snapshot(self) -> JaxSnapshot:
        self._ensure_optimizer_state()
        return take_snapshot(self.mesh.gather(self.list_checkpoint_tensors()))

    def load(self, folder: Path) -> None:
        self._ensure_optimizer_state()
        self.load_weights({"model.safetensors": read_tensors(folder / "model.safetensors")}, folder)
        expected = self.list_checkpoint_tensors()
        loaded: dict[str, dict[str, Any]] = {}
        for file in expected.keys() - {"model.safetensors"}:
            loaded[file] = read_tensors(folder / file)
            check_same_layout(loaded[file], expected[file], folder / file)
        optimizer: dict[str, dict[str, Array]] = {name: {} for name in self._state.optimizer}
        for key, value in loaded["optimizer.safetensors"].items():
            name, _, state_name = key.rpartition("/")
            optimizer[name][state_name] = value
        self._state = self._state._replace(
            optimizer=self.mesh.put_states(optimizer, self.shapes),
            average=self.mesh.put_parameters(loaded.get("ema.safetensors", {})),
            task_state=self._put(loaded.get("state.safetensors", {})),
        )
        self.reset_bad_steps()

    def load_weights(self, files: Mapping[str, Mapping[str, Array]], folder: Path) -> None:
        parameters = self._state.parameters
        expected = {
            "model.safetensors": {name: p for name, p in parameters.items() if self.task.is_trainable(name)},
            "ema.safetensors": {name: parameters[name] for name in self.assigned},
        }
        for file, tensors in files.items():
            check_same_layout(tensors, expected[file], folder / file)
            check_finite(tensors, folder / file)
            parameters = {**parameters, **self.mesh.put_parameters(tensors)}
        self._state = self._state._replace(parameters=parameters)

    def checkpoint_bytes(self) -> int:
        self._ensure_optimizer_state()
        return sum(value.nbytes for tensors in self.list_checkpoint_tensors().values() for value in tensors.values())

    def task_state(self) -> Mapping[str, Array]:
        return self._state.task_state

    def write_task_state(self, values: Mapping[str, Array]) -> None:
        # Copies: a step reuses the memory of its state, and one array may not be both a weight and an anchor.
        copies = self._put({name: jnp.array(value) for name, value in values.items()})
        self._state = self._state._replace(task_state={**self._state.task_state, **copies})

    def reset_weight_average(self) -> None:
        average = {name: self._state.parameters[name].copy() for name in self._state.average}
        self._state = self._state._replace(average=average)

    def reset_bad_steps(self) -> None:
        self._state = self._state._replace(nan_after_bad_step=self._zero(), bad_steps=self._zero())


def _name_batch_key(micro_batch_size: int | None) -> str:
    return "training.batch_size" if micro_batch_size is None else "training.micro_batch_size"
