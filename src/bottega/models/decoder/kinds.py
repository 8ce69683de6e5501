"""The kinds of a language model: which keys of a recipe each has a use for, its named sizes, and the shape they make; no torch."""

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

ATTENTION_KEYS = ("num_heads", "num_kv_heads", "head_size", "qk_norm", "rope_theta")
SSM_FIELDS = {
    "state_size": "state_size",
    "ssm_head_size": "head_size",
    "expand": "expand",
    "conv_size": "conv_size",
    "chunk_size": "chunk_size",
}
"""Key of a recipe -> field of the shape."""
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
EXPERT_LOSS_KEYS = ("experts_every", "balance_weight", "z_weight")
TRAINING_KEYS = ("dropout", "context", "chunk_size", "capacity_factor", "expert_capacity", "expert_dropout", "balance")
"""What may be other than in the folder a model starts from: no weight depends on it."""

NUM_EXPERTS, EXPERTS_PER_TOKEN = 8, 2
ATTENTION_EVERY = 4

# Each within 2 % of the parameters that the size promises; experts within 2 % of those that take part in one token.
_SCANNED: dict[str, dict[str, Any]] = {
    "nano": {"num_layers": 8, "state_size": 32, "ssm_head_size": 32},
    "verse": {"num_layers": 24, "state_size": 64},
    "stanza": {"num_layers": 46, "state_size": 128},
    "epic": {"num_layers": 78, "state_size": 128},
}
_MIXED: dict[str, dict[str, Any]] = {
    "nano": {"intermediate_size": 304, "state_size": 32, "ssm_head_size": 32},
    "verse": {"intermediate_size": 1664, "state_size": 64},
    "stanza": {"intermediate_size": 4480, "state_size": 128},
    "epic": {"intermediate_size": 11520, "state_size": 128},
}


