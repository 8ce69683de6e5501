"""The transformer classifier from scratch: padding has no effect, features depend on all tokens and their order, and initial
weights depend on the seed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from bottega.models.text_classifier.config import EncoderShape, KimShape, PretrainedShape, TextClassifierShape
from bottega.models.text_classifier.encoder.torch import TextClassifier, initialise_encoder

SHAPE = EncoderShape(
    vocab_size=30, num_labels=3, hidden_size=16, num_layers=2, num_heads=2, max_positions=24, dropout=0.0
)


def build_network(seed: int = 0, **changes: object) -> TextClassifier:
    model = TextClassifier(SHAPE.model_copy(update=changes))
    initialise_encoder(model, seed, residual_layers=model.shape.num_layers)
    return model.eval()


def draw_texts(lengths: list[int], *, padded_length: int, padding_id: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(1, 30, (len(lengths), 40), generator=torch.Generator().manual_seed(0))[:, :padded_length]
    mask = torch.arange(padded_length) < torch.tensor(lengths)[:, None]
    return words.where(mask, torch.tensor(padding_id)), mask


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 12), st.integers(0, 29))
def test_padding_and_batch_have_no_effect(lengths: list[int], num_padding: int, padding_id: int) -> None:
    model = build_network()
    with torch.no_grad():
        together = model(*draw_texts(lengths, padded_length=max(lengths) + num_padding, padding_id=padding_id))
        for i, length in enumerate(lengths):
            ids, mask = draw_texts(lengths, padded_length=max(lengths) + num_padding)
            alone = model(ids[i : i + 1, :length], mask[i : i + 1, :length])
            torch.testing.assert_close(together[i], alone[0], rtol=1e-6, atol=1e-6)


def test_empty_row_has_zero_features_and_finite_gradients() -> None:
    model = build_network().train()
    ids, mask = draw_texts([0, 4], padded_length=6)
    features = model.features(ids, mask)
    assert (features[0] == 0).all()
    model.head(features).square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_features_depend_on_all_tokens_and_their_order() -> None:
    model, mask = build_network(), torch.ones(1, 3, dtype=torch.bool)
    with torch.no_grad():
        original, reversed_order = (model.features(torch.tensor([ids]), mask) for ids in ([1, 2, 3], [3, 2, 1]))
    assert (original - reversed_order).abs().max() > 1e-3
    # Attention is bidirectional: the output at the first token has a gradient with respect to all tokens.
    x = model.embedding(torch.tensor([[4, 5, 6, 7]])).detach().requires_grad_()
    model.embedding.register_forward_hook(lambda module, args, out: x)
    outputs: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda module, args, out: outputs.append(out))
    model.features(torch.tensor([[4, 5, 6, 7]]), torch.ones(1, 4, dtype=torch.bool))
    outputs[0][0, 0].square().sum().backward()
    assert x.grad is not None
    assert (x.grad[0].abs().amax(1) > 1e-6).all(), "the first token does not attend to all tokens"


def test_logits_are_the_head_of_the_features() -> None:
    model = build_network()
    ids, mask = draw_texts([7, 3], padded_length=7)
    assert model.features(ids, mask).shape == (2, SHAPE.num_features)
    torch.testing.assert_close(model.head(model.features(ids, mask)), model(ids, mask))


def test_initial_weights_depend_on_the_seed_and_not_on_the_meta_device() -> None:
    first, other = build_network(0), build_network(1)
    with torch.device("meta"):
        materialised = TextClassifier(SHAPE)
    materialised.to_empty(device="cpu")
    initialise_encoder(materialised, 0, residual_layers=SHAPE.num_layers)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), materialised.parameters(), strict=True))
    assert not torch.equal(first.embedding.weight, other.embedding.weight)
    assert (first.norm.weight == 1).all()
    ids, mask = draw_texts([7, 3], padded_length=7)
    assert torch.equal(first(ids, mask), materialised.eval()(ids, mask)), "rotary tables are not recomputed"


def test_checkpointing_changes_no_gradient() -> None:
    gradients = []
    for checkpoint_blocks in (False, True):
        model = build_network(dropout=0.2, attention_dropout=0.2).train()
        model.checkpoint_blocks = checkpoint_blocks
        torch.manual_seed(0)
        model(*draw_texts([7, 3], padded_length=9)).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("key", ["dropout", "attention_dropout"])
def test_dropout_acts_in_training_only(key: str) -> None:
    model, (ids, mask) = build_network(**{key: 0.5}), draw_texts([7, 3], padded_length=9)
    assert torch.equal(model(ids, mask), model(ids, mask))
    model.train()
    assert not torch.equal(model(ids, mask), model(ids, mask))


def test_bf16_is_close_with_finite_gradients() -> None:
    model, (ids, mask) = build_network().train(), draw_texts([7, 3], padded_length=9)
    plain = model(ids, mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low_precision = model(ids, mask)
    torch.testing.assert_close(low_precision.float(), plain, rtol=0.1, atol=0.02)
    low_precision.float().square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_long_texts_and_indivisible_heads_are_refused() -> None:
    with pytest.raises(AssertionError, match="25 tokens exceed"):
        build_network()(torch.ones(1, 25, dtype=torch.long), torch.ones(1, 25, dtype=torch.bool))
    with pytest.raises(ValidationError, match="try hidden_size 96"):
        EncoderShape(vocab_size=10, num_labels=2, hidden_size=100, num_heads=8)


def test_shape_is_discriminated_by_its_kind() -> None:
    reader: TypeAdapter[TextClassifierShape] = TypeAdapter(TextClassifierShape)
    pretrained = PretrainedShape(config='{"model_type": "bert", "id2label": {"0": "a", "1": "b"}}')
    for shape in (SHAPE, KimShape(vocab_size=10, num_labels=2), pretrained):
        assert reader.validate_json(shape.model_dump_json()) == shape
    for config in ("[]", '{"id2label": {"0": "a", "1": "b"}}', '{"model_type": "bert"}', "no json"):
        with pytest.raises(ValidationError):
            PretrainedShape(config=config)
