"""Recipes of spiking networks: valid ranges and incompatible keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from bottega.core.errors import UsageError
from bottega.models.spiking.config import SpikingShape
from bottega.tasks.recipes import check_recipe


@pytest.mark.parametrize(
    "wrong",
    [
        {"leak": -0.1},
        {"leak": 1.1},
        {"leak": math.nan},
        {"threshold": 0.0},
        {"threshold": math.inf},
        {"time_steps": 0},
        {"refractory": -1},
        {"adaptation": -1.0},
        {"adaptation_leak": 2.0},
        {"sharpness": 0.0},
        {"surrogate": "step"},
    ],
)
def test_invalid_spiking_shape_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SpikingShape(**wrong)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("leak", -0.1, "expected at least 0, got -0.1"),
        ("leak", 1.5, "expected at most 1, got 1.5"),
        ("spike_threshold", 0.0, "expected a number above 0, got 0.0"),
        ("spike_threshold", -1.0, "expected a number above 0, got -1.0"),
        ("time_steps", 0, "expected a number above 0, got 0"),
        ("refractory", -1, "expected at least 0, got -1"),
        ("sharpness", 0.0, "expected a number above 0, got 0.0"),
        ("adaptation", -0.5, "expected at least 0, got -0.5"),
        ("firing_rate", 1.2, "expected at most 1, got 1.2"),
        ("surrogate", "atan", "expected one of arctan, sigmoid, fast_sigmoid, got 'atan'; did you mean arctan"),
        ("coding", "rates", "expected one of constant, rate, latency, got 'rates'; did you mean rate"),
    ],
)
def test_invalid_value_is_refused_in_one_line(key: str, value: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_recipe(["classify/spiking", {f"model.{key}": value}])
    assert f"model.{key}: {message}" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model.kind": "convnet", "model.firing_rate": None},
            "applies to spiking networks, but model.kind is convnet; set model.kind",
        ),
        ({"model.firing_rate": None, "model.firing_rate_weight": 2.0}, "2 has no effect without model.firing_rate"),
        ({"data.normalise": "standard", "model.coding": "rate"}, "use unit or symmetric"),
    ],
)
def test_incompatible_keys_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_recipe(["classify/spiking", changes])


def test_unset_spiking_keys_do_not_change_the_run_name() -> None:
    """Keys that are null are not part of the results key."""
    results_key = check_recipe(["classify/image"]).recipe.results_key()
    assert [key for key in results_key if key in ("model.leak", "model.time_steps", "model.coding")] == []
