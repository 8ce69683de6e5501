"""Attributes are parsed from class names only where all classes have them."""

from __future__ import annotations

import numpy as np
import pytest

from bottega.tasks.metrics.attributes import conditional_accuracy, index_attribute_values, parse_attributes

NAMES = ["digit=0 direction=left", "digit=0 direction=up", "digit=1 direction=left", "direction=up digit=1"]


def test_attributes_of_classes() -> None:
    assert parse_attributes(NAMES) == {"digit": ["0", "0", "1", "1"], "direction": ["left", "up", "left", "up"]}
    assert parse_attributes(["pitch=A4"]) == {"pitch": ["A4"]}
    assert parse_attributes(["sum=a=b", "sum=c"]) == {"sum": ["a=b", "c"]}


@pytest.mark.parametrize(
    "names",
    [[], [""], ["cat", "dog"], ["digit=0", "dog"], ["digit=0", "colour=red"], ["digit=0 digit=1"], ["digit="], ["=3"]],
)
def test_other_class_names_have_no_attributes(names: list[str]) -> None:
    assert parse_attributes(names) == {}


def test_accuracy_overall_and_by_attribute() -> None:
    predicted, labels = np.array([0, 1, 3, 2, -1]), np.array([0, 0, 2, 2, 3])
    # The 1st and 4th are correct; the 2nd and 3rd have the correct digit only; the last is predicted as no class.
    accuracies = conditional_accuracy(predicted, labels, NAMES)
    assert accuracies == {"conditional_accuracy": 0.4, "digit_accuracy": 0.8, "direction_accuracy": 0.4}
    assert conditional_accuracy(predicted, labels, ["a", "b", "c", "d"]) == {"conditional_accuracy": 0.4}
    assert conditional_accuracy(predicted[:0], labels[:0], NAMES) == {}


def test_classes_share_the_index_of_an_attribute_value_they_have_in_common() -> None:
    assert index_attribute_values(NAMES) == ((0, 2), (0, 3), (1, 2), (1, 3))
    assert index_attribute_values(["pitch=A4", "pitch=B4"]) == (), "a single attribute is the class itself"
    assert index_attribute_values(["cat", "dog"]) == ()
