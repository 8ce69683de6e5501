"""Gradients of terms that must not fight: the formula of the paper, in the order drawn for the step, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bottega.core.noise import Noise, numpy_generator
from bottega.core.types import Batch, Loss, Models
from bottega.engines.torch.gradients import PCGrad, add_penalty
from toy_task import Toy, engine, loader


def settled(rows: list[list[float]], *, seed: int = 0, step: int = 0, micro: int = 1) -> tuple[np.ndarray, float]:
    """The gradient that terms with these gradients come to, over two parameters of unlike shape, and the worst cosine."""
    first, second = nn.Parameter(torch.zeros(1, dtype=torch.float64)), nn.Parameter(torch.zeros(2, 1).double())
    apart = PCGrad([first, second])
    for _ in range(micro):
        weights = [torch.tensor(row, dtype=torch.float64) / micro for row in rows]
        apart.backward({str(i): torch.cat((first, second.flatten())) @ w for i, w in enumerate(weights)})
    worst = apart.combine(seed=seed, step=step)
    assert first.grad is not None
    assert second.grad is not None
    return np.concatenate([first.grad.numpy(), second.grad.flatten().numpy()]), float(worst)


def by_the_paper(rows: list[list[float]], order: list[list[int]]) -> np.ndarray:
    """Yu et al. (2020), algorithm 1: g_i -= (g_i . g_j) / |g_j|^2 g_j, for the others in turn, where they disagree."""
    gradients = [np.array(row) for row in rows]
    total = np.zeros(len(rows[0]))
    for i, own in enumerate(gradients):
        changed = own.copy()
        for j in order[i]:
            product = changed @ gradients[j]
            if product < 0:
                changed = changed - product / (gradients[j] @ gradients[j]) * gradients[j]
        total += changed
    return total


def orders(count: int, *, seed: int, step: int) -> list[list[int]]:
    rng = numpy_generator(seed, "gradient order", step)
    return [list(rng.permutation([j for j in range(count) if j != i])) for i in range(count)]


OPPOSED = [[1.0, 2.0, 0.5], [-2.0, 1.0, -0.25]]
AGREED = [[1.0, 2.0, 0.5], [0.5, 1.0, 0.0]]
THREE = [[1.0, 2.0, 0.5], [-2.0, 1.0, -1.0], [0.5, -1.0, 0.5]]


def test_two_that_agree_are_added_up() -> None:
    found, cosine = settled(AGREED)
    np.testing.assert_allclose(found, np.sum(AGREED, axis=0), rtol=0, atol=1e-15)
    assert cosine > 0


def test_two_that_disagree_lose_what_is_along_the_other() -> None:
    found, cosine = settled(OPPOSED)
    a, b = map(np.array, OPPOSED)
    np.testing.assert_allclose(found, a - (a @ b) / (b @ b) * b + b - (a @ b) / (a @ a) * a, atol=1e-12)
    assert cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    assert cosine < 0
    # Neither of the two is worse off for the step, to first order.
    assert found @ a >= -1e-12
    assert found @ b >= -1e-12


def test_exactly_opposite_ones_cancel() -> None:
    found, cosine = settled([[1.0, 2.0, 3.0], [-1.0, -2.0, -3.0]])
    np.testing.assert_allclose(found, 0.0, atol=1e-12)
    assert cosine == pytest.approx(-1.0)


def test_a_term_without_a_gradient_changes_nothing() -> None:
    found, cosine = settled([[1e-5, 2e-5, 3e-5], [0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(found, [1e-5, 2e-5, 3e-5])
    assert cosine == 0.0  # and no number at all where the product of two small squares would vanish


@pytest.mark.parametrize("step", range(4))
def test_three_meet_each_other_in_the_order_of_the_step(step: int) -> None:
    found, _ = settled(THREE, seed=3, step=step)
    np.testing.assert_allclose(found, by_the_paper(THREE, orders(3, seed=3, step=step)), atol=1e-12)


def test_the_order_is_of_seed_and_step_and_matters() -> None:
    once, again = settled(THREE, seed=3, step=1)[0], settled(THREE, seed=3, step=1)[0]
    np.testing.assert_array_equal(once, again)
    found = {tuple(np.round(settled(THREE, seed=seed, step=step)[0], 9)) for seed in range(3) for step in range(4)}
    assert len(found) > 1


def test_micro_batches_are_one_gradient_before_they_are_compared() -> None:
    np.testing.assert_allclose(settled(THREE, micro=4)[0], settled(THREE)[0], atol=1e-12)


def test_a_parameter_that_a_term_has_no_use_for() -> None:
    used, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    apart = PCGrad([used, other])
    apart.backward({"a": (used * torch.tensor([1.0, 2.0])).sum(), "b": (other * 3).sum()})
    apart.combine(seed=0, step=0)
    assert used.grad is not None
    assert other.grad is not None
    assert used.grad.tolist() == [1.0, 2.0]
    assert other.grad.tolist() == [3.0, 3.0]


def test_a_penalty_is_added_once_and_scaled_as_the_loss_was() -> None:
    parameter, frozen = nn.Parameter(torch.tensor([2.0])), nn.Parameter(torch.tensor([5.0]), requires_grad=False)
    parameter.grad = torch.tensor([1.0])
    penalty: Tensor = (parameter.square() + frozen).sum()
    add_penalty(penalty, [parameter, frozen], scale=torch.tensor(8.0))
    assert parameter.grad.tolist() == [1.0 + 8.0 * 4.0]
    assert frozen.grad is None


def test_a_penalty_of_what_is_frozen_changes_nothing() -> None:
    parameter, frozen = nn.Parameter(torch.tensor([2.0])), nn.Parameter(torch.tensor([5.0]), requires_grad=False)
    add_penalty(frozen.square().sum(), [parameter, frozen], scale=None)
    assert parameter.grad is None


class Halves(Toy):
    """The terms of one task are on one side: they are added up before anybody is asked to give way."""

    gradient_surgery: ClassVar[bool] = True
    named: tuple[str, str] = ("a/error", "a/mean")

    def counts(self, batch: Batch) -> Mapping[str, float]:
        return dict(zip(self.named, super().counts(batch).values(), strict=True))

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        error, mean = super().loss(models, batch, rng).terms.values()
        return Loss(dict(zip(self.named, (error, (-3 * mean[0], mean[1])), strict=True)))


def test_only_tasks_are_reconciled_and_not_the_terms_of_one() -> None:
    plain = engine(task=Plainly())
    batch = loader(of=plain).batch(0)
    one, two = engine(task=Halves()), engine(task=Halves(named=("a/error", "b/error")))
    found = [of.fetch(of.train_step(0, batch))["grad_norm"] for of in (plain, one, two)]
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] != pytest.approx(found[0], rel=1e-3)


class Plainly(Halves):
    gradient_surgery: ClassVar[bool] = False
