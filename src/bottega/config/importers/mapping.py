"""What becomes of each key of another trainer's file: a key of ours, or a reason why there is none. None gets lost."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bottega.config.load import check_recipe
from bottega.config.recipe import Recipe
from bottega.config.registry import TaskRegistry
from bottega.config.wording import shown
from bottega.core.errors import UsageError

Why = Literal["no counterpart", "not built yet", "meaningless here", "not understood"]

OFF = "switched off there"
EMPTY = "empty there"
UNKNOWN = "a key that is not known here"
IDLE = (OFF, EMPTY)
"""Reasons that cost nothing: the key said nothing to its own trainer either."""

_SECRET = re.compile(r"(api_?key|secret|password|webhook_url|(^|[.]|hub_|auth_|access_)token)$", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{[^}]*\}")


@dataclass(frozen=True)
class Mapped:
    theirs: str
    value: Any
    key: str
    becomes: Any
    note: str | None = None
    is_default: bool = False
    """Not said in the file: their default, which is not ours."""


@dataclass(frozen=True)
class Unmapped:
    theirs: str
    value: Any
    why: Why
    reason: str


Convert = Callable[[Any], Any]
"""Their value -> ours; a ValueError says what was expected."""


@dataclass(frozen=True)
class Left:
    """Keys that are known and not taken over."""

    nothing: Mapping[str, str] = field(default_factory=dict)
    """No counterpart; where the value switches the thing off, nothing is lost."""
    later: Mapping[str, str] = field(default_factory=dict)
    """Has a place here that is not built yet."""
    idle: Mapping[str, str] = field(default_factory=dict)
    """Has no meaning here, whatever its value."""
    usual: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values that ask for nothing beyond what happens anyway."""


class Sheet:
    """One file on its way: what it says, leaf by leaf, and what has become of that so far."""

    def __init__(self, said: Mapping[str, Any]) -> None:
        self.said: dict[str, Any] = {}
        for key, value in leaves(said):
            if key in self.said:
                raise UsageError(f"{key}: said twice, with and without a dot in its name; keep one")
            self.said[key] = value
        self.mapped: list[Mapped] = []
        self.unmapped: list[Unmapped] = []
        self.notes: list[str] = []
        self._done: set[str] = set()

    def get(self, key: str) -> Any:
        """Their value; None where the key is absent or empty, which is the same to all of them."""
        return self.said.get(key)

    def under(self, prefix: str) -> dict[str, Any]:
        """Leaves of a block that nothing has become of yet, by their whole keys."""
        return {
            key: value for key, value in self.said.items() if key.startswith(prefix + ".") and key not in self._done
        }

    def is_open(self, key: str) -> bool:
        """Said, not empty, and nothing has become of it yet."""
        return self.get(key) is not None and key not in self._done

    def put(self, theirs: str, key: str, becomes: Any, *, note: str | None = None) -> bool:
        """Whether it was taken over: the first of two keys that say one thing in two ways decides."""
        value = self.said[theirs]
        first = self._rival(key, becomes)
        if first is not None:
            self.leave(theirs, "no counterpart", f"{first.theirs} has decided {first.key}")
        elif any(_VARIABLE.search(str(part)) for part in (value, becomes)):
            self.leave(theirs, "not understood", "${...} is not replaced in a recipe")
        else:
            self._done.add(theirs)
            self.mapped.append(Mapped(theirs, value, key, becomes, note))
            return True
        return False

    def _rival(self, key: str, becomes: Any) -> Mapped | None:
        for row in self.mapped:
            within = row.key.startswith(f"{key}.") or key.startswith(f"{row.key}.")
            if within or (row.key == key and row.becomes != becomes):
                return row
        return None

    def convert(self, theirs: str, key: str, convert: Convert, *, note: str | None = None) -> Any:
        """`put` with a conversion; what cannot be converted is left, with what was expected. Returns our value."""
        if not self.is_open(theirs):
            return None
        try:
            becomes = convert(self.get(theirs))
        except ValueError as error:
            self.leave(theirs, "not understood", str(error))
            return None
        return becomes if self.put(theirs, key, becomes, note=note) else None

    def default(self, theirs: str, value: Any, key: str, becomes: Any) -> None:
        """What their trainer does where the file is silent, and ours would do something else."""
        if self.ours(key) is None and self._rival(key, becomes) is None:
            self.mapped.append(Mapped(theirs, value, key, becomes, is_default=True))

    def leave(self, theirs: str, why: Why, reason: str) -> None:
        if theirs in self.said and theirs not in self._done:
            self._done.add(theirs)
            value = self.said[theirs]
            why, reason = ("meaningless here", EMPTY) if value is None else (why, reason)
            self.unmapped.append(Unmapped(theirs, hidden(theirs, value), why, reason))

    def leave_block(self, prefix: str, why: Why, reason: str) -> None:
        for key, value in self.under(prefix).items():
            if is_off(value):
                self.leave(key, "meaningless here", OFF)
            self.leave(key, why, reason)

    def ours(self, key: str) -> Mapped | None:
        return next((row for row in self.mapped if row.key == key), None)

    def direct(self, table: Mapping[str, tuple[str, Convert]]) -> None:
        """Keys that differ from ours in name and form only."""
        for theirs, (key, convert) in table.items():
            self.convert(theirs, key, convert)

    def finish(self, *tables: Left) -> None:
        """A reason for every key that has none yet."""
        for key, value in self.said.items():
            if key not in self._done:
                self.leave(key, *_reason(key, value, tables))

    def recipe(self) -> dict[str, Any]:
        """The nested recipe, its blocks in the order of the schema."""
        root: dict[str, Any] = {}
        for row in self.mapped:
            _insert(root, row.key.split("."), row.becomes)
        order = ["task", *Recipe.model_fields]
        return {key: root[key] for key in sorted(root, key=order.index)}

    def settle(self, tasks: TaskRegistry) -> None:
        """What our loader would refuse is left out with the loader's reason, so that what is written loads."""
        if _refusal(tasks, self.recipe()) is not None:
            self._sort_out(tasks)
        assert _refusal(tasks, self.recipe()) is None
        places = {key: place for place, key in enumerate(self.said)}
        self.mapped.sort(key=lambda row: places.get(row.theirs, len(places)) if not row.is_default else len(places))
        self.unmapped.sort(key=lambda left: places[left.theirs])

    def _sort_out(self, tasks: TaskRegistry) -> None:
        """Keep each row that loads by itself and together with those kept before it."""
        task = [row for row in self.mapped if row.key in ("task", "techniques.0.name")]
        kept: list[Mapped] = []
        for row in self.mapped:
            alone = _refusal(tasks, _nested([*(r for r in task if r is not row), row]))
            together = alone or _refusal(tasks, _nested([*task, *kept, row]))
            if together is None or row in task:
                kept.append(row)
            elif not row.is_default and not any(left.theirs == row.theirs for left in self.unmapped):
                value = hidden(row.theirs, row.value)
                self.unmapped.append(Unmapped(row.theirs, value, "not understood", together))
        # A key of theirs that became several of ours stays mapped by those that are left.
        still = {row.theirs for row in kept if not row.is_default}
        self.mapped = kept
        self.unmapped = [left for left in self.unmapped if left.theirs not in still]


