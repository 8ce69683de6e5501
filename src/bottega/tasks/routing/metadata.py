"""What a model that routes must know of its data, and whether weights from elsewhere fit what is asked for here."""

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

METADATA_FILE, CONFIG = "routing.json", "config.json"
NAMES: dict[type[BaseModel], dict[str, str]] = {
    ExpertsShape: {"num_shared": "shared_experts"},
    SSMShape: {"head_size": "ssm_head_size"},
    SpikingShape: {"threshold": "spike_threshold"},
}
"""Fields of shapes -> keys of a recipe, where they are called otherwise."""
WHILE_TRAINING = (
    *("dropout", "expert_dropout", "capacity", "capacity_factor", "balance", "bias_rate", "load_decay"),
    "chunk_size",
)
"""Fields of shapes that may be other than in the folder a model starts from: no weight depends on them."""
OF_DATA = {"num_inputs": "inputs", "num_labels": "labels"}
"""Fields that follow from the data, in words."""


@final
class RoutingMetadata(BaseModel):
    """All of the data that a model of it must know to be used where the data is not."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: RoutingShape
    classes: tuple[str, ...]
    num_rules: int | None
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    has_bayes: bool
    """Whether it is known how well the samples can be told."""
    columns: tuple[str, ...] | None = None
    """The inputs by name, in their order; None where they came in one field."""

    def matches(self, other: RoutingMetadata) -> bool:
        """Sums may be added up in another order on another processor."""
        same = {"mean": self.mean, "scale": self.scale}
        near = all(
            len(mine) == len(theirs) and np.allclose(mine, theirs, rtol=1e-4, atol=1e-6)
            for mine, theirs in ((self.mean, other.mean), (self.scale, other.scale))
        )
        return near and other.model_copy(update=same) == self

    def check_columns(self, found: tuple[str, ...] | None, where: str) -> None:
        """Inputs are ordered by name: under other names, each would be taken for another one."""
        if self.columns is None:
            return
        if found is None:
            named = ", ".join(map(repr, self.columns[:8])) + (", ..." if len(self.columns) > 8 else "")
            raise DataError(f"{where}: its numbers have no names, and this run has learnt from the columns {named}")
        problem = describe_column_mismatch(found, self.columns)
        if problem is not None:
            raise DataError(f"{where}: {problem}")


def apply_start_scale(folder: Path, known: RoutingMetadata) -> RoutingMetadata:
    """With the scale that the weights of the start were learnt with; refused by name where its network is another one."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        del config["model_type"]
        found = RoutingMetadata.model_validate(config)
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(f"model.from: {folder} is no exported model that routes") from None
    different = _different(found.shape, known.shape)
    if different:
        told = ", ".join(
            f"{OF_DATA.get(key, key)} {format_value(has)} (here {format_value(is_)})"
            for key, (has, is_) in different.items()
        )
        said = " ".join(f"model.{key}={_written(has)}" for key, (has, _) in different.items() if key not in OF_DATA)
        data = "give it data as it has learnt from" if different.keys() & OF_DATA.keys() else ""
        remedy = "; ".join(filter(None, (data, f"say {said}" if said else "")))
        raise UsageError(f"model.from: {folder} has {told}; {remedy}")
    for has, asked in zip(found.classes, known.classes, strict=True):
        if has != asked:
            raise UsageError(
                f"model.from: {folder} tells label {has} where the data here has {asked}; give it the same"
            )
    return known.model_copy(update={"mean": found.mean, "scale": found.scale})


def _different(has: BaseModel, asked: BaseModel) -> dict[str, tuple[Any, Any]]:
    """Key of a recipe -> (value there, value here) of all that weights depend on and that is another one."""
    found: dict[str, tuple[Any, Any]] = {}
    inner: list[tuple[BaseModel, BaseModel]] = []
    for field, there in has:
        here = getattr(asked, field)
        if isinstance(there, BaseModel) or isinstance(here, BaseModel):
            # Where one of them has no such part, another field says so.
            inner += [(there, here)] if isinstance(there, BaseModel) and isinstance(here, BaseModel) else []
        elif field == "trunk" and "spiking" in (there, here) and there != here:
            found["spike_threshold"] = (_threshold(has), _threshold(asked))
            if there == "state_space":
                found["trunk"] = (there, here)
        # A bias decides which experts are asked, so weights that learnt with one keep it.
        elif there != here and (field not in WHILE_TRAINING or there == "bias"):
            found[NAMES.get(type(has), {}).get(field, field)] = (there, here)
    for pair in inner:
        found = {**_different(*pair), **found}  # an inner width follows from the width of all
    return found


def _threshold(shape: Any) -> float | None:
    return shape.spiking.threshold if shape.spiking is not None else None


def _written(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
