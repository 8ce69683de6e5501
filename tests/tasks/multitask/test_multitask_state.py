"""State of several tasks: each part's own, and what they share once, by what all of them have seen."""

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
from toy_task import advance, engine, state, training


class Scaled(nn.Linear):
    """A layer with a buffer that a forward reads."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (1 + self.seen)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Scaled(), nn.Linear(3, 1)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.squeeze(-1)


def drawn(config: None, *, seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


class Counting(Task):
    """How many examples its layer has seen is a buffer of the layer, and a number of its own beside it."""

    def specs(self) -> dict[str, ModelSpec]:
        return {"model": ModelSpec(drawn, is_seeded=True)}

    def counts(self, batch: Batch) -> Mapping[str, float]:
        return {"loss": float(len(batch["x"]))}

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        wrong = (models["model"](batch["x"]) ** 2).sum()
        return Loss({"loss": (wrong, 1.0)}, stats={"n": torch.tensor(float(len(batch["x"])))})

    def state(self, parameters: Mapping[str, Array]) -> dict[str, Array]:
        return {"own": torch.zeros(())}

    def update(self, tensors: Mapping[str, Array], seen: Mapping[str, Array], rng: Noise) -> Mapping[str, Array]:
        return {"layers.0.seen": tensors["layers.0.seen"] + seen["n"], "own": tensors["own"] + seen["n"]}


def test_what_parts_share_is_changed_by_each_of_them() -> None:
    x = np.random.default_rng(0).standard_normal((16, 3), dtype=np.float32)
    task = Multitask(parts={"a": Counting(), "b": Counting()}, weights={"a": 1.0, "b": 1.0})
    one = engine(training(batch_size=4), task=task, micro=3)
    together = Zip({"a": ArraySource({"x": x}), "b": ArraySource({"x": x})})
    advance(one, Loader(together, 4, seed=0, order=Unshuffled(len(together))), 0, 2)
    found = state(one)
    assert found["model.safetensors/shared.layers.0.seen"] == 16, "eight examples for each of two parts"
    assert found["state.safetensors/a/own"] == found["state.safetensors/b/own"] == 8
    assert one.model.part("a").layers[0].seen == 16, "and both parts read the same"


class Listing(Counting):
    """Keeps what it was shown last."""

    update_inputs: ClassVar[tuple[str, ...]] = ("x",)

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        return super().loss(models, batch, rng)._replace(rows={"x": batch["x"], "more": batch["x"]})

    def update(self, tensors: Mapping[str, Array], seen: Mapping[str, Array], rng: Noise) -> Mapping[str, Array]:
        assert set(seen) == {"n", "x"}
        return {"own": seen["x"].sum(), "layers.0.seen": torch.tensor(rng.seed % 1000)}

    def batch_metrics(self, seen: Mapping[str, Array]) -> dict[str, Array]:
        return {"asked": seen["n"] / 2}


def test_a_part_is_shown_its_own_rows_that_count_and_draws_by_a_seed_of_its_own() -> None:
    task = Multitask(parts={"a": Listing(), "b": Counting()}, weights={"a": 1.0, "b": 1.0})
    assert set(task.update_inputs) == {"a/x", "a/counted"}
    x = torch.arange(12.0).view(4, 3)
    models, rng = build_models(task, 0), Noise(7, 0, torch.arange(4), torch)
    models["model"].train()
    tensors = {**dict(models["model"].named_buffers(remove_duplicate=False)), **task.state({})}
    for weight, expected in ((None, x), (torch.tensor([1.0, 0, 1, 0]), x[::2])):
        own = {"x": x} if weight is None else {"x": x, "weight": weight}
        seen = BatchStats(task.update_inputs)
        out = task.loss(models, {"a": own, "b": {"x": x}}, rng)
        assert ("a/counted" in out.rows) is (weight is not None), "where all count, nobody waits to select"
        seen.add(out, None)
        assert "a/more" not in seen.reduce()
        new = task.update(tensors, seen.reduce(), rng)
        assert new["a/own"] == expected.sum()
        assert task.batch_metrics(seen.reduce()) == {"a/asked": 2}
    own_seed = Listing().update({}, {"n": x, "x": x}, Noise(derive_seed("part", "a", 7), 0, ()))["layers.0.seen"]
    assert new["parts.b.layers.0.seen"] == own_seed + 4, "a's, and then b's four on top of it"