def _nested(rows: list[Mapped]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for row in rows:
        _insert(root, row.key.split("."), row.becomes)
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


def leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key with a value of its own; blocks in a list are numbered, other lists and empty blocks are values."""
    for name, inner in value.items():
        key = f"{prefix}{name}"
        if isinstance(inner, list) and any(isinstance(item, dict) for item in inner):
            inner = {str(number): item for number, item in enumerate(inner)}
        if isinstance(inner, dict) and inner:
            yield from leaves(inner, f"{key}.")
        else:
            yield key, inner


def hidden(key: str, value: Any) -> Any:
    """The value, unless its key says that it is a secret."""
    return "(hidden)" if value and _SECRET.search(key) else value


def is_off(value: Any) -> bool:
    return value in (False, 0, "", [], {}) or (
        isinstance(value, str) and value.lower() in ("no", "none", "false", "off")
    )


def _reason(key: str, value: Any, tables: tuple[Left, ...]) -> tuple[Why, str]:
    starred = re.sub(r"\.\d+(?=\.|$)", ".*", key)
    # The longest name decides: a block may have one reason for most of its keys.
    parts = starred.split(".")
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    if value is None:
        return "meaningless here", EMPTY
    for name in names:
        for table in tables:
            if value in table.usual.get(name, ()):
                return "meaningless here", OFF if is_off(value) else "what happens here anyway"
            if name in table.idle:
                return "meaningless here", table.idle[name]
            if name in table.later:
                return ("meaningless here", OFF) if is_off(value) else ("not built yet", table.later[name])
            if name in table.nothing:
                return ("meaningless here", OFF) if is_off(value) else ("no counterpart", table.nothing[name])
    return ("meaningless here", OFF) if is_off(value) else ("no counterpart", UNKNOWN)


def number(value: Any) -> float | int:
    """Numbers are often quoted in these files: 2e-4 without a dot is text to most readers of YAML."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"expected a number, got {shown(value)}") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"expected a number, got {shown(value)}")
    return value


def whole(value: Any) -> int:
    amount = number(value)
    if amount != amount or amount in (float("inf"), float("-inf")) or amount != int(amount):
        raise ValueError(f"expected a whole number, got {shown(value)}")
    return int(amount)


def switch(value: Any) -> bool:
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if isinstance(value, bool):
        return value
    if str(value).lower() not in words:
        raise ValueError(f"expected true or false, got {shown(value)}")
    return words[str(value).lower()]


def text(value: Any) -> str:
    if isinstance(value, dict | list | bool):
        raise ValueError(f"expected text, got {shown(value)}")
    return str(value)


def texts(value: Any) -> list[str]:
    """A list, or names with commas between them."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise ValueError(f"expected a list of names, got {shown(value)}")


def per_cent(share: float) -> str:
    return f"{round(100 * share, 6):g}%"


def epochs(amount: float) -> str:
    return "1 epoch" if amount == 1 else f"{round(amount, 6):g} epochs"
