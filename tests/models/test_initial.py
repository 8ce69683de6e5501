"""Initial weights depend on seed and name only, whatever other modules exist and however the module was built."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from bottega.models.initial import initial_value, initialise


def build_network(*names: str) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.LayerNorm(64) if "norm" in name else nn.Linear(64, 96) for name in names})


def test_values_are_independent_of_order_other_modules_and_device() -> None:
    first, second = build_network("a", "b", "input_norm"), build_network("input_norm", "c", "b")
    with torch.device("meta"):
        third = build_network("b", "d")
    third.to_empty(device="cpu")
    for module in (first, second, third):
        initialise(module, 7, residual_layers=2)
    assert torch.equal(first["b"].weight, second["b"].weight)
    assert torch.equal(first["b"].weight, third["b"].weight)
    assert not torch.equal(first["a"].weight, first["b"].weight)
    initialise(third, 8, residual_layers=2)
    assert not torch.equal(first["b"].weight, third["b"].weight)


def test_values_follow_the_role_of_the_parameter() -> None:
    module = build_network("q_proj", "o_proj", "down_proj", "input_norm")
    initialise(module, 0, std=0.02, residual_layers=8)
    # 6,144 draws: three standard errors of a deviation are under 3 %.
    assert module["q_proj"].weight.std().item() == pytest.approx(0.02, rel=0.03)
    for name in ("o_proj", "down_proj"):
        assert module[name].weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.03)
    assert (module["input_norm"].weight == 1).all()
    assert (module["q_proj"].bias == 0).all()


def test_zero_residual_zeroes_what_writes_into_the_residual_stream_and_nothing_else() -> None:
    usual, zero = build_network("q_proj", "o_proj", "down_proj"), build_network("q_proj", "o_proj", "down_proj")
    initialise(usual, 0, residual_layers=2)
    initialise(zero, 0, residual_layers=2, zero_residual=True)
    assert torch.equal(zero["q_proj"].weight, usual["q_proj"].weight)
    for name in ("o_proj", "down_proj"):
        assert usual[name].weight.any()
        assert not zero[name].weight.any()
    stack = initial_value("mlp.experts.down_proj", (2, 4, 8), 0, residual_layers=1, zero_residual=True)
    assert not stack.any()
    assert initial_value("mlp.experts.up_proj", (2, 8, 4), 0, residual_layers=1, zero_residual=True).any()


def test_single_parameter_value_can_be_computed_alone() -> None:
    module = build_network("q_proj")
    initialise(module, 3, residual_layers=1)
    alone = initial_value("q_proj.weight", (96, 64), 3, residual_layers=1)
    assert (module["q_proj"].weight.detach().numpy() == alone).all()
