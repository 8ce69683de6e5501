"""Search spaces: which keys a study varies, over which values, and under which condition.

A dimension is written as text (`log(1e-5, 1e-2)`, `uniform(0, 0.5)`, `int(2, 8)`, `int_log(16, 512)`, `[a, b, c]`), as a list, or
as the tuples and lists of other tuners (`(1e-5, 0.1, "log_uniform")`). ` if KEY=VALUE` or ` if KEY in [A, B]` at the end of the text
makes it conditional on another key.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from bottega.config.aliases import resolve_alias
from bottega.config.yaml_io import parse_value
from bottega.core.errors import UsageError

KINDS = {
    "log": "log",
    "log_uniform": "log",
    "loguniform": "log",
    "uniform": "uniform",
    "float": "uniform",
    "int": "int",
    "int_uniform": "int",
    "randint": "int",
    "int_log": "int_log",
    "log_int": "int_log",
}
"""Spelling of a range -> its kind."""

MAX_GRID_SIZE = 100_000
"""Largest number of points of a grid."""

EXAMPLES = "such as log(1e-5,1e-2), uniform(0,0.5), int(2,8), int_log(16,512) or [a,b,c]"

_RANGE = re.compile(r"([a-z_]+)\s*\((.*)\)", re.DOTALL)
_CONDITION = re.compile(r"(.*\S)\s+if\s+([A-Za-z_][\w.-]*)\s*(?:==?\s*|\s+in\s+)(.+)", re.DOTALL)


@dataclass(frozen=True)
class Range:
    """Numbers between two bounds, both included."""

    kind: str
    low: float
    high: float

    @property
    def is_integer(self) -> bool:
        """Whether the values are whole numbers."""
        return self.kind.startswith("int")

    @property
    def is_log(self) -> bool:
        """Whether values are drawn evenly by their logarithm."""
        return self.kind.endswith("log")

    def __str__(self) -> str:
        return f"{self.kind}({self.low:g}, {self.high:g})"


@dataclass(frozen=True)
class Choices:
    """Some values, in no order."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return json.dumps(list(self.values), ensure_ascii=False)


@dataclass(frozen=True)
class Condition:
    """A dimension is used only while another key has one of these values."""

    key: str
    values: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.key} in {json.dumps(list(self.values), ensure_ascii=False)}"


@dataclass(frozen=True)
class Dimension:
    """A key that is searched."""

    key: str
    values: Range | Choices
    condition: Condition | None = None

    def __str__(self) -> str:
        return f"{self.values}" + (f" if {self.condition}" if self.condition is not None else "")

    def list_test_values(self) -> list[Any]:
        """Return the values that must be valid for all to be: every choice, or both bounds of a range."""
        if isinstance(self.values, Choices):
            return list(self.values.values)
        bounds = [self.values.low, self.values.high]
        return [int(bound) for bound in bounds] if self.values.is_integer else bounds

    def list_grid_values(self) -> list[Any]:
        """Return the values of the dimension in a grid; raises UsageError for a range of real numbers."""
        if isinstance(self.values, Choices):
            return list(self.values.values)
        if not self.values.is_integer:
            low, high = f"{self.values.low:g}", f"{self.values.high:g}"
            raise UsageError(
                f"--space {self.key}={self.values}: a grid needs single values; give a list, or a number of values as "
                f"third argument: {self.values.kind}({low}, {high}, 5)"
            )
        return list(range(int(self.values.low), int(self.values.high) + 1))


