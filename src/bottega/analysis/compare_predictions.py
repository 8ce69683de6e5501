"""Predictions that `bottega evaluate` wrote for classifiers: read them, and tell which are correct."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bottega.core.errors import DataError, UsageError

if TYPE_CHECKING:
    from bottega.analysis.compare_groups import Group


def read_correctness(groups: list[Group]) -> dict[str, np.ndarray] | str:
    """Return group label -> whether each sample was predicted correctly, or the path of a run without predictions."""
    predictions: dict[str, dict[str, tuple[str, str]]] = {}
    for group in groups:
        run_predictions = read_predictions(group.members[0].path / "results")
        if run_predictions is None:
            return str(group.members[0].path)
        predictions[group.label] = run_predictions
    first_labels = {key: label for key, (label, _) in predictions[groups[0].label].items()}
    for group in groups[1:]:
        labels = {key: label for key, (label, _) in predictions[group.label].items()}
        all_labels = {**first_labels, **labels}
        differing = [key for key in all_labels if first_labels.get(key) != labels.get(key)]
        if not first_labels.keys() & labels.keys():
            raise UsageError(
                f"{groups[0].name} and {group.name} have predictions of different data: {len(first_labels):,} and {len(labels):,} "
                "samples, none in common; evaluate both on the same data"
            )
        if differing:
            raise UsageError(
                f"{groups[0].name} and {group.name} have predictions of different samples or labels, {len(differing):,} of "
                f"{len(all_labels):,}, the first {differing[0]!r}; evaluate both on the same data"
            )
    expected = first_labels.items()
    return {name: np.array([rows[key][1] == label for key, label in expected]) for name, rows in predictions.items()}


def read_predictions(results: Path) -> dict[str, tuple[str, str]] | None:
    """Return sample key -> (label, predicted) of an evaluated classifier; None without predictions.jsonl."""
    file = results / "predictions.jsonl"
    if not file.is_file():
        return None
    predictions: dict[str, tuple[str, str]] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            row = json.loads(line)
            key, pair = str(row["key"]), (str(row["label"]), str(row["predicted"]))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{file}:{number}: {type(error).__name__}: expected key, label and predicted; write the file again with bottega evaluate"
            ) from None
        if key in predictions:
            raise DataError(
                f"{file}:{number}: the key {key!r} occurs twice; write the file again with bottega evaluate"
            )
        predictions[key] = pair
    if not predictions:
        raise DataError(f"{file} is empty; write it again with bottega evaluate {results.parent} --out {results}")
    return predictions
