"""The loss of a classifier as its recipe describes it, with class weights computed from the training data."""

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
    """Return whether classes without a training sample are part of the model.

    They are if the recipe sets the number of classes, in cross-validation (the folds share their classes), and in
    meta-learning (maml), which evaluates on classes not seen in training.
    """
    split = recipe.data.split
    is_fold = split is not None and split.folds is not None
    is_declared = getattr(recipe.model, "num_labels", None) is not None
    return is_declared or is_fold or any(technique.name == "maml" for technique in recipe.techniques)


@final
class Objective(BaseModel):
    """The loss-related fields of a `Classification`, under the same names."""

    model_config = ConfigDict(frozen=True)

    objective: str = "cross_entropy"
    gamma: float = 2.0
    class_weights: tuple[float, ...] | None = None

    @classmethod
    def from_options(
        cls, loss: LossOptions | None, read_labels: Callable[[], np.ndarray], classes: tuple[str, ...]
    ) -> Objective:
        """Build the objective; `read_labels` returns the labels of all training samples and is called for balanced weights."""
        if loss is None:
            return cls()
        weights = loss.class_weights
        if weights == "balanced":
            weights = compute_balanced_weights(read_labels(), len(classes))
        elif isinstance(weights, dict):
            weights = _order_by_class(weights, classes)
        return cls(objective=loss.name, gamma=loss.gamma, class_weights=weights)

    @classmethod
    def load(cls, loss: LossOptions | None, processor_folder: Path) -> Objective:
        """Read the objective of a finished run: its data may have changed or be gone."""
        if loss is None or loss.class_weights is None:
            return cls.from_options(loss, lambda: np.zeros(0), ())
        weights = read_metadata(processor_folder / CLASS_WEIGHTS_FILE, lambda raw: tuple(map(float, json.loads(raw))))
        return cls(objective=loss.name, gamma=loss.gamma, class_weights=weights)

    def save(self, folder: Path) -> None:
        """Write the class weights, if there are any, into the processor folder."""
        if self.class_weights is not None:
            (folder / CLASS_WEIGHTS_FILE).write_text(json.dumps(self.class_weights) + "\n")

    @property
    def task_fields(self) -> dict[str, Any]:
        """Keyword arguments for `Classification`."""
        return self.model_dump()


def _order_by_class(weights: dict[str, float], classes: tuple[str, ...]) -> tuple[float, ...]:
    """Return one weight for each class; a class without one has weight 1."""
    for name in weights:
        if name not in classes:
            similar = find_similar_names(name, classes)
            hint = f"did you mean {similar[0]!r}?" if similar else f"the classes are {', '.join(classes[:5])}"
            raise UsageError(f"loss.class_weights: {name!r} is not one of the {len(classes)} classes; {hint}")
    return tuple(weights.get(name, 1.0) for name in classes)
