"""State that changes without a gradient: once a step, from all of the batch, and not where the step is held back."""

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
from toy_task import Toy, advance, engine, loader, save, source, state, training

CHANGED = ("model.safetensors/shift", "state.safetensors/trace", "state.safetensors/last")


def after(steps: int, **options: object) -> dict[str, np.ndarray]:
    one = engine(training(optimizer={"name": "sgd"}), task=Remembering(), **options)  # type: ignore[arg-type]
    advance(one, loader(of=one), 0, steps)
    return state(one)


@pytest.mark.parametrize("micro", [1, 3])
def test_state_is_what_the_whole_batch_says_under_any_split(micro: int) -> None:
    whole, split = after(3), after(3, micro=micro)
    for name in whole:
        np.testing.assert_allclose(split[name], whole[name], rtol=1e-6, atol=1e-6, err_msg=name)
    assert all(np.abs(whole[name]).sum() > 0 for name in CHANGED)


def test_examples_come_in_the_order_of_the_batch() -> None:
    one = engine(task=Remembering(), micro=3)
    batches = loader(of=one)
    advance(one, batches, 0, 2)
    expected = batches.batch(1)["x"].mean(1)[-6:]
    np.testing.assert_allclose(state(one)["state.safetensors/last"], expected, rtol=1e-6)


def test_a_resumed_run_has_the_state_of_one_that_never_stopped(tmp_path: Path) -> None:
    straight, first, second = (engine(task=Remembering(), micro=3) for _ in range(3))
    advance(straight, loader(of=straight), 0, 6)
    advance(first, loader(of=first), 0, 2)
    second.load(save(first, tmp_path, 2))
    advance(second, loader(of=second), 2, 6)
    a, b = state(straight), state(second)
    assert [name for name in a if not np.array_equal(a[name], b[name])] == []


def test_a_step_that_is_held_back_changes_no_state() -> None:
    one = engine(task=Remembering())
    batches = loader(source(bad=11), of=one)
    bad = next(step for step in range(5) if not np.isfinite(batches.batch(step)["x"]).all())
    advance(one, batches, 0, bad)
    before = state(one)
    advance(one, batches, bad, bad + 1)
    after = state(one)
    assert [name for name in CHANGED if not np.array_equal(before[name], after[name])] == []


def test_what_the_update_says_of_a_weight_comes_after_the_optimizer() -> None:
    plain = engine(training(optimizer={"name": "sgd"}), task=Toy())
    advance(plain, loader(of=plain), 0, 1)
    expected = 0.99 * state(plain)["model.safetensors/head.bias"]
    np.testing.assert_allclose(after(1)["model.safetensors/head.bias"], expected, rtol=1e-6)


def test_two_ranks_have_the_state_of_one(two_ranks: Path) -> None:
    alone = after(3)
    together = [load_file(two_ranks / f"remembering.{rank}.safetensors") for rank in (0, 1)]
    for name in CHANGED:
        for one in together:
            np.testing.assert_allclose(one[name.replace("/", "|")], alone[name], rtol=1e-6, atol=1e-6, err_msg=name)


class Layered(Toy):
    """A layer and a part of it without weights count steps; what was drawn is told, too."""

    def specs(self) -> dict[str, ModelSpec]:
        return {"model": super().specs()["model"].changed(self._add_counts)}

    def _add_counts(self, models: Models, seed: int) -> None:
        first, inside = models["model"].first, torch.nn.Module()
        for module in (first, inside):
            module.register_buffer("steps", torch.zeros(()))
        first.add_module("inside", inside)
        models["model"].register_buffer("drawn", torch.zeros(2))

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        return super().loss(models, batch, rng)._replace(stats={"n": torch.ones(())})

    def update(self, tensors: Mapping[str, Array], seen: Mapping[str, Array], rng: Noise) -> Mapping[str, Array]:
        counted = {name: tensors[name] + 1 for name in ("first.steps", "first.inside.steps")}
        return {**counted, "drawn": torch.tensor([rng.seed, rng.step]), "first.bias": tensors["first.bias"] + 1}


def counted(**options: Any) -> list[float]:
    one = engine(training(**options), task=Layered(), seed=3)
    one.set_schedule(one.rate, total=8, steps_per_epoch=5)
    bias = one.model.first.bias.detach().clone()
    advance(one, loader(of=one), 0, 4)
    assert one.model.drawn.tolist() == [3, 3], "the seed and the last step"
    moved = float((one.model.first.bias.detach() - bias).mean().round())
    return [float(one.model.first.steps), float(one.model.first.inside.steps), moved]


def test_what_is_frozen_changes_nothing_and_what_is_thawed_later_changes_from_then_on() -> None:
    assert counted() == [4, 4, 4]
    assert counted(freeze=["first"]) == [0, 0, 0]
    assert counted(groups=[{"pattern": "first.*", "scale": None}, {"pattern": ".*"}]) == [0, 0, 0]
    assert counted(groups=[{"pattern": "first.*", "starts": "3 steps"}, {"pattern": ".*"}]) == [1, 1, 1]
    assert counted(groups=[{"pattern": "first.*", "scale": 0.0}, {"pattern": ".*"}]) == [4, 4, 4]
    assert counted(freeze=["second"]) == [4, 4, 4]


def test_only_the_rows_that_are_asked_for_are_kept() -> None:
    seen = BatchStats(["a"])
    for number in (1, 2):
        rows = {"a": torch.full((2,), number), "large": torch.zeros(2, 1000)}
        seen.add(Loss({}, rows=rows, stats={"n": torch.ones(())}), None)
    assert {name: value.tolist() for name, value in seen.reduce().items()} == {"n": 2, "a": [1, 1, 2, 2]}
    plain = BatchStats()
    plain.add(Loss({}, rows=rows), None)
    assert plain.reduce() == {}
