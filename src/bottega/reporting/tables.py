"""Tables of the page, and how numbers are written in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """A table: title, column names, and rows of texts; all columns but the first `num_text_columns` are right-aligned."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    num_text_columns: int = 1
    note: str = ""


def format_number(value: Any) -> str:
    """Return a number with a sensible number of digits: 0.6986, 12.35, 1,234, 3.2e-05."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    if not math.isfinite(value):
        return "not finite"
    if isinstance(value, int) or (value.is_integer() and abs(value) >= 1000):
        return f"{int(value):,}"
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e7):
        return f"{value:.3e}"
    return f"{value:,.1f}" if size >= 1000 else f"{value:.2f}" if size >= 100 else f"{value:.4f}"


def format_seconds(seconds: float) -> str:
    """Return a duration as people say it: 45 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def format_large(number: float) -> str:
    """Return a large number in words: 984 thousand, 1.24 million, 13 billion."""
    rounded = float(f"{number:.3g}")  # before the unit is chosen: 999,999 is a million
    for unit, word in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if rounded >= max(unit, 1e4):
            return f"{rounded / unit:.3g} {word}"
    return f"{number:,.0f}"
