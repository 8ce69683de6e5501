"""Kinds of language model (transformer, ssm, moe, hybrid): their recipe keys, named sizes and shapes; no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import ValidationError

from bottega.config.layers import FlatConfig
from bottega.models.decoder.config import SIZES, Mixer, TransformerShape, nearest_kv_heads
from bottega.models.experts.config import ExpertsShape
from bottega.models.ssm.config import SSMShape

DecoderKind = Literal["transformer", "ssm", "moe", "hybrid"]

ATTENTION_KEYS = ("num_heads", "num_kv_heads", "head_size", "qk_norm", "rope_theta", "value_embeddings")
SSM_FIELDS = {
    "state_size": "state_size",
    "ssm_head_size": "head_size",
    "expand": "expand",
    "conv_size": "conv_size",
    "chunk_size": "chunk_size",
}
"""Recipe key under model -> field of SSMShape."""
EXPERT_FIELDS = {
    "num_experts": "num_experts",
    "experts_per_token": "top_k",
    "expert_size": "expert_size",
    "shared_experts": "num_shared",
    "gate": "gate",
    "router": "router",
    "capacity_factor": "capacity_factor",
    "expert_capacity": "capacity",
    "expert_dropout": "expert_dropout",
    "balance": "balance",
}
"""Recipe key under model -> field of ExpertsShape."""
OTHER_EXPERT_KEYS = ("experts_every", "balance_weight", "z_weight")
"""Recipe keys of models with experts that are not fields of ExpertsShape."""
TRAINING_KEYS = ("dropout", "context", "chunk_size", "capacity_factor", "expert_capacity", "expert_dropout", "balance")
"""Keys that may differ from the folder a model starts from, because no weight depends on them."""

DEFAULT_NUM_EXPERTS, DEFAULT_EXPERTS_PER_TOKEN = 8, 2
DEFAULT_ATTENTION_EVERY = 4

# The number of parameters is within 2 % of the documented number for each size; with experts, that of active parameters.
_SSM_SIZES: dict[str, dict[str, Any]] = {
    "nano": {"num_layers": 8, "state_size": 32, "ssm_head_size": 32},
    "verse": {"num_layers": 24, "state_size": 64},
    "stanza": {"num_layers": 46, "state_size": 128},
    "epic": {"num_layers": 78, "state_size": 128},
}
_HYBRID_SIZES: dict[str, dict[str, Any]] = {
    "nano": {"intermediate_size": 304, "state_size": 32, "ssm_head_size": 32},
    "verse": {"intermediate_size": 1664, "state_size": 64},
    "stanza": {"intermediate_size": 4480, "state_size": 128},
    "epic": {"intermediate_size": 11520, "state_size": 128},
}


def find_unused_keys(kind: DecoderKind, size: str | None, options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (key, problem and remedy) for each key that this kind of model does not use, or whose value contradicts it."""
    has_experts = kind == "moe" or "num_experts" in options
    problems: list[tuple[str, str]] = []
    for key, value in options.items():
        if key in (*EXPERT_FIELDS, *OTHER_EXPERT_KEYS) and (not has_experts or kind == "transformer"):
            remedy = "set model.kind: moe" if kind == "transformer" else "set model.num_experts"
            problems.append((key, f"{value}, but kind {kind} has no experts; {remedy}, or remove the key"))
        elif key in SSM_FIELDS and kind in ("transformer", "moe"):
            problems.append((key, f"{value}, but kind {kind} has no state space; set model.kind: ssm or hybrid"))
        elif key in ATTENTION_KEYS and kind == "ssm":
            problems.append((key, f"{value}, but kind ssm has no attention; set it to null, or set model.kind: hybrid"))
        elif key == "attention_every" and kind != "hybrid":
            problems.append((key, f"{value}, but kind {kind} does not alternate layers; set model.kind: hybrid"))
        elif key in ("intermediate_size", "activation") and kind == "ssm" and not has_experts:
            problems.append((key, f"{value}, but kind ssm has no MLP; set it to null, or set model.kind: hybrid"))
        elif key == "activation" and value == "relu2" and has_experts:
            problems.append(
                (key, f"{value}, but experts have SwiGLU only; remove the key, or set model.kind: transformer")
            )
        elif key == "balance_weight" and (problem := describe_balance_problem(options.get("balance", "loss"), value)):
            problems.append((key, problem))
    num_layers = options.get("num_layers") or (SIZES[size]["num_layers"] if size is not None else math.inf)
    if (
        kind == "hybrid"
        and "attention_every" in options
        and (problem := describe_attention_every_problem(options["attention_every"], num_layers))
    ):
        problems.append(("attention_every", problem))
    return problems


