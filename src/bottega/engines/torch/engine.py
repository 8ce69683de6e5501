"""The torch engine: one fused step over micro-batches and ranks, on torch's own distributed package.

Not on Accelerate: there a CPU run silently ignores sharding plugins, a resumed loader continues on another permutation,
and the saved state is pickle. Its launcher is welcome: it sets the same environment variables as torchrun.
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
from bottega.core.engine import BeforeStepHook, Engine, EvaluationOutput, MemoryReport, ParameterInfo
from bottega.core.noise import Noise, derive_seed
from bottega.core.schedule import ema_decay_at
from bottega.core.task import Task
from bottega.core.types import Batch, Rows
from bottega.engines.torch import (
    evaluation,
    fisher,
    gradients,
    inspection,
    memory,
    micro_batches,
    optimizers,
    ranks,
    state_updates,
)
from bottega.engines.torch.devices import choose_precision, make_deterministic, move_batch, seed_dropout
from bottega.engines.torch.noise import make_noise
from bottega.engines.torch.sums import LocalSum, accumulate_sums, fetch_metrics, sort_rows, sum_terms
from bottega.engines.torch.tensors import TorchSnapshot, check_finite, check_same_layout, take_snapshot
from bottega.engines.torch.unfreezing import unfreeze_parameters
from bottega.engines.torch.weight_average import WeightAverage
from bottega.engines.torch.wrapping import compile_frozen_models, compile_model, require_attribute, wrap_in_ddp
from bottega.models.build import build_models
from bottega.models.device import choose_device
from bottega.models.experts.torch import count_active_parameters
from bottega.models.folders.tensors import read_tensors
from bottega.world import World


class TorchEngine(Engine):
    """`rate` is the learning rate as a function of the step, already in absolute numbers."""

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
    ) -> None:
        self.task, self.training, self.rate, self.seed = task, training, rate, seed
        self.device: torch.device = choose_device(device)
        self.device_type = self.device.type
        place = ranks.join_group(self.device, world or World.from_environment())
        self.rank, self.world = place.rank, place.size
        self.data_rank, self.data_size = place.data_rank, place.data_size
        if deterministic:
            make_deterministic()
        self.dtype = choose_precision(training.mixed_precision, self.device)
        self.precision = str(self.dtype).removeprefix("torch.")
        self.micro_batch_size, self.pin_memory = micro_batch_size, pin_memory
        self._auto = training.micro_batch_size == "auto"
        self.processes_here = place.local_size

        models = build_models(task, seed)
        self.model: torch.nn.Module = models["model"].to(self.device)
        frozen = {name: m.to(self.device).eval().requires_grad_(False) for name, m in models.items() if name != "model"}
        named = dict(self.model.named_parameters())
        self.settings = resolve_parameter_settings(training, list(named), is_trainable=task.is_trainable)
        self.optimizers = optimizers.build_optimizers(
            named, self.settings, training.optimizer, learning_rate=rate(0), weight_decay=training.weight_decay
        )
        self._names = {id(p): name for name, p in named.items()}
        self._params = [p for p in named.values() if p.requires_grad]
        self._average = WeightAverage(self.model, enabled=training.ema is not None)
        self._state: dict[str, Tensor] = {n: t.to(self.device) for n, t in task.state(named).items()}
        self._apart = gradients.PCGrad(self._params) if task.gradient_surgery else None
        self._seen = state_updates.BatchStats(task.update_inputs)
        self._hooks: list[BeforeStepHook] = []
        if training.gradient_checkpointing:
            require_attribute(self.model, "checkpoint_blocks", "training.gradient_checkpointing")
            self.model.checkpoint_blocks = True

        called: Any = self.model
        self._is_bare = (
            task.needs_unwrapped_model or task.gradient_surgery
        )  # gradients are then summed over ranks by hand
        self._fused = self.device.type == "cuda" and training.compile is not False and not self._is_bare
        self._is_compiled = self._fused or (training.compile is True and not self._is_bare)
        if self._is_compiled:
            # What is recorded holds one forward and its backward: several in a step would each want a copy.
            whole = self.micro_batch_size is None and training.micro_batch_size is None
            called = compile_model(self.model, graphs=self._fused and self.world == 1 and whole)
            compile_frozen_models(frozen, always=training.compile is True)
        self._alone, self.frozen = called, frozen
        self._wrap()
        self.eager_models = {**frozen, "model": self.model}
        self._poison, self._bad_steps = (torch.zeros((), device=self.device) for _ in range(2))
        self._scale = torch.full((), 2.0**16, device=self.device) if self.dtype is torch.float16 else None
        self._growth = torch.zeros((), dtype=torch.int32, device=self.device)
        self._buffers: dict[str, dict[str, Tensor]] = {}
        self._has_state = self._is_gradual = self._has_measured = False

    def set_schedule(self, rate: Callable[[int], float], *, total: int, steps_per_epoch: int) -> None:
        self.rate = rate
        self.settings = resolve_parameter_settings(
            self.training,
            list(self.settings),
            total=total,
            steps_per_epoch=steps_per_epoch,
            is_trainable=self.task.is_trainable,
        )
        self._is_gradual = any(one.start_step for one in self.settings.values())

    def _wrap(self) -> None:
        self._called = self._alone if self.world == 1 or self._is_bare else wrap_in_ddp(self._alone, self.device)
        self._train_models = {**self.frozen, "model": self._called}

    # One step

    def train_step(self, step: int, batch: Batch) -> dict[str, Any]:
        if self._fused:
            torch.compiler.cudagraph_mark_step_begin()
        size = batch_length(batch)
        rate = self.rate(step) * self.rate_scale
        optimizers.set_learning_rate(self.optimizers, rate)
        counts = ranks.sum_over_ranks(self.task.counts(batch))
        self._ensure_state()
        changed = self._is_gradual and unfreeze_parameters(self.model, self.settings, step, compiled=self._is_compiled)
        if changed and self.world > 1:
            self._wrap()  # ranks wait for the gradients of what learnt when they were wrapped
        on_device = move_batch(batch, self.device, pin=self.pin_memory)
        if self._auto and self.micro_batch_size is None and not self._has_measured:
            self._has_measured = True
            micro_batches.fit_micro_batch(self, step, on_device, counts, size)
        for before_step in self._hooks:
            before_step(step, batch)
        if not self.model.training:
            self.model.train()
        while True:
            try:
                loss, metrics = self.backward(step, on_device, counts, size)
                metrics |= self._complete(step)
                break
            except (RuntimeError, MemoryError) as error:
                micro_batches.halve_micro_batch(self, size, error, allowed=self._auto and self.world == 1)
        norm = self._update(step, loss)
        return {
            "loss": LocalSum(loss) if self.world > 1 else loss,
            "grad_norm": norm,
            "learning_rate": rate,
            "bad_steps": self._bad_steps,
            "units": next(iter(counts.values())),
            **metrics,
        }

    def backward(
        self, step: int, batch: Batch, counts: Mapping[str, float], size: int
    ) -> tuple[Tensor, dict[str, Any]]:
        """This rank's gradients of the exact global mean, micro-batch by micro-batch; `_complete` joins the ranks'."""
        micro = min(self.micro_batch_size or size, size)
        first = self.data_rank * size
        if self._apart is not None:
            self._apart.gradients = {}  # of a try that ran out of memory
        self._seen.clear()
        total: Tensor | None = None
        sums: dict[str, tuple[Tensor, Any]] = {}
        for number, at in enumerate(range(0, size, micro)):
            part = batch if micro == size else slice_batch(batch, at, at + micro)
            # Dropout is the one draw that knows about ranks and splits; everything else asks `Noise`.
            seed_dropout(derive_seed(self.seed, step, number, self.data_rank), self.device)
            positions = torch.arange(first + at, first + min(at + micro, size), device=self.device)
            rng = make_noise(self.seed, step, positions, fused=self._fused)
            with self._sync(last=at + micro >= size), self.autocast():
                out = self.task.loss(self._train_models, part, rng)
                loss = sum_terms(out.terms, counts)
            self._differentiate(loss, out.terms, counts)
            total = loss.detach() if total is None else total + loss.detach()
            parts = out.terms if len(out.terms) > 1 else {}  # of one, the loss says it all
            shares = {n: (t.detach() / max(counts[n], 1e-12), None) for n, (t, _) in parts.items() if n != "loss"}
            accumulate_sums(sums, {**shares, **out.metrics})
            self._seen.add(out, part.get("weight"))
        assert total is not None
        return total, {name: LocalSum(value, count) for name, (value, count) in sums.items()}

    def _differentiate(self, loss: Tensor, terms: Mapping[str, Any], counts: Mapping[str, float]) -> None:
        if self._apart is not None:
            tasks: dict[str, dict[str, Any]] = {}  # each may have several terms, which are on one side
            for name, term in terms.items():
                tasks.setdefault(name.partition("/")[0], {})[name] = term
            parts = {task: sum_terms(own, counts) for task, own in tasks.items()}
            self._apart.backward(parts if self._scale is None else {n: p * self._scale for n, p in parts.items()})
            return
        if self.world > 1 and not self._is_bare:
            loss = loss * self.data_size  # DDP averages over shares, and ours is a mean over all of them already
        (loss if self._scale is None else loss * self._scale).backward()

    def _complete(self, step: int) -> dict[str, Any]:
        """What is done once a step to the gradients of all micro-batches together, and what is said of all they saw."""
        found: dict[str, Any] = self.task.batch_metrics(self._seen.reduce())
        if self._apart is not None:
            found["gradient_cosine"] = self._apart.combine(seed=self.seed, step=step)
        elif self._is_bare:
            gradients.sum_gradients_over_ranks(self._params)
        penalty = self.task.penalty(dict(self.model.named_parameters()), self._state)
        if penalty is not None:
            gradients.add_penalty(penalty, self._params, scale=self._scale)
            found["penalty"] = penalty.detach()
        return found

    def _update(self, step: int, loss: Tensor) -> Tensor:
        """Clip and update, held back on the device where the loss or a gradient is not finite; and average what is then."""
        grads = [p.grad for p in self._params if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        divisor = self._scale
        if self._scale is not None:
            norm = norm / self._scale
        if self.training.max_grad_norm is not None:
            clip = (norm / self.training.max_grad_norm).clamp(min=1.0)
            divisor = clip if divisor is None else clip * divisor
        # The norm is the same on all ranks and the loss is not, and ranks that disagree about an update drift apart.
        probe = norm + loss if self.world == 1 else norm
        passed_over = step in self.skip_steps
        # x - x is 0 for a number and NaN for inf and NaN: no comparison, no branch, no waiting.
        probe = self._poison if passed_over else (probe - probe) + self._poison
        hold = probe.ne(0).float()
        if self._scale is None:
            self._bad_steps += hold
            if self.training.on_nonfinite != "skip":
                self._poison = probe  # from here on nothing moves until the loop has seen it
        else:
            # fp16 overflows as a matter of course: the update is skipped and the loss scale halved.
            torch._amp_update_scale_(self._scale, self._growth, hold, 2.0, 0.5, 2000)
            self._bad_steps += (self._scale < 2.0**-10).float()
        if passed_over:
            hold = torch.ones_like(hold)
        optimizers.step_optimizers(self.optimizers, divisor=divisor, skip_update=hold)
        rng = Noise(self.seed, step, (), torch)
        state_updates.apply_state_update(
            self.task, self.model, self._state, self._seen.reduce(), rng=rng, skip_update=hold
        )
        for p in self._params:
            p.grad = None
        if self.training.ema is not None:
            self._average.update(self._params, ema_decay_at(step, self.training.ema))
        return norm

    def _ensure_state(self) -> None:
        """The optimizers' state, whole, before it is first written or read; a run that only evaluates never has it."""
        if not self._has_state:
            optimizers.initialise_state(self.optimizers)
            self._has_state = True

    def _sync(self, *, last: bool) -> Any:
        return contextlib.nullcontext() if last or self._called is self._alone else self._called.no_sync()

    def autocast(self) -> Any:
        if self.dtype is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def without_sync(self) -> Any:
        """Gradients of what runs inside stay with this rank."""
        return self._sync(last=False)

    # Everything that is not a step

    def eval_step(self, batch: Batch, *, with_rows: bool = True, task: Task | None = None) -> EvaluationOutput:
        with self._average.averaged_weights():
            return evaluation.evaluate_batch(self, batch, task or self.task, with_rows=with_rows)

    def fetch_rows(self, parts: Sequence[Mapping[str, Tensor]]) -> Rows:
        return sort_rows({name: torch.cat([part[name] for part in parts]).cpu().numpy() for name in parts[0]})

    def fetch(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        return fetch_metrics(metrics, self.device)

    def any_rank(self, flag: bool) -> bool:
        return ranks.any_rank(flag)

    def all_ranks_equal(self, text: str) -> bool:
        return ranks.all_ranks_equal(text)

    def evaluating(self) -> Any:
        return self._average.averaged_weights()

    @contextlib.contextmanager
    def sampling(self) -> Any:
        was = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), self._average.averaged_weights():
                yield self.eager_models
        finally:
            self.model.train(was)

    def add_hook(self, before_step: BeforeStepHook) -> None:
        self._hooks.append(before_step)

    def remove_hooks(self) -> None:
        self._hooks.clear()

    def parameters(self) -> dict[str, ParameterInfo]:
        settings = self.settings
        named = self.model.named_parameters()
        return {name: ParameterInfo(tuple(p.shape), is_trainable=settings[name].scale is not None) for name, p in named}

    def num_active_parameters(self) -> int:
        return count_active_parameters(self.model)

    def inspect(self, batch: Batch) -> dict[str, Any]:
        return inspection.inspect_modules(self, batch)

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

    # State

    def state(self) -> dict[str, dict[str, Tensor]]:
        """File -> name -> tensor: everything a checkpoint keeps, still on the device."""
        files = {"model.safetensors": {n: t for n, t in self.model.state_dict().items() if self.task.is_trainable(n)}}
        files["optimizer.safetensors"] = optimizers.state_tensors(self.optimizers, self._names)
        if self._scale is not None:
            files["optimizer.safetensors"] |= {"loss_scale/scale": self._scale, "loss_scale/growth": self._growth}
        if self._average.tensors:
            files["ema.safetensors"] = dict(self._average.tensors)
        if self._state:
            files["state.safetensors"] = dict(self._state)
        return files

    def snapshot(self) -> TorchSnapshot:
        if self.rank != 0:
            return TorchSnapshot({}, None)
        self._ensure_state()
        return take_snapshot(self.state(), self._buffers, on_device=self.device.type == "cuda")

    def load(self, folder: Path) -> None:
        self.load_weights({"model.safetensors": read_tensors(folder / "model.safetensors")}, folder)
        state = read_tensors(folder / "optimizer.safetensors")
        scaling = {name: state.pop(name) for name in list(state) if name.startswith("loss_scale/")}
        if self._scale is not None and scaling:  # none where the run had another precision until now
            self._scale.copy_(scaling["loss_scale/scale"])
            self._growth.copy_(scaling["loss_scale/growth"])
        self._ensure_state()
        check_same_layout(
            state, optimizers.state_tensors(self.optimizers, self._names), folder / "optimizer.safetensors"
        )
        optimizers.load_state(self.optimizers, self._names, state)
        for file, tensors in (("ema.safetensors", self._average.tensors), ("state.safetensors", self._state)):
            if tensors:
                found = read_tensors(folder / file)
                check_same_layout(found, tensors, folder / file)
                for name, tensor in found.items():
                    tensors[name].copy_(tensor)
        self._poison.zero_()
        self._bad_steps.zero_()

    def load_weights(self, files: Mapping[str, Mapping[str, Tensor]], folder: Path) -> None:
        wanted = {
            "model.safetensors": {n: t for n, t in self.model.state_dict().items() if self.task.is_trainable(n)},
            "ema.safetensors": {n: p for n, p in self.model.named_parameters() if p.requires_grad},
        }
        for file, tensors in files.items():
            check_same_layout(tensors, wanted[file], folder / file)
            check_finite(tensors, wanted[file], folder / file)
            self.model.load_state_dict(tensors, strict=False)  # the rest is as it was built

    def checkpoint_bytes(self) -> int:
        self._ensure_state()
        return sum(t.numel() * t.element_size() for tensors in self.state().values() for t in tensors.values())

    def task_state(self) -> Mapping[str, Tensor]:
        return self._state

    @torch.no_grad()
    def write_task_state(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self._state[name].copy_(value)

    def reset_weight_average(self) -> None:
        self._average.reset()

    def reset_bad_steps(self) -> None:
        self._poison = torch.zeros_like(self._poison)
        self._bad_steps.zero_()

    def close(self) -> None:
        if dist.is_initialized():
            # The wrapper keeps the group alive; freed after it, the group would join threads that want the interpreter.
            self._called, self._train_models = None, {}
            gc.collect()  # it may be part of a cycle
            dist.destroy_process_group()
