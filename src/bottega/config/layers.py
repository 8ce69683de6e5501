"""Layers of a recipe as flat maps, dotted key -> value and location, so that merging layers is a dict update."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Location(NamedTuple):
    """A line of a file, or the command line (line 0), for messages."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True)
class Entry:
    """One setting: its value, its location, and the key as the user typed it."""

    value: Any
    location: Location
    typed_key: str
    is_fallback: bool = False
    """Whether it yields to another alias of the same key in the same layer: `fp16: false` is ignored beside `bf16: true`."""


FlatConfig = dict[str, Entry]


@dataclass(frozen=True)
class Problem:
    """One line of an error message. `key` is the canonical key, so that one mistake is not reported twice."""

    location: Location | None
    typed_key: str
    message: str
    key: str

    def __str__(self) -> str:
        return (
            f"{self.location}: {self.typed_key}: {self.message}"
            if self.location
            else f"{self.typed_key}: {self.message}"
        )


@dataclass
class Layer:
    """The settings of one file, one dict or the command line."""

    entries: FlatConfig = field(default_factory=dict)
    lines: dict[str, Location] = field(default_factory=dict)
    """Location of each key, blocks and list items included."""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def flatten_layer(value: Mapping[str, Any], *, file: str, lines: Mapping[str, int]) -> Layer:
    """Return nested values as a layer. Lists and empty maps are leaves."""
    layer = Layer(lines={key: Location(file, line) for key, line in lines.items()})
    for key, leaf in _iterate_leaves(value, ""):
        location = Location(file, lines.get(key, 0))
        if key in layer.entries and layer.entries[key].value != leaf:
            previous = layer.entries[key]
            message = (
                f"conflicts with {previous.typed_key} at {previous.location}: {leaf!r} and {previous.value!r}; keep one"
            )
            layer.problems.append(Problem(location, key, message, key))
        layer.entries[key] = Entry(leaf, location, key)
    return layer


def _iterate_leaves(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        key = f"{prefix}{name}"
        if isinstance(inner, Mapping) and inner:
            yield from _iterate_leaves(inner, key + ".")
        else:
            yield key, _to_plain_value(inner)


def _to_plain_value(value: Any) -> Any:
    """Convert tuples and paths, which a caller's dict may hold and a file cannot."""
    if isinstance(value, Mapping):
        return {str(key): _to_plain_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain_value(inner) for inner in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


BUILTIN_KINDS = ("embedded", "synthetic")
"""Kinds of data that are bundled or generated, and need no path."""

EXCLUSIVE_KEYS = (
    ("training.max_steps", "training.num_epochs"),
    ("model.expert_capacity", "model.capacity_factor"),
    ("training.scheduler.eta_min", "training.scheduler.min_ratio"),
    ("training.scheduler.t_max", "training.scheduler.cycles"),
    ("training.optimizer.betas", "training.optimizer.beta1"),
    ("training.optimizer.betas", "training.optimizer.beta2"),
    ("model.size", "model.from"),
    ("data.validation.path", "data.validation.split"),
    ("data.test.path", "data.test.split"),
    *(
        (f"data.{part}.split", f"data.{part}.{key}")
        for part in ("validation", "test")
        for key in ("kind", "rules", "num_samples")
    ),
    ("data.train.path", "data.train.kind"),
    ("data.train.path", "data.sources"),
    ("data.train.path", "data.train.more_paths"),
    ("data.train.kind", "data.sources"),
    ("data.train.field", "data.sources"),
    ("data.train.label", "data.sources"),
)
"""Pairs of keys that exclude each other: a later layer that sets one removes the other from the earlier layers."""


LENGTH_KEYS, STREAM_KEY = ("training.max_steps", "training.num_epochs"), "data.online"


def merge_layers(base: FlatConfig, layer: FlatConfig) -> FlatConfig:
    """Return `base` updated with `layer`: keys of the layer win, the others stay unless a key of the layer excludes them."""
    merged = {
        key: entry
        for key, entry in base.items()
        if not _is_excluded(key, entry, base, layer) and not _belongs_to_builtin_data(key, base, layer)
    }
    for key, entry in layer.items():
        if entry.value == {} and any(inner.startswith(key + ".") for inner in merged):
            continue
        for ancestor in _iterate_ancestors(key):
            merged.pop(ancestor, None)
        for inner in [inner for inner in merged if inner.startswith(key + ".")]:
            del merged[inner]
        merged[key] = entry
    return merged


def _is_excluded(key: str, entry: Entry, base: FlatConfig, layer: FlatConfig) -> bool:
    if key in LENGTH_KEYS and any(enables_stream(name, other) for name, other in layer.items()):
        return True
    if key in layer or key == "training.optimizer.betas":
        # A later single beta changes one of the pair, which therefore stays; a later pair replaces a single beta.
        return False
    if key.startswith("needs.") and entry.value is not None:
        dependency, _, field = key.removeprefix("needs.").partition(".")
        # A dependency is a finished run, or a recipe with its settings.
        other = layer.get(f"needs.{dependency}.{'recipe' if field == 'run' else 'run'}")
        return other is not None and other.value is not None
    exclusive_keys = [b if key == a else a for a, b in EXCLUSIVE_KEYS if key in (a, b)]
    return any(
        _are_exclusive({key: entry.value, other: layer[other].value}) for other in exclusive_keys if other in layer
    )


def are_nested(first: str, second: str) -> bool:
    """Return whether two dotted keys are the same, or one is a block that contains the other."""
    return f"{first}.".startswith(f"{second}.") or f"{second}.".startswith(f"{first}.")


def enables_stream(key: str, entry: Entry) -> bool:
    """Return whether an entry turns on `data.online`, which replaces the length of the run set by earlier layers."""
    is_set = entry.value is not None and entry.value is not False  # a replay fraction of 0 turns it on, too
    return is_set and (key == STREAM_KEY or key.startswith(f"{STREAM_KEY}."))


def _belongs_to_builtin_data(key: str, base: FlatConfig, layer: FlatConfig) -> bool:
    """Return whether a key is about builtin data that `layer` replaces with other data.

    Such keys are a split by a field of the builtin data, and prompts from the same file that chose it.
    """
    if key not in ("data.split.by", "data.split.field", "samples.prompts") or key in layer:
        return False
    kind, field = base.get("data.train.kind"), base.get("data.split.field")
    replacements = (layer.get(name) for name in ("data.train.path", "data.sources"))
    if (
        kind is None
        or kind.value not in BUILTIN_KINDS
        or not any(entry is not None and entry.value is not None for entry in replacements)
    ):
        return False
    if key == "samples.prompts":
        return base[key].location.file == kind.location.file and kind.location.line > 0
    return field is not None and field.value is not None


def _are_exclusive(values: dict[str, Any]) -> bool:
    """Return whether the values of an exclusive pair of keys exclude each other."""
    if "data.sources" in values:
        return all(value is not None for value in values.values())
    for key, value in values.items():
        # A named split or a file format goes with a path; a fraction or a builtin kind does not.
        if value is None or (key.endswith(".split") and isinstance(value, str)):
            return False
        if key.endswith(".kind") and value not in BUILTIN_KINDS:
            return False
    return True


def _iterate_ancestors(key: str) -> Iterator[str]:
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


def nest_entries(flat: FlatConfig) -> dict[str, Any]:
    """Return the entries as nested values, for the schema."""
    root: dict[str, Any] = {}
    for key, entry in flat.items():
        *parents, last = key.split(".")
        block = root
        for parent in parents:
            block = block.setdefault(parent, {})
        block[last] = entry.value if entry.value != {} else block.get(last, {})
    return root
