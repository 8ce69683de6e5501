"""What a run will need, predicted before it starts: parameters, memory, steps and disk. The trained model is not allocated."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bottega.config.load import get_global_batch_size
from bottega.config.recipe import Recipe
from bottega.config.training import Training
from bottega.core.types import Batch
from bottega.data.loading.loader import Loader
from bottega.data.sources.source import Source
from bottega.engines.backend import Backend, ModelPart, open_backend, resolve_precision
from bottega.engines.compile_choice import CompileChoice, choose_at_start
from bottega.measurements import MemoryPrediction, PredictionUnavailable, format_bytes
from bottega.run.checks import find_checkpoint_folder
from bottega.run.compose import build_plain_loader, count_total_steps, resolve_micro_batch_size
from bottega.techniques.training_plan import TrainingPlan
from bottega.world import World

MIN_SHOWN = 1 << 20
"""Bytes of the smallest category in the table."""
ALWAYS_SHOWN = ("weights", "gradients", "optimizer", "activations")


@dataclass(frozen=True)
class RunPrediction:
    """Predicted size of a run. The fields are keys of `prediction` in `bottega plan --json`."""

    device: str
    """The type of device: cpu, cuda or mps."""
    precision: str
    is_compiled: bool
    batch_size: int
    """Samples of a step on one process."""
    micro_batch_size: int
    """Samples of one forward pass."""
    steps: int
    samples: int
    epochs: float
    checkpoint_bytes: int
    """0 if the model can only be built with its weights."""
    num_checkpoints: int
    """Checkpoints on the disk at once: those that are kept, the best if there is validation data, and one that replaces another."""
    disk_free: int
    parts: list[ModelPart]
    model_memory: dict[str, int]
    """Bytes of weights, gradients, optimizer and averaged weights, as far as they are known without building the model."""
    memory: MemoryPrediction | None
    """Memory of a step at its peak; None if a step cannot be simulated."""
    available_memory: int | None
    """Memory that is free on the device; None if it is not here."""
    notes: list[str] = field(default_factory=list)

    @property
    def disk_bytes(self) -> int:
        """Disk space of all checkpoints."""
        return self.checkpoint_bytes * self.num_checkpoints

    def to_plain_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        memory = None if self.memory is None else self.memory._asdict()
        parts = [part._asdict() for part in self.parts]
        return {**self.__dict__, "parts": parts, "memory": memory, "disk_bytes": self.disk_bytes}


class MemoryPredictor:
    """Predicts the memory of a recipe's training step for other settings: micro-batch, precision, checkpointing."""

    def __init__(self, recipe: Recipe, plan: TrainingPlan, *, device_type: str) -> None:
        self.recipe, self.plan, self.device_type = recipe, plan, device_type
        self.backend: Backend = open_backend(recipe.engine)
        num_processes = World.from_environment().data_size
        self.batch_size = get_global_batch_size(recipe, num_processes) // num_processes
        self._batch: Batch | None = None
        self.loader: Loader = build_plain_loader(recipe, plan.training, data_size=num_processes, order=plan.order)
        self.num_steps = count_total_steps(recipe, self.loader)
        self.compile_choice = (
            CompileChoice(True)  # JAX has no other steps
            if recipe.engine == "jax"
            else choose_at_start(plan.task, recipe.training, device_type=device_type, num_steps=self.num_steps)
        )

    @property
    def batch(self) -> Batch:
        """The longest samples of the training data, because these decide what fits."""
        if self._batch is None:
            self._batch = build_longest_batch(self.plan.training, self.batch_size)
        return self._batch

    @property
    def evaluation_batch_size(self) -> int | None:
        """Samples that an evaluation computes at once; None if there is none, or if it follows the micro-batch of training."""
        return None if self.plan.validation is None else self.recipe.evaluation.batch_size

    def predict(self, training: Training, *, micro_batch_size: int | None) -> MemoryPrediction:
        """Return the memory at its peak; None as `micro_batch_size` is the whole batch."""
        return self.backend.predict_memory(
            self.plan.task,
            training.model_copy(update={"compile": self.compile_choice.is_compiled}),
            self.batch,
            seed=self.recipe.seed,
            device_type=self.device_type,
            micro_batch_size=micro_batch_size,
        )

    def resolve_precision(self, training: Training) -> str:
        """Return fp32, bf16 or fp16."""
        return resolve_precision(training, self.device_type)


def build_longest_batch(source: Source, size: int) -> Batch:
    """Return a batch of the `size` longest samples, because these decide what fits; the first ones if all have the same length."""
    by_length = source.length_order(len(source))
    order = np.arange(len(source)) if by_length is None else np.asarray(by_length)[::-1]
    index = order[np.arange(size) % len(order)]
    return source.rows(index, epoch=np.zeros(size, dtype=np.int64))


