"""Kim's network: padding has no effect, short texts work, and initial weights depend on seed and name."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bottega.models.text_classifier.config import KimShape
from bottega.models.text_classifier.kim.torch import Kim, initialise_kim

SHAPE = KimShape(vocab_size=30, num_labels=3, embed_size=8, num_filters=6, filter_sizes=(2, 3, 5), dropout=0.0)


def build_network(seed: int = 0, **changes: object) -> Kim:
    model = Kim(SHAPE.model_copy(update=changes))
    initialise_kim(model, seed)
    with torch.no_grad():
        for convolution in model.convolutions:
            convolution.bias.fill_(-0.01)  # so that an all-padding window has a distinct value
    return model.eval()


def draw_texts(lengths: list[int], *, padded_length: int, padding_id: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(1, 30, (len(lengths), 40), generator=draw)[:, :padded_length]
    mask = torch.arange(padded_length) < torch.tensor(lengths)[:, None]
    return words.where(mask, torch.tensor(padding_id)), mask


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(0, 12), st.integers(0, 29))
def test_padding_and_batch_have_no_effect(lengths: list[int], num_padding: int, padding_id: int) -> None:
    model = build_network()
    together = model(*draw_texts(lengths, padded_length=max(lengths) + num_padding, padding_id=padding_id))
    for i, length in enumerate(lengths):
        ids, mask = draw_texts(lengths, padded_length=max(lengths) + num_padding)
        alone = model(ids[i : i + 1, : max(1, length)], mask[i : i + 1, : max(1, length)])
        torch.testing.assert_close(together[i], alone[0], rtol=1e-6, atol=1e-6)


def test_max_pooling_covers_windows_inside_the_text_only() -> None:
    model = build_network()
    ids, mask = draw_texts([7], padded_length=12)
    x = model.embedding(ids[0, :7])
    expected = []
    for convolution, width in zip(model.convolutions, SHAPE.filter_sizes, strict=True):
        windows = torch.stack([x[i : i + width].T for i in range(7 - width + 1)])
        expected.append((torch.einsum("nek,fek->nf", windows, convolution.weight) + convolution.bias).amax(0))
    torch.testing.assert_close(model.features(ids, mask)[0], torch.cat(expected).relu(), rtol=1e-5, atol=1e-6)


def test_padding_window_never_wins_the_max() -> None:
    """With a bias of 1 an all-padding window scores 1, and every window of this text less."""
    model = build_network()
    with torch.no_grad():
        model.embedding.weight.fill_(1.0)
        for convolution in model.convolutions:
            convolution.bias.fill_(1.0)
            convolution.weight.fill_(-0.01)
    features = model.features(*draw_texts([6], padded_length=30))
    assert features.max().item() < 0.99
    torch.testing.assert_close(features[0, :6], torch.full((6,), 1 - 0.01 * 2 * 8))


def test_text_shorter_than_every_filter_has_features() -> None:
    model, mask = build_network(filter_sizes=(4, 5)), torch.ones(1, 1, dtype=torch.bool)
    first, second = (model.features(torch.tensor([[word]]), mask) for word in (3, 4))
    assert first.max() > 0
    assert not torch.equal(first, second)


def test_logits_are_the_head_of_the_features() -> None:
    model = build_network()
    ids, mask = draw_texts([7, 3], padded_length=7)
    assert model.features(ids, mask).shape == (2, SHAPE.num_features)
    torch.testing.assert_close(model.head(model.features(ids, mask)), model(ids, mask))


def test_initial_weights_are_a_function_of_seed_and_name() -> None:
    first, repeated, other = (build_network(seed, vocab_size=2000).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], repeated[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])
    assert first["embedding.weight"].std().item() == pytest.approx(0.1, rel=0.03)
    large = Kim(KimShape(vocab_size=10, num_labels=2))
    initialise_kim(large, 0)
    for convolution in large.convolutions:
        fan_in = math.prod(convolution.weight.shape[1:])
        assert convolution.weight.std().item() == pytest.approx(1 / math.sqrt(fan_in), rel=0.03)
        assert (convolution.bias == 0).all()


def test_checkpointing_changes_no_gradient() -> None:
    gradients = []
    for checkpoint_blocks in (False, True):
        model = build_network().train()
        model.checkpoint_blocks = checkpoint_blocks
        model(*draw_texts([7, 3], padded_length=9)).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_dropout_acts_in_training_only() -> None:
    model, (ids, mask) = build_network(dropout=0.5), draw_texts([7, 3], padded_length=9)
    assert torch.equal(model(ids, mask), model(ids, mask))
    model.train()
    assert not torch.equal(model(ids, mask), model(ids, mask))
