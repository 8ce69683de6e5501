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

from bottega.config.groups import parameter_settings
from bottega.config.training import Training
from bottega.core.batch import batch_length, slice_batch
from bottega.core.engine import BeforeStep, Engine, Evaluated, Memory, Parameter
from bottega.core.noise import Noise, seed_of
from bottega.core.schedule import decay_at
from bottega.core.task import Task
from bottega.core.types import Batch, Rows
from bottega.engines.torch import changes, evaluation, fisher, fitting, gradients, inspection, memory, optimizers, ranks
from bottega.engines.torch.average import Average
from bottega.engines.torch.devices import choose_precision, make_deterministic, put, seed_dropout
from bottega.engines.torch.noise import draw
from bottega.engines.torch.sums import Local, add_up, fetched, in_order, sum_terms
from bottega.engines.torch.tensors import TorchSnapshot, check_finite, compare, take
from bottega.engines.torch.thawing import thaw
from bottega.engines.torch.wrapping import compile_frozen, compiled, replicated, require
from bottega.models.build import build_models
from bottega.models.device import choose_device
from bottega.models.experts.torch import active_parameters
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
        place = ranks.join_group(self.device, world or World.current())
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
        self.settings = parameter_settings(training, list(named), learns=task.learns)
        self.optimizers = optimizers.build(
            named, self.settings, training.optimizer, learning_rate=rate(0), weight_decay=training.weight_decay
        )
        self._names = {id(p): name for name, p in named.items()}
        self._params = [p for p in named.values() if p.requires_grad]
        self._average = Average(self.model, wanted=training.ema is not None)
        self._state: dict[str, Tensor] = {n: t.to(self.device) for n, t in task.state(named).items()}
        self._apart = gradients.Apart(self._params) if task.keeps_apart else None
        self._seen = changes.Seen(task.learns_from_rows)
        self._hooks: list[BeforeStep] = []
        if training.gradient_checkpointing:
            require(self.model, "checkpoint_blocks", "training.gradient_checkpointing")
            self.model.checkpoint_blocks = True

        called: Any = self.model
        self._is_bare = task.rebinds or task.keeps_apart  # gradients are then summed over ranks by hand
        self._fused = self.device.type == "cuda" and training.compile is not False and not self._is_bare
        self._is_compiled = self._fused or (training.compile is True and not self._is_bare)
        if self._is_compiled:
            # What is recorded holds one forward and its backward: several in a step would each want a copy.
            whole = self.micro_batch_size is None and training.micro_batch_size is None
            called = compiled(self.model, graphs=self._fused and self.world == 1 and whole)
            compile_frozen(frozen, always=training.compile is True)
        self._alone, self.frozen = called, frozen
        self._wrap()
        self.eager_models = {**frozen, "model": self.model}
        self._poison, self._bad_steps = (torch.zeros((), device=self.device) for _ in range(2))
        self._scale = torch.full((), 2.0**16, device=self.device) if self.dtype is torch.float16 else None
        self._growth = torch.zeros((), dtype=torch.int32, device=self.device)
        self._buffers: dict[str, dict[str, Tensor]] = {}
        self._has_state = self._is_gradual = self._has_measured = False

    def plan(self, rate: Callable[[int], float], *, total: int, steps_per_epoch: int) -> None:
        self.rate = rate
        self.settings = parameter_settings(
            self.training, list(self.settings), total=total, steps_per_epoch=steps_per_epoch, learns=self.task.learns
        )
        self._is_gradual = any(one.starts for one in self.settings.values())

    def _wrap(self) -> None:
        self._called = self._alone if self.world == 1 or self._is_bare else replicated(self._alone, self.device)
        self._train_models = {**self.frozen, "model": self._called}

    # One step

    def train_step(self, step: int, batch: Batch) -> dict[str, Any]:
        if self._fused:
            torch.compiler.cudagraph_mark_step_begin()
        size = batch_length(batch)
        rate = self.rate(step) * self.rate_scale
        optimizers.set_rate(self.optimizers, rate)
        counts = ranks.summed(self.task.counts(batch))
        self._ensure_state()
        changed = self._is_gradual and thaw(self.model, self.settings, step, compiled=self._is_compiled)
        if changed and self.world > 1:
            self._wrap()  # ranks wait for the gradients of what learnt when they were wrapped
        on_device = put(batch, self.device, pin=self.pin_memory)
        if self._auto and self.micro_batch_size is None and not self._has_measured:
            self._has_measured = True
            fitting.find_micro_batch(self, step, on_device, counts, size)
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
                fitting.back_off(self, size, error, allowed=self._auto and self.world == 1)
        norm = self._update(step, loss)
        return {
            "loss": Local(loss) if self.world > 1 else loss,
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
            seed_dropout(seed_of(self.seed, step, number, self.data_rank), self.device)
            positions = torch.arange(first + at, first + min(at + micro, size), device=self.device)
            rng = draw(self.seed, step, positions, fused=self._fused)
            with self._sync(last=at + micro >= size), self.autocast():
                out = self.task.loss(self._train_models, part, rng)
                loss = sum_terms(out.terms, counts)
            self._differentiate(loss, out.terms, counts)
            total = loss.detach() if total is None else total + loss.detach()
            parts = out.terms if len(out.terms) > 1 else {}  # of one, the loss says it all
            shares = {n: (t.detach() / max(counts[n], 1e-12), None) for n, (t, _) in parts.items() if n != "loss"}
            add_up(sums, {**shares, **out.metrics})
            self._seen.add(out, part.get("weight"))
        assert total is not None
        return total, {name: Local(value, count) for name, (value, count) in sums.items()}

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
        found: dict[str, Any] = self.task.observed(self._seen.whole())
        if self._apart is not None:
            found["gradient_cosine"] = self._apart.settle(seed=self.seed, step=step)
        elif self._is_bare:
            gradients.reduce(self._params)
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
        optimizers.apply(self.optimizers, divisor=divisor, hold=hold)
        rng = Noise(self.seed, step, (), torch)
        changes.renew(self.task, self.model, self._state, self._seen.whole(), rng=rng, hold=hold)
        for p in self._params:
            p.grad = None
        if self.training.ema is not None:
            self._average.follow(self._params, decay_at(step, self.training.ema))
        return norm

    def _ensure_state(self) -> None:
        """The optimizers' state, whole, before it is first written or read; a run that only evaluates never has it."""
        if not self._has_state:
            optimizers.initialise(self.optimizers)
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

    def eval_step(self, batch: Batch, *, with_rows: bool = True, task: Task | None = None) -> Evaluated:
        with self._average.in_place():
            return evaluation.evaluate(self, batch, task or self.task, with_rows=with_rows)

    def fetch_rows(self, parts: Sequence[Mapping[str, Tensor]]) -> Rows:
        return in_order({name: torch.cat([part[name] for part in parts]).cpu().numpy() for name in parts[0]})

    def fetch(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        return fetched(metrics, self.device)

    def agree(self, flag: bool) -> bool:
        return ranks.any_rank(flag)

    def same(self, text: str) -> bool:
        return ranks.all_same(text)

    def evaluating(self) -> Any:
        return self._average.in_place()

    @contextlib.contextmanager
    def sampling(self) -> Any:
        was = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), self._average.in_place():
                yield self.eager_models
        finally:
            self.model.train(was)

    def add_hook(self, before_step: BeforeStep) -> None:
        self._hooks.append(before_step)

    def remove_hooks(self) -> None:
        self._hooks.clear()

    def parameters(self) -> dict[str, Parameter]:
        settings = self.settings
        named = self.model.named_parameters()
        return {name: Parameter(tuple(p.shape), learns=settings[name].scale is not None) for name, p in named}

    def num_active(self) -> int:
        return active_parameters(self.model)

    def inspect(self, batch: Batch) -> dict[str, Any]:
        return inspection.inspect(self, batch)

    def first_bad_module(self, step: int, batch: Batch) -> str | None:
        return inspection.first_bad_module(self, step, batch)

    def squared_gradients(
        self, examples: Iterable[tuple[int, Batch]], *, count: int, names: Sequence[str]
    ) -> dict[str, Tensor]:
        return fisher.diagonal(self, examples, count=count, names=names)

    def measure_memory(self, batch_of: Callable[[int], Batch], *, most: int, say: Callable[[int, int], None]) -> Memory:
        return memory.measure(self, batch_of, most=most, say=say)

    # State

    def state(self) -> dict[str, dict[str, Tensor]]:
        """File -> name -> tensor: everything a checkpoint keeps, still on the device."""
        files = {"model.safetensors": {n: t for n, t in self.model.state_dict().items() if self.task.learns(n)}}
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
        return take(self.state(), self._buffers, on_device=self.device.type == "cuda")

    def load(self, folder: Path) -> None:
        self.load_weights({"model.safetensors": read_tensors(folder / "model.safetensors")}, folder)
        state = read_tensors(folder / "optimizer.safetensors")
        scaling = {name: state.pop(name) for name in list(state) if name.startswith("loss_scale/")}
        if self._scale is not None and scaling:  # none where the run had another precision until now
            self._scale.copy_(scaling["loss_scale/scale"])
            self._growth.copy_(scaling["loss_scale/growth"])
        self._ensure_state()
        compare(state, optimizers.state_tensors(self.optimizers, self._names), folder / "optimizer.safetensors")
        optimizers.load_state(self.optimizers, self._names, state)
        for file, tensors in (("ema.safetensors", self._average.tensors), ("state.safetensors", self._state)):
            if tensors:
                found = read_tensors(folder / file)
                compare(found, tensors, folder / file)
                for name, tensor in found.items():
                    tensors[name].copy_(tensor)
        self._poison.zero_()
        self._bad_steps.zero_()

    def load_weights(self, files: Mapping[str, Mapping[str, Tensor]], folder: Path) -> None:
        wanted = {
            "model.safetensors": {n: t for n, t in self.model.state_dict().items() if self.task.learns(n)},
            "ema.safetensors": {n: p for n, p in self.model.named_parameters() if p.requires_grad},
        }
        for file, tensors in files.items():
            compare(tensors, wanted[file], folder / file)
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

    def restart_average(self) -> None:
        self._average.restart()

    def forget_bad_steps(self) -> None:
        self._poison = torch.zeros_like(self._poison)
        self._bad_steps.zero_()

    def close(self) -> None:
        if dist.is_initialized():
            # The wrapper keeps the group alive; freed after it, the group would join threads that want the interpreter.
            self._called, self._train_models = None, {}
            gc.collect()  # it may be part of a cycle
            dist.destroy_process_group()
