"""Definition of a command-line verb, and helpers that all verbs share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bottega.core.errors import UsageError


@dataclass(frozen=True)
class Verb:
    """A verb of the command line: its help text, its arguments, and the function that runs it.

    The function gets the parsed arguments and the words that argparse left over, such as recipes and `key=value` settings.
    """

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, list[str]], Any]


def reject_extra_words(words: list[str]) -> None:
    """Raise `UsageError` if there are words left over, for a verb that takes none."""
    if words:
        raise UsageError(f"unexpected {' '.join(words)}; see --help")


def take_positional_words(words: list[str]) -> list[str]:
    """Return the positional words that argparse left over after an option; options among them are refused, except after --."""
    end = words.index("--") if "--" in words else len(words)
    reject_extra_words([word for word in words[:end] if word.startswith("-")])
    return words[:end] + words[end + 1 :]


def add_no_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the verb has no arguments of its own."""
