"""Dotted keys of a schema: lookup, membership, and suggestions for mistyped keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from bottega.config.aliases import ALIASES, resolve_alias
from bottega.config.section import Section
from bottega.config.technique_options import is_option_key, list_option_keys
from bottega.similar_names import find_similar_names


def get_section_type(annotation: Any) -> type[Section] | None:
    """Return the section class in `Section`, `Section | None`, `tuple[Section, ...]` or `dict[str, Section]`, if any."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def _iterate_keys(schema: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every key and its field, blocks before their keys; `*` stands for the index or name of a repeated block."""
    for name, info in schema.model_fields.items():
        key = prefix + (info.alias or name)
        yield key, info
        inner = get_section_type(info.annotation)
        if inner is not None:
            yield from _iterate_keys(inner, f"{key}.*." if get_origin(info.annotation) in (tuple, dict) else f"{key}.")


@cache
def collect_schema_keys(schema: type[Section]) -> dict[str, FieldInfo]:
    """Return every dotted key of a schema with its field; `*` stands for the index or name of a repeated block."""
    return dict(_iterate_keys(schema))


def to_wildcard_key(key: str, schema: type[Section]) -> str:
    """Return `training.groups.0.scale` as `training.groups.*.scale`, the form that `collect_schema_keys` uses."""
    keys, parts = collect_schema_keys(schema), key.split(".")
    for i in range(1, len(parts)):
        if any(other.startswith(".".join([*parts[:i], "*"])) for other in keys):
            parts[i] = "*"
    return ".".join(parts)


def has_key(key: str, schema: type[Section]) -> bool:
    """Return whether a schema has a key; a named block such as `needs.judge` and any key inside a free-form dict count."""
    keys, wildcard = collect_schema_keys(schema), to_wildcard_key(key, schema)
    block = wildcard.removesuffix(".*")
    if wildcard in keys or (block in keys and get_origin(keys[block].annotation) is dict):
        return True
    parts = wildcard.split(".")
    ancestors = (".".join(parts[:i]) for i in range(1, len(parts)))
    return any(keys[ancestor].annotation == dict[str, Any] for ancestor in ancestors if ancestor in keys)


def suggest_key(key: str, schema: type[Section]) -> str | None:
    """Return the key that was probably meant by `key`: a similar one in the same block, or the same name elsewhere."""
    keys = collect_schema_keys(schema)
    block, _, name = to_wildcard_key(key, schema).rpartition(".")
    siblings = {other.rpartition(".")[2] for other in (*keys, *ALIASES) if other.rpartition(".")[0] == block}
    similar = find_similar_names(name, sorted(siblings))
    if similar:
        return similar[0]
    return next((other for other in keys if other.rpartition(".")[2] == name and "*" not in other), None)


def is_flag(key: str, schemas: Iterable[type[Section]]) -> bool:
    """Return whether any of the schemas has this key, an alias of that name exists, or it is an option of a technique."""
    return (
        key in ALIASES
        or is_option_key(key)
        or any(has_key(next(iter(resolve_alias(key, 0))), schema) for schema in schemas)
    )


def suggest_flag(key: str, schemas: Iterable[type[Section]]) -> str | None:
    """Return the flag that was probably meant by `key`, over all schemas and aliases."""
    flags = {other for schema in schemas for other in collect_schema_keys(schema) if "*" not in other} | set(ALIASES)
    flags |= set(list_option_keys())
    similar = find_similar_names(key, sorted(flags))
    return similar[0] if similar else None


def list_block_keys(key: str, schemas: Iterable[type[Section]]) -> list[str]:
    """Return the names of the keys in a block, over all schemas."""
    keys = [other for schema in schemas for other in collect_schema_keys(schema) if other.rpartition(".")[0] == key]
    return list(dict.fromkeys(other.rpartition(".")[2] for other in keys))


def find_enclosing_list(key: str, schemas: Iterable[type[Section]]) -> str | None:
    """Return the key of the list that a key with an index is in: `data.sources` for `data.sources.0.labels`; else None."""
    parts = key.split(".")
    indices = [i for i, part in enumerate(parts) if part.isdecimal()]
    if not indices or indices[0] == 0:
        return None
    ancestor = ".".join(parts[: indices[0]])
    fields = [keys[ancestor] for schema in schemas if ancestor in (keys := collect_schema_keys(schema))]
    annotations = [annotation for info in fields for annotation in (info.annotation, *get_args(info.annotation))]
    return ancestor if any(get_origin(annotation) is tuple for annotation in annotations) else None
