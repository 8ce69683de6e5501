"""A model of text that starts from weights has their dimensions, so those of earlier layers go."""

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
"""Keys of a model of text that the weights it starts from decide."""


def drop_dimensions(base: FlatConfig, layer: FlatConfig, applies: Callable[[Mapping[str, Any]], bool]) -> None:
    """Drop earlier dimensions where a later layer names weights, in recipes that `is_meant` accepts by their values."""
    start = layer.get("model.from")
    if start is None or start.value is None:
        return
    if applies({name: entry.value for flat in (base, layer) for name, entry in flat.items()}):
        for key in DIMENSION_KEYS:
            if key not in layer:
                base.pop(key, None)
