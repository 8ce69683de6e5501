"""Translation of another trainer's configuration: each key becomes a recipe key, or gets a reason why it is left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bottega.config.error_messages import format_value
from bottega.config.load import check_recipe
from bottega.config.recipe import Recipe
from bottega.config.registry import TaskRegistry
from bottega.core.errors import UsageError
from bottega.redaction import REPLACEMENT
from bottega.secret_names import is_secret_name

SkipCategory = Literal["no counterpart", "not implemented yet", "not applicable", "invalid value"]

DISABLED_REASON = "turned off in the file"
EMPTY_REASON = "empty in the file"
UNKNOWN_REASON = "unknown key"
HARMLESS_REASONS = (DISABLED_REASON, EMPTY_REASON)
"""Reasons that lose nothing: the key had no effect in its own trainer either."""

_INTERPOLATION = re.compile(r"\$\{[^}]*\}")


@dataclass(frozen=True)
class MappedKey:
    """A key of the source file, and the recipe key and value that it becomes."""

    source_key: str
    source_value: Any
    recipe_key: str
    recipe_value: Any
    note: str | None = None
    is_default: bool = False
    """Whether the key is absent from the file, and stands for the trainer's default, which differs from Bottega's."""


@dataclass(frozen=True)
class UnmappedKey:
    """A key of the source file that is left out, and why."""

    source_key: str
    source_value: Any
    category: SkipCategory
    reason: str


Converter = Callable[[Any], Any]
"""Source value -> recipe value; raises ValueError with what was expected."""


@dataclass(frozen=True)
class SkippedKeys:
    """Known keys of a trainer that are left out, with the reason for each."""

    no_counterpart: Mapping[str, str] = field(default_factory=dict)
    """Features without a counterpart; a value that switches one off loses nothing."""
    not_implemented_yet: Mapping[str, str] = field(default_factory=dict)
    """Features that are planned and not implemented."""
    not_applicable: Mapping[str, str] = field(default_factory=dict)
    """Keys that have no meaning here, whatever the value; the category is "not applicable"."""
    harmless_values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values that match what is always done here."""


