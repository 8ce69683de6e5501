"""Which parameters move, and how fast: one table of (pattern, scale, weight decay), first match wins."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bottega.core.errors import UsageError


@dataclass(frozen=True)
class Row:
    """Parameters whose whole name matches `pattern` learn at `scale` times the rate; None means frozen."""

    pattern: str
    scale: float | None = 1.0
    weight_decay: float | None = None


def assign(names: Sequence[str], rows: Sequence[Row]) -> dict[str, int]:
    """Row number of each parameter. A parameter without a row, or a row without a parameter, is an error."""
    patterns = [_compiled(row.pattern) for row in rows]
    chosen: dict[str, int] = {}
    for name in names:
        row = next((i for i, pattern in enumerate(patterns) if pattern.fullmatch(name)), None)
        if row is None:
            raise UsageError(f"training.groups: no row matches the parameter {name}; add a last row with pattern '.*'")
        chosen[name] = row
    for i, row_ in enumerate(rows):
        if i not in chosen.values():
            raise UsageError(f"training.groups: the pattern {row_.pattern!r} matches no parameter, such as {names[0]}")
    if all(rows[i].scale is None for i in chosen.values()):
        raise UsageError("training.groups: every parameter is frozen, so nothing would learn")
    return chosen


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UsageError(f"training.groups: {pattern!r} is not a regular expression: {error}") from None
