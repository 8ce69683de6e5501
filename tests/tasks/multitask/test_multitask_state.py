"""State updates of several tasks: each part's own state, and shared buffers updated by every part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from bottega.core.model_spec import ModelSpec
from bottega.core.noise import Noise, derive_seed
from bottega.core.task import Task
from bottega.core.types import Array, Batch, Loss, Models
from bottega.data.loading.loader import Loader
from bottega.data.sources.source import ArraySource
from bottega.data.sources.zip_sources import Unshuffled, Zip
from bottega.engines.torch.state_updates import BatchStats
from bottega.models.build import build_models
from bottega.tasks.multitask.task import Multitask
from toy_task import copy_state, engine, train_steps, training


class ScaledLinear(nn.Linear):
    """A layer with a buffer that a forward reads."""

    num_seen: Tensor

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("num_seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (1 + self.num_seen)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ScaledLinear(), nn.Linear(3, 1)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.squeeze(-1)


def build_net(config: None, *, seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


class Counting(Task):
    """A task that counts its examples in a buffer of the shared layer and in a state of its own."""

    def specs(self) -> dict[str, ModelSpec]:
        return {"model": ModelSpec(build_net, is_seeded=True)}

    def counts(self, batch: Batch) -> Mapping[str, float]:
        return {"loss": float(len(batch["x"]))}

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        loss = (models["model"](batch["x"]) ** 2).sum()
        return Loss({"loss": (loss, 1.0)}, stats={"n": torch.tensor(float(len(batch["x"])))})

    def state(self, parameters: Mapping[str, Array]) -> dict[str, Array]:
        return {"own": torch.zeros(())}

    def update(self, tensors: Mapping[str, Array], stats: Mapping[str, Array], rng: Noise) -> Mapping[str, Array]:
        return {"layers.0.num_seen": tensors["layers.0.num_seen"] + stats["n"], "own": tensors["own"] + stats["n"]}


def test_shared_buffers_are_updated_by_every_part() -> None:
    x = np.random.default_rng(0).standard_normal((16, 3), dtype=np.float32)
    task = Multitask(parts={"a": Counting(), "b": Counting()}, weights={"a": 1.0, "b": 1.0})
    trained = engine(training(batch_size=4), task=task, micro=3)
    together = Zip({"a": ArraySource({"x": x}), "b": ArraySource({"x": x})})
    train_steps(trained, Loader(together, 4, seed=0, order=Unshuffled(len(together))), 0, 2)
    tensors = copy_state(trained)
    assert tensors["model.safetensors/shared.layers.0.num_seen"] == 16, "eight examples for each of two parts"
    assert tensors["state.safetensors/a/own"] == tensors["state.safetensors/b/own"] == 8
    assert trained.model.part("a").layers[0].num_seen == 16, "both parts read the same buffer"


class RowReader(Counting):
    """A task whose update reads rows of the batch."""

    update_inputs: ClassVar[tuple[str, ...]] = ("x",)

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        return super().loss(models, batch, rng)._replace(rows={"x": batch["x"], "more": batch["x"]})

    def update(self, tensors: Mapping[str, Array], stats: Mapping[str, Array], rng: Noise) -> Mapping[str, Array]:
        assert set(stats) == {"n", "x"}
        return {"own": stats["x"].sum(), "layers.0.num_seen": torch.tensor(rng.seed % 1000)}

    def batch_metrics(self, stats: Mapping[str, Array]) -> dict[str, Array]:
        return {"half_count": stats["n"] / 2}


def test_update_gets_the_counted_rows_and_the_seed_of_its_part() -> None:
    task = Multitask(parts={"a": RowReader(), "b": Counting()}, weights={"a": 1.0, "b": 1.0})
    assert set(task.update_inputs) == {"a/x", "a/counted"}
    x = torch.arange(12.0).view(4, 3)
    models, rng = build_models(task, 0), Noise(7, 0, torch.arange(4), torch)
    models["model"].train()
    tensors = {**dict(models["model"].named_buffers(remove_duplicate=False)), **task.state({})}
    for weight, expected in ((None, x), (torch.tensor([1.0, 0, 1, 0]), x[::2])):
        own = {"x": x} if weight is None else {"x": x, "weight": weight}
        stats = BatchStats(task.update_inputs)
        out = task.loss(models, {"a": own, "b": {"x": x}}, rng)
        assert ("a/counted" in out.rows) is (weight is not None), "no selection where all rows count"
        stats.add(out, None)
        assert "a/more" not in stats.reduce()
        new = task.update(tensors, stats.reduce(), rng)
        assert new["a/own"] == expected.sum()
        assert task.batch_metrics(stats.reduce()) == {"a/half_count": 2}
    own_seed = RowReader().update({}, {"n": x, "x": x}, Noise(derive_seed("part", "a", 7), 0, ()))["layers.0.num_seen"]
    assert new["parts.b.layers.0.num_seen"] == own_seed + 4, "the value of a, plus the four examples of b"
