"""Metadata of a routing run, and the check that pretrained weights match its recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, final

import numpy as np
from pydantic import BaseModel, ConfigDict

from bottega.config.error_messages import format_value
from bottega.core.errors import DataError, UsageError
from bottega.data.numbers.numeric_fields import describe_column_mismatch
from bottega.models.experts.config import ExpertsShape
from bottega.models.routing.config import RoutingShape
from bottega.models.spiking.config import SpikingShape
from bottega.models.ssm.config import SSMShape

METADATA_FILE, CONFIG_FILE = "routing.json", "config.json"
RECIPE_KEYS: dict[type[BaseModel], dict[str, str]] = {
    ExpertsShape: {"num_shared": "shared_experts"},
    SSMShape: {"head_size": "ssm_head_size"},
    SpikingShape: {"threshold": "spike_threshold"},
}
"""Field of a shape -> recipe key, where the names differ."""
TRAINING_FIELDS = (
    *("dropout", "expert_dropout", "capacity", "capacity_factor", "balance", "bias_rate", "load_decay"),
    "chunk_size",
)
"""Fields of shapes that may differ from those of the pretrained weights, since no weight depends on them."""
DATA_FIELDS = {"num_inputs": "inputs", "num_labels": "labels"}
"""Field of a shape that follows from the data -> its name in messages."""


@final
class RoutingMetadata(BaseModel):
    """What a trained model needs to know of its data: routing.json in the processor folder, config.json in an export."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: RoutingShape
    classes: tuple[str, ...]
    num_rules: int | None
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    has_bayes: bool
    """Whether the Bayes-optimal accuracy of the samples is known."""
    columns: tuple[str, ...] | None = None
    """Names of the input columns in order; None if the inputs come from one field."""

    def matches(self, other: RoutingMetadata) -> bool:
        """Return whether `other` is the same, up to rounding of mean and scale on another machine."""
        own_scale = {"mean": self.mean, "scale": self.scale}
        is_close = all(
            len(mine) == len(theirs) and np.allclose(mine, theirs, rtol=1e-4, atol=1e-6)
            for mine, theirs in ((self.mean, other.mean), (self.scale, other.scale))
        )
        return is_close and other.model_copy(update=own_scale) == self

    def check_columns(self, columns: tuple[str, ...] | None, where: str) -> None:
        """Raise a DataError if other data has other columns; inputs are ordered by column name."""
        if self.columns is None:
            return
        if columns is None:
            names = ", ".join(map(repr, self.columns[:8])) + (", ..." if len(self.columns) > 8 else "")
            raise DataError(
                f"{where} has no column names; give it a header with the columns that this run was trained on: {names}"
            )
        problem = describe_column_mismatch(columns, self.columns)
        if problem is not None:
            raise DataError(f"{where}: {problem}")


def apply_pretrained_scale(folder: Path, metadata: RoutingMetadata) -> RoutingMetadata:
    """Return `metadata` with the input scale that the pretrained weights in `folder` were trained with.

    Raises a UsageError that names all differences if the network or its labels differ.
    """
    try:
        config = json.loads((folder / CONFIG_FILE).read_bytes())
        del config["model_type"]
        pretrained = RoutingMetadata.model_validate(config)
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(f"model.from: {folder} is not an exported routing model; give one, or remove it") from None
    differences = _find_differences(pretrained.shape, metadata.shape)
    if differences:
        description = ", ".join(
            f"{DATA_FIELDS.get(key, key)} {format_value(pretrained_value)} (here {format_value(own_value)})"
            for key, (pretrained_value, own_value) in differences.items()
        )
        changes = [
            f"model.{key}={_to_yaml(pretrained_value)}"
            for key, (pretrained_value, _) in differences.items()
            if key not in DATA_FIELDS
        ]
        data_remedy = "give it data like its training data" if differences.keys() & DATA_FIELDS.keys() else ""
        remedy = "; ".join(filter(None, (data_remedy, f"set {' '.join(changes)}" if changes else "")))
        raise UsageError(f"model.from: {folder} has {description}; {remedy}")
    for pretrained_value, own_value in zip(pretrained.classes, metadata.classes, strict=True):
        if pretrained_value != own_value:
            raise UsageError(
                f"model.from: {folder} has label {pretrained_value} where the data here has {own_value}; use data with the same labels"
            )
    return metadata.model_copy(update={"mean": pretrained.mean, "scale": pretrained.scale})


def _find_differences(pretrained: BaseModel, own: BaseModel) -> dict[str, tuple[Any, Any]]:
    """Return recipe key -> (pretrained value, own value) for every field that weights depend on and that differs."""
    differences: dict[str, tuple[Any, Any]] = {}
    inner_shapes: list[tuple[BaseModel, BaseModel]] = []
    for field, pretrained_value in pretrained:
        own_value = getattr(own, field)
        if isinstance(pretrained_value, BaseModel) or isinstance(own_value, BaseModel):
            # If one of them has no such inner shape, another field differs as well.
            if isinstance(pretrained_value, BaseModel) and isinstance(own_value, BaseModel):
                inner_shapes.append((pretrained_value, own_value))
        elif field == "trunk" and "spiking" in (pretrained_value, own_value) and pretrained_value != own_value:
            differences["spike_threshold"] = (_get_threshold(pretrained), _get_threshold(own))
            if pretrained_value == "state_space":
                differences["trunk"] = (pretrained_value, own_value)
        # A bias takes part in the choice of experts, so weights that were trained with one keep it.
        elif pretrained_value != own_value and (field not in TRAINING_FIELDS or pretrained_value == "bias"):
            differences[RECIPE_KEYS.get(type(pretrained), {}).get(field, field)] = (pretrained_value, own_value)
    for pair in inner_shapes:
        differences = {**_find_differences(*pair), **differences}  # an inner width follows from the outer one
    return differences


def _get_threshold(shape: Any) -> float | None:
    return shape.spiking.threshold if shape.spiking is not None else None


def _to_yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
