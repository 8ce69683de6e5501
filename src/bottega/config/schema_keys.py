"""The keys of a schema: every dotted key with its field, and the nearest one to a mistyped key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from bottega.config.aliases import ALIASES, resolve_alias
from bottega.config.section import Section
from bottega.similar_names import find_similar_names


def get_section_type(annotation: Any) -> type[Section] | None:
    """The section behind `Section`, `Section | None`, `tuple[Section, ...]` or `dict[str, Section]`."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def _walk(schema: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key, blocks before their inside; `*` stands for the number or name of a block of which there are many."""
    for name, info in schema.model_fields.items():
        key = prefix + (info.alias or name)
        yield key, info
        inner = get_section_type(info.annotation)
        if inner is not None:
            yield from _walk(inner, f"{key}.*." if get_origin(info.annotation) in (tuple, dict) else f"{key}.")


@cache
def collect_schema_keys(schema: type[Section]) -> dict[str, FieldInfo]:
    return dict(_walk(schema))


def to_wildcard_key(key: str, schema: type[Section]) -> str:
    """`training.groups.0.scale` as `training.groups.*.scale`, the form in which `keys_of` has it."""
    known, parts = collect_schema_keys(schema), key.split(".")
    for i in range(1, len(parts)):
        if any(other.startswith(".".join([*parts[:i], "*"])) for other in known):
            parts[i] = "*"
    return ".".join(parts)


def has_key(key: str, schema: type[Section]) -> bool:
    """Also of a whole named block, such as `needs.judge`, and of what lies in a block that anything may stand in."""
    known, form = collect_schema_keys(schema), to_wildcard_key(key, schema)
    block = form.removesuffix(".*")
    if form in known or (block in known and get_origin(known[block].annotation) is dict):
        return True
    parts = form.split(".")
    above = (".".join(parts[:i]) for i in range(1, len(parts)))
    return any(known[other].annotation == dict[str, Any] for other in above if other in known)


def suggest_key(key: str, schema: type[Section]) -> str | None:
    """The key of the schema that `key` probably means: a near one in the same block, or the same name elsewhere."""
    known = collect_schema_keys(schema)
    block, _, name = to_wildcard_key(key, schema).rpartition(".")
    beside = {other.rpartition(".")[2] for other in (*known, *ALIASES) if other.rpartition(".")[0] == block}
    near = find_similar_names(name, sorted(beside))
    if near:
        return near[0]
    return next((other for other in known if other.rpartition(".")[2] == name and "*" not in other), None)


def is_flag(key: str, schemas: Iterable[type[Section]]) -> bool:
    """Whether any task has this key, under any spelling."""
    return key in ALIASES or any(has_key(next(iter(resolve_alias(key, 0))), schema) for schema in schemas)


def suggest_flag(key: str, schemas: Iterable[type[Section]]) -> str | None:
    """The flag that `key` probably means, over all tasks and spellings."""
    known = {other for schema in schemas for other in collect_schema_keys(schema) if "*" not in other} | set(ALIASES)
    near = find_similar_names(key, sorted(known))
    return near[0] if near else None


def list_block_keys(key: str, schemas: Iterable[type[Section]]) -> list[str]:
    """The keys of a block, over all tasks."""
    found = [other for schema in schemas for other in collect_schema_keys(schema) if other.rpartition(".")[0] == key]
    return list(dict.fromkeys(other.rpartition(".")[2] for other in found))


def find_enclosing_list(key: str, schemas: Iterable[type[Section]]) -> str | None:
    """The list that `data.sources.0.labels` wants to change an item of; None where there is no such list."""
    parts = key.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    if not numbers or numbers[0] == 0:
        return None
    above = ".".join(parts[: numbers[0]])
    fields = [known[above] for schema in schemas if above in (known := collect_schema_keys(schema))]
    kinds = [kind for info in fields for kind in (info.annotation, *get_args(info.annotation))]
    return above if any(get_origin(kind) is tuple for kind in kinds) else None
