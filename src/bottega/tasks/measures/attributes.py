"""Classes that are named by attributes, as in "digit=3 direction=left": how often each attribute came out as asked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def parse_attributes(names: Sequence[str]) -> dict[str, list[str]]:
    """Attribute -> its value in each class; empty unless every class has the same attributes, each once."""
    classes = [_pairs(name) for name in names]
    if not classes or any(not pairs or pairs.keys() != classes[0].keys() for pairs in classes):
        return {}
    return {attribute: [pairs[attribute] for pairs in classes] for attribute in classes[0]}


def shared_rows(names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Class -> a number for each of its attributes' values; empty unless there are several attributes."""
    found = parse_attributes(names)
    if len(found) < 2:
        return ()
    numbers: dict[tuple[str, str], int] = {}
    for attribute, values in found.items():
        for value in sorted(set(values)):
            numbers[attribute, value] = len(numbers)
    return tuple(tuple(numbers[a, found[a][i]] for a in found) for i in range(len(names)))


def conditional_accuracy(predicted: np.ndarray, asked: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    """How often the class a classifier sees [n] is the class asked for [n], as a whole and by attribute.

    `predicted` below 0 is none of the classes, and wrong. Without samples there is nothing to say.
    """
    predicted, asked = np.asarray(predicted), np.asarray(asked)
    assert predicted.shape == asked.shape, "one prediction for each sample"
    if not len(asked):
        return {}
    result = {"conditional_accuracy": float((predicted == asked).mean())}
    for attribute, values in parse_attributes(names).items():
        table = np.array(values)
        result[f"{attribute}_accuracy"] = float(((table[predicted] == table[asked]) & (predicted >= 0)).mean())
    return result


def _pairs(name: str) -> dict[str, str]:
    """Empty if any word is not key=value, or a key comes twice."""
    words = [word.partition("=") for word in name.split()]
    pairs = {key: value for key, _, value in words}
    return pairs if len(pairs) == len(words) and all(key and value for key, value in pairs.items()) else {}
