"""What becomes of each key of another trainer's file: a key of ours, or a reason why there is none. None gets lost."""

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

SkipCategory = Literal["no counterpart", "not built yet", "meaningless here", "not understood"]

DISABLED_REASON = "switched off there"
EMPTY_REASON = "empty there"
UNKNOWN_REASON = "a key that is not known here"
HARMLESS_REASONS = (DISABLED_REASON, EMPTY_REASON)
"""Reasons that cost nothing: the key said nothing to its own trainer either."""

_SECRET = re.compile(r"(api_?key|secret|password|webhook_url|(^|[.]|hub_|auth_|access_)token)$", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{[^}]*\}")


@dataclass(frozen=True)
class MappedKey:
    source_key: str
    source_value: Any
    recipe_key: str
    recipe_value: Any
    note: str | None = None
    is_default: bool = False
    """Not said in the file: their default, which is not ours."""


@dataclass(frozen=True)
class UnmappedKey:
    source_key: str
    source_value: Any
    category: SkipCategory
    reason: str


Converter = Callable[[Any], Any]
"""Their value -> ours; a ValueError says what was expected."""


@dataclass(frozen=True)
class SkippedKeys:
    """Keys that are known and not taken over."""

    no_counterpart: Mapping[str, str] = field(default_factory=dict)
    """No counterpart; where the value switches the thing off, nothing is lost."""
    not_built_yet: Mapping[str, str] = field(default_factory=dict)
    """Has a place here that is not built yet."""
    meaningless: Mapping[str, str] = field(default_factory=dict)
    """Has no meaning here, whatever its value."""
    harmless_values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values that ask for nothing beyond what happens anyway."""


class Translation:
    """One file on its way: what it says, leaf by leaf, and what has become of that so far."""

    def __init__(self, said: Mapping[str, Any]) -> None:
        self.source_values: dict[str, Any] = {}
        for key, value in iterate_leaves(said):
            if key in self.source_values:
                raise UsageError(f"{key}: said twice, with and without a dot in its name; keep one")
            self.source_values[key] = value
        self.mapped: list[MappedKey] = []
        self.unmapped: list[UnmappedKey] = []
        self.notes: list[str] = []
        self._done: set[str] = set()

    def get(self, key: str) -> Any:
        """Their value; None where the key is absent or empty, which is the same to all of them."""
        return self.source_values.get(key)

    def pending_under(self, prefix: str) -> dict[str, Any]:
        """Leaves of a block that nothing has become of yet, by their whole keys."""
        return {
            key: value
            for key, value in self.source_values.items()
            if key.startswith(prefix + ".") and key not in self._done
        }

    def is_pending(self, key: str) -> bool:
        """Said, not empty, and nothing has become of it yet."""
        return self.get(key) is not None and key not in self._done

    def map_key(self, theirs: str, key: str, becomes: Any, *, note: str | None = None) -> bool:
        """Whether it was taken over: the first of two keys that say one thing in two ways decides."""
        value = self.source_values[theirs]
        first = self._rival(key, becomes)
        if first is not None:
            self.skip(theirs, "no counterpart", f"{first.source_key} has decided {first.recipe_key}")
        elif any(_VARIABLE.search(str(part)) for part in (value, becomes)):
            self.skip(theirs, "not understood", "${...} is not replaced in a recipe")
        else:
            self._done.add(theirs)
            self.mapped.append(MappedKey(theirs, value, key, becomes, note))
            return True
        return False

    def _rival(self, key: str, becomes: Any) -> MappedKey | None:
        for row in self.mapped:
            within = row.recipe_key.startswith(f"{key}.") or key.startswith(f"{row.recipe_key}.")
            if within or (row.recipe_key == key and row.recipe_value != becomes):
                return row
        return None

    def map_converted(self, theirs: str, key: str, convert: Converter, *, note: str | None = None) -> Any:
        """`put` with a conversion; what cannot be converted is left, with what was expected. Returns our value."""
        if not self.is_pending(theirs):
            return None
        try:
            becomes = convert(self.get(theirs))
        except ValueError as error:
            self.skip(theirs, "not understood", str(error))
            return None
        return becomes if self.map_key(theirs, key, becomes, note=note) else None

    def map_default(self, theirs: str, value: Any, key: str, becomes: Any) -> None:
        """What their trainer does where the file is silent, and ours would do something else."""
        if self.find_mapped(key) is None and self._rival(key, becomes) is None:
            self.mapped.append(MappedKey(theirs, value, key, becomes, is_default=True))

    def skip(self, theirs: str, why: SkipCategory, reason: str) -> None:
        if theirs in self.source_values and theirs not in self._done:
            self._done.add(theirs)
            value = self.source_values[theirs]
            why, reason = ("meaningless here", EMPTY_REASON) if value is None else (why, reason)
            self.unmapped.append(UnmappedKey(theirs, redact_secret(theirs, value), why, reason))

    def skip_block(self, prefix: str, why: SkipCategory, reason: str) -> None:
        for key, value in self.pending_under(prefix).items():
            if is_disabled(value):
                self.skip(key, "meaningless here", DISABLED_REASON)
            self.skip(key, why, reason)

    def find_mapped(self, key: str) -> MappedKey | None:
        return next((row for row in self.mapped if row.recipe_key == key), None)

    def map_table(self, table: Mapping[str, tuple[str, Converter]]) -> None:
        """Keys that differ from ours in name and form only."""
        for theirs, (key, convert) in table.items():
            self.map_converted(theirs, key, convert)

    def skip_remaining(self, *tables: SkippedKeys) -> None:
        """A reason for every key that has none yet."""
        for key, value in self.source_values.items():
            if key not in self._done:
                self.skip(key, *_reason(key, value, tables))

    def to_recipe(self) -> dict[str, Any]:
        """The nested recipe, its blocks in the order of the schema."""
        root: dict[str, Any] = {}
        for row in self.mapped:
            _insert(root, row.recipe_key.split("."), row.recipe_value)
        order = ["task", *Recipe.model_fields]
        return {key: root[key] for key in sorted(root, key=order.index)}

    def drop_rejected(self, tasks: TaskRegistry) -> None:
        """What our loader would refuse is left out with the loader's reason, so that what is written loads."""
        if _refusal(tasks, self.to_recipe()) is not None:
            self._sort_out(tasks)
        assert _refusal(tasks, self.to_recipe()) is None
        places = {key: place for place, key in enumerate(self.source_values)}
        self.mapped.sort(key=lambda row: places.get(row.source_key, len(places)) if not row.is_default else len(places))
        self.unmapped.sort(key=lambda left: places[left.source_key])

    def _sort_out(self, tasks: TaskRegistry) -> None:
        """Keep each row that loads by itself and together with those kept before it."""
        task = [row for row in self.mapped if row.recipe_key in ("task", "techniques.0.name")]
        kept: list[MappedKey] = []
        for row in self.mapped:
            alone = _refusal(tasks, _nested([*(r for r in task if r is not row), row]))
            together = alone or _refusal(tasks, _nested([*task, *kept, row]))
            if together is None or row in task:
                kept.append(row)
            elif not row.is_default and not any(left.source_key == row.source_key for left in self.unmapped):
                value = redact_secret(row.source_key, row.source_value)
                self.unmapped.append(UnmappedKey(row.source_key, value, "not understood", together))
        # A key of theirs that became several of ours stays mapped by those that are left.
        still = {row.source_key for row in kept if not row.is_default}
        self.mapped = kept
        self.unmapped = [left for left in self.unmapped if left.source_key not in still]


