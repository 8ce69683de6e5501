"""The layer over n-grams equals a dense matrix product, and a wide part adds its logits to those of a network."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bottega.models.text_classifier.config import EncoderShape, KimShape, NgramShape
from bottega.models.text_classifier.encoder.torch import TextClassifier, initialise_encoder
from bottega.models.text_classifier.kim.torch import Kim, initialise_kim
from bottega.models.text_classifier.ngrams import NgramClassifier, initialise_ngrams

B, L, N, K = 5, 7, 30, 3


def make_inputs() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    ids, weights = torch.randint(0, N, (B, L), generator=draw), torch.rand(B, L, generator=draw)
    weights[0] = 0  # a text without n-grams
    weights[1, 3:] = 0
    return ids, weights


def test_logits_and_gradients_equal_those_of_a_dense_product() -> None:
    ids, weights = make_inputs()
    model = NgramClassifier(NgramShape(num_buckets=N, num_labels=K))
    torch.nn.init.normal_(model.ngrams.weight)
    torch.nn.init.normal_(model.ngrams.bias)
    dense = torch.zeros(B, N).scatter_add_(1, ids, weights)
    table, bias = model.ngrams.weight.detach().clone().requires_grad_(), model.ngrams.bias.detach()
    expected = dense @ table + bias
    logits = model(ids, weights)
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(logits[0], bias)
    logits.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(model.ngrams.weight.grad, table.grad)


def test_neighbouring_buckets_share_a_row() -> None:
    ids, weights = make_inputs()
    shared = NgramClassifier(NgramShape(num_buckets=N, num_labels=K, buckets_per_row=4))
    assert shared.ngrams.weight.shape == (8, K)
    torch.nn.init.normal_(shared.ngrams.weight)
    torch.nn.init.normal_(shared.ngrams.bias)
    own = NgramClassifier(NgramShape(num_buckets=N, num_labels=K))
    own.load_state_dict(
        {
            "ngrams.weight": shared.ngrams.weight.repeat_interleave(4, dim=0)[:N],
            "ngrams.bias": shared.ngrams.bias,
        }
    )
    torch.testing.assert_close(shared(ids, weights), own(ids, weights))


def test_padding_has_no_influence() -> None:
    ids, weights = make_inputs()
    model = NgramClassifier(NgramShape(num_buckets=N, num_labels=K))
    torch.nn.init.normal_(model.ngrams.weight)
    torch.nn.init.zeros_(model.ngrams.bias)
    padded = torch.nn.functional.pad(ids, (0, 9)), torch.nn.functional.pad(weights, (0, 9))
    torch.testing.assert_close(model(*padded), model(ids, weights))


def test_weights_start_at_zero() -> None:
    model = NgramClassifier(NgramShape(num_buckets=N, num_labels=K))
    initialise_ngrams(model, 3)
    assert not any(parameter.any() for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["cnn", "transformer"])
def test_a_wide_part_adds_its_logits(kind: str) -> None:
    ids, weights = make_inputs()
    tokens, mask = torch.arange(B * 6).reshape(B, 6) % 11, torch.ones(B, 6, dtype=torch.bool)

    def build(num_buckets: int | None) -> Kim | TextClassifier:
        model: Kim | TextClassifier
        if kind == "cnn":
            sizes = {"embed_size": 4, "num_filters": 3, "dropout": 0.0}
            initialise_kim(model := Kim(KimShape(vocab_size=11, num_labels=K, num_buckets=num_buckets, **sizes)), 0)
        else:
            sizes = {"hidden_size": 8, "num_layers": 1, "num_heads": 2, "dropout": 0.0}
            shape = EncoderShape(vocab_size=11, num_labels=K, num_buckets=num_buckets, **sizes)
            initialise_encoder(model := TextClassifier(shape), 0, residual_layers=shape.num_layers)
        return model

    deep, both = build(None), build(N)
    logits = deep(tokens, mask)
    torch.testing.assert_close(both(tokens, mask, ids, weights), logits, msg="a wide part of zeros changes nothing")
    assert both.ngrams is not None
    torch.nn.init.normal_(both.ngrams.weight)
    torch.testing.assert_close(both(tokens, mask, ids, weights), logits + both.ngrams(ids, weights))
    assert {name for name in both.state_dict() if name not in deep.state_dict()} == {"ngrams.weight", "ngrams.bias"}
