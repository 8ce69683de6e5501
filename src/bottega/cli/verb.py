"""What a verb is, and what all of them need."""

from __future__ import annotations

import argparse
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


def no_more(rest: list[str]) -> None:
    if rest:
        raise UsageError(f"unexpected {' '.join(rest)}; see --help")


def words_of(rest: list[str]) -> list[str]:
    """Words that argparse leaves over because they follow an option; what begins with a dash is no word, unless behind --."""
    end = rest.index("--") if "--" in rest else len(rest)
    no_more([word for word in rest[:end] if word.startswith("-")])
    return rest[:end] + rest[end + 1 :]


def no_arguments(parser: argparse.ArgumentParser) -> None:
    """A verb without arguments of its own."""
