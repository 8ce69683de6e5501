"""The toy task with state: a buffer read by the forward pass, a running trace, and the last examples in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from bottega.core.model_spec import ModelSpec
from bottega.core.noise import Noise
from bottega.core.types import Array, Batch, Loss, Models
from toy_task import F, Net, Toy

LAST = 6


class Shifted(Net):
    shift: Tensor

    def __init__(self, dropout: float) -> None:
        super().__init__(dropout)
        self.register_buffer("shift", torch.zeros(F))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - self.shift)


class Remembering(Toy):
    update_inputs: ClassVar[tuple[str, ...]] = ("mean",)

    def specs(self) -> dict[str, ModelSpec]:
        return {"model": replace(super().specs()["model"], architecture=Shifted)}

    def state(self, parameters: Mapping[str, Array]) -> dict[str, Array]:
        return {"trace": torch.zeros(F), "last": torch.zeros(LAST, F)}

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        loss = super().loss(models, batch, rng)
        mean = batch["x"].mean(dim=1)
        stats = {"x": mean.sum(0), "n": torch.tensor(float(len(mean)))}
        return loss._replace(stats=stats, rows={"mean": mean})

    def update(self, tensors: Mapping[str, Array], batch_stats: Mapping[str, Array], rng: Noise) -> Mapping[str, Array]:
        trace = 0.9 * tensors["trace"] + batch_stats["x"] / batch_stats["n"]
        last = torch.cat((tensors["last"], batch_stats["mean"]))[-LAST:]
        return {"trace": trace, "shift": 0.1 * trace, "last": last, "head.bias": tensors["head.bias"] * 0.99}
