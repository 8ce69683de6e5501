"""State updated without a gradient: once a step, from the full batch, and not in skipped steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from bottega.core.model_spec import ModelSpec
from bottega.core.noise import Noise
from bottega.core.types import Array, Batch, Loss, Models
from bottega.engines.torch.state_updates import BatchStats
from toy_state import Remembering
from toy_task import Toy, copy_state, engine, loader, save_checkpoint, source, train_steps, training

CHANGED = ("model.safetensors/shift", "state.safetensors/trace", "state.safetensors/last")


def state_after(steps: int, **options: object) -> dict[str, np.ndarray]:
    torch_engine = engine(training(optimizer={"name": "sgd"}), task=Remembering(), **options)  # type: ignore[arg-type]
    train_steps(torch_engine, loader(of=torch_engine), 0, steps)
    return copy_state(torch_engine)


@pytest.mark.parametrize("micro", [1, 3])
def test_state_does_not_depend_on_the_micro_batch_split(micro: int) -> None:
    unsplit, split = state_after(3), state_after(3, micro=micro)
    for name in unsplit:
        np.testing.assert_allclose(split[name], unsplit[name], rtol=1e-6, atol=1e-6, err_msg=name)
    assert all(np.abs(unsplit[name]).sum() > 0 for name in CHANGED)


def test_state_update_receives_examples_in_batch_order() -> None:
    torch_engine = engine(task=Remembering(), micro=3)
    batches = loader(of=torch_engine)
    train_steps(torch_engine, batches, 0, 2)
    expected = batches.batch(1)["x"].mean(1)[-6:]
    np.testing.assert_allclose(copy_state(torch_engine)["state.safetensors/last"], expected, rtol=1e-6)


def test_resumed_state_is_bit_exact(tmp_path: Path) -> None:
    straight, first, second = (engine(task=Remembering(), micro=3) for _ in range(3))
    train_steps(straight, loader(of=straight), 0, 6)
    train_steps(first, loader(of=first), 0, 2)
    second.load(save_checkpoint(first, tmp_path, 2))
    train_steps(second, loader(of=second), 2, 6)
    a, b = copy_state(straight), copy_state(second)
    assert [name for name in a if not np.array_equal(a[name], b[name])] == []


def test_skipped_step_changes_no_state() -> None:
    torch_engine = engine(task=Remembering())
    batches = loader(source(bad=11), of=torch_engine)
    bad = next(step for step in range(5) if not np.isfinite(batches.batch(step)["x"]).all())
    train_steps(torch_engine, batches, 0, bad)
    before = copy_state(torch_engine)
    train_steps(torch_engine, batches, bad, bad + 1)
    after = copy_state(torch_engine)
    assert [name for name in CHANGED if not np.array_equal(before[name], after[name])] == []


def test_state_update_of_a_weight_runs_after_the_optimizer() -> None:
    plain = engine(training(optimizer={"name": "sgd"}), task=Toy())
    train_steps(plain, loader(of=plain), 0, 1)
    expected = 0.99 * copy_state(plain)["model.safetensors/head.bias"]
    np.testing.assert_allclose(state_after(1)["model.safetensors/head.bias"], expected, rtol=1e-6)


def test_two_ranks_have_the_state_of_one_process(two_ranks: Path) -> None:
    alone = state_after(3)
    ranks = [load_file(two_ranks / f"remembering.{rank}.safetensors") for rank in (0, 1)]
    for name in CHANGED:
        for tensors in ranks:
            np.testing.assert_allclose(tensors[name.replace("/", "|")], alone[name], rtol=1e-6, atol=1e-6, err_msg=name)


class StepCounts(Toy):
    """A layer and a submodule without weights count their updates; `drawn` records seed and step."""

    def specs(self) -> dict[str, ModelSpec]:
        return {"model": super().specs()["model"].with_change(self._add_counts)}

    def _add_counts(self, models: Models, seed: int) -> None:
        first, inner = models["model"].first, torch.nn.Module()
        for module in (first, inner):
            module.register_buffer("steps", torch.zeros(()))
        first.add_module("inside", inner)
        models["model"].register_buffer("drawn", torch.zeros(2))

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        return super().loss(models, batch, rng)._replace(stats={"n": torch.ones(())})

    def update(self, tensors: Mapping[str, Array], stats: Mapping[str, Array], rng: Noise) -> Mapping[str, Array]:
        counted = {name: tensors[name] + 1 for name in ("first.steps", "first.inside.steps")}
        return {**counted, "drawn": torch.tensor([rng.seed, rng.step]), "first.bias": tensors["first.bias"] + 1}


def count_updates(**options: Any) -> list[float]:
    torch_engine = engine(training(**options), task=StepCounts(), seed=3)
    torch_engine.set_schedule(torch_engine.rate, total=8, steps_per_epoch=5)
    bias = torch_engine.model.first.bias.detach().clone()
    train_steps(torch_engine, loader(of=torch_engine), 0, 4)
    assert torch_engine.model.drawn.tolist() == [3, 3], "not the seed and the last step"
    bias_change = float((torch_engine.model.first.bias.detach() - bias).mean().round())
    return [float(torch_engine.model.first.steps), float(torch_engine.model.first.inside.steps), bias_change]


def test_frozen_modules_are_not_updated_until_their_start() -> None:
    assert count_updates() == [4, 4, 4]
    assert count_updates(freeze=["first"]) == [0, 0, 0]
    assert count_updates(groups=[{"pattern": "first.*", "scale": None}, {"pattern": ".*"}]) == [0, 0, 0]
    assert count_updates(groups=[{"pattern": "first.*", "starts": "3 steps"}, {"pattern": ".*"}]) == [1, 1, 1]
    assert count_updates(groups=[{"pattern": "first.*", "scale": 0.0}, {"pattern": ".*"}]) == [4, 4, 4]
    assert count_updates(freeze=["second"]) == [4, 4, 4]


def test_batch_stats_collect_only_the_requested_rows() -> None:
    stats = BatchStats(["a"])
    for number in (1, 2):
        rows = {"a": torch.full((2,), number), "large": torch.zeros(2, 1000)}
        stats.add(Loss({}, rows=rows, stats={"n": torch.ones(())}), None)
    assert {name: value.tolist() for name, value in stats.reduce().items()} == {"n": 2, "a": [1, 1, 2, 2]}
    stats_without_rows = BatchStats()
    stats_without_rows.add(Loss({}, rows=rows), None)
    assert stats_without_rows.reduce() == {}
