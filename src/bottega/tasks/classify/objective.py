"""What a classifier minimises, as its recipe says, with the weights of its classes as they were in training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import numpy as np
from pydantic import BaseModel, ConfigDict

from bottega.config.recipe import Recipe
from bottega.core.errors import UsageError
from bottega.data.text.labelled import compute_balanced_weights
from bottega.similar_names import find_similar_names
from bottega.tasks.classify.config import LossOptions
from bottega.tasks.metadata import read_metadata

CLASS_WEIGHTS_FILE = "weights.json"


def includes_unseen_classes(recipe: Recipe) -> bool:
    """Whether classes that no training sample has are classes: where the recipe says how many there are, in a fold, whose
    classes are those of all folds, and where the point is to tell classes that were never seen (maml)."""
    split = recipe.data.split
    is_fold = split is not None and split.folds is not None
    is_declared = getattr(recipe.model, "num_labels", None) is not None
    return is_declared or is_fold or any(one.name == "maml" for one in recipe.techniques)


@final
class Objective(BaseModel):
    """The fields of a `Classification` of the same names."""

    model_config = ConfigDict(frozen=True)

    objective: str = "cross_entropy"
    gamma: float = 2.0
    class_weights: tuple[float, ...] | None = None

    @classmethod
    def from_options(
        cls, loss: LossOptions | None, labels: Callable[[], np.ndarray], classes: tuple[str, ...]
    ) -> Objective:
        """`labels` are those of all training samples, asked for where classes are to be balanced."""
        if loss is None:
            return cls()
        asked = loss.class_weights
        if asked == "balanced":
            asked = compute_balanced_weights(labels(), len(classes))
        elif isinstance(asked, dict):
            asked = _by_name(asked, classes)
        return cls(objective=loss.name, gamma=loss.gamma, class_weights=asked)

    @classmethod
    def load(cls, loss: LossOptions | None, processor: Path) -> Objective:
        """As it was when the codec was written: the data may have other shares by now, or be gone."""
        if loss is None or loss.class_weights is None:
            return cls.from_options(loss, lambda: np.zeros(0), ())
        weights = read_metadata(processor / CLASS_WEIGHTS_FILE, lambda raw: tuple(map(float, json.loads(raw))))
        return cls(objective=loss.name, gamma=loss.gamma, class_weights=weights)

    def save(self, folder: Path) -> None:
        if self.class_weights is not None:
            (folder / CLASS_WEIGHTS_FILE).write_text(json.dumps(self.class_weights) + "\n")

    @property
    def task_fields(self) -> dict[str, Any]:
        return self.model_dump()


def _by_name(asked: dict[str, float], classes: tuple[str, ...]) -> tuple[float, ...]:
    """In the order of the classes; one that is not named weighs 1."""
    for name in asked:
        if name not in classes:
            near = find_similar_names(name, classes)
            hint = f"did you mean {near[0]!r}?" if near else f"there is {', '.join(classes[:5])}"
            raise UsageError(f"loss.class_weights: {name!r} is none of the {len(classes)} classes; {hint}")
    return tuple(asked.get(name, 1.0) for name in classes)
