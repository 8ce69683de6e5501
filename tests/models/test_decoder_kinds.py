"""Every kind of decoder: parameter counts, causality, and that caching, packing and compilation change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from bottega.models.decoder.config import DOCUMENTED_PARAMETERS, SIZES, TransformerShape
from bottega.models.decoder.kinds import (
    infer_decoder_kind,
    list_layer_mixers,
    resolve_shape_fields,
    shape_to_recipe_keys,
)
from bottega.models.decoder.torch import Block, DecoderCache, Transformer
from bottega.models.experts.config import ExpertsShape
from decoders import KINDS, V, compile_and_count, small_model, small_shape

T = 24


def draw_tokens(rows: int = 2, length: int = T, *, seed: int = 0) -> Tensor:
    return torch.randint(0, V, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=KINDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["transformer", "ssm", "moe", "hybrid"])
def test_named_size_has_the_documented_number_of_active_parameters(kind: Any, size: str) -> None:
    vocab_size, documented = DOCUMENTED_PARAMETERS[size]
    shape = TransformerShape(vocab_size=vocab_size, **resolve_shape_fields(kind, size, {}))
    assert infer_decoder_kind(shape) == kind
    with torch.device("meta"):
        counted = sum(p.numel() for p in Transformer(shape).parameters())
    assert shape.num_parameters() == counted
    assert abs(shape.num_active_parameters() / documented - 1) < 0.02
    assert (shape.num_parameters() > 2 * documented) == (kind == "moe"), "only MoE has inactive parameters"


def test_parameters_are_counted_in_closed_form(name: str) -> None:
    model = small_model(name)
    assert model.shape.num_parameters() == sum(p.numel() for p in model.parameters())
    unused = 0
    if (experts := model.shape.experts) is not None:
        expert_parameters = 3 * experts.hidden_size * experts.expert_size
        unused = len(model.shape.expert_layers) * (experts.num_experts - experts.top_k) * expert_parameters
    assert model.shape.num_parameters() - model.shape.num_active_parameters() == unused


def test_flops_per_token_count_active_parameters_only() -> None:
    dense, moe = small_shape("transformer", intermediate_size=48), small_shape("moe")
    router_flops = 6 * 4 * 4 * 32
    assert moe.flops_per_token() == dense.flops_per_token() + router_flops


def test_flops_per_token_of_an_ssm_do_not_depend_on_the_length() -> None:
    ssm = small_shape("ssm")
    assert ssm.flops_per_token(10) == ssm.flops_per_token(100_000)


def test_shape_round_trips_through_recipe_keys(name: str) -> None:
    shape = small_shape(name)
    keys = shape_to_recipe_keys(shape)
    kind: Any = keys.pop("kind")
    options = {key: value for key, value in keys.items() if value is not None and value != 0}
    fields = resolve_shape_fields(kind, None, options)
    assert TransformerShape(**fields) == shape


@pytest.mark.parametrize("size", [None, "verse"])
def test_squared_relu_has_as_many_weights_in_two_matrices(size: str | None) -> None:
    dimensions = {"num_layers": 3, "hidden_size": 96} if size is None else {}
    gated, squared = (
        TransformerShape(
            **{
                "vocab_size": 64,
                "context": 8,
                **resolve_shape_fields("transformer", size, {**dimensions, "activation": activation}),
            }
        )
        for activation in ("swiglu", "relu2")
    )
    assert squared.num_parameters() == gated.num_parameters()
    assert squared.intermediate_size == gated.intermediate_size * 3 // 2


def test_value_embeddings_are_in_every_second_attention_layer_from_the_last_down() -> None:
    assert [
        i for i in range(5) if small_shape("transformer", num_layers=5, value_embeddings=True).has_value_embedding(i)
    ] == [0, 2, 4]
    hybrid = small_shape("hybrid", num_layers=6, value_embeddings=True)  # attention in layers 1, 3 and 5
    assert [i for i in range(6) if hybrid.has_value_embedding(i)] == [1, 5]
    assert not any(map(small_shape("transformer").has_value_embedding, range(4)))


@pytest.mark.parametrize("option", ["activation", "logit_softcap", "value_embeddings"])
def test_each_option_of_the_speedrun_changes_the_logits(option: str) -> None:
    """Otherwise the tests of caching and causality would hold without it."""
    tokens, options = draw_tokens(), KINDS["transformer-speedrun"]
    changed, plain = (
        small_model("transformer", **settings).eval()(tokens) for settings in ({option: options[option]}, {})
    )
    assert (changed - plain).abs().max() > 0.1
    if option == "logit_softcap":
        assert changed.abs().max() <= options[option]


def test_value_embeddings_cost_no_flops() -> None:
    plain, with_embeddings = small_shape("transformer"), small_shape("transformer", value_embeddings=True)
    assert with_embeddings.flops_per_token() == plain.flops_per_token()
    assert with_embeddings.num_parameters() == plain.num_parameters() + 2 * V * 32


def test_attention_is_in_every_nth_layer_only() -> None:
    assert list_layer_mixers(5, attention_every=2) == ("ssm", "attention", "ssm", "attention", "ssm")
    assert list_layer_mixers(2, attention_every=4) == ("ssm", "ssm")
    assert list_layer_mixers(2, attention_every=1) == ("attention", "attention")
    assert list_layer_mixers(2, attention_every=None) == ("ssm", "ssm")


def test_impossible_shape_is_refused_by_the_name_of_its_field() -> None:
    experts = ExpertsShape(hidden_size=32, expert_size=8, num_experts=4)
    dense = small_shape("transformer").model_dump()
    for change, message in (
        (
            {"experts": experts, "experts_every": 5},
            "experts_every is 5, but then none of the 4 layers has experts; try 4",
        ),
        (
            {"experts": experts.model_copy(update={"hidden_size": 16})},
            "experts.hidden_size is 16, but hidden_size is 32",
        ),
        ({"mixers": ("attention",)}, "mixers has length 1, but num_layers is 4"),
        ({"mixers": ("ssm",) * 4}, "ssm must be given if a layer is a state-space layer"),
        ({"num_heads": 0}, "num_heads is 0, but a layer with attention needs at least 1"),
        (
            {**small_shape("ssm").model_dump(), "value_embeddings": True},
            "value_embeddings is true, but no layer has attention",
        ),
    ):
        with pytest.raises(ValidationError, match=message):
            TransformerShape(**{**dense, **change})


def test_plain_transformer_has_the_shape_and_names_of_older_runs() -> None:
    """shape.json files of older runs lack the fields of state spaces and experts."""
    shape = small_shape("transformer")
    old_fields = shape.model_dump(exclude={"mixers", "ssm", "experts", "experts_every"})
    assert TransformerShape(**old_fields) == shape
    assert list(Transformer(shape).state_dict())[1:4] == [
        f"model.layers.0.self_attn.{part}_proj.weight" for part in ("q", "k", "v")
    ]


def test_a_later_token_changes_no_earlier_logit(name: str) -> None:
    model, tokens = small_model(name).eval(), draw_tokens()
    before = model(tokens)
    changed = tokens.clone()
    changed[:, 15] = (changed[:, 15] + 1) % V
    after = model(changed)
    torch.testing.assert_close(after[:, :15], before[:, :15], atol=1e-6, rtol=0)
    assert ((after[:, 15:] - before[:, 15:]).abs().amax(dim=(0, 2)) > 1e-4).all(), "each later position sees the change"


def test_rows_are_independent(name: str) -> None:
    model, tokens = small_model(name).eval(), draw_tokens(4)
    torch.testing.assert_close(model(tokens)[1:3], model(tokens[1:3]), atol=1e-5, rtol=0)


def test_loss_and_routing_leave_out_ignored_targets(name: str) -> None:
    model, tokens, targets = small_model(name).eval(), draw_tokens(), draw_tokens(seed=1)
    targets[0, 5:9] = -100
    expected = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    output = model(tokens, targets)
    if model.shape.experts is None:
        torch.testing.assert_close(output, expected)
        return
    total, routings = output
    torch.testing.assert_close(total, expected)
    assert len(routings) == len(model.shape.expert_layers)
    for routing in routings:
        assert routing.tokens == 2 * T - 4
        assert routing.load.sum() == (2 * T - 4) * model.shape.experts.top_k
    logits, masked_routings = model(tokens, token_mask=targets != -100)
    torch.testing.assert_close(logits, model(tokens))
    torch.testing.assert_close(masked_routings[0].balance, routings[0].balance)


def test_cached_decoding_equals_the_full_pass(name: str) -> None:
    model, tokens = small_model(name).eval(), draw_tokens()
    with torch.no_grad():
        expected = model(tokens)
        cache = DecoderCache.empty(model.shape, batch_size=2)
        pieces, position = [], 0
        for length in (7, 1, 1, 5, 1, 9):
            pieces.append(model(tokens[:, position : position + length], cache=cache, position=position))
            position += length
    assert position == T
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, atol=1e-5, rtol=0)


def test_padding_of_a_prompt_has_no_effect_on_the_next_token(name: str) -> None:
    model, tokens = small_model(name).eval(), draw_tokens()
    with torch.no_grad():
        expected = model(tokens)
        for padding_id in (0, 7):
            cache = DecoderCache.empty(model.shape, batch_size=2)
            prompts = tokens[:, :12].clone()
            prompts[1, 5:] = padding_id
            model.hidden(prompts, cache=cache, lengths=[12, 5])
            step = torch.stack((tokens[0, 12:13], tokens[1, 5:6]))
            logits = model(step, cache=cache, position=[12, 5])
            torch.testing.assert_close(logits[0, 0], expected[0, 12], atol=1e-5, rtol=0)
            torch.testing.assert_close(logits[1, 0], expected[1, 5], atol=1e-5, rtol=0)


def test_ssm_cache_does_not_grow_with_length() -> None:
    short, long = (DecoderCache.empty(small_shape("ssm"), batch_size=2, length=n) for n in (8, 8000))
    assert [t.shape for layer in short.layers for t in layer] == [t.shape for layer in long.layers for t in layer]


def test_ssm_decodes_beyond_its_context() -> None:
    model, tokens = small_model("ssm").eval(), draw_tokens(1, 100)
    with torch.no_grad():
        cache = DecoderCache.empty(model.shape, batch_size=1)
        model(tokens[:, :99], cache=cache)
        stepped = model(tokens[:, 99:], cache=cache, position=99)
        torch.testing.assert_close(stepped[:, 0], model(tokens)[:, 99], atol=1e-5, rtol=0)


def test_documents_are_independent(name: str) -> None:
    model, tokens = small_model(name).eval(), draw_tokens()
    documents = torch.tensor([[0] * 9 + [1] * 15, [0] * 4 + [1] * 10 + [2] * 10])
    packed = model(tokens, documents=documents)
    for row, first, last in [(0, 0, 9), (0, 9, 24), (1, 0, 4), (1, 4, 14), (1, 14, 24)]:
        alone = model(tokens[row : row + 1, first:last])
        torch.testing.assert_close(packed[row, first:last], alone[0], atol=1e-5, rtol=0)
    assert not torch.allclose(packed, model(tokens), atol=1e-3)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_checkpointing_blocks_changes_no_gradient(name: str, dropout: float) -> None:
    tokens, gradients, balances = draw_tokens(), [], []
    for checkpoint_blocks in (False, True):
        model = small_model(name, dropout=dropout)
        model.checkpoint_blocks = checkpoint_blocks
        torch.manual_seed(0)
        output = model(tokens, draw_tokens(seed=1))
        loss, routings = output if isinstance(output, tuple) else (output, ())
        if routings:
            loss = loss + sum(routing.balance + routing.z for routing in routings)
            balances.append([routing.balance.item() for routing in routings])
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert not balances or balances[0] == balances[1]
    for parameter, gradient in gradients[0].items():
        assert gradient is not None, parameter
        torch.testing.assert_close(gradients[1][parameter], gradient, msg=parameter, atol=0, rtol=0)


# torch.compile itself accesses .grad of non-leaf tensors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(("name", "num_graphs"), [("moe", 0), ("ssm", 1), ("hybrid", 2), ("ssm-experts", 1)])
def test_blocks_without_experts_compile_once_per_kind_of_block(name: str, num_graphs: int) -> None:
    """Blocks with experts are compiled only with the grouped GPU kernel; otherwise a graph would run every expert on every
    token."""
    torch._dynamo.reset()
    model, tokens, targets = small_model(name), draw_tokens(), draw_tokens(seed=1)
    output = model(tokens, targets)
    expected = output[0] if isinstance(output, tuple) else output
    compilations = compile_and_count(model)
    output = model(tokens, targets)
    torch.testing.assert_close(output[0] if isinstance(output, tuple) else output, expected)
    assert len(compilations) == num_graphs
    model.eval()(tokens, targets)
    assert len(compilations) == num_graphs
    assert all(block.compiled is not None for block in model.model.layers if isinstance(block, Block))


def test_forward_does_not_change_router_state() -> None:
    model, tokens = small_model("moe", capacity_factor=1.0, expert_dropout=0.3), draw_tokens()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model(tokens, tokens)[0].backward()
    model.eval()(tokens, tokens)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
