"""Safe YAML for recipes: plain values only, no tags, no duplicate keys, bounded size, and the line of every key.

The parser's events are converted with an explicit stack, so that neither depth nor aliases exhaust memory, and only dicts, lists,
text, numbers, true, false and null are constructed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bottega.core.errors import UsageError

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_ALIASES = 100
MAX_NODES = 20_000

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)")
_INTEGER_POWER = re.compile(r"[-+]?[0-9]+[eE]\+?[0-9]{1,2}")
_FLOAT = re.compile(r"[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)")
_SPECIAL_FLOATS = {".inf": "inf", "-.inf": "-inf", "+.inf": "inf", ".nan": "nan"}


@dataclass
class Document:
    """The value of a file; `lines` maps the dotted path of each key and list item to its line."""

    value: Any
    lines: dict[str, int] = field(default_factory=dict)


def read_yaml(path: Path) -> Document:
    """Read a recipe file; raises UsageError with the file and line of any problem."""
    if not path.exists():
        raise UsageError(f"{path} does not exist; check the path")
    if not path.is_file():
        raise UsageError(f"{path} is not a file")
    try:
        # Read one byte more than allowed, so that a growing file is caught, too.
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise UsageError(f"{path}: larger than {MAX_BYTES >> 20} MiB, the limit for a recipe; check the path")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UsageError(f"{path}:{line}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> Document:
    """Parse YAML text; `name` is used in error messages."""
    try:
        return _Parser(name).parse(yaml.parse(text, Loader=_LOADER))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        raise UsageError(f"{where}: not YAML: {' '.join((error.problem or str(error)).split())}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{name}: not YAML: {' '.join(str(error).split())}") from None


def parse_scalar(text: str) -> Any:
    """Parse an unquoted scalar as in YAML 1.2: `1e-4` is a number, and `no`, `off` and `yes` are text."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if len(text) > 40:
        return text
    if _INTEGER.fullmatch(text):
        return int(text)
    if _INTEGER_POWER.fullmatch(text):
        # An int, because step counts are often written as 1e5.
        return int(float(text))
    if _FLOAT.fullmatch(text):
        return float(text)
    return float(_SPECIAL_FLOATS[text.lower()]) if text.lower() in _SPECIAL_FLOATS else text


def parse_value(text: str, name: str) -> Any:
    """Parse a value from the command line: a list or map in brackets, quoted text, or a scalar."""
    if text[:1] in ("[", "{"):
        return parse_yaml(text, name).value
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return parse_scalar(text)


@dataclass
class _OpenCollection:
    """A list or map that is being parsed."""

    value: Any
    path: str
    line: int
    anchor: str | None
    first_node: int
    """`num_nodes` of the parser when it was opened, itself included."""
    key: str | None = None
    """The key of a map whose value comes next."""
    keys: dict[str, int] = field(default_factory=dict)
    """Key of a map -> its line."""
    height: int = 1
    """Levels of nesting, itself included."""


