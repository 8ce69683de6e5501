"""MoE and SSM exports load in transformers and vice versa with the same logits; other kinds keep our own layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bottega.core.errors import CheckpointError, UsageError
from bottega.models.decoder.config import TransformerShape
from bottega.models.decoder.kinds import resolve_shape_fields
from bottega.models.decoder.layout import OWN_MODEL_TYPE, select_layout
from bottega.models.decoder.torch import Transformer
from bottega.models.folders.pretrained import export_transformers, load_weights, read_decoder_shape
from bottega.models.initial import initialise

TOKENS = torch.arange(20).reshape(2, 10) * 3
SSM = {"state_size": 8, "ssm_head_size": 8, "chunk_size": 8}
MOE = {"num_experts": 4, "num_kv_heads": 2, "num_heads": 4, "head_size": 8, "intermediate_size": 48}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen": ("moe", "qwen3_moe", MOE),
    "qwen-single": ("moe", "qwen3_moe", {**MOE, "experts_per_token": 1}),
    "qwen-some": ("moe", "qwen3_moe", {**MOE, "experts_every": 2}),
    "mixtral": ("moe", "mixtral", {**MOE, "qk_norm": False}),
    "mamba": ("ssm", "mamba2", SSM),
    "sigmoid": ("moe", OWN_MODEL_TYPE, {**MOE, "gate": "sigmoid"}),
    "shared": ("moe", OWN_MODEL_TYPE, {**MOE, "shared_experts": 1}),
    "spiking": ("moe", OWN_MODEL_TYPE, {**MOE, "router": "spiking"}),
    "llama-single": ("moe", OWN_MODEL_TYPE, {**MOE, "qk_norm": False, "experts_per_token": 1}),
    "biased": ("moe", OWN_MODEL_TYPE, {**MOE, "balance": "bias"}),
    "hybrid": ("hybrid", OWN_MODEL_TYPE, {**SSM, "attention_every": 2}),
    "relu2": ("transformer", OWN_MODEL_TYPE, {"activation": "relu2"}),
    "softcap": ("transformer", OWN_MODEL_TYPE, {"logit_softcap": 3.0}),
    "value-embeddings": ("transformer", OWN_MODEL_TYPE, {"value_embeddings": True}),
    "ssm-experts": ("ssm", OWN_MODEL_TYPE, {**SSM, "num_experts": 3}),
}


def build_model(case: str, *, tied: bool = True) -> Transformer:
    kind, _, settings = CASES[case]
    keys = {"num_layers": 2, "hidden_size": 32, "tie_embeddings": tied, **settings}
    fields = resolve_shape_fields(kind, None, keys)  # type: ignore[arg-type]
    model = Transformer(TransformerShape(vocab_size=64, context=32, **fields))
    initialise(model, 0, std=0.2, residual_layers=2)
    if case == "biased":
        for name, buffer in model.named_buffers():
            if name.endswith("router.bias"):
                buffer.copy_(torch.tensor([0.5, 0.0, -0.5, 0.0]))
    return model.eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("case", [case for case, (_, layout, _) in CASES.items() if layout != OWN_MODEL_TYPE])
def test_export_loads_in_transformers(tmp_path: Path, case: str, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    model = build_model(case, tied=tied)
    export_transformers(model.state_dict(), model.shape, tmp_path, bos_token_id=1, eos_token_id=2)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert theirs.config.model_type == CASES[case][1]
    with torch.no_grad():
        expected = model(TOKENS)
        assert expected.std() > 0.1, "logits are not trivially equal"
        torch.testing.assert_close(theirs(TOKENS).logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_export_round_trips(tmp_path: Path, case: str) -> None:
    model = build_model(case)
    assert select_layout(model.shape, model.state_dict()) == CASES[case][1]
    export_transformers(model.state_dict(), model.shape, tmp_path)
    shape = read_decoder_shape(tmp_path)
    # transformers states whether gates are renormalised; here it may follow from the number of experts.
    assert shape.model_copy(update={"experts": None}) == model.shape.model_copy(update={"experts": None})
    reloaded = Transformer(shape).eval()
    load_weights(reloaded, tmp_path)
    with torch.no_grad():
        assert torch.equal(reloaded(TOKENS), model(TOKENS))


def build_transformers_model(kind: str) -> Any:
    import transformers

    shared = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "tie_word_embeddings": False}
    attention = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 32,
        "initializer_range": 0.2,
        "attn_implementation": "eager",
        "num_experts_per_tok": 2,
    }
    if kind == "mamba2":
        config: Any = transformers.Mamba2Config(
            **shared, num_heads=8, head_dim=8, state_size=8, n_groups=2, chunk_size=8, initializer_range=0.2
        )
    elif kind == "mixtral":
        config = transformers.MixtralConfig(**shared, **attention, intermediate_size=16, num_local_experts=4)
    else:
        sizes = {"intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 4}
        config = transformers.Qwen3MoeConfig(**shared, **attention, **sizes, norm_topk_prob=kind == "qwen3_moe")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):  # initialised to 0 in transformers, so that all experts tie
                parameter.normal_(std=0.2)
    return model


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_moe-unnormalised", "mixtral", "mamba2"])
def test_transformers_model_loads(tmp_path: Path, kind: str) -> None:
    theirs = build_transformers_model(kind)
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    model = Transformer(read_decoder_shape(tmp_path)).eval()
    load_weights(model, tmp_path)
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        assert expected.std() > 0.1, "logits are not trivially equal"
        torch.testing.assert_close(model(TOKENS), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("qwen", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("qwen", {"attention_bias": True}, "attention_bias"),
        ("mixtral", {"sliding_window": 8, "use_sliding_window": True}, "sliding_window 8"),
        ("mamba", {"use_bias": True}, "use_bias"),
        ("mamba", {"use_conv_bias": False}, "use_conv_bias"),
        ("mamba", {"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
        ("mamba", {"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_unsupported_config_is_refused(tmp_path: Path, case: str, change: dict[str, Any], message: str) -> None:
    model = build_model(case)
    export_transformers(model.state_dict(), model.shape, tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises(UsageError, match=message):
        read_decoder_shape(tmp_path)


def test_an_incomplete_folder_is_refused(tmp_path: Path) -> None:
    model = build_model("qwen")
    export_transformers(model.state_dict(), model.shape, tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    values = json.loads(config.read_text())
    config.write_text(json.dumps({key: value for key, value in values.items() if key != "moe_intermediate_size"}))
    with pytest.raises(CheckpointError, match="moe_intermediate_size is missing"):
        read_decoder_shape(tmp_path)
    config.write_text(json.dumps(values | {"num_experts_per_tok": 9}))
    with pytest.raises(CheckpointError, match="does not describe a valid model"):
        read_decoder_shape(tmp_path)
    config.write_text(json.dumps(values))
    tensors = load_file(weights)
    save_file({name: t for name, t in tensors.items() if "experts.3.up_proj" not in name}, weights)
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.0\.mlp\.experts\.3\.up_proj"):
        load_weights(Transformer(read_decoder_shape(tmp_path)), tmp_path)


def test_router_buffers_are_saved_in_our_layout_only(tmp_path: Path) -> None:
    model = build_model("biased")
    export_transformers(model.state_dict(), model.shape, tmp_path)
    router_names = [name for name in load_file(tmp_path / "model.safetensors") if ".router." in name]
    assert sorted({name.rpartition(".")[2] for name in router_names}) == ["bias", "load", "weight"]
    reloaded = Transformer(read_decoder_shape(tmp_path))
    load_weights(reloaded, tmp_path)
    assert torch.equal(reloaded.model.layers[0].mlp.router.bias, torch.tensor([0.5, 0.0, -0.5, 0.0]))  # type: ignore[union-attr]
