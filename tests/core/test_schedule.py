"""Schedules: functions of the step alone, with warm-up, bounds and final values."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.core.schedule import SHAPES, Schedule

NAMES = [*SHAPES, "one_cycle"]
DECREASING = ["linear", "cosine", "polynomial", "exponential", "inverse_sqrt", "wsd", "one_cycle"]
ENDING_AT_FLOOR = ["linear", "cosine", "polynomial", "wsd", "one_cycle"]


@pytest.mark.parametrize("name", NAMES)
@given(total=st.integers(1, 300), warmup=st.integers(0, 300), floor=st.floats(0, 1), step=st.integers(0, 400))
def test_multiplier_is_in_the_unit_interval_and_depends_on_the_step_alone(
    name: str, total: int, warmup: int, floor: float, step: int
) -> None:
    schedule = Schedule(name, total=total, warmup=min(warmup, total), floor=floor)
    value = schedule(step)
    assert 0 <= value <= 1 + 1e-12
    # The value is bitwise the same in any order of calls and for an equal schedule.
    _ = [schedule(other) for other in (total, 0, step + 1)]
    assert schedule(step) == value == Schedule(name, total=total, warmup=min(warmup, total), floor=floor)(step)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "one_cycle"])
def test_warm_up_is_linear_and_ends_at_the_peak(name: str) -> None:
    schedule = Schedule(name, total=100, warmup=10, floor=0.1)
    assert [schedule(step) for step in range(10)] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert schedule(10) == pytest.approx(1.0)
    assert Schedule(name, total=100)(0) == pytest.approx(1.0), "without a warm-up the first step is at the peak"


@pytest.mark.parametrize("name", DECREASING)
def test_never_rises_after_the_peak(name: str) -> None:
    schedule = Schedule(name, total=200, warmup=20, floor=0.05)
    after = [schedule(step) for step in range(20, 260)]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(after))
    assert after[-1] < 0.5


@pytest.mark.parametrize("name", ENDING_AT_FLOOR)
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_ends_at_the_floor_and_stays_there(name: str, floor: float) -> None:
    schedule = Schedule(name, total=100, warmup=10, floor=floor)
    assert schedule(100) == schedule(150) == pytest.approx(floor, abs=1e-12)
    assert schedule(99) == pytest.approx(floor, abs=0.06), "the last step of the run is not near the floor"


@pytest.mark.parametrize("name", ["constant", "plateau"])
def test_constant_stays_at_the_peak(name: str) -> None:
    schedule = Schedule(name, total=100, warmup=5, floor=0.3)
    assert {schedule(step) for step in range(5, 200)} == {1.0}


def test_restarts_come_back_to_the_peak_each_period() -> None:
    schedule = Schedule("cosine_with_restarts", total=110, warmup=10, cycle=25)
    assert [schedule(10 + 25 * i) for i in range(4)] == [1.0] * 4
    assert [schedule(9 + 25 * i) < 0.01 for i in range(1, 5)] == [True] * 4
    period = [schedule(step) for step in range(10, 35)]
    assert period == [schedule(step) for step in range(60, 85)]


def test_values_computed_by_hand() -> None:
    assert Schedule("cosine", total=100, floor=0.2)(50) == pytest.approx(0.2 + 0.8 * 0.5)
    assert Schedule("linear", total=100)(25) == pytest.approx(0.75)
    assert Schedule("polynomial", total=100, power=2.0)(50) == pytest.approx(0.25)
    assert Schedule("exponential", total=100, gamma=0.01)(50) == pytest.approx(0.1)
    assert Schedule("inverse_sqrt", total=1000, warmup=100)(400) == pytest.approx(0.5)
    wsd = Schedule("wsd", total=100, decay_fraction=0.2)
    assert (wsd(79), wsd(80), wsd(90)) == (1.0, 1.0, pytest.approx(0.5))


def test_one_cycle_warms_up_from_a_twenty_fifth() -> None:
    schedule = Schedule("one_cycle", total=100)
    up = [schedule(step) for step in range(30)]
    assert all(later > earlier for earlier, later in pairwise(up))
    assert up[-1] == pytest.approx(1.0)
    assert 0.04 <= up[0] < 0.05
    assert math.isclose(Schedule("one_cycle", total=100, warmup=50)(49), 1.0)
