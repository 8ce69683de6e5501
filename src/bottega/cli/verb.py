"""What a verb is, and what all of them need."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bottega.core.errors import UsageError


@dataclass(frozen=True)
class Verb:
    """What a verb says of itself, which arguments it has, and what it does. The rest of the line is for the recipe."""

    says: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, list[str]], Any]


def finite(value: Any) -> Any:
    """JSON has no infinity and no NaN; null is what a reader can tell from a number."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def no_more(rest: list[str]) -> None:
    if rest:
        raise UsageError(f"unexpected {' '.join(rest)}; see --help")


def no_arguments(parser: argparse.ArgumentParser) -> None:
    """A verb without arguments of its own."""
