"""Compute of a sample and the rate of the device: the figures, and that measuring them leaves no trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bottega.core.model_spec import Initial, ModelSpec
from bottega.core.noise import Noise
from bottega.core.types import Batch, Loss, Models
from bottega.engines.torch import compute
from contract.cases import CASES, Case, build
from toy_task import Toy, copy_state, engine, initialise, loader, train_steps, training

RATE = 1e9


@pytest.fixture(autouse=True)
def fixed_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate itself is measured in one test only."""
    monkeypatch.setattr(compute, "measure_matmul_rate", lambda device, dtype: RATE)


def test_flops_of_linear_layers_are_those_of_the_formula() -> None:
    """Two operations for each weight and position forward, four backward; the inputs of the first layer need no gradient."""
    toy = engine()
    positions, first, second, head = 5, 4 * 8, 8 * 8, 8
    expected = 2.0 * positions * (3 * (first + second + head) - first)
    assert toy.measure_compute(loader(of=toy).batch(0)) == {"flops_per_sample": expected, "matmul_rate": RATE}


def test_frozen_layers_have_no_weight_gradient() -> None:
    frozen = engine(training(groups=[{"pattern": "first.*", "scale": "none"}, {"pattern": ".*"}]))
    positions, first, second, head = 5, 4 * 8, 8 * 8, 8
    # The gradient ends at the gain of the norm after the frozen layer, so `second` still has both.
    expected = 2.0 * positions * (3 * (second + head) + first)
    assert frozen.measure_compute(loader(of=frozen).batch(0))["flops_per_sample"] == expected


@pytest.mark.parametrize("size", [1, 2, 8])
def test_flops_of_a_sample_do_not_depend_on_the_batch(size: int) -> None:
    toy = engine()
    batch = {name: array[:size] for name, array in loader(of=toy).batch(0).items()}
    assert toy.measure_compute(batch) == toy.measure_compute(loader(of=toy).batch(3))


class NormNet(nn.Module):
    """A model with buffers that its forward changes, and dropout."""

    def __init__(self, _: None) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x).flatten(0, 1)).unflatten(0, x.shape[:2])
        return self.head(nn.functional.dropout(hidden, 0.3, self.training)).squeeze(-1)


class WithBuffers(Toy):
    def specs(self) -> dict[str, ModelSpec]:
        return {"model": ModelSpec(NormNet, None, initial=Initial(initialise))}


@pytest.mark.parametrize("is_training", [True, False])
def test_measuring_changes_nothing(is_training: bool) -> None:
    toy = engine(training(ema=0.9), task=WithBuffers())
    batch = loader(of=toy).batch(0)
    toy.model.train(is_training)
    toy.model.get_submodule("norm").eval()  # a technique may fix part of a model
    state, generator = copy_state(toy), torch.get_rng_state()
    assert toy.measure_compute(batch)
    assert all(np.array_equal(state[name], array) for name, array in copy_state(toy).items())
    assert torch.equal(generator, torch.get_rng_state())
    assert all(p.grad is None for p in toy.model.parameters())
    assert toy.model.training is is_training
    assert not toy.model.get_submodule("norm").training


def test_training_is_equal_with_and_without_measuring() -> None:
    states = []
    for is_measured in (False, True):
        toy = engine(training(ema=0.9), task=Toy(dropout=0.3))
        if is_measured:
            assert toy.measure_compute(loader(of=toy).batch(0))
        train_steps(toy, loader(of=toy), 0, 4)
        states.append(copy_state(toy))
    assert all(np.array_equal(states[0][name], states[1][name]) for name in states[0])


class Uncountable(Toy):
    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        raise RuntimeError("an operation that the counter cannot follow")


def test_a_task_that_cannot_be_counted_has_no_figures() -> None:
    toy = engine(task=Uncountable())
    assert toy.measure_compute(loader(of=toy).batch(0)) == {}
    assert toy.model.training


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_task_is_counted(case: Case, tmp_path: Any) -> None:
    subject = build(case, tmp_path)
    before = subject.state()
    measured = subject.engine.measure_compute(subject.loader.batch(0))
    has_products = case.recipe != "classify"  # the weights of n-grams are looked up and added
    assert measured["flops_per_sample"] > 0 if has_products else measured == {}
    assert all(np.array_equal(before[name], array) for name, array in subject.state().items())


def test_rate_counts_two_operations_for_each_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    seconds = iter(range(1000))
    monkeypatch.setattr(compute.time, "perf_counter", lambda: float(next(seconds)))
    size = compute.MATRIX_SIZES["cpu"]
    assert compute.measure_matmul_rate(torch.device("cpu"), torch.float32) == 2.0 * size**3


@pytest.mark.parametrize(("micro_batch_size", "expected"), [(None, 2), (1, 1), (4, 2), ("auto", 1)])
def test_no_more_examples_than_a_micro_batch_are_counted(micro_batch_size: Any, expected: int) -> None:
    sizes = []

    class Sized(Toy):
        def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
            sizes.append(len(batch["x"]))
            return super().loss(models, batch, rng)

    micro = micro_batch_size if isinstance(micro_batch_size, int) else None
    toy = engine(training(micro_batch_size=micro_batch_size), task=Sized(), micro=micro)
    assert toy.measure_compute(loader(of=toy).batch(0))
    assert sizes == [expected]


def test_the_peak_memory_of_a_gpu_is_reset_even_if_measuring_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append(f"reset {device}"))
    toy = engine(task=Uncountable())
    monkeypatch.setattr(toy, "device", torch.device("cuda", 0))
    assert toy.measure_compute(loader(of=toy).batch(0)) == {}
    assert calls == ["empty", "reset cuda:0"]