def find_unused_keys(kind: DecoderKind, size: str | None, said: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(key, what to do about it) of what this kind of model does not have."""
    has_experts = kind == "moe" or "num_experts" in said
    found: list[tuple[str, str]] = []
    for key, value in said.items():
        if key in (*EXPERT_FIELDS, *EXPERT_LOSS_KEYS) and (not has_experts or kind == "transformer"):
            more = "say model.kind: moe" if kind == "transformer" else "say model.num_experts"
            found.append((key, f"{value}, and kind {kind} has no experts; {more}, or leave it out"))
        elif key in SSM_FIELDS and kind in ("transformer", "moe"):
            found.append((key, f"{value}, and kind {kind} has no state space; say model.kind: ssm or hybrid"))
        elif key in ATTENTION_KEYS and kind == "ssm":
            found.append((key, f"{value}, and kind ssm has no attention; set it to null, or say model.kind: hybrid"))
        elif key == "attention_every" and kind != "hybrid":
            found.append((key, f"{value}, and kind {kind} does not alternate; say model.kind: hybrid"))
        elif key == "intermediate_size" and kind == "ssm" and not has_experts:
            found.append((key, f"{value}, and kind ssm has no feed-forward; set it to null, or say model.kind: hybrid"))
        elif key == "balance_weight" and (wrong := describe_balance_problem(said.get("balance", "loss"), value)):
            found.append((key, wrong))
    layers = said.get("num_layers") or (SIZES[size]["num_layers"] if size is not None else math.inf)
    if (
        kind == "hybrid"
        and "attention_every" in said
        and (wrong := describe_attention_every_problem(said["attention_every"], layers))
    ):
        found.append(("attention_every", wrong))
    return found


def describe_balance_problem(balance: str, weight: float) -> str | None:
    if balance == "loss":
        return None
    return f"{weight}, and balance: {balance} has no balancing loss; leave it out, or say model.balance: loss"


def describe_attention_every_problem(every: int, layers: float) -> str | None:
    """Why attention in the last of so many layers is no hybrid."""
    if every == 1:
        return "1, and no layer would have a state space; say 2 or more, or kind: transformer"
    if every > layers:
        remedy = f"say {layers} at most" if layers > 1 else "raise num_layers"
        return f"{every}, and no layer of {layers} would have attention; {remedy}, or say kind: ssm"
    return None


def resolve_shape_fields(kind: DecoderKind, size: str | None, said: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a shape, as far as they do not depend on the data: a size's, or what follows from the width, changed by
    what is said. `said` are keys of a recipe's model that are not null."""
    usual = _of_size(kind, size) if size is not None else _of_width(kind, said)
    words = {**usual, **said}
    if "num_heads" in said and "num_kv_heads" in usual and "num_kv_heads" not in said:
        words["num_kv_heads"] = nearest_kv_heads(said["num_heads"], usual["num_kv_heads"])
    fields = {key: words[key] for key in TransformerShape.model_fields if key in words}
    experts = kind == "moe" or "num_experts" in said
    if kind in ("ssm", "hybrid"):
        every = words.get("attention_every", min(ATTENTION_EVERY, words["num_layers"]))
        found = layer_mixers(words["num_layers"], attention_every=every if kind == "hybrid" else None)
        if "ssm" in found:  # a single layer cannot be both
            fields |= {"mixers": found, "ssm": _state_space(words)}
    if experts:
        fields["experts"] = _experts(words)
    if kind == "ssm" and (not experts or words.get("experts_every", 1) == 1):
        fields["intermediate_size"] = 0
    return fields


def layer_mixers(num_layers: int, *, attention_every: int | None) -> tuple[Mixer, ...]:
    """State space in all layers, or attention in the last of every so many."""
    found: list[Mixer] = ["ssm"] * num_layers
    if attention_every is not None:
        found[attention_every - 1 :: attention_every] = ["attention"] * (num_layers // attention_every)
    return tuple(found)


def _of_size(kind: DecoderKind, size: str) -> dict[str, Any]:
    found = dict(SIZES[size])
    if kind == "ssm":
        return {key: value for key, value in found.items() if key not in ATTENTION_KEYS} | _SCANNED[size]
    return found | _MIXED[size] if kind == "hybrid" else found


def _of_width(kind: DecoderKind, said: Mapping[str, Any]) -> dict[str, Any]:
    width = said["hidden_size"]
    # Two thirds of the usual four times the width: the gate is a third matrix.
    found: dict[str, Any] = {"intermediate_size": -(-width * 8 // 3 // 32) * 32}
    if kind in ("ssm", "hybrid"):
        inner = width * said.get("expand", 2)
        found["ssm_head_size"] = next(size for size in range(min(64, inner), 0, -1) if inner % size == 0)
    if kind != "ssm":
        head = said.get("head_size") or (width // said["num_heads"] if "num_heads" in said else min(64, width))
        heads = said.get("num_heads") or max(1, width // head)
        found |= {"head_size": head, "num_heads": heads, "num_kv_heads": heads}
    return found


def _state_space(words: Mapping[str, Any]) -> SSMShape:
    given = {field: words[key] for key, field in SSM_FIELDS.items() if key in words}
    # One number for all norms of the model, as the models of others have it.
    epsilon = words.get("norm_epsilon", TransformerShape.model_fields["norm_epsilon"].default)
    return SSMShape(hidden_size=words["hidden_size"], norm_epsilon=epsilon, **given)


def _experts(words: Mapping[str, Any]) -> ExpertsShape:
    given = {field: words[key] for key, field in EXPERT_FIELDS.items() if key in words}
    given = {"num_experts": NUM_EXPERTS, "top_k": EXPERTS_PER_TOKEN, **given}
    # Those that one token sees are together as wide as the feed-forward they replace.
    given.setdefault("expert_size", max(1, words["intermediate_size"] // given["top_k"]))
    return ExpertsShape(hidden_size=words["hidden_size"], **given)


def decoder_kind(shape: TransformerShape) -> DecoderKind:
    if shape.has_ssm:
        return "hybrid" if shape.has_attention else "ssm"
    return "moe" if shape.experts is not None else "transformer"


def shape_to_recipe_keys(shape: TransformerShape) -> dict[str, Any]:
    """A shape in the keys of a recipe."""
    found = {**shape.model_dump(exclude={"mixers", "ssm", "experts"}), "kind": decoder_kind(shape)}
    for names, part in ((SSM_FIELDS, shape.ssm), (EXPERT_FIELDS, shape.experts)):
        if part is not None:
            found |= {key: getattr(part, field) for key, field in names.items()}
    if shape.has_ssm and shape.has_attention:
        assert shape.mixers is not None, "or there were no state space"
        found["attention_every"] = shape.mixers.index("attention") + 1
    return found


def apply_training_keys(shape: TransformerShape, said: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a shape whose weights stay, with what is said about their training."""
    fields: dict[str, Any] = {name: getattr(shape, name) for name in TransformerShape.model_fields}
    fields |= {key: said[key] for key in ("dropout", "context") if key in said}
    if shape.ssm is not None and "chunk_size" in said:
        fields["ssm"] = shape.ssm.model_copy(update={"chunk_size": said["chunk_size"]})
    given = {EXPERT_FIELDS[key]: said[key] for key in TRAINING_KEYS if key in EXPERT_FIELDS and key in said}
    if shape.experts is not None and given:
        fields["experts"] = ExpertsShape(**{**shape.experts.model_dump(), **given})
    return fields


def describe_shape_error(error: ValidationError) -> tuple[str, str]:
    """(key under model, message) of the first thing that is wrong with a shape."""
    wrong = error.errors()[0]
    text = wrong["msg"].removeprefix("Value error, ")
    names = {
        "ExpertsShape": {field: key for key, field in EXPERT_FIELDS.items()},
        "SSMShape": {field: key for key, field in SSM_FIELDS.items()},
    }.get(error.title, {})
    for field, key in names.items():
        text = re.sub(rf"\b{field}\b", key, text)
    key = ".".join(map(str, wrong["loc"])) or text.partition(" ")[0].rstrip(":")
    return names.get(key, key), text


def adapt_kv_heads(base: FlatConfig, layer: FlatConfig) -> list[str]:
    """Change the key-value heads of earlier layers where a later one gives other query heads alone, and they do not fit."""
    heads, entry = layer.get("model.num_heads"), base.get("model.num_kv_heads")
    if heads is None or entry is None or "model.num_kv_heads" in layer:
        return []
    if not (type(heads.value) is type(entry.value) is int and heads.value > 0 < entry.value):
        return []  # whatever is wrong with them, the schema says
    fitting = nearest_kv_heads(heads.value, entry.value)
    if heads.value % entry.value == 0:
        return []
    base["model.num_kv_heads"] = replace(entry, value=fitting)
    return [f"model.num_kv_heads is {fitting} instead of {entry.value}, because num_heads is {heads.value}"]