class Translation:
    """The translation of one file: its leaf keys, the keys mapped so far, the keys left out, and notes."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.source_values: dict[str, Any] = {}
        for key, value in iterate_leaves(config):
            if key in self.source_values:
                raise UsageError(f"{key}: given twice, as a dotted key and as a nested one; keep one")
            self.source_values[key] = value
        self.mapped: list[MappedKey] = []
        self.unmapped: list[UnmappedKey] = []
        self.notes: list[str] = []
        self._handled_keys: set[str] = set()

    def get(self, key: str) -> Any:
        """Return the value of a source key; None if it is absent or empty."""
        return self.source_values.get(key)

    def get_pending_values(self, block: str) -> dict[str, Any]:
        """Return full key -> value of the leaves of a block that are not yet mapped or skipped."""
        return {
            key: value
            for key, value in self.source_values.items()
            if key.startswith(block + ".") and key not in self._handled_keys
        }

    def is_pending(self, key: str) -> bool:
        """Return whether a key is in the file, not empty, and not yet mapped or skipped."""
        return self.get(key) is not None and key not in self._handled_keys

    def map_key(self, source_key: str, recipe_key: str, recipe_value: Any, *, note: str | None = None) -> bool:
        """Map a source key to a recipe key and return whether it was; the first of two conflicting keys takes precedence."""
        value = self.source_values[source_key]
        conflict = self._find_conflict(recipe_key, recipe_value)
        if conflict is not None:
            self.skip(source_key, "no counterpart", f"{conflict.source_key} already sets {conflict.recipe_key}")
        elif any(_INTERPOLATION.search(str(text)) for text in (value, recipe_value)):
            self.skip(source_key, "invalid value", "${...} is not replaced in a recipe")
        else:
            self._handled_keys.add(source_key)
            self.mapped.append(MappedKey(source_key, value, recipe_key, recipe_value, note))
            return True
        return False

    def _find_conflict(self, recipe_key: str, recipe_value: Any) -> MappedKey | None:
        for row in self.mapped:
            is_nested = row.recipe_key.startswith(f"{recipe_key}.") or recipe_key.startswith(f"{row.recipe_key}.")
            if is_nested or (row.recipe_key == recipe_key and row.recipe_value != recipe_value):
                return row
        return None

    def map_converted(self, source_key: str, recipe_key: str, convert: Converter, *, note: str | None = None) -> Any:
        """Map a source key with a converted value and return that value; None if the key is absent or cannot be converted."""
        if not self.is_pending(source_key):
            return None
        try:
            recipe_value = convert(self.get(source_key))
        except ValueError as error:
            self.skip(source_key, "invalid value", str(error))
            return None
        return recipe_value if self.map_key(source_key, recipe_key, recipe_value, note=note) else None

    def map_default(self, source_key: str, source_value: Any, *, recipe_key: str, recipe_value: Any) -> None:
        """Set a recipe key to the trainer's default, for a key that is absent from the file and has another default in Bottega."""
        if self.find_mapped(recipe_key) is None and self._find_conflict(recipe_key, recipe_value) is None:
            self.mapped.append(MappedKey(source_key, source_value, recipe_key, recipe_value, is_default=True))

    def skip(self, source_key: str, category: SkipCategory, reason: str) -> None:
        """Leave a pending key out, with a reason."""
        if source_key in self.source_values and source_key not in self._handled_keys:
            self._handled_keys.add(source_key)
            value = self.source_values[source_key]
            category, reason = ("not applicable", EMPTY_REASON) if value is None else (category, reason)
            self.unmapped.append(UnmappedKey(source_key, redact_secret(source_key, value), category, reason))

    def skip_block(self, block: str, category: SkipCategory, reason: str) -> None:
        """Leave out all pending keys of a block."""
        for key, value in self.get_pending_values(block).items():
            if is_disabled(value):
                self.skip(key, "not applicable", DISABLED_REASON)
            self.skip(key, category, reason)

    def find_mapped(self, key: str) -> MappedKey | None:
        """Return the row that sets a recipe key, or None."""
        return next((row for row in self.mapped if row.recipe_key == key), None)

    def map_table(self, table: Mapping[str, tuple[str, Converter]]) -> None:
        """Map several keys: source key -> (recipe key, converter)."""
        for source_key, (recipe_key, convert) in table.items():
            self.map_converted(source_key, recipe_key, convert)

    def skip_remaining(self, *tables: SkippedKeys) -> None:
        """Leave out all pending keys, with their reasons in `tables`."""
        for key, value in self.source_values.items():
            if key not in self._handled_keys:
                self.skip(key, *_find_reason(key, value, tables))

    def to_recipe(self) -> dict[str, Any]:
        """Return the nested recipe, with its blocks in the order of the schema."""
        root: dict[str, Any] = {}
        for row in self.mapped:
            _insert(root, row.recipe_key.split("."), row.recipe_value)
        order = ["task", *Recipe.model_fields]
        return {key: root[key] for key in sorted(root, key=order.index)}

    def drop_rejected_keys(self, tasks: TaskRegistry) -> None:
        """Leave out keys that recipe validation rejects, with its reason, so that the written recipe loads; sort as in the file."""
        if _find_validation_error(tasks, self.to_recipe()) is not None:
            self._keep_valid_rows(tasks)
        assert _find_validation_error(tasks, self.to_recipe()) is None
        positions = {key: position for position, key in enumerate(self.source_values)}
        self.mapped.sort(
            key=lambda row: positions.get(row.source_key, len(positions)) if not row.is_default else len(positions)
        )
        self.unmapped.sort(key=lambda skipped: positions[skipped.source_key])

    def _keep_valid_rows(self, tasks: TaskRegistry) -> None:
        """Keep each row that is valid by itself and together with the rows before it."""
        base_rows = [row for row in self.mapped if row.recipe_key in ("task", "techniques.0.name")]
        valid: list[MappedKey] = []
        for row in self.mapped:
            own_error = _find_validation_error(tasks, _nest_rows([*(r for r in base_rows if r is not row), row]))
            error = own_error or _find_validation_error(tasks, _nest_rows([*base_rows, *valid, row]))
            if error is None or row in base_rows:
                valid.append(row)
            elif not row.is_default and not any(skipped.source_key == row.source_key for skipped in self.unmapped):
                value = redact_secret(row.source_key, row.source_value)
                self.unmapped.append(UnmappedKey(row.source_key, value, "invalid value", error))
        # A source key that became several recipe keys stays mapped while one of them is valid.
        mapped_keys = {row.source_key for row in valid if not row.is_default}
        self.mapped = valid
        self.unmapped = [skipped for skipped in self.unmapped if skipped.source_key not in mapped_keys]