def parse_space(entries: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[Dimension]:
    """Return the dimensions of a space, or of several joined; a condition follows the key it names.

    Raises UsageError with all problems, one line each.
    """
    joined: dict[str, Any] = {}
    problems: list[str] = []
    if isinstance(entries, str) or not all(isinstance(part, Mapping) for part in _as_list(entries)):
        raise UsageError("space: expected a dict of keys and values, or a list of such dicts")
    for part in _as_list(entries):
        for key, value in _flatten(part):
            canonical_key = next(iter(resolve_alias(str(key).strip(), 0)))
            if canonical_key in joined:
                problems.append(f"--space {key}: given twice; keep one")
            joined[canonical_key] = value
    if not joined:
        raise UsageError(f"the search space is empty; add --space KEY=VALUES, {EXAMPLES}")
    dimensions: list[Dimension] = []
    for key, value in joined.items():
        try:
            dimensions.append(_parse_dimension(key, value))
        except UsageError as error:
            problems.append(str(error))
    if problems:
        raise UsageError("\n".join(problems))
    return _sort_by_condition(dimensions)


def parse_space_words(words: Sequence[str]) -> dict[str, str]:
    """Return the spaces of `--space KEY=VALUES` words by key."""
    space: dict[str, str] = {}
    for word in words:
        key, separator, text = word.partition("=")
        if not separator or not key.strip() or not text.strip():
            raise UsageError(f"--space {word}: expected KEY=VALUES, {EXAMPLES}")
        if key.strip() in space:
            raise UsageError(f"--space {key.strip()}: given twice; keep one")
        space[key.strip()] = text
    return space


def build_grid(dimensions: Sequence[Dimension], base: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every combination of values; keys whose condition is false are left out, and equal combinations count once.

    `base` maps the keys of conditions that are not searched to their values.
    """
    columns = [dimension.list_grid_values() for dimension in dimensions]
    size = math.prod(len(column) for column in columns)
    if size > MAX_GRID_SIZE:
        raise UsageError(
            f"the grid has {size:,} points, more than {MAX_GRID_SIZE:,}; remove values, or use --method random"
        )
    points: dict[str, dict[str, Any]] = {}
    for values in product(*columns):
        point: dict[str, Any] = {}
        for dimension, value in zip(dimensions, values, strict=True):
            if is_active(dimension, {**base, **point}):
                point[dimension.key] = value
        points.setdefault(json.dumps(point, sort_keys=True), point)
    return list(points.values())


def is_active(dimension: Dimension, values: Mapping[str, Any]) -> bool:
    """Return whether the condition of a dimension holds, given the values of other keys."""
    condition = dimension.condition
    return condition is None or values.get(condition.key) in condition.values


def _as_list(entries: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [entries] if isinstance(entries, Mapping) else list(entries)


def encode_choice(value: Any) -> Any:
    """Return a choice as a value that the storage accepts: lists and blocks become JSON."""
    return f"json:{json.dumps(value, sort_keys=True)}" if isinstance(value, list | dict | tuple) else value


def decode_choice(value: Any) -> Any:
    """Return the choice that `encode_choice` has encoded."""
    return json.loads(value.removeprefix("json:")) if isinstance(value, str) and value.startswith("json:") else value


def _flatten(space: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return dotted key -> value of nested blocks, as a recipe file writes them."""
    leaves: list[tuple[str, Any]] = []
    for key, value in space.items():
        leaves += _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return leaves


def _parse_dimension(key: str, value: Any) -> Dimension:
    condition = None
    if isinstance(value, str):
        match = _CONDITION.fullmatch(value.strip())
        if match is not None:
            value, other, text = match.groups()
            condition_value = parse_value(text, f"--space {key}")
            values = tuple(condition_value) if isinstance(condition_value, list) else (condition_value,)
            condition = Condition(next(iter(resolve_alias(other, 0))), values)
        return Dimension(key, _parse_text(key, value.strip()), condition)
    if isinstance(value, tuple) and len(value) == 3 and value[2] in KINDS:
        return Dimension(key, _build_range(key, str(value[2]), list(value[:2])))
    if isinstance(value, list | tuple):
        return Dimension(key, _build_choices(key, list(value)))
    if type(value).__module__ != "builtins" and hasattr(value, "tolist"):  # an array of values
        return Dimension(key, _build_choices(key, list(value.tolist())))
    raise UsageError(f"--space {key}: {value!r} is one value; give several, {EXAMPLES}")


def _parse_text(key: str, text: str) -> Range | Choices:
    match = _RANGE.fullmatch(text)
    if match is not None and match[1] in KINDS:
        arguments = (
            [parse_value(part.strip(), f"--space {key}") for part in match[2].split(",")] if match[2].strip() else []
        )
        return _build_range(key, match[1], arguments)
    if match is not None:
        raise UsageError(
            f"--space {key}: {match[1]} is not a range; choose from log, uniform, int, int_log, or a list [a,b,c]"
        )
    value = parse_value(text, f"--space {key}")
    if not isinstance(value, list):
        raise UsageError(f"--space {key}: {text} is one value; give several, {EXAMPLES}")
    return _build_choices(key, value)


def _build_choices(key: str, values: list[Any]) -> Choices:
    if not values:
        raise UsageError(f"--space {key}: the list is empty; give several values, {EXAMPLES}")
    duplicates = [value for index, value in enumerate(values) if value in values[:index]]
    if duplicates:
        raise UsageError(f"--space {key}: {duplicates[0]!r} is listed twice; remove one")
    return Choices(tuple(values))


def _build_range(key: str, spelling: str, arguments: list[Any]) -> Range | Choices:
    kind = KINDS[spelling]
    label = f"--space {key}: {spelling}({', '.join(map(str, arguments))})"
    if len(arguments) not in (2, 3) or not all(_is_number(argument) for argument in arguments):
        raise UsageError(f"{label}: expected two numbers, the lowest and the highest value")
    low, high = float(arguments[0]), float(arguments[1])
    if not low < high:
        raise UsageError(f"{label}: the lowest value must be below the highest")
    if kind.endswith("log") and low <= 0:
        raise UsageError(f"{label}: the lowest value must be above 0")
    if kind.startswith("int") and not (low.is_integer() and high.is_integer()):
        raise UsageError(f"{label}: expected whole numbers")
    space = Range(kind, low, high)
    return space if len(arguments) == 2 else _spread_values(space, arguments[2], label)


def _spread_values(space: Range, count: Any, label: str) -> Choices:
    """Return `count` values at equal distances, of the logarithm in a logarithmic range."""
    if not isinstance(count, int) or count < 2:
        raise UsageError(f"{label}: the third argument is a number of values, 2 or more")
    low, high = (math.log(space.low), math.log(space.high)) if space.is_log else (space.low, space.high)
    values = [low + (high - low) * index / (count - 1) for index in range(count)]
    values = [math.exp(value) for value in values] if space.is_log else values
    rounded = [round(value) if space.is_integer else float(f"{value:.6g}") for value in values]
    return Choices(tuple(dict.fromkeys(rounded)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _sort_by_condition(dimensions: list[Dimension]) -> list[Dimension]:
    """Put each dimension after the one its condition names."""
    keys = {dimension.key for dimension in dimensions}
    waiting, ordered = list(dimensions), []
    done: set[str] = set()
    while waiting:
        ready = [
            dimension
            for dimension in waiting
            if dimension.condition is None or dimension.condition.key not in keys or dimension.condition.key in done
        ]
        if not ready:
            raise UsageError(f"--space {waiting[0].key}: its condition depends on itself; remove one of the conditions")
        ordered += ready
        done |= {dimension.key for dimension in ready}
        waiting = [dimension for dimension in waiting if dimension not in ready]
    return ordered
