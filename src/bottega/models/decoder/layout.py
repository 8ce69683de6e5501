"""Tensor names and config.json of decoders in transformers that our decoder computes exactly."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bottega.core.errors import CheckpointError, UsageError
from bottega.core.types import Array
from bottega.models.decoder.config import TransformerShape
from bottega.models.experts.config import ExpertsShape
from bottega.models.ssm.config import SSMShape

OWN_MODEL_TYPE = "bottega-decoder"
"""The model_type of decoders that no class of transformers computes; tensors have our names."""
ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
}
"""model_type -> class, for models that ours computes exactly. Qwen2 is not among them: its attention has biases."""
ROUTER_STATE = re.compile(r".*\.mlp\.router\.(load|bias|absent)")
"""Buffers of our routers. `absent` (the experts dropped in a step) is never saved."""

# model_type -> (name of the MLP, our matrix of an expert -> its name)
_EXPERT_NAMES = {
    "qwen3_moe": ("mlp", {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}),
    "mixtral": ("block_sparse_moe", {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}),
}
_MIXTRAL_REASON = "without qk_norm, transformers needs experts in every layer, with two or more per token"
_MAMBA_RULES = (
    (r"model\.embed_tokens\.", "backbone.embeddings."),
    (r"model\.norm\.", "backbone.norm_f."),
    (r"model\.(layers\.\d+)\.input_layernorm\.", r"backbone.\1.norm."),
    (r"model\.(layers\.\d+\.mixer)\.dynamics\.", r"backbone.\1."),
    (r"model\.(layers\.)", r"backbone.\1"),
)


def select_layout(shape: TransformerShape, state: Mapping[str, Array]) -> str:
    """Return the model_type of the transformers class that computes this model exactly, or our own."""
    experts = shape.experts
    if _find_own_options(shape):
        return OWN_MODEL_TYPE
    if shape.has_ssm:
        assert shape.ssm is not None, "checked by the shape"
        is_plain = not shape.has_attention and experts is None and not shape.intermediate_size
        return "mamba2" if is_plain and shape.ssm.norm_epsilon == shape.norm_epsilon else OWN_MODEL_TYPE
    if experts is None:
        return "qwen3" if shape.qk_norm else "llama"
    is_plain = (experts.gate, experts.router, experts.activation, experts.num_shared) == (
        "softmax",
        "linear",
        "swiglu",
        0,
    )
    is_biased = experts.balance == "bias" and any(
        bool(tensor.any()) for name, tensor in state.items() if name.endswith(".mlp.router.bias")
    )
    if not is_plain or is_biased:
        return OWN_MODEL_TYPE
    if shape.qk_norm:
        return "qwen3_moe"
    return "mixtral" if experts.renormalises and shape.experts_every == 1 else OWN_MODEL_TYPE


def _find_own_options(shape: TransformerShape) -> list[str]:
    """Return which options of the shape the classes of transformers do not have."""
    options = {
        "squared ReLU (activation: relu2)": shape.activation == "relu2",
        "a cap of its logits (logit_softcap)": shape.logit_softcap is not None,
        "value embeddings (value_embeddings: true)": shape.value_embeddings,
    }
    return [name for name, is_set in options.items() if is_set]


def explain_own_layout(shape: TransformerShape) -> str:
    """Return why no class of transformers computes a model for which `select_layout` returns our own layout."""
    if options := _find_own_options(shape):
        return f"it has {' and '.join(options)}"
    experts = shape.experts
    if shape.has_ssm:
        if shape.has_attention:
            return "it has state spaces and attention"
        if experts is not None or shape.intermediate_size:
            return f"its layers have state spaces and {'experts' if experts is not None else 'an MLP'}"
        return "the norm_epsilon of its state spaces differs from that of the other norms"
    assert experts is not None, "transformers has a class for every attention model without experts"
    reasons = {
        f"its gates are {experts.gate}": experts.gate != "softmax",
        f"its router is {experts.router}": experts.router != "linear",
        f"its experts are {experts.activation}": experts.activation != "swiglu",
        "it has shared experts": experts.num_shared > 0,
        "its experts are chosen with a bias (balance: bias)": experts.balance == "bias",
    }
    return next((reason for reason, applies in reasons.items() if applies), _MIXTRAL_REASON)


def rename_tensors(state: Mapping[str, Array], model_type: str) -> dict[str, Array]:
    """Return views of our tensors under the names of a layout, to write or to fill; stacked experts are split."""
    views: dict[str, Array] = {}
    for name, tensor in state.items():
        is_router_state = ROUTER_STATE.fullmatch(name) is not None
        if is_router_state and (model_type != OWN_MODEL_TYPE or name.endswith(".absent")):
            continue
        if model_type == "mamba2":
            views[_apply_rules(name, _MAMBA_RULES)] = tensor
        elif model_type in _EXPERT_NAMES and ".mlp." in name:
            views |= _split_experts(name, tensor, model_type)
        else:
            views[name] = tensor
    return views


def _apply_rules(name: str, rules: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in rules:
        if re.match(pattern, name):
            return re.sub(f"^{pattern}", replacement, name)
    return name


def _split_experts(name: str, tensor: Array, model_type: str) -> dict[str, Array]:
    """Return one tensor of an MLP under the names of the layout; a stack of experts is one tensor for each expert."""
    their_mlp, their_matrices = _EXPERT_NAMES[model_type]
    layer, _, mlp_name = name.partition(".mlp.")
    module, _, matrix = mlp_name.partition(".")
    if module == "router":
        return {f"{layer}.{their_mlp}.gate.weight": tensor}
    if module != "experts":  # the MLP of a layer without experts
        return {name: tensor}
    prefix, their_matrix = f"{layer}.{their_mlp}.experts", their_matrices[matrix]
    return {f"{prefix}.{expert}.{their_matrix}.weight": weight for expert, weight in enumerate(tensor)}


def build_config(shape: TransformerShape, model_type: str) -> dict[str, Any]:
    """Return the content of config.json that describes the model."""
    if model_type == OWN_MODEL_TYPE:
        return {"model_type": OWN_MODEL_TYPE, "shape": shape.model_dump(mode="json")}
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "max_position_embeddings": shape.context,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tie_embeddings,
        "use_cache": True,
    }
    if model_type == "mamba2":
        return config | _build_mamba_config(shape)
    config |= {
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "rms_norm_eps": shape.norm_epsilon,
        # transformers reads rope_theta before version 5, and rope_parameters since.
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": shape.dropout,
        "use_sliding_window": False,
    }
    experts = shape.experts
    if experts is None:
        return config
    config["num_experts_per_tok"] = experts.top_k
    if model_type == "mixtral":
        return config | {"num_local_experts": experts.num_experts, "intermediate_size": experts.expert_size}
    return config | {
        "num_experts": experts.num_experts,
        "moe_intermediate_size": experts.expert_size,
        "norm_topk_prob": experts.renormalises,
        "decoder_sparse_step": shape.experts_every,
        "mlp_only_layers": [],
    }


def _build_mamba_config(shape: TransformerShape) -> dict[str, Any]:
    ssm = shape.ssm
    assert ssm is not None, "checked by select_layout"
    return {
        "state_size": ssm.state_size,
        "num_heads": ssm.num_heads,
        "head_dim": ssm.head_size,
        "n_groups": ssm.num_groups,
        "expand": ssm.expand,
        "conv_kernel": ssm.conv_size,
        "chunk_size": ssm.chunk_size,
        "layer_norm_epsilon": shape.norm_epsilon,
        "time_step_min": ssm.time_step_min,
        "time_step_max": ssm.time_step_max,
        "use_bias": False,
        "use_conv_bias": True,
        "pad_token_id": None,
    }


def shape_from_config(config: Mapping[str, Any], path: Path) -> TransformerShape:
    """Return the shape of a config.json read from `path`; raise `UsageError` if our model cannot compute the same as
    transformers."""
    model_type = config.get("model_type")
    try:
        if model_type == OWN_MODEL_TYPE:
            return TransformerShape(**config["shape"])
        if model_type not in ARCHITECTURES:
            architecture = (config.get("architectures") or [model_type])[0]
            raise UsageError(
                f"{path}: architecture {architecture} is not supported; supported: {', '.join(ARCHITECTURES.values())}"
            )
        return _read_mamba_shape(config, path) if model_type == "mamba2" else _read_attention_shape(config, path)
    except KeyError as error:
        raise CheckpointError(
            f"{path}: the key {error.args[0]} is missing; it is not a complete model config"
        ) from None
    except (ValueError, TypeError, AttributeError, IndexError, ArithmeticError) as error:
        reason = "; ".join(str(error).splitlines()[1:3]) if isinstance(error, ValidationError) else str(error)
        raise CheckpointError(f"{path} does not describe a valid model ({reason})") from None


def _read_attention_shape(config: Mapping[str, Any], path: Path) -> TransformerShape:
    _refuse_problems(_find_attention_problems(config), path, "bias-free SiLU models with plain RoPE")
    model_type = config["model_type"]
    layer_keys = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    missing = [key for key in (*layer_keys, "vocab_size", "max_position_embeddings") if key not in config]
    if missing:
        raise CheckpointError(
            f"{path}: these keys are missing: {', '.join(missing)}; it is not a complete model config"
        )
    num_heads = config["num_attention_heads"]
    # Defaults of missing keys are those of the transformers class.
    head_size = config.get("head_dim") or (128 if model_type == "qwen3" else config["hidden_size"] // num_heads)
    default_theta = 1e6 if model_type == "mixtral" else 10000.0
    experts = _read_experts_shape(config) if model_type in _EXPERT_NAMES else None
    # Mixtral has experts in every layer; our intermediate_size is then the total width of the experts of one token.
    intermediate_size = config["intermediate_size"] * (
        experts.top_k if experts is not None and model_type == "mixtral" else 1
    )
    return TransformerShape(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_size=head_size,
        intermediate_size=intermediate_size,
        vocab_size=config["vocab_size"],
        context=config["max_position_embeddings"],
        dropout=config.get("attention_dropout") or 0.0,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qk_norm=model_type in ("qwen3", "qwen3_moe"),
        rope_theta=_read_rope_parameters(config).get("rope_theta") or config.get("rope_theta") or default_theta,
        norm_epsilon=config.get("rms_norm_eps", 1e-5 if model_type == "mixtral" else 1e-6),
        experts=experts,
        experts_every=config.get("decoder_sparse_step", 1) if model_type == "qwen3_moe" else 1,
    )


def _read_experts_shape(config: Mapping[str, Any]) -> ExpertsShape:
    is_mixtral = config["model_type"] == "mixtral"
    num_experts = config["num_experts"] if "num_experts" in config else config["num_local_experts"]
    return ExpertsShape(
        hidden_size=config["hidden_size"],
        expert_size=config["intermediate_size" if is_mixtral else "moe_intermediate_size"],
        num_experts=num_experts,
        top_k=config["num_experts_per_tok"],
        renormalise=is_mixtral or bool(config.get("norm_topk_prob", False)),
    )


def _read_mamba_shape(config: Mapping[str, Any], path: Path) -> TransformerShape:
    limit = config.get("time_step_limit") or (0.0, float("inf"))
    # transformers 5 writes infinity as {"__float__": ...}.
    max_time_step = float("inf") if isinstance(limit[1], dict) else float(limit[1])
    hidden_size, expand, num_heads, head_size = (
        config[key] for key in ("hidden_size", "expand", "num_heads", "head_dim")
    )
    problems = {
        f"use_bias {config.get('use_bias')}": config.get("use_bias", False),
        f"use_conv_bias {config.get('use_conv_bias')}": not config.get("use_conv_bias", True),
        f"hidden_act {config.get('hidden_act')!r}": config.get("hidden_act", "silu") not in ("silu", "swish"),
        f"time_step_limit {limit}": limit[0] > 0 or max_time_step != float("inf"),
        f"num_heads {num_heads}": hidden_size * expand != num_heads * head_size,
    }
    _refuse_problems(problems, path, "Mamba-2 as published")
    epsilon = config.get("layer_norm_epsilon", 1e-5)
    return TransformerShape(
        num_layers=config["num_hidden_layers"],
        hidden_size=hidden_size,
        intermediate_size=0,
        vocab_size=config["vocab_size"],
        # Mamba has no maximum length; this is the default training context.
        context=config.get("max_position_embeddings", 2048),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        norm_epsilon=epsilon,
        mixers=("ssm",) * config["num_hidden_layers"],
        ssm=SSMShape(
            hidden_size=hidden_size,
            expand=expand,
            head_size=head_size,
            state_size=config["state_size"],
            num_groups=config.get("n_groups", 8),
            conv_size=config.get("conv_kernel", 4),
            chunk_size=config.get("chunk_size", 256),
            norm_epsilon=epsilon,
            time_step_min=config.get("time_step_min", 1e-3),
            time_step_max=config.get("time_step_max", 0.1),
        ),
    )


def _read_rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _find_attention_problems(config: Mapping[str, Any]) -> dict[str, bool]:
    """Map each option that our model does not support to whether it is set.

    The weights of such a model would load without an error, but give other outputs than in transformers.
    """
    rope_type = _read_rope_parameters(config).get("rope_type") or _read_rope_parameters(config).get("type") or "default"
    window, is_used_by_default = config.get("sliding_window"), config["model_type"] in ("mistral", "mixtral")
    has_window = config.get("use_sliding_window", is_used_by_default) and window is not None
    return {
        f"attention_bias {config.get('attention_bias')}": config.get("attention_bias", False),
        f"mlp_bias {config.get('mlp_bias')}": config.get("mlp_bias", False),
        f"hidden_act {config.get('hidden_act')!r}": config.get("hidden_act", "silu") not in ("silu", "swish"),
        f"rope_type {rope_type!r}": rope_type != "default",
        f"sliding_window {window}": has_window and window < config.get("max_position_embeddings", 0),
        f"mlp_only_layers {config.get('mlp_only_layers')}": bool(config.get("mlp_only_layers")),
    }


def _refuse_problems(problems: Mapping[str, bool], path: Path, supported: str) -> None:
    for problem, is_present in problems.items():
        if is_present:
            raise UsageError(f"{path}: {problem} is not supported; use {supported}")
