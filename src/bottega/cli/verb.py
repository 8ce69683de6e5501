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

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, list[str]], Any]


def reject_extra_words(rest: list[str]) -> None:
    if rest:
        raise UsageError(f"unexpected {' '.join(rest)}; see --help")


def remaining_words(rest: list[str]) -> list[str]:
    """Words that argparse leaves over because they follow an option; what begins with a dash is no word, unless behind --."""
    end = rest.index("--") if "--" in rest else len(rest)
    reject_extra_words([word for word in rest[:end] if word.startswith("-")])
    return rest[:end] + rest[end + 1 :]


def add_no_arguments(parser: argparse.ArgumentParser) -> None:
    """A verb without arguments of its own."""