def predict_run(predictor: MemoryPredictor) -> RunPrediction:
    """Predict a run as its recipe says; what cannot be predicted is missing, with a note."""
    recipe, plan, backend = predictor.recipe, predictor.plan, predictor.backend
    training, notes = recipe.training, []
    memory: MemoryPrediction | None = None
    micro_batch_size = resolve_micro_batch_size(recipe)
    try:
        memory = predictor.predict(training, micro_batch_size=micro_batch_size)
    except PredictionUnavailable as reason:
        notes.append(f"the memory of activations is not predicted: {reason}; bottega plan --probe measures it")
    available = backend.find_available_memory(recipe.device)
    if memory is not None and available is not None and memory.peak > available:
        notes.append(
            f"training is predicted to need {format_bytes(memory.peak)}, but {format_bytes(available)} are free; "
            f"bottega plan --fit {max(1, available >> 30)}GiB device={predictor.device_type} says what fits"
        )
    if training.micro_batch_size == "auto":
        notes.append("training.micro_batch_size: auto lowers the micro-batch if this does not fit")
    if predictor.compile_choice.note is not None:
        notes.append(predictor.compile_choice.note)
    loader, steps = predictor.loader, predictor.num_steps
    estimate = backend.estimate_memory(plan.task, training, seed=recipe.seed)
    parts = backend.list_parts(plan.task, training, seed=recipe.seed)
    return RunPrediction(
        device=predictor.device_type,
        precision=predictor.resolve_precision(training),
        is_compiled=predictor.compile_choice.is_compiled,
        batch_size=predictor.batch_size,
        micro_batch_size=min(micro_batch_size or predictor.batch_size, predictor.batch_size),
        steps=steps,
        samples=steps * loader.batch_size,
        epochs=steps / max(loader.steps_per_epoch, 1e-9),
        checkpoint_bytes=estimate.checkpoint,
        num_checkpoints=recipe.checkpoint.keep + (1 if plan.validation is None else 2),
        disk_free=shutil.disk_usage(find_checkpoint_folder(recipe)).free,
        parts=parts,
        model_memory={
            "weights": estimate.weights,
            **({"gradients": estimate.gradients, "optimizer": estimate.optimizer} if parts else {}),
            **({"averaged weights": estimate.average} if estimate.average else {}),
        },
        memory=memory,
        available_memory=available,
        notes=notes,
    )


def format_prediction(prediction: RunPrediction) -> str:
    """Format a prediction for the terminal."""
    lines = [*_format_parts(prediction.parts), "", *_format_memory(prediction), ""]
    disk_free = f"{format_bytes(prediction.disk_free)} of disk are free"
    sizes = f"of {format_bytes(prediction.checkpoint_bytes)}, {format_bytes(prediction.disk_bytes)} in all"
    lines += [
        f"{'steps':<14}{prediction.steps:,} of {prediction.samples // prediction.steps:,} samples: {prediction.samples:,} samples, "
        f"{prediction.epochs:.3g} epochs",
        f"{'checkpoints':<14}{prediction.num_checkpoints} {sizes if prediction.checkpoint_bytes else 'of unknown size'}; {disk_free}",
    ]
    return "\n".join([*lines, *(f"note: {note}" for note in prediction.notes)])


def _format_parts(parts: list[ModelPart]) -> list[str]:
    """Return a table of the parameters of each model and of its parts."""
    lines = [f"{'parameters':<32}{'all':>18}{'trainable':>18}"] if parts else []
    for part in parts:
        name = part.model if part.part is None else f"  {part.part}"
        lines.append(f"{name:<32}{part.parameters:>18,}{part.trainable:>18,}")
    return lines


def _format_memory(prediction: RunPrediction) -> list[str]:
    memory = prediction.memory
    if memory is None:
        lines = [f"memory on {prediction.device}, without activations, which are not predicted"]
        return [*lines, *_format_categories(prediction.model_memory)]
    compiled = ", compiled" if prediction.is_compiled else ""
    size, batch_size = prediction.micro_batch_size, prediction.batch_size
    batch = f"batches of {batch_size}" if size == batch_size else f"micro-batches of {size}"
    lines = [f"memory at its peak on {prediction.device}, {prediction.precision}{compiled}, {batch}"]
    lines += _format_categories(memory.categories)
    return [*lines, f"  {'in all':<20}{format_bytes(memory.peak):>14}"]


def _format_categories(categories: Mapping[str, int]) -> list[str]:
    """Return a line for each category, without those too small to matter."""
    shown = {name: size for name, size in categories.items() if size >= MIN_SHOWN or name in ALWAYS_SHOWN}
    return [f"  {name:<20}{format_bytes(size):>14}" for name, size in shown.items()]
