"""A toy task with two loss terms, ragged masks, noise and dropout: everything the engine supports, in a tiny model.

b: examples   T: positions of an example, of which `mask` selects some   F: features
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bottega.config.training import Training
from bottega.core import checkpoint
from bottega.core.model_spec import Initial, ModelSpec
from bottega.core.noise import Noise, numpy_generator
from bottega.core.task import Task
from bottega.core.types import Batch, Loss, Models
from bottega.data.loading.loader import Loader
from bottega.data.sources.source import ArraySource
from bottega.engines.torch.engine import TorchEngine

F, T = 4, 5


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(F, 8)
        self.norm = nn.LayerNorm(8)
        self.second = nn.Linear(8, 8)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.tanh(self.second(self.norm(self.first(x)))))).squeeze(-1)


def initialise(model: nn.Module, seed: int) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            drawn = numpy_generator(seed, name).standard_normal(p.shape, dtype=np.float32)
            p.copy_(torch.from_numpy(0.3 * drawn + float("norm.weight" in name)))


class Toy(Task):
    """Squared error over the masked positions, and a term over examples."""

    dropout: float = 0.0
    noise: float = 0.1

    def specs(self) -> dict[str, ModelSpec]:
        return {"model": ModelSpec(Net, self.dropout, initial=Initial(initialise))}

    def counts(self, batch: Batch) -> Mapping[str, float]:
        return {"error": float(np.asarray(batch["mask"]).sum()), "mean": float(len(batch["mask"]))}

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        mask = batch["mask"].float()
        x = batch["x"] + self.noise * rng.normal("x", (T, F))
        errors = (models["model"](x) - batch["y"]) ** 2 * mask
        means = errors.sum(dim=1) / mask.sum(dim=1)
        return Loss(
            terms={"error": (errors.sum(), 1.0), "mean": (means.sum(), 0.25)},
            metrics={"absolute": (errors.detach().sqrt().sum(), mask.sum())},
        )


def source(*, samples: int = 40, bad: int | None = None) -> ArraySource:
    """Return random samples; sample number `bad` contains an infinity."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((samples, T, F), dtype=np.float32)
    lengths = rng.integers(1, T + 1, samples)
    y = np.sin(x.sum(-1))
    if bad is not None:
        x[bad, 0, 0] = np.inf
    return ArraySource({"x": x, "y": y, "mask": np.arange(T) < lengths[:, None]})


def training(**changes: Any) -> Training:
    defaults = {"max_steps": 8, "batch_size": 8, "learning_rate": 1e-2, "mixed_precision": "fp32"}
    return Training.model_validate({**defaults, **changes})


def engine(
    options: Training | None = None,
    *,
    task: Task | None = None,
    micro: int | None = None,
    rate: Callable[[int], float] | None = None,
    **more: Any,
) -> TorchEngine:
    options = options or training()
    return TorchEngine(
        task or Toy(),
        options,
        rate=rate or (lambda step: options.learning_rate / (1 + 0.1 * step)),
        device="cpu",
        micro_batch_size=micro,
        **more,
    )


def loader(data: ArraySource | None = None, *, of: TorchEngine, batch_size: int = 8, workers: int = 0) -> Loader:
    return Loader(data or source(), batch_size, seed=0, data_rank=of.data_rank, data_size=of.data_size, workers=workers)


def train_steps(toy_engine: TorchEngine, batches: Loader, start: int, stop: int) -> list[dict[str, float]]:
    """Train from step `start` up to `stop`; return the report of each step."""
    stream = batches(start)
    reports = [toy_engine.fetch(toy_engine.train_step(step, next(stream))) for step in range(start, stop)]
    stream.close()
    return reports


def copy_state(toy_engine: TorchEngine) -> dict[str, np.ndarray]:
    """Return a copy of everything in a checkpoint, as `file/name` -> array."""
    return {
        f"{file}/{name}": tensor.detach().numpy().copy()
        for file, tensors in toy_engine.state().items()
        for name, tensor in tensors.items()
    }


def save_checkpoint(
    toy_engine: TorchEngine, folder: Path, step: int, progress: Mapping[str, Any] | None = None
) -> Path:
    return checkpoint.write(
        folder, step=step, files=toy_engine.snapshot().files(), progress=progress or {"step": step}, fingerprint={}
    )