class _Parser:
    """Converts parser events to values. `num_nodes` counts values with every alias expanded, to stop alias bombs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[str, int] = {}
        self.stack: list[_OpenCollection] = []
        self.anchors: dict[str, tuple[Any, int, int]] = {}
        """Name -> value, its size and its height, as `_add_value` takes them."""
        self.num_nodes = 0
        self.num_aliases = 0
        self.duplicates: list[str] = []

    def parse(self, events: Iterator[Any]) -> Document:
        result: Any = None
        num_documents = 0
        for event in events:
            line = event.start_mark.line + 1
            if isinstance(event, yaml.DocumentStartEvent):
                num_documents += 1
                if num_documents > 1:
                    raise UsageError(
                        f"{self.name}:{line}: a second YAML document; a recipe has one: remove the line ---"
                    )
            elif isinstance(event, yaml.AliasEvent):
                result = self._add_value(*self._resolve_alias(event.anchor, line), line, self._expects_key())
            elif isinstance(event, yaml.ScalarEvent):
                result = self._add_scalar(event, line)
            elif isinstance(event, yaml.CollectionStartEvent):
                self._open_collection(event, line)
            elif isinstance(event, yaml.CollectionEndEvent):
                result = self._close_collection()
        if self.duplicates:
            raise UsageError("\n".join(self.duplicates))
        return Document(result, self.lines)

    def _expects_key(self) -> bool:
        return bool(self.stack) and isinstance(self.stack[-1].value, dict) and self.stack[-1].key is None

    def _add_scalar(self, event: Any, line: int) -> Any:
        self._reject_tag(event, line)
        value = parse_scalar(event.value) if event.implicit[0] else event.value
        is_key = self._expects_key()
        if is_key and not event.implicit[0]:
            value = str(event.value)
        if event.anchor:
            self.anchors[event.anchor] = (value, 1, 0)
        return self._add_value(value, 1, 0, line, is_key)

    def _resolve_alias(self, anchor: str | None, line: int) -> tuple[Any, int, int]:
        self.num_aliases += 1
        if self.num_aliases > MAX_ALIASES:
            raise UsageError(f"{self.name}:{line}: more than {MAX_ALIASES} aliases")
        if anchor is None or anchor not in self.anchors:
            raise UsageError(f"{self.name}:{line}: the alias *{anchor} is used before or inside its anchor")
        return self.anchors[anchor]

    def _open_collection(self, event: Any, line: int) -> None:
        self._reject_tag(event, line)
        if self._expects_key():
            raise UsageError(f"{self.name}:{line}: a list or map cannot be a key")
        if len(self.stack) >= MAX_DEPTH:
            raise UsageError(f"{self.name}:{line}: nested deeper than {MAX_DEPTH} levels")
        self.num_nodes += 1
        value: Any = {} if isinstance(event, yaml.MappingStartEvent) else []
        path = self._build_child_path() if self.stack else ""
        self.stack.append(_OpenCollection(value, path, line, event.anchor, self.num_nodes))

    def _close_collection(self) -> Any:
        collection = self.stack.pop()
        size = self.num_nodes - collection.first_node + 1
        self.num_nodes -= size
        if collection.anchor:
            self.anchors[collection.anchor] = (collection.value, size, collection.height)
        return self._add_value(collection.value, size, collection.height, collection.line, False)

    def _add_value(self, value: Any, size: int, height: int, line: int, is_key: bool) -> Any:
        """Add a finished value to its parent; `size` counts the values in it, itself included, and `height` their levels."""
        self.num_nodes += size
        if self.num_nodes > MAX_NODES:
            raise UsageError(f"{self.name}:{line}: more than {MAX_NODES} values, counting those repeated by aliases")
        if len(self.stack) + height > MAX_DEPTH:
            raise UsageError(f"{self.name}:{line}: nested deeper than {MAX_DEPTH} levels")
        if not self.stack:
            return value
        parent = self.stack[-1]
        parent.height = max(parent.height, height + 1)
        if is_key:
            self._set_key(parent, value, line)
        elif isinstance(parent.value, list):
            self.lines.setdefault(self._build_child_path(), line)
            parent.value.append(value)
        else:
            parent.value[parent.key] = value
            parent.key = None
        return value

    def _set_key(self, parent: _OpenCollection, key: Any, line: int) -> None:
        if key == "<<":
            raise UsageError(f"{self.name}:{line}: merge keys (<<) are not supported; use extends instead")
        if isinstance(key, int) and not isinstance(key, bool):
            key = str(key)  # class numbers, such as {1: world, 2: sports}
        if not isinstance(key, str):
            raise UsageError(f"{self.name}:{line}: a key must be text, got {key!r}")
        if key in parent.keys:
            name = _join_path(parent.path, key)
            self.duplicates.append(
                f"{self.name}:{line}: {name}: given twice, first on line {parent.keys[key]}; keep one"
            )
        parent.keys[key], parent.key = line, key
        self.lines.setdefault(_join_path(parent.path, key), line)

    def _build_child_path(self) -> str:
        parent = self.stack[-1]
        return _join_path(parent.path, str(len(parent.value)) if isinstance(parent.value, list) else str(parent.key))

    def _reject_tag(self, event: Any, line: int) -> None:
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise UsageError(f"{self.name}:{line}: tags such as {tag} are not allowed in a recipe; remove it")


def _join_path(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


class _Dumper(yaml.SafeDumper):
    """Block style without anchors, quoting text that our parser would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    # PyYAML follows YAML 1.1, where 1e-4 is text and is not quoted.
    style = '"' if "\n" in value or parse_scalar(value) is not value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _represent_text)


def dump_yaml(value: Any, *, flow: bool | None = False) -> str:
    """Return YAML that `parse_yaml` reads as an equal value; `flow=True` writes it on one line."""
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=flow, width=10_000)
    return text.removesuffix("...\n")
