"""Folders load in both directions with transformers with the same logits; unsupported configs and code are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bottega.core.errors import CheckpointError, UsageError
from bottega.models.decoder.config import TransformerShape
from bottega.models.decoder.torch import Transformer
from bottega.models.folders.pretrained import export_transformers, load_weights, read_decoder_shape
from bottega.models.initial import initialise

TOKENS = torch.arange(20).reshape(2, 10) * 3


def build_transformers_model(kind: str, *, tied: bool) -> Any:
    import transformers

    config = {
        "qwen3": transformers.Qwen3Config,
        "llama": transformers.LlamaConfig,
        "mistral": transformers.MistralConfig,
    }
    fields = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 32,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "initializer_range": 0.2,
        "attn_implementation": "eager",
    }
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config[kind](**fields)).eval()


def build_shape(**changes: Any) -> TransformerShape:
    fields: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 8,
        "intermediate_size": 48,
        "vocab_size": 64,
        "context": 32,
        "rope_theta": 5000.0,
    }
    return TransformerShape(**{**fields, **changes})


def build_model(shape: TransformerShape) -> Transformer:
    model = Transformer(shape)
    initialise(model, 0, std=0.2, residual_layers=2)
    return model.eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "mistral"])
def test_transformers_model_loads(tmp_path: Path, kind: str, tied: bool) -> None:
    theirs = build_transformers_model(kind, tied=tied)
    theirs.save_pretrained(tmp_path)
    model = Transformer(read_decoder_shape(tmp_path)).eval()
    load_weights(model, tmp_path)
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        assert expected.std() > 0.1, "logits are not trivially equal"
        torch.testing.assert_close(model(TOKENS), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_export_loads_in_transformers(tmp_path: Path, qk_norm: bool, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    shape = build_shape(qk_norm=qk_norm, tie_embeddings=tied)
    model = build_model(shape)
    export_transformers(model.state_dict(), shape, tmp_path, bos_token_id=1, eos_token_id=2)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert theirs.config.eos_token_id == 2
    assert theirs.config.model_type == ("qwen3" if qk_norm else "llama")
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, model(TOKENS), atol=1e-4, rtol=0)
    assert read_decoder_shape(tmp_path) == shape


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    theirs, folder = build_transformers_model("qwen3", tied=False), tmp_path / "model"
    theirs.save_pretrained(folder, max_shard_size="20KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 1
    model = Transformer(read_decoder_shape(folder)).eval()
    load_weights(model, folder)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), theirs(TOKENS).logits, atol=1e-4, rtol=0)
    # An index that points out of its folder is refused even where the file exists.
    shards[0].rename(tmp_path / shards[0].name)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(shards[0].name, f"../{shards[0].name}"))
    with pytest.raises(CheckpointError, match="not in the folder"):
        load_weights(model, folder)


def test_head_saved_with_its_tied_embedding_is_accepted(tmp_path: Path) -> None:
    shape = build_shape()
    model = build_model(shape)
    export_transformers(model.state_dict(), shape, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file({**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors")
    other = Transformer(shape)
    load_weights(other, tmp_path)
    assert torch.equal(other.model.embed_tokens.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
            "Qwen2ForCausalLM is not supported.*Qwen3ForCausalLM",
        ),
        ({"attention_bias": True}, "attention_bias True"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type 'yarn'"),
        ({"use_sliding_window": True, "sliding_window": 16}, "sliding_window 16"),
    ],
)
def test_unsupported_config_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    shape = build_shape()
    export_transformers(build_model(shape).state_dict(), shape, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(UsageError, match=message):
        read_decoder_shape(tmp_path)


def test_weights_of_a_different_model_are_refused_by_name(tmp_path: Path) -> None:
    shape = build_shape()
    export_transformers(build_model(shape).state_dict(), shape, tmp_path)
    with pytest.raises(CheckpointError, match=r"lacks model.layers.2.*11 missing, 0 unexpected"):
        load_weights(Transformer(build_shape(num_layers=3)), tmp_path)
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight has shape \[64, 32\].*needs \[80, 32\]"):
        load_weights(Transformer(build_shape(vocab_size=80)), tmp_path)


def test_pickled_and_damaged_weights_are_refused(tmp_path: Path) -> None:
    model = Transformer(build_shape())
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors"):
        load_weights(model, tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is a pickle.*convert"):
        load_weights(model, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 40)
    with pytest.raises(CheckpointError, match="is damaged"):
        load_weights(model, tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json: "):
        read_decoder_shape(tmp_path)