def _nest_rows(rows: list[MappedKey]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for row in rows:
        _insert(root, row.recipe_key.split("."), row.recipe_value)
    return root


def _find_validation_error(tasks: TaskRegistry, recipe: Mapping[str, Any]) -> str | None:
    try:
        check_recipe(tasks, [recipe])
    except UsageError as error:
        return str(error).splitlines()[0].removeprefix("settings: ")
    return None


def _insert(root: dict[str, Any], path: list[str], value: Any) -> None:
    """Set a dotted key; a number is an index into a list."""
    block: Any = root
    for name, next_name in zip(path, [*path[1:], ""], strict=True):
        if isinstance(block, list):
            index = int(name)
            while len(block) <= index:
                block.append({})
            block = block[index]
        elif next_name == "":
            block[name] = value
        else:
            if not isinstance(block.get(name), dict | list):
                block[name] = [] if next_name.isdigit() else {}
            block = block[name]


def iterate_leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value of each leaf; mappings in a list are numbered, other lists and empty blocks are leaves."""
    for name, inner in value.items():
        key = f"{prefix}{name}"
        if isinstance(inner, list) and any(isinstance(item, dict) for item in inner):
            inner = {str(number): item for number, item in enumerate(inner)}
        if isinstance(inner, dict) and inner:
            yield from iterate_leaves(inner, f"{key}.")
        else:
            yield key, inner


def redact_secret(key: str, value: Any) -> Any:
    """Return the value, or `***` if the key is named like a secret."""
    return REPLACEMENT if value and (is_secret_name(key) or key.endswith("webhook_url")) else value


def is_disabled(value: Any) -> bool:
    """Return whether a value switches a feature off: false, 0, empty, or a word such as "none"."""
    return value in (False, 0, "", [], {}) or (
        isinstance(value, str) and value.lower() in ("no", "none", "false", "off")
    )


def _find_reason(key: str, value: Any, tables: tuple[SkippedKeys, ...]) -> tuple[SkipCategory, str]:
    wildcard_key = re.sub(r"\.\d+(?=\.|$)", ".*", key)
    # The most specific name comes first: a block may have one reason for most of its keys.
    parts = wildcard_key.split(".")
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    if value is None:
        return "not applicable", EMPTY_REASON
    for name in names:
        for table in tables:
            if value in table.harmless_values.get(name, ()):
                return "not applicable", DISABLED_REASON if is_disabled(value) else "this is always done here"
            if name in table.not_applicable:
                return "not applicable", table.not_applicable[name]
            if name in table.not_implemented_yet:
                return (
                    ("not applicable", DISABLED_REASON)
                    if is_disabled(value)
                    else ("not implemented yet", table.not_implemented_yet[name])
                )
            if name in table.no_counterpart:
                return (
                    ("not applicable", DISABLED_REASON)
                    if is_disabled(value)
                    else ("no counterpart", table.no_counterpart[name])
                )
    return ("not applicable", DISABLED_REASON) if is_disabled(value) else ("no counterpart", UNKNOWN_REASON)


def parse_number(value: Any) -> float | int:
    """Convert to a number; accept text, since most YAML readers take 2e-4 without a dot for text."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"expected a number, got {format_value(value)}") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"expected a number, got {format_value(value)}")
    return value


def parse_integer(value: Any) -> int:
    """Convert to a whole number."""
    amount = parse_number(value)
    if amount != amount or amount in (float("inf"), float("-inf")) or amount != int(amount):
        raise ValueError(f"expected a whole number, got {format_value(value)}")
    return int(amount)


def parse_boolean(value: Any) -> bool:
    """Convert to a boolean; accept true, yes, on and 1, and their opposites, as text."""
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if isinstance(value, bool):
        return value
    if str(value).lower() not in words:
        raise ValueError(f"expected true or false, got {format_value(value)}")
    return words[str(value).lower()]


def parse_text(value: Any) -> str:
    """Convert a scalar to text."""
    if isinstance(value, dict | list | bool):
        raise ValueError(f"expected text, got {format_value(value)}")
    return str(value)


def parse_text_list(value: Any) -> list[str]:
    """Convert to a list of names; accept text with commas between them."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise ValueError(f"expected a list of names, got {format_value(value)}")


def format_percent(fraction: float) -> str:
    """Format a fraction of the run as a recipe does, such as "3%"."""
    return f"{round(100 * fraction, 6):g}%"


def format_epochs(amount: float) -> str:
    """Format a number of epochs as a recipe does, such as "0.25 epochs"."""
    return "1 epoch" if amount == 1 else f"{round(amount, 6):g} epochs"
