"""GPU kernels match the plain implementation: linear cross-entropy, grouped experts, packed documents, prefixes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bottega.models.attention import attend, build_document_mask
from bottega.models.experts import dispatch
from bottega.models.frozen import prefix_attention
from bottega.models.losses.linear_cross_entropy import cap_logits, linear_cross_entropy

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [37, 512, 5003])
def test_linear_cross_entropy_matches_float64(vocab: int, dtype: torch.dtype, softcap: float | None) -> None:
    hidden = normal(70, 64, dtype=dtype).requires_grad_()
    weight = normal(vocab, 64, seed=1, dtype=dtype).mul_(0.2).requires_grad_()
    targets = torch.randint(0, vocab, (70,), generator=torch.Generator().manual_seed(2)).to("cuda")
    targets[::5] = -100
    total = linear_cross_entropy(hidden, weight, targets, chunk_rows=32, softcap=softcap)
    gradients = torch.autograd.grad(total, (hidden, weight))
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    logits = cap_logits(exact_inputs[0] @ exact_inputs[1].T, softcap)
    expected = F.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 6e-3}[dtype]
    assert abs(total.item() - expected.item()) <= tolerance * expected.item()
    for actual, exact in zip(gradients, torch.autograd.grad(expected, exact_inputs), strict=True):
        assert (actual.double() - exact).abs().max() <= tolerance * exact.abs().max()


@pytest.mark.parametrize("k", [1, 2])
def test_grouped_and_looped_experts_agree(k: int) -> None:
    experts, tokens, width, inner = 5, 60, 32, 48
    draw = torch.Generator().manual_seed(0)
    chosen = torch.stack([torch.randperm(experts - 1, generator=draw)[:k] for _ in range(tokens)]).to("cuda")
    stacks = [
        normal(experts, *size, seed=i, dtype=torch.bfloat16).mul_(0.2)
        for i, size in enumerate(((inner, width), (inner, width), (width, inner)))
    ]
    outputs = []
    for run in (dispatch.run_grouped, dispatch.run_loop):
        x = normal(tokens, width, seed=7, dtype=torch.bfloat16).requires_grad_()
        leaves = [stack.clone().requires_grad_() for stack in stacks]
        weights = normal(tokens, k, seed=8, dtype=torch.bfloat16)
        y = dispatch.dispatch_sorted(x, chosen, weights, tuple(leaves), run=run)
        outputs.append((y, *torch.autograd.grad(y.float().square().sum(), (x, *leaves))))
    for grouped, looped in zip(*outputs, strict=True):
        assert (grouped - looped).float().abs().max() <= 2e-2 * looped.float().abs().max()
    assert all(gradient[-1].abs().max() == 0 for gradient in outputs[0][2:]), "an expert without tokens has no gradient"


@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_flex_attention_of_documents_matches_a_mask(num_kv_heads: int) -> None:
    documents = (torch.arange(256, device="cuda") // 70).repeat(2, 1)
    outputs = []
    for flex in (True, False):
        q, k, v = (
            normal(2, n, 256, 32, seed=i).requires_grad_() for i, n in enumerate((4, num_kv_heads, num_kv_heads))
        )
        y = attend(q, k, v, mask=build_document_mask(documents, use_flex=flex), is_causal=True, dropout=0.0)
        outputs.append((y, *torch.autograd.grad(y.sin().sum(), (q, k, v))))
    for flexed, masked in zip(*outputs, strict=True):
        assert (flexed - masked).abs().max() <= 5e-3 * masked.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_queries_use_a_fused_kernel(dtype: torch.dtype) -> None:
    q, k, v = (normal(2, heads, 256, 32, seed=i, dtype=dtype).requires_grad_() for i, heads in enumerate((4, 2, 2)))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
        attend(q, k, v, mask=None, is_causal=True, dropout=0.0).sum().backward()  # raises if none of them applies


def test_causal_flash_attention_with_a_prefix_matches_a_mask() -> None:
    q, k, v = (
        normal(2, n, size, 32, seed=i, dtype=torch.bfloat16) for i, (n, size) in enumerate(((4, 9), (2, 14), (2, 14)))
    )
    actual = prefix_attention.causal_flash_attention(q, k, v, scale=None)
    mask = torch.ones(9, 14, dtype=torch.bool, device="cuda").tril(14 - 9)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    assert (actual - expected).float().abs().max() <= 2e-2 * expected.float().abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [96, 768])
def test_kernels_of_a_diffusion_transformer_compute_what_torch_does(width: int, dtype: torch.dtype) -> None:
    from bottega.models.dit import sampling_kernels

    x, delta = (normal(3, 10, width, seed=i, dtype=dtype) for i in (0, 1))
    # Slices of one projection, as in the model: rows are further apart than they are long.
    shift, scale, gate = normal(3, 1, 3 * width, seed=2, dtype=dtype).chunk(3, dim=-1)
    tolerance = 1e-5 if dtype is torch.float32 else 8e-3
    modulated = sampling_kernels.normalise_and_modulate(x, shift, scale, epsilon=1e-6)
    expected = F.layer_norm(x.double(), (width,), eps=1e-6) * (1 + scale.double()) + shift.double()
    assert modulated.dtype == dtype
    assert (modulated.double() - expected).norm() <= tolerance * expected.norm()
    total = sampling_kernels.add_gated(x, gate, delta)
    expected = x.double() + gate.double() * delta.double()
    assert (total.double() - expected).norm() <= tolerance * expected.norm()


def test_a_diffusion_transformer_without_gradients_predicts_what_it_is_trained_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from bottega.models.dit import torch as dit
    from bottega.models.generator.config import DiTShape

    shape = DiTShape(grid=(8, 8), patch=(2, 2), channels=3, hidden_size=96, num_layers=3, num_heads=4)
    model = dit.DiT(shape)
    for index, parameter in enumerate(model.parameters()):
        parameter.data = 0.2 * normal(*parameter.shape, seed=index).cpu()
    model = model.to("cuda").eval()
    inputs = normal(5, 8, 8, 3), torch.full((5,), 300.0, device="cuda")
    with torch.enable_grad():
        expected = model(*inputs, vector=normal(5, 96, seed=1)).detach()
    with torch.no_grad():
        assert dit._find_kernels(inputs[0]) is not None
        actual = model(*inputs, vector=normal(5, 96, seed=1))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
