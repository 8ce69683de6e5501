"""Options of a technique by its name: `techniques.lora.rank=8` sets an option of an entry of the `techniques` list."""

from __future__ import annotations

from typing import Any

from bottega.config.layers import Entry, FlatConfig, Problem
from bottega.config.technique_spec import TECHNIQUES, TECHNIQUES_KEY
from bottega.similar_names import find_similar_names


def is_option_key(key: str) -> bool:
    """Return whether `key` is techniques.NAME.OPTION with a technique and an option that exist."""
    parts = key.split(".", 2)
    spec = TECHNIQUES.get(parts[1]) if len(parts) == 3 and parts[0] == TECHNIQUES_KEY else None
    return spec is not None and (parts[2] in spec.options.model_fields or parts[2] in spec.option_aliases)


def list_option_keys() -> list[str]:
    """Return techniques.NAME.OPTION of every option of every technique."""
    return [
        f"{TECHNIQUES_KEY}.{name}.{option}" for name, spec in TECHNIQUES.items() for option in spec.options.model_fields
    ]


def pop_options(entries: FlatConfig) -> FlatConfig:
    """Remove and return the entries that set an option of a technique by its name."""
    prefix = f"{TECHNIQUES_KEY}."
    keys = [key for key in entries if key.startswith(prefix) and not key.removeprefix(prefix)[0].isdigit()]
    return {key: entries.pop(key) for key in keys}


def set_options(merged: FlatConfig, options: FlatConfig) -> list[Problem]:
    """Set the options in the `techniques` list of `merged`; return the problems of those that cannot be set."""
    problems: list[Problem] = []
    for key, entry in options.items():
        _, name, *option = key.split(".", 2)
        techniques = [_expand(item) for item in _get_list(merged)]
        match = next((item for item in techniques if isinstance(item, dict) and item.get("name") == name), None)
        if match is None or not option:
            problems.append(Problem(entry.location, entry.typed_key, _explain(name, techniques, option), key))
            continue
        match["options"] = {**(match.get("options") or {}), option[0]: entry.value}
        merged[TECHNIQUES_KEY] = Entry(techniques, entry.location, TECHNIQUES_KEY)
    return problems


def _get_list(merged: FlatConfig) -> list[Any]:
    entry = merged.get(TECHNIQUES_KEY)
    return list(entry.value) if entry is not None and isinstance(entry.value, list) else []


def _expand(item: Any) -> Any:
    return {"name": item} if isinstance(item, str) else dict(item) if isinstance(item, dict) else item


def _explain(name: str, techniques: list[Any], option: list[str]) -> str:
    if name not in TECHNIQUES:
        similar = find_similar_names(name, TECHNIQUES)
        return (
            f"unknown technique; did you mean {similar[0]}?"
            if similar
            else f"unknown technique; choose from {', '.join(TECHNIQUES)}"
        )
    if not option:
        return f"expected an option, such as {TECHNIQUES_KEY}.{name}.{next(iter(TECHNIQUES[name].options.model_fields), 'OPTION')}"
    used = [str(item.get("name")) for item in techniques if isinstance(item, dict)]
    return f"the recipe does not use {name}; add it to the list: techniques=[{', '.join([*used, name])}]"
