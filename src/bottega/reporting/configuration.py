"""Tables of configurations: where runs differ from each other, or from the recipe they started from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bottega.core.errors import BottegaError
from bottega.reporting.tables import Table
from bottega.run_files.configuration import flatten, format_value
from bottega.tasks.recipes import check_recipe

UNCOMPARED_KEYS = ("name", "origin", "output_dir")
"""Keys that always differ and change nothing."""


def compare_with_origin(values: Mapping[str, Any]) -> Table | None:
    """Return the keys that differ from the bundled recipe that a run started from; None if that cannot be loaded."""
    origin = values.get("origin")
    if not isinstance(origin, str) or origin.endswith((".yaml", ".yml")):
        return None
    try:
        base = flatten(check_recipe([origin], check_conflicts=False).recipe.to_plain_dict())
    except (BottegaError, OSError):  # the recipe needs a key that has no default, or is not bundled any more
        return None
    own = flatten(values)
    rows = [
        (key, format_value(base.get(key)), format_value(own.get(key)))
        for key in dict.fromkeys([*base, *own])
        if key not in UNCOMPARED_KEYS and base.get(key) != own.get(key)
    ]
    note = "" if rows else "All keys have the values of that recipe."
    title = f"Changes to the recipe {origin}"
    return Table(title, ("key", f"in {origin}", "in this run"), rows, num_text_columns=3, note=note)


def compare_configurations(names: Sequence[str], configurations: Sequence[Mapping[str, Any]]) -> Table:
    """Return the keys in which several runs differ, with a column for each run."""
    flat = [flatten(values) for values in configurations]
    keys = [key for key in dict.fromkeys(key for values in flat for key in values) if key not in UNCOMPARED_KEYS]
    rows = [
        (key, *(format_value(values[key]) if values.get(key) is not None else "" for values in flat))
        for key in keys
        if any(values.get(key) != flat[0].get(key) for values in flat)
    ]
    note = "" if rows else "The runs have equal configurations."
    return Table("Differences", ("key", *names), rows, num_text_columns=1 + len(names), note=note)


def list_configuration(values: Mapping[str, Any]) -> Table:
    """Return all keys of a configuration that are set."""
    rows = [(key, format_value(value)) for key, value in flatten(values).items() if value not in (None, {}, [])]
    return Table("All keys", ("key", "value"), rows, num_text_columns=2)
