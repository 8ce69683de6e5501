"""The kernels of the state-space layer compute what plain torch computes. They need a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bottega.models.initial import initialise
from bottega.models.ssm.config import SSMShape
from bottega.models.ssm.scan import scan_chunked
from bottega.models.ssm.torch import CausalConvolution, GatedRMSNorm, StateSpace

pytest.importorskip("triton", reason="triton is not installed")
from bottega.models.ssm import kernel, scan_kernel  # noqa: F401

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

DEVICE = "cuda"


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def far(one: Tensor, other: Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max()).item()


@pytest.mark.parametrize(
    ("rows", "length", "channels", "width"), [(2, 70, 100, 4), (1, 5, 130, 4), (2, 65, 64, 2), (1, 3, 16, 1)]
)
@pytest.mark.parametrize("packed", [False, True])
def test_the_convolution(rows: int, length: int, channels: int, width: int, packed: bool) -> None:
    layer = CausalConvolution(channels, width)
    initialise(layer, 0, residual_layers=1)
    layer.to(DEVICE)
    whole = normal(rows, length, channels + 24).requires_grad_()  # a slice of it, as the layer has it
    segments = (normal(rows, length, seed=1) > 1).cumsum(1) if packed else None
    found = []
    for fused in (True, False):
        x = whole[..., 8 : 8 + channels]
        if fused:
            y = layer.fused(x, slice(0, channels), segments)
        else:
            y = F.silu(layer(F.pad(x, (0, 0, width - 1, 0)), segments=segments))
        found.append((y, *torch.autograd.grad(y, (whole, *layer.parameters()), normal(*y.shape, seed=2))))
    assert all(far(one, other) < 1e-5 for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(("rows", "size"), [(35, 96), (3, 64), (17, 512)])
def test_the_gated_norm(rows: int, size: int) -> None:
    layer = GatedRMSNorm(size, 1e-5).to(DEVICE)
    with torch.no_grad():
        layer.weight.copy_(normal(size, seed=3))
    x, whole = normal(1, rows, size).requires_grad_(), normal(1, rows, size + 8, seed=1).requires_grad_()
    found = []
    for form in (layer.fused, layer):
        y = form(x, whole[..., :size])
        found.append((y, *torch.autograd.grad(y, (x, whole, layer.weight), normal(*y.shape, seed=2))))
    assert all(far(one, other) < 1e-5 for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(("length", "size", "states"), [(3, 2, 3), (37, 3, 5), (130, 8, 72)])
@pytest.mark.parametrize("cut", [False, True])
def test_the_passing_of_states(length: int, size: int, states: int, cut: bool) -> None:
    x, B, C = (normal(2, length, *s, seed=i) for i, s in enumerate(((4, size), (2, states), (2, states))))
    dt, A = 0.1 * normal(2, length, 4, seed=3).abs(), -normal(4, seed=4).abs()
    resets = normal(2, length, seed=5) > 1.5 if cut else None
    leaves = [t.requires_grad_() for t in (x, dt, A, B, C)]
    found = []
    for kernels in (True, False):
        y, last = scan_chunked(*leaves, chunk=8, resets=resets, kernels=kernels)
        found.append((y, last, *torch.autograd.grad(y.sin().sum() + last.cos().sum(), leaves)))
    assert all(far(one, other) < 1e-5 for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_layer_is_the_same_with_kernels_and_without(packed: bool, compiled: bool) -> None:
    layer = StateSpace(SSMShape(hidden_size=64, num_groups=2, chunk_size=32))
    initialise(layer, 0, std=0.1, residual_layers=1)
    layer.to(DEVICE)
    x = normal(2, 300, 64).requires_grad_()
    documents = (torch.arange(300, device=DEVICE) // 70).repeat(2, 1) if packed else None
    found = []
    for fused in (True, False):
        layer.fused = fused
        torch.compiler.reset()
        form = torch.compile(layer, fullgraph=True, dynamic=False) if compiled and fused else layer
        y = form(x, documents=documents)[0]
        found.append((y, *torch.autograd.grad(y, (x, *layer.parameters()), normal(*y.shape, seed=2))))
    assert all(far(one, other) < 5e-5 for one, other in zip(*found, strict=True))
