"""Dimensions of a text model that starts from pretrained weights: those of the weights replace the recipe's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bottega.config.layers import FlatConfig

DIMENSION_KEYS = tuple(
    f"model.{name}"
    for name in (
        *("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_size", "intermediate_size"),
        *("dropout", "attention_dropout"),
    )
)
"""Model keys that pretrained weights decide."""


def drop_dimensions(base: FlatConfig, layer: FlatConfig, applies: Callable[[Mapping[str, Any]], bool]) -> None:
    """Drop dimensions of earlier layers where a later layer sets model.from, in recipes for which `applies` is true."""
    base_model = layer.get("model.from")
    if base_model is None or base_model.value is None:
        return
    if applies({name: entry.value for flat in (base, layer) for name, entry in flat.items()}):
        for key in DIMENSION_KEYS:
            if key not in layer:
                base.pop(key, None)
