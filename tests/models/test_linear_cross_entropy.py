"""The fused head and loss equals cross-entropy in value and gradient, and never holds more than a chunk of logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bottega.models.losses import linear_cross_entropy as module
from bottega.models.losses.linear_cross_entropy import cap_logits, linear_cross_entropy

D, V = 16, 37


def draw_example(rows: int, *, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, D, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, D, generator=generator, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(0, V, (rows,), generator=generator)


def reference_loss(hidden: Tensor, weight: Tensor, targets: Tensor, *, softcap: float | None = None) -> Tensor:
    logits = hidden @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize(("rows", "chunk"), [(1, 4), (3, 4), (4, 4), (5, 4), (8, 4), (9, 1), (9, None)])
def test_equals_cross_entropy(
    rows: int, chunk: int | None, ignored: str, dtype: torch.dtype, softcap: float | None
) -> None:
    hidden, weight, targets = draw_example(rows, dtype=dtype)
    if ignored != "none":
        targets[:: 2 if ignored == "some" else 1] = -100
    expected = reference_loss(hidden, weight, targets, softcap=softcap)
    expected_gradients = torch.autograd.grad(expected * 3.5, (hidden, weight))
    total = linear_cross_entropy(hidden, weight, targets, chunk_rows=chunk, softcap=softcap)
    gradients = torch.autograd.grad(total * 3.5, (hidden, weight))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(total, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradients, expected_gradients, rtol=tolerance, atol=tolerance)


def test_a_cap_keeps_large_logits_of_half_precision_apart() -> None:
    logits = torch.arange(20, 40, dtype=torch.bfloat16)
    capped = cap_logits(logits, 15.0)
    assert capped.dtype is torch.float32
    assert (capped.diff() > 0).all()
    assert capped.max() < 15
    assert cap_logits(logits, None) is logits


def test_only_trainable_inputs_get_a_gradient() -> None:
    hidden, weight, targets = draw_example(6)
    for frozen, trained in ((hidden, weight), (weight, hidden)):
        frozen.requires_grad_(False)
        linear_cross_entropy(hidden, weight, targets).backward()
        assert frozen.grad is None
        assert trained.grad is not None
        frozen.requires_grad_(True)
        trained.grad = None


def test_evaluation_computes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = draw_example(6)
    gradient_flags = []
    original = module._compute_losses_and_gradient

    def spy(*args: Tensor, with_gradient: bool, **options: Any) -> None:
        gradient_flags.append(with_gradient)
        original(*args, with_gradient=with_gradient, **options)

    monkeypatch.setattr(module, "_compute_losses_and_gradient", spy)
    with torch.no_grad():
        total = linear_cross_entropy(hidden, weight, targets)
    assert gradient_flags == [False]
    assert not total.requires_grad
    torch.testing.assert_close(total, reference_loss(hidden, weight, targets).detach())


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements of any operation's result."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_logits_never_exceed_a_chunk() -> None:
    rows, vocab, chunk = 512, 128, 16
    hidden = torch.randn(rows, 4, requires_grad=True)
    weight = torch.randn(vocab, 4, requires_grad=True)
    with LargestTensor() as largest:
        linear_cross_entropy(hidden, weight, torch.randint(0, vocab, (rows,)), chunk_rows=chunk).backward()
    assert largest.elements == chunk * vocab
    with LargestTensor() as largest:
        reference_loss(hidden, weight, torch.randint(0, vocab, (rows,))).backward()
    assert largest.elements == rows * vocab, "the recorder sees full logits"


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("rows", [1, 100, 5000, 65536])
def test_chosen_chunk_fits_the_byte_budget_of_its_device(device_type: str, rows: int) -> None:
    chunk_rows = module._choose_chunk_rows(rows, 50304, itemsize=2, device_type=device_type)
    assert 1 <= chunk_rows * 50304 * 2 <= module.CHUNK_BYTES[device_type]


def test_autocast_keeps_the_master_gradient_in_float32() -> None:
    hidden, weight, targets = draw_example(8, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total = linear_cross_entropy(hidden.bfloat16(), weight, targets)
    total.backward()
    assert total.dtype == torch.float32
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert hidden.grad is not None
    torch.testing.assert_close(total, reference_loss(hidden.bfloat16().float(), weight, targets), rtol=1e-5, atol=1e-5)
