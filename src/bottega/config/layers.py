"""A layer of a recipe as a flat map: dotted key -> value and where it was said. Merging layers is then an update."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Location(NamedTuple):
    """A line of a file, or the command line (line 0)."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True)
class Entry:
    """One setting: its value, its place, and the key as the person typed it."""

    value: Any
    location: Location
    typed_key: str
    is_fallback: bool = False
    """Gives way to another spelling in the same layer: `fp16: false` says nothing where `bf16: true` stands beside it."""


FlatConfig = dict[str, Entry]


@dataclass(frozen=True)
class Problem:
    """One line for a person. `key` is what it is about, so that one mistake is not reported twice."""

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
    """One file, one dict or the command line."""

    entries: FlatConfig = field(default_factory=dict)
    lines: dict[str, Location] = field(default_factory=dict)
    """Where each key stands, blocks and list items included."""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def flatten_layer(value: Mapping[str, Any], *, file: str, lines: Mapping[str, int]) -> Layer:
    """The layer that nested values make. Lists and empty maps are leaves."""
    layer = Layer(lines={key: Location(file, line) for key, line in lines.items()})
    for key, leaf in _leaves(value, ""):
        where = Location(file, lines.get(key, 0))
        if key in layer.entries and layer.entries[key].value != leaf:
            first = layer.entries[key]
            message = f"disagrees with {first.typed_key} at {first.location}: {leaf!r} and {first.value!r}"
            layer.problems.append(Problem(where, key, message, key))
        layer.entries[key] = Entry(leaf, where, key)
    return layer


def _leaves(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        key = f"{prefix}{name}"
        if isinstance(inner, Mapping) and inner:
            yield from _leaves(inner, key + ".")
        else:
            yield key, _plain(inner)


def _plain(value: Any) -> Any:
    """A caller's dict may hold tuples and paths; a file cannot."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


BUILTIN_KINDS = ("embedded", "synthetic")
"""Kinds of data that come with the program and have no path."""

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
"""Two ways to say one thing: a later layer that says it one way takes back what an earlier layer said the other way."""


LENGTH_KEYS, STREAM_KEY = ("training.max_steps", "training.num_epochs"), "data.online"


def merge_layers(base: FlatConfig, layer: FlatConfig) -> FlatConfig:
    """`base` with `layer` over it: what the layer says wins, and what it does not mention stays."""
    merged = {
        key: entry
        for key, entry in base.items()
        if not _taken_back(key, entry, base, layer) and not _is_of_embedded(key, base, layer)
    }
    for key, entry in layer.items():
        if entry.value == {} and any(inner.startswith(key + ".") for inner in merged):
            continue
        for ancestor in _ancestors(key):
            merged.pop(ancestor, None)
        for inner in [inner for inner in merged if inner.startswith(key + ".")]:
            del merged[inner]
        merged[key] = entry
    return merged


def _taken_back(key: str, entry: Entry, base: FlatConfig, layer: FlatConfig) -> bool:
    if key in LENGTH_KEYS and any(enables_stream(name, said) for name, said in layer.items()):
        return True
    if key in layer or key == "training.optimizer.betas":
        # One beta over a pair changes its half; a pair over one beta replaces it.
        return False
    if key.startswith("needs.") and entry.value is not None:
        part, _, what = key.removeprefix("needs.").partition(".")
        # A finished run, or a recipe with its settings.
        other = layer.get(f"needs.{part}.{'recipe' if what == 'run' else 'run'}")
        return other is not None and other.value is not None
    others = [b if key == a else a for a, b in EXCLUSIVE_KEYS if key in (a, b)]
    return any(_excludes({key: entry.value, other: layer[other].value}) for other in others if other in layer)


def are_nested(one: str, other: str) -> bool:
    """Whether two dotted keys are the same, or one is a block that holds the other."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def enables_stream(key: str, entry: Entry) -> bool:
    """A stream is as long as it is, so whoever asks for one takes back the length of an earlier layer."""
    said = entry.value is not None and entry.value is not False  # a share of 0 is one, too
    return said and (key == STREAM_KEY or key.startswith(f"{STREAM_KEY}."))


def _is_of_embedded(key: str, base: FlatConfig, layer: FlatConfig) -> bool:
    """A split by a field of the data that come with the program goes when other data take their place, and so do prompts
    that the same file gave for them."""
    if key not in ("data.split.by", "data.split.field", "samples.prompts") or key in layer:
        return False
    kind, field = base.get("data.train.kind"), base.get("data.split.field")
    others = (layer.get(name) for name in ("data.train.path", "data.sources"))
    if (
        kind is None
        or kind.value not in BUILTIN_KINDS
        or not any(one is not None and one.value is not None for one in others)
    ):
        return False
    if key == "samples.prompts":
        return base[key].location.file == kind.location.file and kind.location.line > 0
    return field is not None and field.value is not None


def _excludes(values: dict[str, Any]) -> bool:
    """Whether the two values really say the same thing."""
    if "data.sources" in values:
        return all(value is not None for value in values.values())
    for key, value in values.items():
        # A named split goes with a path, a share does not; so it is with a kind.
        if value is None or (key.endswith(".split") and isinstance(value, str)):
            return False
        if key.endswith(".kind") and value not in BUILTIN_KINDS:
            return False
    return True


def _ancestors(key: str) -> Iterator[str]:
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


def nest_entries(flat: FlatConfig) -> dict[str, Any]:
    """The nested values again, for the schema."""
    root: dict[str, Any] = {}
    for key, entry in flat.items():
        *parents, last = key.split(".")
        block = root
        for parent in parents:
            block = block.setdefault(parent, {})
        block[last] = entry.value if entry.value != {} else block.get(last, {})
    return root
