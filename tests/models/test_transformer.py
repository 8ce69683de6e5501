"""The language model: names, parameter counts, causality, and that caching, packing and compilation change nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from bottega.core.errors import UsageError
from bottega.models.attention import attend
from bottega.models.decoder.config import DOCUMENTED_PARAMETERS, SIZES, TransformerShape, shape_for_size
from bottega.models.decoder.torch import DecoderCache, Transformer, compute_rotary_tables
from bottega.models.device import simulated_device
from bottega.models.initial import initialise
from decoders import compile_and_count

V, T = 61, 24


def small_shape(**changes: Any) -> TransformerShape:
    fields: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 8,
        "intermediate_size": 48,
        "vocab_size": V,
        "context": 32,
    }
    return TransformerShape(**{**fields, **changes})


def small_model(*, seed: int = 0, std: float = 0.2, **changes: Any) -> Transformer:
    """Build a model with wide initial weights, so that attention affects the output."""
    shape = small_shape(**changes)
    model = Transformer(shape)
    initialise(model, seed, std=std, residual_layers=shape.num_layers)
    return model


def draw_tokens(rows: int = 2, length: int = T, *, seed: int = 0) -> Tensor:
    return torch.randint(0, V, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", SIZES)
def test_named_size_has_the_documented_number_of_parameters(size: str) -> None:
    vocab_size, documented = DOCUMENTED_PARAMETERS[size]
    shape = shape_for_size(size, vocab_size=vocab_size)
    with torch.device("meta"):
        counted = sum(p.numel() for p in Transformer(shape).parameters())
    assert shape.num_parameters() == counted
    assert abs(counted / documented - 1) < 0.02


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": False}, {"qk_norm": False}, {"num_kv_heads": 4}])
def test_parameters_are_counted_in_closed_form(changes: dict[str, Any]) -> None:
    model = small_model(**changes)
    assert model.shape.num_parameters() == sum(p.numel() for p in model.parameters())


def test_verse_has_the_flops_of_gpt2_small() -> None:
    gpt2 = 6 * 123.7e6 + 12 * 12 * 768 * 1024
    assert abs(shape_for_size("verse", vocab_size=50304).flops_per_token(1024) / gpt2 - 1) < 0.02


def test_untied_embedding_costs_no_flops() -> None:
    tied, untied = small_shape(), small_shape(tie_embeddings=False)
    assert tied.flops_per_token() == untied.flops_per_token()


def test_impossible_shapes_name_the_remedy() -> None:
    with pytest.raises(ValidationError, match=r"num_heads 6 is not a multiple of num_kv_heads 4.*try num_kv_heads 3"):
        small_shape(num_heads=6, num_kv_heads=4)
    with pytest.raises(ValidationError, match=r"head_size 7 is odd.*try head_size 8"):
        small_shape(head_size=7)
    with pytest.raises(UsageError, match=r"'vers' is not a size.*did you mean 'verse'"):
        shape_for_size("vers", vocab_size=V)


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_names_and_shapes_are_those_of_transformers(qk_norm: bool, tied: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config_class, model_class = (Qwen3Config, Qwen3ForCausalLM) if qk_norm else (LlamaConfig, LlamaForCausalLM)
    shape = small_shape(qk_norm=qk_norm, tie_embeddings=tied)
    with torch.device("meta"):
        theirs = model_class(
            config_class(
                vocab_size=V,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                tie_word_embeddings=tied,
            )
        )
        ours = Transformer(shape)
    expected = {name: tuple(p.shape) for name, p in theirs.named_parameters()}
    assert {name: tuple(p.shape) for name, p in ours.named_parameters()} == expected
    assert {name: tuple(p.shape) for name, p in ours.state_dict().items()} == expected


def test_a_later_token_changes_no_earlier_logit() -> None:
    model, tokens = small_model().eval(), draw_tokens()
    before = model(tokens)
    changed = tokens.clone()
    changed[:, 15] = (changed[:, 15] + 1) % V
    after = model(changed)
    torch.testing.assert_close(after[:, :15], before[:, :15], atol=0, rtol=0)
    assert ((after[:, 15:] - before[:, 15:]).abs().amax(dim=(0, 2)) > 1e-4).all(), "each later position sees the change"


def test_loss_is_the_sum_over_targets_that_are_not_ignored() -> None:
    model, tokens, targets = small_model().eval(), draw_tokens(), draw_tokens(seed=1)
    targets[0, 5:9] = -100
    expected = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    total = model(tokens, targets)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, expected)


def test_random_tokens_cannot_be_predicted_better_than_their_entropy() -> None:
    """A model that beats ln V on new random tokens can see its targets."""
    model = small_model(std=0.02)
    generator = torch.Generator().manual_seed(0)

    def batch() -> Tensor:
        return torch.randint(0, V, (64, 17), generator=generator)

    tokens = batch()
    assert abs(model(tokens[:, :-1], tokens[:, 1:]).item() / (64 * 16) - math.log(V)) < 0.02
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        tokens = batch()
        loss = model(tokens[:, :-1], tokens[:, 1:]) / (64 * 16)
        # Each step is evaluated on new tokens; 0.03 is far beyond the deviation of 1,024 draws.
        assert loss.item() > math.log(V) - 0.03
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("qk_norm", [True, False])
def test_cached_decoding_equals_the_full_pass(qk_norm: bool) -> None:
    model, tokens = small_model(qk_norm=qk_norm).eval(), draw_tokens()
    with torch.no_grad():
        expected = model(tokens)
        cache = DecoderCache.empty(model.shape, batch_size=2)
        pieces, position = [], 0
        for length in (7, 1, 1, 5, 1, 9):
            pieces.append(model(tokens[:, position : position + length], cache=cache, position=position))
            position += length
    assert position == T
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, atol=1e-5, rtol=0)


def test_rows_may_be_at_different_positions() -> None:
    model, tokens = small_model().eval(), draw_tokens()
    with torch.no_grad():
        expected = model(tokens)
        cache = DecoderCache.empty(model.shape, batch_size=2)
        model(tokens[:, :12], cache=cache)
        # Row 1 goes back to position 6: later entries of its cache must not be attended to.
        step = torch.stack((tokens[0, 12:14], tokens[1, 6:8]))
        logits = model(step, cache=cache, position=[12, 6])
    torch.testing.assert_close(logits[0], expected[0, 12:14], atol=1e-5, rtol=0)
    torch.testing.assert_close(logits[1], expected[1, 6:8], atol=1e-5, rtol=0)


def test_documents_are_independent() -> None:
    """RoPE is relative, so a document in the middle of a row equals the same document alone."""
    model, tokens = small_model().eval(), draw_tokens()
    documents = torch.tensor([[0] * 9 + [1] * 15, [0] * 4 + [1] * 10 + [2] * 10])
    packed = model(tokens, documents=documents)
    for row, first, last in [(0, 0, 9), (0, 9, 24), (1, 0, 4), (1, 4, 14), (1, 14, 24)]:
        alone = model(tokens[row : row + 1, first:last])
        torch.testing.assert_close(packed[row, first:last], alone[0], atol=1e-5, rtol=0)
    assert not torch.allclose(packed, model(tokens), atol=1e-3)


def test_dropout_acts_in_training_only() -> None:
    model, tokens = small_model(dropout=0.2), draw_tokens()
    torch.manual_seed(0)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_grouped_keys_equal_the_same_keys_repeated() -> None:
    grouped, tokens = small_model().eval(), draw_tokens()
    full = small_model(num_kv_heads=4).eval()
    state = grouped.state_dict()
    for name, weight in state.items():
        if "k_proj" in name or "v_proj" in name:
            state[name] = weight.unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    torch.testing.assert_close(full(tokens), grouped(tokens), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_checkpointing_blocks_changes_no_gradient(dropout: float) -> None:
    tokens, gradients = draw_tokens(), []
    for checkpoint_blocks in (False, True):
        model = small_model(dropout=dropout)
        model.checkpoint_blocks = checkpoint_blocks
        torch.manual_seed(0)
        model(tokens, draw_tokens(seed=1)).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name, atol=0, rtol=0)


def test_the_rotary_tables_survive_moves_between_devices_and_types() -> None:
    shape = small_shape()
    with torch.device("meta"):
        model = Transformer(shape)
    model.to_empty(device="cpu")
    model.to(torch.bfloat16)
    cos, sin = compute_rotary_tables(shape)
    torch.testing.assert_close((model.cos, model.sin), (cos, sin), atol=0, rtol=0)
    assert model.cos.dtype == torch.float32
    assert not {"cos", "sin"} & model.state_dict().keys()


# torch.compile itself accesses .grad of non-leaf tensors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_blocks_compile_once() -> None:
    """Compiled once for all layers, used in training only, names unchanged, results equal."""
    model, tokens, targets = small_model(num_layers=3), draw_tokens(), draw_tokens(seed=1)
    names = list(model.state_dict())
    expected = model(tokens, targets)
    compilations = compile_and_count(model)
    torch.testing.assert_close(model(tokens, targets), expected)
    assert len(compilations) == 1
    model.eval()
    torch.testing.assert_close(model(tokens, targets), expected)
    assert len(compilations) == 1
    assert list(model.state_dict()) == names


# torch.compile itself accesses .grad of non-leaf tensors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_trunk_compiles_without_a_graph_break() -> None:
    model, tokens = small_model(), draw_tokens()
    compiled = torch.compile(model.hidden, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens), model.hidden(tokens))


@pytest.mark.parametrize("is_causal", [True, False])
def test_float32_attention_of_a_gpu_repeats_key_value_heads(is_causal: bool) -> None:
    """The kernel of a GPU for float32 has no grouped queries; heads repeated for it give the same output."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 8, generator=draw) for heads in (6, 2, 2))
    expected = attend(q, k, v, mask=None, is_causal=is_causal, dropout=0.0)
    with simulated_device("cuda"):
        actual = attend(q, k, v, mask=None, is_causal=is_causal, dropout=0.0)
    torch.testing.assert_close(actual, expected)
