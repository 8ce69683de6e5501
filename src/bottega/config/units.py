"""Intervals of a run with units, such as 200, "1 epoch", "5%" and "10 min", and their conversion to steps."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

Unit = Literal["steps", "epochs", "percent", "seconds"]

_UNITS: dict[str, tuple[Unit, float]] = {
    "": ("steps", 1),
    "step": ("steps", 1),
    "steps": ("steps", 1),
    "epoch": ("epochs", 1),
    "epochs": ("epochs", 1),
    "%": ("percent", 1),
    "s": ("seconds", 1),
    "sec": ("seconds", 1),
    "min": ("seconds", 60),
    "h": ("seconds", 3600),
}
"""Unit as written in a recipe -> unit of an Interval, and the factor that converts to it."""
_INTERVAL_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Z]*|%)\s*")


@dataclass(frozen=True)
class Interval:
    """A cadence or a duration in steps, epochs, percent of the run, or seconds."""

    amount: float
    unit: Unit = "steps"

    @classmethod
    def parse(cls, value: Any, *, allows_time: bool = False) -> Interval:
        """Parse the value of a recipe; raises ValueError with the expected form.

        `allows_time` accepts seconds, minutes and hours.
        """
        if isinstance(value, Interval):
            return value
        match = None if isinstance(value, bool) else _INTERVAL_TEXT.fullmatch(str(value))
        if (
            match is None
            or match[2].lower() not in _UNITS
            or (_UNITS[match[2].lower()][0] == "seconds" and not allows_time)
        ):
            examples = '"1 epoch", "5%" or "10 min"' if allows_time else '"1 epoch" or "5%"'
            raise ValueError(f"expected a number of steps, {examples}, got {value!r}")
        unit, factor = _UNITS[match[2].lower()]
        amount = float(match[1]) * factor
        if not math.isfinite(amount) or amount > 1e15:
            raise ValueError(f"expected at most 1e15, got {value!r}")
        if unit == "steps" and amount != int(amount):
            raise ValueError(f"expected a whole number of steps, got {value!r}")
        if unit == "percent" and amount > 100:
            raise ValueError(f"expected at most 100%, got {value!r}")
        return cls(amount, unit)

    def to_steps(self, total_steps: int, steps_per_epoch: int) -> int:
        """Convert to steps of a run: at least 1, except that an amount of 0 is 0."""
        if self.unit == "seconds":
            raise ValueError(f"{self} is a time, not a number of steps")
        unit_steps = {"steps": 1.0, "epochs": float(steps_per_epoch), "percent": total_steps / 100}[self.unit]
        return 0 if self.amount == 0 else max(1, round(self.amount * unit_steps))

    @property
    def seconds(self) -> float | None:
        """The amount in seconds, or None if the unit is not a time."""
        return self.amount if self.unit == "seconds" else None

    def to_recipe_value(self) -> int | str:
        """Return the value for a recipe file: an integer for steps, otherwise text with the unit."""
        return int(self.amount) if self.unit == "steps" else str(self)

    def __str__(self) -> str:
        amount, unit = self.amount, self.unit
        if unit == "percent":
            return f"{_format_amount(amount)}%"
        if unit == "seconds":
            return f"{_format_amount(amount / 60)} min" if amount % 60 == 0 else f"{_format_amount(amount)} s"
        return f"{_format_amount(amount)} {unit[:-1] if amount == 1 else unit}"


def _format_amount(amount: float) -> str:
    return str(int(amount)) if amount == int(amount) else repr(amount)


def _parse_cadence(value: Any, *, allows_time: bool = False) -> Interval | None:
    cadence = None if value is None else Interval.parse(value, allows_time=allows_time)
    return None if cadence is not None and cadence.amount == 0 else cadence


def _serialize_interval(interval: Interval | None) -> int | str | None:
    return None if interval is None else interval.to_recipe_value()


_SERIALIZER = PlainSerializer(_serialize_interval)


def _build_json_schema(pattern: str, *alternatives: dict[str, str]) -> WithJsonSchema:
    number, text = {"type": "integer", "minimum": 0}, {"type": "string", "pattern": pattern}
    return WithJsonSchema({"anyOf": [number, text, *alternatives]})


StepCadence = Annotated[
    Interval | None,
    BeforeValidator(partial(_parse_cadence, allows_time=False)),
    _SERIALIZER,
    _build_json_schema(r"^\d+(\.\d+)? ?(steps?|epochs?|%)$", {"type": "null"}),
]
"""A cadence in steps, epochs or percent of the run. None, written null or 0, means never or only at the end of the run."""

StepOrTimeCadence = Annotated[
    Interval | None,
    BeforeValidator(partial(_parse_cadence, allows_time=True)),
    _SERIALIZER,
    _build_json_schema(r"^\d+(\.\d+)? ?(steps?|epochs?|%|s|sec|min|h)$", {"type": "null"}),
]
"""A cadence that may also be a wall-clock time; for checkpoints, which do not change the trained weights."""

Duration = Annotated[
    Interval,
    BeforeValidator(partial(Interval.parse, allows_time=False)),
    _SERIALIZER,
    _build_json_schema(r"^\d+(\.\d+)? ?(steps?|epochs?|%)$"),
]
"""A duration within the run; may be 0."""


def _parse_step_range(value: Any) -> tuple[int, int]:
    match = re.fullmatch(r"\s*(\d+)\s*-\s*(\d+)\s*", value) if isinstance(value, str) else None
    steps = [int(match[1]), int(match[2])] if match else value
    if not isinstance(steps, list | tuple) or len(steps) != 2 or any(type(step) is not int for step in steps):
        raise ValueError(f'expected the first and the last step, such as [10, 20] or "10-20", got {value!r}')
    first, last = steps
    if not 1 <= first <= last:
        raise ValueError(f"expected steps from 1 on, the first before the last, got {value!r}")
    return first, last


StepRange = Annotated[
    tuple[int, int],
    BeforeValidator(_parse_step_range),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 2, "maxItems": 2},
                {"type": "string", "pattern": r"^\d+ ?- ?\d+$"},
            ]
        }
    ),
]
"""First and last of consecutive steps, counted from 1."""
