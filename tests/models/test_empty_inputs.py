"""Layers on empty inputs: no tokens, no samples, no steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bottega.models.experts.config import ExpertsShape
from bottega.models.experts.torch import Experts, count_active_parameters
from bottega.models.spiking.config import SpikingShape
from bottega.models.spiking.units import LIF
from bottega.models.ssm.config import SSMShape
from bottega.models.ssm.scan import scan_chunked, scan_recurrent
from bottega.models.ssm.torch import StateSpace

D = 8


def test_ssm_state_is_unchanged_by_zero_tokens() -> None:
    layer = StateSpace(SSMShape(hidden_size=D, head_size=4, state_size=4))
    _, state = layer(torch.randn(2, 5, D), state=layer.empty(2, "cpu", torch.float32))
    assert state is not None
    out, after = layer(torch.zeros(2, 0, D), state=state)
    assert out.shape == (2, 0, D)
    assert after is not None
    assert torch.equal(after.conv, state.conv)
    assert torch.equal(after.ssm, state.ssm)
    assert layer(torch.zeros(2, 0, D))[0].shape == (2, 0, D)
    assert layer(torch.zeros(2, 0, D), documents=torch.zeros(2, 0))[0].shape == (2, 0, D)
    assert layer(torch.zeros(0, 5, D))[0].shape == (0, 5, D)


@pytest.mark.parametrize("has_state", [False, True])
def test_scans_of_zero_tokens_agree(has_state: bool) -> None:
    x, dt, A, B = torch.zeros(2, 0, 3, 4), torch.zeros(2, 0, 3), -torch.ones(3), torch.zeros(2, 0, 1, 5)
    state = torch.randn(2, 3, 4, 5) if has_state else None
    for y, after in (scan_recurrent(x, dt, A, B, B, state=state), scan_chunked(x, dt, A, B, B, chunk=4, state=state)):
        assert y.shape == x.shape
        assert torch.equal(after, torch.zeros(2, 3, 4, 5) if state is None else state)


def test_chunk_of_zero_is_refused() -> None:
    x = torch.zeros(1, 2, 1, 1)
    with pytest.raises(AssertionError, match="chunk must be 1 token or more, got 0"):
        scan_chunked(x, x[..., 0], -torch.ones(1), x, x, chunk=0)


@pytest.mark.parametrize(
    "options",
    [{}, {"capacity_factor": 1.0}, {"capacity": 2}, {"router": "spiking"}, {"num_shared": 1, "gate": "sigmoid"}],
    ids=str,
)
@pytest.mark.parametrize("size", [(0, D), (0, 3, D), (2, 0, D)], ids=str)
@pytest.mark.parametrize("has_mask", [False, True])
def test_experts_on_zero_tokens_give_zero_sums(options: dict[str, Any], size: tuple[int, ...], has_mask: bool) -> None:
    layer = Experts(ExpertsShape(hidden_size=D, expert_size=4, num_experts=4, top_k=2, **options))
    x = torch.zeros(size, requires_grad=True)
    out, routing = layer(x, token_mask=torch.zeros(size[:-1]) if has_mask else None)
    assert out.shape == size
    assert routing.chosen.shape == (*size[:-1], 2)
    sums = (routing.balance, routing.z, routing.dropped, routing.entropy, routing.tokens, *routing.load)
    assert [float(value.detach()) for value in sums] == [0.0] * 9
    (out.sum() + routing.balance + routing.z).backward()


def test_lif_without_time_steps_is_refused() -> None:
    with pytest.raises(AssertionError, match="LIF needs at least one time step"):
        LIF(SpikingShape())(torch.zeros(0, 2, 3))


@pytest.mark.parametrize("options", [{}, {"router": "spiking"}, {"num_shared": 2}, {"activation": "gelu"}], ids=str)
def test_active_parameters_match_the_shape(options: dict[str, Any]) -> None:
    shape = ExpertsShape(hidden_size=D, expert_size=4, num_experts=4, top_k=3, **options)
    layer = Experts(shape)
    assert count_active_parameters(layer) == shape.num_active_parameters()
    several = torch.nn.ModuleList([layer, Experts(shape), torch.nn.Linear(2, 2)])
    several[1].experts = layer.experts
    stack = sum(p.numel() for p in layer.experts.parameters())
    assert count_active_parameters(several) == 2 * shape.num_active_parameters() - stack * 3 // 4 + 6, (
        "shared parameters count once"
    )