def _nested(rows: list[MappedKey]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for row in rows:
        _insert(root, row.recipe_key.split("."), row.recipe_value)
    return root


def _refusal(tasks: TaskRegistry, recipe: Mapping[str, Any]) -> str | None:
    try:
        check_recipe(tasks, [recipe])
    except UsageError as error:
        return str(error).splitlines()[0].removeprefix("settings: ")
    return None


def _insert(root: dict[str, Any], path: list[str], value: Any) -> None:
    """Set a dotted key; a number stands for an item of a list."""
    block: Any = root
    for name, following in zip(path, [*path[1:], ""], strict=True):
        if isinstance(block, list):
            index = int(name)
            while len(block) <= index:
                block.append({})
            block = block[index]
        elif following == "":
            block[name] = value
        else:
            if not isinstance(block.get(name), dict | list):
                block[name] = [] if following.isdigit() else {}
            block = block[name]


def iterate_leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key with a value of its own; blocks in a list are numbered, other lists and empty blocks are values."""
    for name, inner in value.items():
        key = f"{prefix}{name}"
        if isinstance(inner, list) and any(isinstance(item, dict) for item in inner):
            inner = {str(number): item for number, item in enumerate(inner)}
        if isinstance(inner, dict) and inner:
            yield from iterate_leaves(inner, f"{key}.")
        else:
            yield key, inner


def redact_secret(key: str, value: Any) -> Any:
    """The value, unless its key says that it is a secret."""
    return "(hidden)" if value and _SECRET.search(key) else value


def is_disabled(value: Any) -> bool:
    return value in (False, 0, "", [], {}) or (
        isinstance(value, str) and value.lower() in ("no", "none", "false", "off")
    )


def _reason(key: str, value: Any, tables: tuple[SkippedKeys, ...]) -> tuple[SkipCategory, str]:
    starred = re.sub(r"\.\d+(?=\.|$)", ".*", key)
    # The longest name decides: a block may have one reason for most of its keys.
    parts = starred.split(".")
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    if value is None:
        return "meaningless here", EMPTY_REASON
    for name in names:
        for table in tables:
            if value in table.harmless_values.get(name, ()):
                return "meaningless here", DISABLED_REASON if is_disabled(value) else "what happens here anyway"
            if name in table.meaningless:
                return "meaningless here", table.meaningless[name]
            if name in table.not_built_yet:
                return (
                    ("meaningless here", DISABLED_REASON)
                    if is_disabled(value)
                    else ("not built yet", table.not_built_yet[name])
                )
            if name in table.no_counterpart:
                return (
                    ("meaningless here", DISABLED_REASON)
                    if is_disabled(value)
                    else ("no counterpart", table.no_counterpart[name])
                )
    return ("meaningless here", DISABLED_REASON) if is_disabled(value) else ("no counterpart", UNKNOWN_REASON)


def parse_number(value: Any) -> float | int:
    """Numbers are often quoted in these files: 2e-4 without a dot is text to most readers of YAML."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"expected a number, got {format_value(value)}") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"expected a number, got {format_value(value)}")
    return value


def parse_integer(value: Any) -> int:
    amount = parse_number(value)
    if amount != amount or amount in (float("inf"), float("-inf")) or amount != int(amount):
        raise ValueError(f"expected a whole number, got {format_value(value)}")
    return int(amount)


def parse_boolean(value: Any) -> bool:
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if isinstance(value, bool):
        return value
    if str(value).lower() not in words:
        raise ValueError(f"expected true or false, got {format_value(value)}")
    return words[str(value).lower()]


def parse_text(value: Any) -> str:
    if isinstance(value, dict | list | bool):
        raise ValueError(f"expected text, got {format_value(value)}")
    return str(value)


def parse_text_list(value: Any) -> list[str]:
    """A list, or names with commas between them."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise ValueError(f"expected a list of names, got {format_value(value)}")


def format_percent(share: float) -> str:
    return f"{round(100 * share, 6):g}%"


def format_epochs(amount: float) -> str:
    return "1 epoch" if amount == 1 else f"{round(amount, 6):g} epochs"
