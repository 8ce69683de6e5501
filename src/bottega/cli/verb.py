"""Definition of a command-line verb, and helpers that all verbs share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bottega.core.errors import UsageError


@dataclass(frozen=True)
class Verb:
    """A verb of the command line: its help text, its arguments, and the function that runs it, given the words that argparse left over."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, list[str]], Any]


def reject_extra_words(rest: list[str]) -> None:
    """Raise `UsageError` if words are left that the verb does not take."""
    if rest:
        raise UsageError(f"unexpected {' '.join(rest)}; see --help")


def take_positional_words(rest: list[str]) -> list[str]:
    """Return the positional words that argparse left over after an option; options among them are refused, except after --."""
    end = rest.index("--") if "--" in rest else len(rest)
    reject_extra_words([word for word in rest[:end] if word.startswith("-")])
    return rest[:end] + rest[end + 1 :]


def add_no_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the verb has no arguments of its own."""
