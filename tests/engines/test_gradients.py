"""Gradient surgery (PCGrad): the paper's formula in the order drawn for the step; and penalty gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bottega.core.noise import Noise, numpy_generator
from bottega.core.types import Batch, Loss, Models
from bottega.engines.torch.gradients import PCGrad, add_penalty, compute_norm_and_divisor
from bottega.engines.torch.optimizers import step_optimizers
from bottega.engines.torch.update_guard import UpdateGuard
from toy_task import Toy, engine, loader


def combine_gradients(
    rows: list[list[float]], *, seed: int = 0, step: int = 0, micro: int = 1
) -> tuple[np.ndarray, float]:
    """Combine the given gradients over two parameters of different shapes; return the result and the lowest cosine."""
    first, second = nn.Parameter(torch.zeros(1, dtype=torch.float64)), nn.Parameter(torch.zeros(2, 1).double())
    surgery = PCGrad([first, second])
    for _ in range(micro):
        weights = [torch.tensor(row, dtype=torch.float64) / micro for row in rows]
        surgery.backward({str(i): torch.cat((first, second.flatten())) @ w for i, w in enumerate(weights)})
    lowest_cosine = surgery.combine(seed=seed, step=step)
    assert first.grad is not None
    assert second.grad is not None
    return np.concatenate([first.grad.numpy(), second.grad.flatten().numpy()]), float(lowest_cosine)


def reference_pcgrad(rows: list[list[float]], order: list[list[int]]) -> np.ndarray:
    """Yu et al. (2020), algorithm 1: g_i -= (g_i . g_j) / |g_j|^2 g_j for each other j in turn where the product is negative."""
    gradients = [np.array(row) for row in rows]
    total = np.zeros(len(rows[0]))
    for i, gradient in enumerate(gradients):
        projected = gradient.copy()
        for j in order[i]:
            product = projected @ gradients[j]
            if product < 0:
                projected = projected - product / (gradients[j] @ gradients[j]) * gradients[j]
        total += projected
    return total


def draw_orders(count: int, *, seed: int, step: int) -> list[list[int]]:
    rng = numpy_generator(seed, "gradient order", step)
    return [list(rng.permutation([j for j in range(count) if j != i])) for i in range(count)]


CONFLICTING = [[1.0, 2.0, 0.5], [-2.0, 1.0, -0.25]]
AGREEING = [[1.0, 2.0, 0.5], [0.5, 1.0, 0.0]]
THREE = [[1.0, 2.0, 0.5], [-2.0, 1.0, -1.0], [0.5, -1.0, 0.5]]


def test_agreeing_gradients_are_summed() -> None:
    gradient, cosine = combine_gradients(AGREEING)
    np.testing.assert_allclose(gradient, np.sum(AGREEING, axis=0), rtol=0, atol=1e-15)
    assert cosine > 0


def test_conflicting_gradients_lose_their_component_along_each_other() -> None:
    gradient, cosine = combine_gradients(CONFLICTING)
    a, b = map(np.array, CONFLICTING)
    np.testing.assert_allclose(gradient, a - (a @ b) / (b @ b) * b + b - (a @ b) / (a @ a) * a, atol=1e-12)
    assert cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    assert cosine < 0
    # To first order, the step increases neither loss.
    assert gradient @ a >= -1e-12
    assert gradient @ b >= -1e-12


def test_opposite_gradients_cancel() -> None:
    gradient, cosine = combine_gradients([[1.0, 2.0, 3.0], [-1.0, -2.0, -3.0]])
    np.testing.assert_allclose(gradient, 0.0, atol=1e-12)
    assert cosine == pytest.approx(-1.0)


def test_zero_gradient_changes_nothing() -> None:
    gradient, cosine = combine_gradients([[1e-5, 2e-5, 3e-5], [0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(gradient, [1e-5, 2e-5, 3e-5])
    assert cosine == 0.0  # and not NaN, although the product of two small squares underflows


@pytest.mark.parametrize("step", range(4))
def test_three_gradients_are_projected_in_the_order_of_the_step(step: int) -> None:
    gradient, _ = combine_gradients(THREE, seed=3, step=step)
    np.testing.assert_allclose(gradient, reference_pcgrad(THREE, draw_orders(3, seed=3, step=step)), atol=1e-12)


def test_projection_order_depends_on_seed_and_step() -> None:
    once, again = combine_gradients(THREE, seed=3, step=1)[0], combine_gradients(THREE, seed=3, step=1)[0]
    np.testing.assert_array_equal(once, again)
    gradients = {
        tuple(np.round(combine_gradients(THREE, seed=seed, step=step)[0], 9)) for seed in range(3) for step in range(4)
    }
    assert len(gradients) > 1


def test_gradients_are_accumulated_over_micro_batches_before_projection() -> None:
    np.testing.assert_allclose(combine_gradients(THREE, micro=4)[0], combine_gradients(THREE)[0], atol=1e-12)


def test_parameter_unused_by_one_task_has_the_gradient_of_the_other() -> None:
    used, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    surgery = PCGrad([used, other])
    surgery.backward({"a": (used * torch.tensor([1.0, 2.0])).sum(), "b": (other * 3).sum()})
    surgery.combine(seed=0, step=0)
    assert used.grad is not None
    assert other.grad is not None
    assert used.grad.tolist() == [1.0, 2.0]
    assert other.grad.tolist() == [3.0, 3.0]


def test_penalty_gradient_is_added_with_the_loss_scale() -> None:
    parameter, frozen = nn.Parameter(torch.tensor([2.0])), nn.Parameter(torch.tensor([5.0]), requires_grad=False)
    parameter.grad = torch.tensor([1.0])
    penalty: Tensor = (parameter.square() + frozen).sum()
    add_penalty(penalty, [parameter, frozen], scale=torch.tensor(8.0))
    assert parameter.grad.tolist() == [1.0 + 8.0 * 4.0]
    assert frozen.grad is None


def test_penalty_of_frozen_parameters_changes_nothing() -> None:
    parameter, frozen = nn.Parameter(torch.tensor([2.0])), nn.Parameter(torch.tensor([5.0]), requires_grad=False)
    add_penalty(frozen.square().sum(), [parameter, frozen], scale=None)
    assert parameter.grad is None


class TwoTerms(Toy):
    """Two terms with conflicting gradients; terms of the same task are summed before surgery."""

    gradient_surgery: ClassVar[bool] = True
    term_names: tuple[str, str] = ("a/error", "a/mean")

    def counts(self, batch: Batch) -> Mapping[str, float]:
        return dict(zip(self.term_names, super().counts(batch).values(), strict=True))

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        error, mean = super().loss(models, batch, rng).terms.values()
        return Loss(dict(zip(self.term_names, (error, (-3 * mean[0], mean[1])), strict=True)))


def test_surgery_is_between_tasks_and_not_between_terms_of_one_task() -> None:
    plain = engine(task=TwoTermsWithoutSurgery())
    batch = loader(of=plain).batch(0)
    one_task, two_tasks = engine(task=TwoTerms()), engine(task=TwoTerms(term_names=("a/error", "b/error")))
    norms = [
        torch_engine.fetch(torch_engine.train_step(0, batch))["grad_norm"]
        for torch_engine in (plain, one_task, two_tasks)
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    assert norms[2] != pytest.approx(norms[0], rel=1e-3)


class TwoTermsWithoutSurgery(TwoTerms):
    gradient_surgery: ClassVar[bool] = False


@pytest.mark.parametrize("max_norm", [None, 1e6])
def test_divisor_is_the_scale_of_the_loss_even_if_the_scale_grows_in_this_step(max_norm: float | None) -> None:
    guard = UpdateGuard(torch.device("cpu"), torch.float16, continues=False)
    assert guard.scale is not None
    guard.growth.fill_(1999)  # the scale doubles after 2,000 steps without an overflow
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    guard.scale_loss(weight @ torch.tensor([3.0, 4.0])).backward()
    norm, divisor = compute_norm_and_divisor([weight], scale=guard.scale, max_norm=max_norm)
    scale_of_loss = float(guard.scale)
    skip_update = guard.check(norm, is_skipped=False)
    assert float(guard.scale) == 2 * scale_of_loss
    optimizer = torch.optim.SGD([weight], lr=1.0)
    step_optimizers([optimizer], divisor=divisor, skip_update=skip_update)
    assert weight.tolist() == [-2.0, -2.0]
