"""Muon: its iteration sets singular values to about 1, its steps are those of torch.optim.Muon, and a bad step changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bottega.engines.torch import muon
from bottega.engines.torch.muon import Muon, orthogonalise

SHAPES = ((16, 16), (24, 8), (8, 24), (16, 16), (24, 8))


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def build_parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(0.1 * draw(*shape, seed=i)) for i, shape in enumerate(SHAPES)]


def set_gradients(parameters: list[torch.nn.Parameter], step: int) -> None:
    for i, p in enumerate(parameters):
        p.grad = draw(*p.shape, seed=100 * (step + 1) + i)


def build_optimizer(parameters: list[torch.nn.Parameter], *, nesterov: bool = True) -> Muon:
    return Muon(parameters, lr=0.01, momentum=0.9, nesterov=nesterov, weight_decay=0.1)


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 40, 8), (2, 8, 40)])
def test_singular_values_become_about_one(shape: tuple[int, ...]) -> None:
    matrices = draw(*shape, seed=0)
    result = orthogonalise(matrices)
    values = torch.linalg.svdvals(result)
    assert 0.3 < values.min() < values.max() < 1.3
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    cosine = (result * (left @ right)).sum() / result.norm() / (left @ right).norm()
    assert cosine > 0.97, "the singular vectors stay"


def test_zero_matrix_stays_zero() -> None:
    assert (orthogonalise(torch.zeros(1, 4, 4)) == 0).all()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("max_elements", [1, 1 << 25])
def test_steps_are_those_of_torch(nesterov: bool, max_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the precision of bfloat16, in which torch iterates."""
    monkeypatch.setattr(muon, "MAX_BATCH_ELEMENTS", max_elements)
    ours, theirs = build_parameters(), build_parameters()
    optimizer = build_optimizer(ours, nesterov=nesterov)
    reference = torch.optim.Muon(
        theirs, lr=0.01, momentum=0.9, nesterov=nesterov, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(3):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        optimizer.step()
        reference.step()
    for initial, a, b in zip(build_parameters(), ours, theirs, strict=True):
        assert (a - b).norm() <= 2e-2 * (b - initial).norm()
        torch.testing.assert_close(optimizer.state[a]["momentum_buffer"], reference.state[b]["momentum_buffer"])


def test_gradients_are_divided_before_they_enter_the_momentum() -> None:
    clipped, scaled = build_parameters(), build_parameters()
    optimizers = [build_optimizer(parameters) for parameters in (clipped, scaled)]
    for step in range(2):
        set_gradients(clipped, step)
        set_gradients(scaled, step)
        for p in scaled:
            assert p.grad is not None
            p.grad *= 4.0
        optimizers[1].grad_scale = torch.tensor(4.0)
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(clipped, scaled, strict=True):
        torch.testing.assert_close(a, b)


def test_skipped_step_changes_no_bit() -> None:
    parameters = build_parameters()
    optimizer = build_optimizer(parameters)
    set_gradients(parameters, 0)
    optimizer.step()
    before = [(p.detach().clone(), optimizer.state[p]["momentum_buffer"].clone()) for p in parameters]
    for p in parameters:
        p.grad = torch.full_like(p, torch.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    for p, (weight, momentum) in zip(parameters, before, strict=True):
        assert torch.equal(p, weight)
        assert torch.equal(optimizer.state[p]["momentum_buffer"], momentum)
