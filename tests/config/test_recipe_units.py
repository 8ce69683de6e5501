"""Intervals with units: parsing and conversion to steps."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from bottega.config.units import Duration, Interval, StepCadence, StepOrTimeCadence


@pytest.mark.parametrize(
    ("value", "steps"),
    [(7, 7), ("7", 7), ("7 steps", 7), ("1 epoch", 50), ("2 epochs", 100), ("0.5 epoch", 25), ("5%", 10), ("0.01%", 1)],
)
def test_interval_is_converted_to_steps(value: Any, steps: int) -> None:
    assert Interval.parse(value).to_steps(total_steps=200, steps_per_epoch=50) == steps


@pytest.mark.parametrize("value", ["10 min", "90 s", "2 h"])
def test_times_are_accepted_for_checkpoints_only(value: str) -> None:
    assert TypeAdapter(StepOrTimeCadence).validate_python(value).seconds in (600, 90, 7200)
    for kind in (StepCadence, Duration):
        with pytest.raises(ValidationError, match='expected a number of steps, "1 epoch" or "5%"'):
            TypeAdapter(kind).validate_python(value)
    with pytest.raises(ValueError, match="is a time"):
        Interval.parse(value, allows_time=True).to_steps(10, 10)


@pytest.mark.parametrize("value", [True, None, [1], -1, "-5", "often", "1.5", 1.5, "5 blah", "200%", "1e400 steps", ""])
def test_invalid_interval_is_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        Interval.parse(value, allows_time=True)


def test_zero_is_an_empty_duration_and_turns_a_cadence_off() -> None:
    assert TypeAdapter(Duration).validate_python(0).to_steps(10, 10) == 0
    assert TypeAdapter(StepCadence).validate_python(0) is None


amounts = st.one_of(st.integers(1, 10**6).map(float), st.floats(0.001, 100).map(lambda x: round(x, 3)))


@settings(deadline=None)
@given(amounts, st.sampled_from(["steps", "epochs", "percent", "seconds"]))
def test_interval_round_trip(amount: float, unit: Any) -> None:
    if unit == "steps":
        amount = float(int(amount) + 1)
    if unit == "percent":
        amount = min(amount, 100.0)
    cadence = Interval(amount, unit)
    assert Interval.parse(cadence.to_recipe_value(), allows_time=True) == cadence
    if unit != "seconds":
        assert cadence.to_steps(1000, 100) >= 1
