"""GPU kernels of the state-space layer match plain torch."""

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


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize(
    ("rows", "length", "channels", "width"), [(2, 70, 100, 4), (1, 5, 130, 4), (2, 65, 64, 2), (1, 3, 16, 1)]
)
@pytest.mark.parametrize("packed", [False, True])
def test_convolution_kernel_matches_torch(rows: int, length: int, channels: int, width: int, packed: bool) -> None:
    layer = CausalConvolution(channels, width)
    initialise(layer, 0, residual_layers=1)
    layer.to(DEVICE)
    projected = normal(rows, length, channels + 24).requires_grad_()  # the layer passes a slice of it
    segments = (normal(rows, length, seed=1) > 1).cumsum(1) if packed else None
    outputs = []
    for fused in (True, False):
        x = projected[..., 8 : 8 + channels]
        if fused:
            y = layer.forward_fused(x, slice(0, channels), segments)
        else:
            y = F.silu(layer(F.pad(x, (0, 0, width - 1, 0)), segments=segments))
        outputs.append((y, *torch.autograd.grad(y, (projected, *layer.parameters()), normal(*y.shape, seed=2))))
    assert all(relative_error(actual, expected) < 1e-5 for actual, expected in zip(*outputs, strict=True))


@pytest.mark.parametrize(("rows", "size"), [(35, 96), (3, 64), (17, 512)])
def test_gated_norm_kernel_matches_torch(rows: int, size: int) -> None:
    layer = GatedRMSNorm(size, 1e-5).to(DEVICE)
    with torch.no_grad():
        layer.weight.copy_(normal(size, seed=3))
    x, gate = normal(1, rows, size).requires_grad_(), normal(1, rows, size + 8, seed=1).requires_grad_()
    outputs = []
    for compute in (layer.forward_fused, layer):
        y = compute(x, gate[..., :size])
        outputs.append((y, *torch.autograd.grad(y, (x, gate, layer.weight), normal(*y.shape, seed=2))))
    assert all(relative_error(actual, expected) < 1e-5 for actual, expected in zip(*outputs, strict=True))


@pytest.mark.parametrize(("length", "size", "states"), [(3, 2, 3), (37, 3, 5), (130, 8, 72)])
@pytest.mark.parametrize("has_resets", [False, True])
def test_state_passing_kernel_matches_torch(length: int, size: int, states: int, has_resets: bool) -> None:
    x, B, C = (normal(2, length, *s, seed=i) for i, s in enumerate(((4, size), (2, states), (2, states))))
    dt, A = 0.1 * normal(2, length, 4, seed=3).abs(), -normal(4, seed=4).abs()
    resets = normal(2, length, seed=5) > 1.5 if has_resets else None
    leaves = [t.requires_grad_() for t in (x, dt, A, B, C)]
    outputs = []
    for kernels in (True, False):
        y, last = scan_chunked(*leaves, chunk=8, resets=resets, use_kernels=kernels)
        outputs.append((y, last, *torch.autograd.grad(y.sin().sum() + last.cos().sum(), leaves)))
    assert all(relative_error(actual, expected) < 1e-5 for actual, expected in zip(*outputs, strict=True))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_layer_with_kernels_matches_torch(packed: bool, compiled: bool) -> None:
    layer = StateSpace(SSMShape(hidden_size=64, num_groups=2, chunk_size=32))
    initialise(layer, 0, std=0.1, residual_layers=1)
    layer.to(DEVICE)
    x = normal(2, 300, 64).requires_grad_()
    documents = (torch.arange(300, device=DEVICE) // 70).repeat(2, 1) if packed else None
    outputs = []
    for fused in (True, False):
        layer.has_kernels = fused
        torch.compiler.reset()
        module = torch.compile(layer, fullgraph=True, dynamic=False) if compiled and fused else layer
        y = module(x, documents=documents)[0]
        outputs.append((y, *torch.autograd.grad(y, (x, *layer.parameters()), normal(*y.shape, seed=2))))
    assert all(relative_error(actual, expected) < 5e-5 for actual, expected in zip(*outputs, strict=True))