def describe_balance_problem(balance: str, weight: float) -> str | None:
    """Return why a weight of the balancing loss has no effect; None if it has one."""
    if balance == "loss":
        return None
    return f"{weight}, but balance: {balance} has no balancing loss; remove the key, or set model.balance: loss"


def describe_attention_every_problem(every: int, num_layers: float) -> str | None:
    """Return why attention in every n-th of `num_layers` layers does not make a hybrid; None if it does."""
    if every == 1:
        return "1, but then no layer has a state space; use 2 or more, or kind: transformer"
    if every > num_layers:
        remedy = f"use {num_layers} at most" if num_layers > 1 else "raise num_layers"
        return f"{every}, but then none of {num_layers} layers has attention; {remedy}, or use kind: ssm"
    return None


def resolve_shape_fields(kind: DecoderKind, size: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a shape that do not depend on the data.

    Defaults are those of the named size, or follow from the width; `options` (keys under model that are not null) override
    them.
    """
    defaults = _build_size_defaults(kind, size) if size is not None else _derive_width_defaults(kind, options)
    if options.get("activation") == "relu2":
        # Two matrices in place of three, with as many weights.
        defaults["intermediate_size"] = defaults["intermediate_size"] * 3 // 2
    keys = {**defaults, **options}
    if "num_heads" in options and "num_kv_heads" in defaults and "num_kv_heads" not in options:
        keys["num_kv_heads"] = nearest_kv_heads(options["num_heads"], defaults["num_kv_heads"])
    fields = {key: keys[key] for key in TransformerShape.model_fields if key in keys}
    has_experts = kind == "moe" or "num_experts" in options
    if kind in ("ssm", "hybrid"):
        attention_every = keys.get("attention_every", min(DEFAULT_ATTENTION_EVERY, keys["num_layers"]))
        mixers = list_layer_mixers(keys["num_layers"], attention_every=attention_every if kind == "hybrid" else None)
        if "ssm" in mixers:  # a hybrid of a single layer has attention only
            fields |= {"mixers": mixers, "ssm": _build_ssm_shape(keys)}
    if has_experts:
        fields["experts"] = _build_experts_shape(keys)
    if kind == "ssm" and (not has_experts or keys.get("experts_every", 1) == 1):
        fields["intermediate_size"] = 0
    return fields


def list_layer_mixers(num_layers: int, *, attention_every: int | None) -> tuple[Mixer, ...]:
    """Return the mixer of each layer: state spaces, with attention in every n-th layer."""
    mixers: list[Mixer] = ["ssm"] * num_layers
    if attention_every is not None:
        mixers[attention_every - 1 :: attention_every] = ["attention"] * (num_layers // attention_every)
    return tuple(mixers)


def _build_size_defaults(kind: DecoderKind, size: str) -> dict[str, Any]:
    defaults = dict(SIZES[size])
    if kind == "ssm":
        return {key: value for key, value in defaults.items() if key not in ATTENTION_KEYS} | _SSM_SIZES[size]
    return defaults | _HYBRID_SIZES[size] if kind == "hybrid" else defaults


def _derive_width_defaults(kind: DecoderKind, options: Mapping[str, Any]) -> dict[str, Any]:
    width = options["hidden_size"]
    # 8/3 of the width: two thirds of the usual four times the width, because the gate is a third matrix.
    defaults: dict[str, Any] = {"intermediate_size": -(-width * 8 // 3 // 32) * 32}
    if kind in ("ssm", "hybrid"):
        inner_size = width * options.get("expand", 2)
        defaults["ssm_head_size"] = next(size for size in range(min(64, inner_size), 0, -1) if inner_size % size == 0)
    if kind != "ssm":
        head_size = options.get("head_size") or (
            width // options["num_heads"] if "num_heads" in options else min(64, width)
        )
        num_heads = options.get("num_heads") or max(1, width // head_size)
        defaults |= {"head_size": head_size, "num_heads": num_heads, "num_kv_heads": num_heads}
    return defaults


def _build_ssm_shape(keys: Mapping[str, Any]) -> SSMShape:
    fields = {field: keys[key] for key, field in SSM_FIELDS.items() if key in keys}
    # One epsilon for all norms of the model, as in other libraries.
    epsilon = keys.get("norm_epsilon", TransformerShape.model_fields["norm_epsilon"].default)
    return SSMShape(hidden_size=keys["hidden_size"], norm_epsilon=epsilon, **fields)


def _build_experts_shape(keys: Mapping[str, Any]) -> ExpertsShape:
    fields = {field: keys[key] for key, field in EXPERT_FIELDS.items() if key in keys}
    fields = {"num_experts": DEFAULT_NUM_EXPERTS, "top_k": DEFAULT_EXPERTS_PER_TOKEN, **fields}
    # The experts of one token are together as wide as the MLP they replace.
    fields.setdefault("expert_size", max(1, keys["intermediate_size"] // fields["top_k"]))
    return ExpertsShape(hidden_size=keys["hidden_size"], **fields)


def infer_decoder_kind(shape: TransformerShape) -> DecoderKind:
    """Return the kind of a shape."""
    if shape.has_ssm:
        return "hybrid" if shape.has_attention else "ssm"
    return "moe" if shape.experts is not None else "transformer"


def shape_to_recipe_keys(shape: TransformerShape) -> dict[str, Any]:
    """Return a shape as recipe keys under model."""
    keys = {**shape.model_dump(exclude={"mixers", "ssm", "experts"}), "kind": infer_decoder_kind(shape)}
    for fields_by_key, inner_shape in ((SSM_FIELDS, shape.ssm), (EXPERT_FIELDS, shape.experts)):
        if inner_shape is not None:
            keys |= {key: getattr(inner_shape, field) for key, field in fields_by_key.items()}
    if shape.has_ssm and shape.has_attention:
        assert shape.mixers is not None, "a shape with a state space has mixers"
        keys["attention_every"] = shape.mixers.index("attention") + 1
    return keys


def apply_training_keys(shape: TransformerShape, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a loaded model's shape, with the training keys in `options` applied."""
    fields: dict[str, Any] = {name: getattr(shape, name) for name in TransformerShape.model_fields}
    fields |= {key: options[key] for key in ("dropout", "context") if key in options}
    if shape.ssm is not None and "chunk_size" in options:
        fields["ssm"] = shape.ssm.model_copy(update={"chunk_size": options["chunk_size"]})
    changes = {EXPERT_FIELDS[key]: options[key] for key in TRAINING_KEYS if key in EXPERT_FIELDS and key in options}
    if shape.experts is not None and changes:
        fields["experts"] = ExpertsShape(**{**shape.experts.model_dump(), **changes})
    return fields


def describe_shape_error(error: ValidationError) -> tuple[str, str]:
    """Return (recipe key under model, message) of the first problem of a shape."""
    first_error = error.errors()[0]
    message = first_error["msg"].removeprefix("Value error, ")
    keys_by_field = {
        "ExpertsShape": {field: key for key, field in EXPERT_FIELDS.items()},
        "SSMShape": {field: key for key, field in SSM_FIELDS.items()},
    }.get(error.title, {})
    for field, key in keys_by_field.items():
        message = re.sub(rf"\b{field}\b", key, message)
    key = ".".join(map(str, first_error["loc"])) or message.partition(" ")[0].rstrip(":")
    return keys_by_field.get(key, key), message


def adapt_kv_heads(base: FlatConfig, layer: FlatConfig) -> list[str]:
    """Adapt num_kv_heads of `base` if the overriding `layer` of a recipe sets only num_heads; return notes for the user."""
    heads_entry, kv_entry = layer.get("model.num_heads"), base.get("model.num_kv_heads")
    if heads_entry is None or kv_entry is None or "model.num_kv_heads" in layer:
        return []
    if not (type(heads_entry.value) is type(kv_entry.value) is int and heads_entry.value > 0 < kv_entry.value):
        return []  # the schema reports what is wrong with them
    num_kv_heads = nearest_kv_heads(heads_entry.value, kv_entry.value)
    if heads_entry.value % kv_entry.value == 0:
        return []
    base["model.num_kv_heads"] = replace(kv_entry, value=num_kv_heads)
    return [
        f"model.num_kv_heads is {num_kv_heads} instead of {kv_entry.value}, because num_heads is {heads_entry.value}"
    ]
