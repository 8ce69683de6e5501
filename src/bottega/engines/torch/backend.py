"""The torch backend. Each method imports what it needs, so that ranks can join before slow modules are imported."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, final

import torch

from bottega.config.optimizers import OPTIMIZER_SPECS, describe_fallback
from bottega.config.training import Training
from bottega.core.engine import Engine
from bottega.core.errors import BottegaError
from bottega.core.task import Task
from bottega.core.types import Batch
from bottega.engines.backend import Backend, MemoryEstimate, ModelPart
from bottega.measurements import MemoryPrediction
from bottega.models.device import choose_device
from bottega.world import World


@final
class TorchBackend(Backend):
    """PyTorch, on CPU, CUDA and MPS."""

    def build_engine(self, task: Task, training: Training, **options: Any) -> Engine:
        from bottega.engines.torch.engine import TorchEngine

        options.pop("mesh", None)  # the processes that a launcher has started are the mesh

        return TorchEngine(task, training, **{"rate": lambda step: 0.0, **options})

    def read_tensors(self, path: Path) -> Mapping[str, Any]:
        from bottega.models.folders.tensors import read_tensors

        return read_tensors(path)

    def device_type(self, device: str) -> str:
        return choose_device(device).type

    def check_precision(self, precision: str, device: str) -> None:
        from bottega.engines.torch.devices import choose_precision

        choose_precision(precision, choose_device(device))

    def count_gpus(self) -> int:
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def limit_threads(self, count: int | None) -> None:
        if count is not None:
            torch.set_num_threads(count)

    def measure_matmul_rate(self, device: str, precision: str) -> float:
        from bottega.engines.torch import compute
        from bottega.engines.torch.devices import choose_precision

        chosen = choose_device(device)
        return compute.measure_matmul_rate(chosen, choose_precision(precision, chosen))

    def find_model_problems(self, task: Task, training: Training, *, seed: int) -> list[BottegaError]:
        from bottega.config.parameter_groups import resolve_parameter_settings
        from bottega.engines.torch.wrapping import require_attribute
        from bottega.models.build import build_meta_models

        problems: list[BottegaError] = []
        try:
            models = build_meta_models(task, seed)
        except BottegaError as error:
            return [error]
        if models is None:
            return []
        model = models["model"]
        try:
            resolve_parameter_settings(
                training, [name for name, _ in model.named_parameters()], is_trainable=task.is_trainable
            )
        except BottegaError as error:
            problems.append(error)
        if training.gradient_checkpointing:
            try:
                require_attribute(model, "checkpoint_blocks", "training.gradient_checkpointing")
            except BottegaError as error:
                problems.append(error)
        return problems

    def describe_optimizer(self, task: Task, training: Training, *, seed: int) -> list[str]:
        from bottega.config.parameter_groups import resolve_parameter_settings
        from bottega.models.build import build_meta_models

        models = (
            build_meta_models(task, seed)
            if OPTIMIZER_SPECS[training.optimizer.name].is_for_hidden_matrices_only
            else None
        )
        if models is None:
            return []
        parameters = dict(models["model"].named_parameters())
        settings = resolve_parameter_settings(training, list(parameters), is_trainable=task.is_trainable)
        # The scale of the learning rate is None for frozen parameters.
        trainable = {name: parameter for name, parameter in parameters.items() if settings[name].scale is not None}
        return describe_fallback(
            {name: parameter.dim() for name, parameter in trainable.items()}, training.optimizer.name
        )

    def estimate_memory(self, task: Task, training: Training, *, seed: int, is_frozen: bool = False) -> MemoryEstimate:
        from bottega.engines.torch import sizing

        return sizing.estimate_memory(task, training, seed=seed, is_frozen=is_frozen)

    def check_memory(self, estimate: MemoryEstimate, device: str) -> None:
        from bottega.engines.torch import sizing

        sizing.check_memory(estimate, choose_device(device))

    def list_parts(self, task: Task, training: Training, *, seed: int) -> list[ModelPart]:
        from bottega.engines.torch import sizing

        return sizing.list_parts(task, training, seed=seed)

    def predict_memory(self, task: Task, training: Training, batch: Batch, **options: Any) -> MemoryPrediction:
        from bottega.engines.torch import memory_prediction

        return memory_prediction.predict_memory(task, training, batch, **options)

    def find_available_memory(self, device: str) -> int | None:
        from bottega.engines.host_memory import get_available_memory

        try:
            chosen = choose_device(device)
        except BottegaError:
            return None
        return torch.cuda.mem_get_info(chosen)[0] if chosen.type == "cuda" else get_available_memory()

    def join_ranks(self, device: str) -> int:
        from bottega.engines.torch import ranks

        return ranks.join_group(choose_device(device), World.from_environment()).rank

    def any_rank(self, flag: bool) -> bool:
        from bottega.engines.torch import ranks

        return ranks.any_rank(flag)

    def watch_ranks(self, log: Path) -> AbstractContextManager[object]:
        from bottega.engines.torch import heartbeat

        return heartbeat.watch_ranks(log) or nullcontext()

    def describe_lost_rank(self, error: BaseException) -> str | None:
        from bottega.engines.torch import heartbeat, ranks

        if World.from_environment().size == 1 or not ranks.is_lost_peer(error):
            return None
        monitor = heartbeat.Heartbeat.current
        return monitor.describe_loss() if monitor is not None else "another rank was lost"
