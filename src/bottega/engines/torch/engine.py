"""The torch engine: one training step over micro-batches and ranks, on torch.distributed.

Not on Accelerate: there a CPU run silently ignores sharding plugins, a resumed loader continues on another permutation,
and the saved state is pickle. Its launcher works: it sets the same environment variables as torchrun.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bottega.config.parameter_groups import resolve_parameter_settings
from bottega.config.training import Training
from bottega.core.batch import batch_length, slice_batch
from bottega.core.engine import BeforeStepHook, Engine, EvaluationOutput, Inspection, ParameterInfo
from bottega.core.noise import Noise, derive_seed
from bottega.core.schedule import ema_decay_at
from bottega.core.task import Task
from bottega.core.types import Batch, Rows
from bottega.engines.compile_choice import is_compilable
from bottega.engines.host_memory import get_resident_memory
from bottega.engines.torch import (
    compute,
    evaluation,
    fisher,
    gradients,
    inspection,
    memory,
    micro_batches,
    optimizers,
    ranks,
    retries,
    state_updates,
)
from bottega.engines.torch.devices import choose_precision, make_deterministic, move_batch, seed_dropout
from bottega.engines.torch.noise import make_noise
from bottega.engines.torch.profiling import TorchProfiler, profile_step
from bottega.engines.torch.step_inspection import StepInspector
from bottega.engines.torch.sums import LocalSum, accumulate_sums, fetch_metrics, sort_rows, sum_terms, sum_terms_by_task
from bottega.engines.torch.tensors import TorchSnapshot, check_same_layout, load_model, load_tensors, take_snapshot
from bottega.engines.torch.unfreezing import unfreeze_parameters
from bottega.engines.torch.update_guard import UpdateGuard
from bottega.engines.torch.weight_average import WeightAverage
from bottega.engines.torch.wrapped_models import WrappedModels
from bottega.engines.torch.wrapping import require_attribute
from bottega.measurements import MemoryReport, MemoryUse
from bottega.models.build import build_models
from bottega.models.device import choose_device, get_device_type
from bottega.models.experts.torch import count_active_parameters
from bottega.models.folders.tensors import read_tensors
from bottega.world import World


class TorchEngine(Engine):
    """Engine on torch. `rate` is the learning rate by step, not a factor of a peak; `models` are on the device already."""

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
        world: World | None = None,
        models: Mapping[str, Any] | None = None,
    ) -> None:
        self.task, self.training, self.rate, self.seed = task, training, rate, seed
        self.device: torch.device = choose_device(device)
        self.device_type, self.memory_before_model = get_device_type(self.device), get_resident_memory()
        group = ranks.join_group(self.device, world or World.from_environment())
        self.rank, self.world_size = group.rank, group.size
        self.data_rank, self.data_size = group.data_rank, group.data_size
        if deterministic:
            make_deterministic()
        self.dtype = choose_precision(training.mixed_precision, self.device)
        self.precision = str(self.dtype).removeprefix("torch.")
        self.micro_batch_size, self.pin_memory = micro_batch_size, pin_memory
        self._is_auto, self.num_local_processes = training.micro_batch_size == "auto", group.local_size
        self.profiler: TorchProfiler = TorchProfiler(self.device)

        models = models or {name: model.to(self.device) for name, model in build_models(task, seed).items()}
        self.model: torch.nn.Module = models["model"]
        self.frozen = {name: model.eval().requires_grad_(False) for name, model in models.items() if name != "model"}
        parameters = dict(self.model.named_parameters())
        self.settings = resolve_parameter_settings(training, list(parameters), is_trainable=task.is_trainable)
        self.optimizers = optimizers.build_optimizers(
            parameters, self.settings, training.optimizer, learning_rate=rate(0), weight_decay=training.weight_decay
        )
        self._parameter_names = {id(p): name for name, p in parameters.items()}
        self._params = [p for p in parameters.values() if p.requires_grad]
        self._weight_average = WeightAverage(self.model, enabled=training.ema is not None)
        self._task_state: dict[str, Tensor] = {n: t.to(self.device) for n, t in task.state(parameters).items()}
        self._pcgrad = gradients.PCGrad(self._params) if task.gradient_surgery else None
        self._batch_stats = state_updates.BatchStats(task.update_inputs)
        self.inspector = StepInspector(self.model, device=self.device, is_active=self.rank == 0)
        self._hooks: list[BeforeStepHook] = []
        if training.gradient_checkpointing:
            require_attribute(self.model, "checkpoint_blocks", "training.gradient_checkpointing")
            self.model.checkpoint_blocks = True

        self._is_unwrapped = task.needs_unwrapped_model or task.gradient_surgery  # `finish_gradients` sums over ranks
        # A CUDA graph holds one forward and its backward: several micro-batches would each need a copy.
        has_one_pass = self.micro_batch_size is None and training.micro_batch_size is None
        self._wrapped = WrappedModels(
            self.model,
            self.frozen,
            device=self.device,
            needs_ddp=self.world_size > 1 and not self._is_unwrapped,
            graphs=self.world_size == 1 and has_one_pass,
            always=training.compile is True,
        )
        self.is_compiled = training.compile is True and is_compilable(task)
        self._wrapped.switch(self.is_compiled)
        self.eager_models = {**self.frozen, "model": self.model}
        self._guard = UpdateGuard(self.device, self.dtype, continues=training.on_nonfinite == "skip")
        self._snapshot_buffers: dict[str, dict[str, Tensor]] = {}
        self._has_optimizer_state = self._unfreezes_gradually = self._has_fitted_micro_batch = False

    def set_schedule(self, rate: Callable[[int], float], *, total: int, steps_per_epoch: int) -> None:
        self.rate = rate
        self.settings = resolve_parameter_settings(
            self.training,
            list(self.settings),
            total_steps=total,
            steps_per_epoch=steps_per_epoch,
            is_trainable=self.task.is_trainable,
        )
        self._unfreezes_gradually = any(setting.start_step for setting in self.settings.values())

    def stop_compiling(self) -> None:
        """Continue eagerly, in the middle of a step: what the compiled models have added to the gradients is discarded."""
        self.is_compiled = False
        self._wrapped.switch(False)
        gradients.clear_gradients(self._params)

    # One step

    @profile_step
    def train_step(
        self, step: int, batch: Batch, *, module_statistics: bool = False, histograms: bool = False
    ) -> dict[str, Any]:
        self.inspector.request(modules=module_statistics, histograms=histograms)
        self._wrapped.switch(self.is_compiled)
        if self._wrapped.is_fused:
            torch.compiler.cudagraph_mark_step_begin()
        size = batch_length(batch)
        rate = self.rate(step) * self.learning_rate_scale
        optimizers.set_learning_rate(self.optimizers, rate)
        counts = ranks.sum_over_ranks(self.task.counts(batch))
        self._ensure_optimizer_state()
        has_changed = self._unfreezes_gradually and unfreeze_parameters(
            self.model, self.settings, step, is_compiled=self.is_compiled
        )
        if has_changed and self.world_size > 1:
            self._wrapped.wrap()
        device_batch = move_batch(batch, self.device, pin=self.pin_memory)
        if self.world_size > 1 and self.is_compiled and not self._wrapped.has_run_compiled:
            retries.try_on_all_ranks(self, step, device_batch, counts, size)
        if self._is_auto and self.micro_batch_size is None and not self._has_fitted_micro_batch:
            self._has_fitted_micro_batch = True
            micro_batches.fit_micro_batch(self, step, device_batch, counts, size)
        for before_step in self._hooks:
            before_step(step, batch)
        if not self.model.training:
            self.model.train()
        may_halve = self._is_auto and self.world_size == 1
        loss, metrics = retries.compute_gradients(self, step, device_batch, counts, size, may_halve=may_halve)
        self._wrapped.has_run_compiled = self.is_compiled
        with self.profiler.region("optimizer"):
            norm = self._update(step, loss)
        return {
            "loss": LocalSum(loss) if self.world_size > 1 else loss,
            "grad_norm": norm,
            "learning_rate": rate,
            "bad_steps": self._guard.bad_steps,
            "units": next(iter(counts.values())),
            **metrics,
        }

    def backward(
        self, step: int, batch: Batch, counts: Mapping[str, float], size: int
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute this rank's part of the gradient of the global mean, micro-batch by micro-batch.

        Returns the loss and the metrics. Without DDP, `finish_gradients` sums the gradients over ranks.
        """
        micro_batch_size = min(self.micro_batch_size or size, size)
        first_position = self.data_rank * size
        if self._pcgrad is not None:
            self._pcgrad.gradients = {}  # left from an attempt that ran out of memory
        self._batch_stats.clear()
        total: Tensor | None = None
        sums: dict[str, tuple[Tensor, Any]] = {}
        for number, start in enumerate(range(0, size, micro_batch_size)):
            stop = min(start + micro_batch_size, size)
            micro_batch = batch if micro_batch_size == size else slice_batch(batch, start, stop)
            # Only dropout depends on ranks and micro-batches; all other randomness is from `Noise`.
            seed_dropout(derive_seed(self.seed, step, number, self.data_rank), self.device)
            positions = torch.arange(first_position + start, first_position + stop, device=self.device)
            rng = make_noise(self.seed, step, positions, fused=self._wrapped.is_fused)
            with self.profiler.region("forward"), self._wrapped.sync_context(is_last=stop == size), self.autocast():
                out = self.task.loss(self._wrapped.models, micro_batch, rng)
                loss = sum_terms(out.terms, counts)
            with self.profiler.region("backward"):
                self._backpropagate(loss, out.terms, counts)
            total = loss.detach() if total is None else total + loss.detach()
            terms = out.terms if len(out.terms) > 1 else {}  # a single term equals the loss
            means = {n: (t.detach() / max(counts[n], 1e-12), None) for n, (t, _) in terms.items() if n != "loss"}
            accumulate_sums(sums, {**means, **out.metrics})
            self._batch_stats.add(out, micro_batch.get("weight"))
        assert total is not None
        return total, {name: LocalSum(value, count) for name, (value, count) in sums.items()}

    def _backpropagate(self, loss: Tensor, terms: Mapping[str, Any], counts: Mapping[str, float]) -> None:
        if self._pcgrad is not None:
            losses = sum_terms_by_task(terms, counts)
            self._pcgrad.backward({name: self._guard.scale_loss(task_loss) for name, task_loss in losses.items()})
            return
        if self.world_size > 1 and not self._is_unwrapped:
            loss = loss * self.data_size  # DDP averages over ranks, but this loss has the global count already
        self._guard.scale_loss(loss).backward()

    def finish_gradients(self, step: int) -> dict[str, Any]:
        """Finish the gradients after the last micro-batch: sum over ranks, PCGrad, penalty. Returns further metrics."""
        metrics: dict[str, Any] = self.task.batch_metrics(self._batch_stats.reduce())
        if self._pcgrad is not None:
            metrics["gradient_cosine"] = self._pcgrad.combine(seed=self.seed, step=step)
        elif self._is_unwrapped:
            gradients.sum_gradients_over_ranks(self._params)
        penalty = self.task.penalty(dict(self.model.named_parameters()), self._task_state)
        if penalty is not None:
            gradients.add_penalty(penalty, self._params, scale=self._guard.scale)
            metrics["penalty"] = penalty.detach()
        return metrics

    def _update(self, step: int, loss: Tensor) -> Tensor:
        """Clip, update and average the weights; the device skips the update if the loss or a gradient is not finite."""
        self.inspector.before_update(self._params, scale=self._guard.scale)
        norm, divisor = gradients.compute_norm_and_divisor(
            self._params, scale=self._guard.scale, max_norm=self.training.max_grad_norm
        )
        # With several ranks only the norm is checked, which is the same on all of them; the loss is not.
        probe = norm + loss if self.world_size == 1 else norm
        skip_update = self._guard.check(probe, is_skipped=step in self.skip_steps)
        optimizers.step_optimizers(self.optimizers, divisor=divisor, skip_update=skip_update)
        self.inspector.after_update()
        rng = Noise(self.seed, step, (), torch)
        state_updates.apply_state_update(
            self.task, self.model, self._task_state, self._batch_stats.reduce(), rng=rng, skip_update=skip_update
        )
        gradients.clear_gradients(self._params)
        if self.training.ema is not None:
            self._weight_average.update(self._params, ema_decay_at(step, self.training.ema))
        return norm

    def _ensure_optimizer_state(self) -> None:
        """Allocate the optimizer state before it is first used; a run that only evaluates never does."""
        if not self._has_optimizer_state:
            optimizers.initialise_state(self.optimizers)
            self._has_optimizer_state = True

    def autocast(self) -> Any:
        """Context in which the forward pass runs at the engine's precision."""
        return contextlib.nullcontext() if self.dtype is torch.float32 else torch.autocast(self.device.type, self.dtype)

    def without_sync(self) -> Any:
        """Context in which DDP does not synchronise gradients."""
        return self._wrapped.sync_context(is_last=False)

    # Evaluation, ranks, models, measurements

    def eval_step(self, batch: Batch, *, with_rows: bool = True, task: Task | None = None) -> EvaluationOutput:
        with self.profiler.region("evaluation"), self._weight_average.averaged_weights():
            return evaluation.evaluate_batch(self, batch, task or self.task, with_rows=with_rows)

    def fetch_rows(self, batch_rows: Sequence[Mapping[str, Tensor]]) -> Rows:
        return sort_rows({n: torch.cat([rows[n] for rows in batch_rows]).cpu().numpy() for n in batch_rows[0]})

    def fetch(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        return fetch_metrics(metrics, self.device)

    def fetch_inspection(self) -> Inspection:
        return self.inspector.fetch()

    def any_rank(self, flag: bool) -> bool:
        return ranks.any_rank(flag)

    def all_ranks_equal(self, text: str) -> bool:
        return ranks.all_ranks_equal(text)

    def evaluating(self) -> Any:
        return self._weight_average.averaged_weights()

    def sampling(self) -> Any:
        return evaluation.open_for_sampling(self.eager_models, self._weight_average)

    def add_hook(self, before_step: BeforeStepHook) -> None:
        self._hooks.append(before_step)

    def remove_hooks(self) -> None:
        self._hooks.clear()

    def parameters(self) -> dict[str, ParameterInfo]:
        shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        return {n: ParameterInfo(s, is_trainable=self.settings[n].scale is not None) for n, s in shapes.items()}

    def num_active_parameters(self) -> int:
        return count_active_parameters(self.model)

    def inspect(self, batch: Batch) -> dict[str, Any]:
        return inspection.inspect_modules(self, batch)

    def measure_compute(self, batch: Batch) -> dict[str, float]:
        return compute.measure_compute(self, batch)

    def find_nonfinite_module(self, step: int, batch: Batch) -> str | None:
        return inspection.find_nonfinite_module(self, step, batch)

    def fisher_diagonal(
        self, examples: Iterable[tuple[int, Batch]], *, count: int, names: Sequence[str]
    ) -> dict[str, Tensor]:
        return fisher.fisher_diagonal(self, examples, count=count, names=names)

    def measure_memory(
        self, make_batch: Callable[[int], Batch], *, max_micro_batch: int, report_progress: Callable[[int, int], None]
    ) -> MemoryReport:
        return memory.measure_memory(self, make_batch, max_micro_batch=max_micro_batch, report_progress=report_progress)

    def memory_use(self, *, at_peak: bool = True) -> MemoryUse:
        return memory.measure_use(self, at_peak=at_peak)

    # State

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of a checkpoint by file and name, still on the device."""
        files = {"model.safetensors": {n: t for n, t in self.model.state_dict().items() if self.task.is_trainable(n)}}
        optimizer_state = optimizers.collect_state_tensors(self.optimizers, self._parameter_names)
        files["optimizer.safetensors"] = optimizer_state | self._guard.state()
        if self._weight_average.tensors:
            files["ema.safetensors"] = dict(self._weight_average.tensors)
        if self._task_state:
            files["state.safetensors"] = dict(self._task_state)
        return files

    def snapshot(self) -> TorchSnapshot:
        if self.rank != 0:
            return TorchSnapshot({}, None)
        self._ensure_optimizer_state()
        return take_snapshot(self.state(), self._snapshot_buffers, is_cuda=self.device.type == "cuda")

    def load(self, folder: Path) -> None:
        self.load_weights({"model.safetensors": read_tensors(folder / "model.safetensors")}, folder)
        state = read_tensors(folder / "optimizer.safetensors")
        self._guard.load_state({name: state.pop(name) for name in list(state) if name.startswith("loss_scale/")})
        self._ensure_optimizer_state()
        expected = optimizers.collect_state_tensors(self.optimizers, self._parameter_names)
        check_same_layout(state, expected, folder / "optimizer.safetensors")
        optimizers.load_state(self.optimizers, self._parameter_names, state)
        load_tensors(self._weight_average.tensors, folder / "ema.safetensors")
        load_tensors(self._task_state, folder / "state.safetensors")
        self._guard.reset()

    def load_weights(self, files: Mapping[str, Mapping[str, Tensor]], folder: Path) -> None:
        load_model(self.model, files, folder, is_trainable=self.task.is_trainable)

    def checkpoint_bytes(self) -> int:
        self._ensure_optimizer_state()
        return sum(t.numel() * t.element_size() for tensors in self.state().values() for t in tensors.values())

    def task_state(self) -> Mapping[str, Tensor]:
        return self._task_state

    @torch.no_grad()
    def write_task_state(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self._task_state[name].copy_(value.detach())

    def reset_weight_average(self) -> None:
        self._weight_average.reset()

    def reset_bad_steps(self) -> None:
        self._guard.reset()

    def close(self) -> None:
        if dist.is_initialized():
            # DDP keeps the group alive; if it were freed later, the group would wait for threads that need the GIL.
            self._wrapped.close()
            gc.collect()  # DDP may be part of a reference cycle
            dist.destroy_process_group()
