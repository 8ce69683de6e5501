"""Classes named by attributes, as in "digit=3 direction=left": accuracy of generated samples by attribute."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def parse_attributes(names: Sequence[str]) -> dict[str, list[str]]:
    """Return attribute -> its value in each class; empty unless every class has the same attributes, each once."""
    classes = [_parse_pairs(name) for name in names]
    if not classes or any(not pairs or pairs.keys() != classes[0].keys() for pairs in classes):
        return {}
    return {attribute: [pairs[attribute] for pairs in classes] for attribute in classes[0]}


def index_attribute_values(names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return for each class the indices of its attribute values; empty unless there are several attributes."""
    attributes = parse_attributes(names)
    if len(attributes) < 2:
        return ()
    value_indices: dict[tuple[str, str], int] = {}
    for attribute, values in attributes.items():
        for value in sorted(set(values)):
            value_indices[attribute, value] = len(value_indices)
    return tuple(
        tuple(value_indices[attribute, values[i]] for attribute, values in attributes.items())
        for i in range(len(names))
    )


def conditional_accuracy(predicted: np.ndarray, requested: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    """Return the accuracy of a classifier's `predicted` (n,) against the requested classes (n,), overall and by attribute.

    A prediction below 0 is none of the classes, and counts as wrong. The result is empty without samples.
    """
    predicted, requested = np.asarray(predicted), np.asarray(requested)
    assert predicted.shape == requested.shape, "one prediction for each sample"
    if not len(requested):
        return {}
    result = {"conditional_accuracy": float((predicted == requested).mean())}
    for attribute, values in parse_attributes(names).items():
        class_values = np.array(values)
        is_correct = (class_values[predicted] == class_values[requested]) & (predicted >= 0)
        result[f"{attribute}_accuracy"] = float(is_correct.mean())
    return result


def _parse_pairs(name: str) -> dict[str, str]:
    """Return key -> value; empty if any word is not key=value, or a key comes twice."""
    words = [word.partition("=") for word in name.split()]
    pairs = {key: value for key, _, value in words}
    return pairs if len(pairs) == len(words) and all(key and value for key, value in pairs.items()) else {}
