"""Parse the command line after the verb: recipes to load, and settings to override."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bottega.config import bundled_recipes
from bottega.config.error_messages import SECRETS_HINT
from bottega.config.registry import TaskRegistry
from bottega.config.schema_keys import find_enclosing_list, is_flag, list_block_keys, suggest_flag
from bottega.core.errors import UsageError
from bottega.secret_names import is_secret_name

CONFIG_FLAGS = ("config", "config_file", "data_config", "model_config", "training_config")
"""Flags whose value is another recipe file."""
FLAGS_WITHOUT_VALUE = ("online",)
"""Flags that need no value."""

MAX_LISTED_KEYS = 6
"""Blocks with at most this many keys have all of them listed in the message about an unknown key."""


class Override(NamedTuple):
    """One setting from the command line, with its value as text."""

    key: str
    text: str
    origin: str = "command line"
    """Where it was set, for messages."""


class FlagError(UsageError):
    """Problems of a command line, one line each; `sources` and `overrides` hold what could be parsed."""

    def __init__(self, message: str, sources: list[str], overrides: list[Override]) -> None:
        super().__init__(message)
        self.sources, self.overrides = sources, overrides


_SETTING = re.compile(r"([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)


def parse_overrides(tasks: TaskRegistry, argv: Sequence[str]) -> tuple[list[str], list[Override]]:
    """Return recipe names and paths, and settings. Raises FlagError with all problems at once.

    Settings are written `key=value`, `--key value` or `--key=value`; dashes may replace underscores.
    """
    sources: list[str] = []
    overrides: list[Override] = []
    problems: list[str] = []
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        setting = _SETTING.fullmatch(token)
        if token.startswith("--") and token != "--":
            name, separator, text = token[2:].partition("=")
            if not separator and name in FLAGS_WITHOUT_VALUE and not (tokens and tokens[0] in ("true", "false")):
                text = "true"
            elif not separator:
                if not tokens or tokens[0].startswith("--"):
                    problems.append(f"--{name}: {_explain_missing_value(tasks, name)}")
                    continue
                text = tokens.pop(0)
                if name == "data":
                    text = _collect_data_paths(tasks, text, tokens, has_recipe=bool(sources))
            _add_setting(tasks, name.replace("-", "_"), text, f"--{name}", sources, overrides, problems)
        elif setting and not (token.endswith((".yaml", ".yml")) and Path(token).is_file()):
            _add_setting(tasks, setting[1].replace("-", "_"), setting[2], setting[1], sources, overrides, problems)
        elif token.startswith("-"):
            problems.append(f"{token}: unknown flag; settings are written --key value or key=value")
        else:
            sources.append(token)
    if problems:
        raise FlagError("\n".join(problems), sources, overrides)
    return sources, overrides


def _collect_data_paths(tasks: TaskRegistry, first_path: str, tokens: list[str], *, has_recipe: bool) -> str:
    """Return the value of --data: one path, or a JSON list with the paths after it (a shell expands *.txt to several).

    Removes these paths from `tokens`.
    """
    paths = [first_path]
    while tokens and _is_data_path(tasks, tokens[0], has_recipe=has_recipe):
        paths.append(tokens.pop(0))
    return first_path if len(paths) == 1 else json.dumps(paths)


def _is_data_path(tasks: TaskRegistry, token: str, *, has_recipe: bool) -> bool:
    if (
        token.startswith("-")
        or token.endswith((".yaml", ".yml"))
        or (_SETTING.fullmatch(token) and not Path(token).exists())
    ):
        return False
    is_recipe = token in bundled_recipes.list_recipe_names() or token in tasks
    return bool(Path(token).suffix or Path(token).exists()) and (has_recipe or not is_recipe)


def _add_setting(
    tasks: TaskRegistry,
    key: str,
    text: str,
    typed_key: str,
    sources: list[str],
    overrides: list[Override],
    problems: list[str],
) -> None:
    if key in CONFIG_FLAGS:
        sources.append(text)
    elif (list_key := find_enclosing_list(key, tasks.schemas)) is not None:
        problems.append(f"{typed_key}: give the whole list: {list_key}=[{{…}}]")
    elif is_flag(key, tasks.schemas):
        overrides.append(Override(key, text))
    else:
        tasks.discover()
        if is_flag(key, tasks.schemas):
            overrides.append(Override(key, text))
        else:
            problems.append(f"{typed_key}: {_explain_unknown_key(tasks, key, typed_key)}")


def _explain_unknown_key(tasks: TaskRegistry, key: str, typed_key: str) -> str:
    if is_secret_name(key):
        return f"unknown key; {SECRETS_HINT}"
    similar, block = suggest_flag(key, tasks.schemas), key.rpartition(".")[0]
    keys = list_block_keys(block, tasks.schemas) if similar is None else []
    if 0 < len(keys) <= MAX_LISTED_KEYS:
        return f"unknown key; use {', '.join(keys[:-1])}{' or ' if keys[:-1] else ''}{keys[-1]}"
    dashes = "--" if typed_key.startswith("--") else ""
    return f"unknown {'flag' if dashes else 'key'}" + (f"; did you mean {dashes}{similar}?" if similar else "")


def _explain_missing_value(tasks: TaskRegistry, name: str) -> str:
    key = name.replace("-", "_")
    if (list_key := find_enclosing_list(key, tasks.schemas)) is not None:
        return f"give the whole list: {list_key}=[{{…}}]"
    if is_flag(key, tasks.schemas) or key in CONFIG_FLAGS:
        return f"needs a value: --{name} VALUE"
    return _explain_unknown_key(tasks, key, f"--{name}")
