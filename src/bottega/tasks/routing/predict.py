"""Predictions for new rows of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bottega.core.errors import UsageError
from bottega.core.types import Models
from bottega.tasks.prediction import NewSamples, is_missing, predict_class

if TYPE_CHECKING:
    from bottega.tasks.routing.workload import RoutingWorkload


def predict_rows(
    workload: RoutingWorkload, models: Models, new_samples: NewSamples, *, device: Any
) -> list[dict[str, Any]]:
    """Return the predicted label and the expert or experts of each row, given as numbers or as tables."""
    inputs = new_samples.inputs
    parsed_rows = [_parse_numbers(text) for text in inputs]
    if inputs and all(row is not None for row in parsed_rows):
        keys, x = (
            [str(n) for n in range(len(inputs))],
            _stack_rows([row for row in parsed_rows if row is not None], inputs),
        )
    else:
        paths = new_samples.paths
        if not paths:
            raise UsageError(
                "this run classifies rows of numbers; give a table with --data FILE, or numbers such as 0.5,1,-2"
            )
        for text, row in zip(inputs, parsed_rows, strict=True):
            if is_missing(text):
                problem = (
                    f"{text} is neither an existing file nor numbers such as 0.5,1,-2"
                    if row is None
                    else f"{text} is a row of numbers, but other inputs are not"
                )
                raise UsageError(f"{problem}; give a table with --data FILE")
        keys, x = workload.read_rows(paths[0] if len(paths) == 1 else paths)
    probabilities, chosen = workload.predict_with_experts(models, x, device=device)
    return [
        {
            "row": key,
            **predict_class(workload.classes.names, row),
            "expert": experts[0] if len(experts) == 1 else experts,
        }
        for key, row, experts in zip(keys, probabilities.tolist(), chosen.tolist(), strict=True)
    ]


def _parse_numbers(text: str) -> list[float] | None:
    try:
        return [float(part) for part in text.strip("[]() ").split(",")]
    except ValueError:
        return None


def _stack_rows(rows: list[list[float]], texts: Sequence[str]) -> np.ndarray:
    for row, text in zip(rows, texts, strict=True):
        if len(row) != len(rows[0]):
            raise UsageError(
                f"{text} has {len(row)} numbers, but {texts[0]} has {len(rows[0])}; give rows of equal length"
            )
    return np.array(rows, np.float32)
