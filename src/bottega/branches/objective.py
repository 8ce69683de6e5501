"""What a classifier minimises, as its recipe says, with the weights of its classes as they were in training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import numpy as np
from pydantic import BaseModel, ConfigDict

from bottega.branches.kept import read_kept
from bottega.data.labelled import balanced_weights
from bottega.schema.classify import LossOptions

WEIGHTS = "weights.json"


@final
class Objective(BaseModel):
    """The fields of a `Classification` of the same names."""

    model_config = ConfigDict(frozen=True)

    objective: str = "cross_entropy"
    gamma: float = 2.0
    class_weights: tuple[float, ...] | None = None

    @classmethod
    def of(cls, loss: LossOptions | None, labels: Callable[[], np.ndarray], num_classes: int) -> Objective:
        """`labels` are those of all training samples, asked for where classes are to be balanced."""
        if loss is None:
            return cls()
        asked = loss.class_weights
        weights = balanced_weights(labels(), num_classes) if asked == "balanced" else asked
        return cls(objective=loss.name, gamma=loss.gamma, class_weights=weights)

    @classmethod
    def again(cls, loss: LossOptions | None, codec: Path) -> Objective:
        """As it was when the codec was written: the data may have other shares by now, or be gone."""
        if loss is None or loss.class_weights != "balanced":
            return cls.of(loss, lambda: np.zeros(0), 0)
        weights = read_kept(codec / WEIGHTS, lambda raw: tuple(map(float, json.loads(raw))))
        return cls(objective=loss.name, gamma=loss.gamma, class_weights=weights)

    def save(self, folder: Path) -> None:
        if self.class_weights is not None:
            (folder / WEIGHTS).write_text(json.dumps(self.class_weights) + "\n")

    @property
    def fields(self) -> dict[str, Any]:
        return self.model_dump()
