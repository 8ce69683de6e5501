"""The label of a text as it is stored: one name, or a JSON list of names; and whether the data wrote it as a number.

1, "1" and 1.0 are one class, named 1. true and false are the classes of those names.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from bottega.data.records.fields import find_label_field, normalize_label, to_text
from bottega.data.records.record import Record, Unreadable
from bottega.data.tables.classes import is_integer_label

WORD, NUMBER, EITHER, COPY = 0, 1, 2, 3
"""What a label was in the data; "1" and a list of no class fit with both. A changed copy is not looked at again."""
BLANKS = 8
"""Added to these where blanks were taken off the label."""


NAME_IT = "name it with data.label_field"
SKIP = ", or set data.bad_records=skip"
"""Helps where some rows have no label, and not where no row has one."""
GIVE = "give it a class, or set data.bad_records=skip"


@final
@dataclass(frozen=True)
class LabelReader:
    field: str
    separator: str | None = None
    """Where a text has several classes: what divides them in a text. None is one class each."""

    def read(self, record: Record) -> tuple[str, int]:
        """The label of a record and its form. Raises Unreadable where it has none."""
        fields = record.fields
        is_plural = self.separator is not None and self.field == "label" and "label" not in fields
        try:
            name = "labels" if is_plural and "labels" in fields else find_label_field(fields, self.field)
        except Unreadable as error:
            raise Unreadable(f"{error}; {NAME_IT}") from None
        assert name is not None, "a field that is asked for is there, or it is an error"
        if self.separator is not None:
            return self._several(fields[name], name, self.separator)
        if isinstance(fields[name], list | tuple):
            raise Unreadable(
                f"field {name!r} is a list, and it is the label; where a text may have several, set data.multi_label=true"
            )
        text, form = _named(fields[name], name)
        if not text:
            raise Unreadable(f"field {name!r} has no value, and it is the label; {GIVE}")
        return text, form

    def _several(self, value: Any, field: str, separator: str) -> tuple[str, int]:
        if isinstance(value, bytes):
            value = to_text(value, field)
        if value is None:
            raise Unreadable(
                f"field {field!r} has no value, and it is the label; write [] for a text of no class, or set data.bad_records=skip"
            )
        found = [_named(one, field) for one in _members(value, field, separator)]
        if any(not name for name, _ in found):
            raise Unreadable(f"field {field!r} has a class without a name")
        blanks = max((form & BLANKS for _, form in found), default=0)
        forms = {form & ~BLANKS for _, form in found}
        if forms >= {WORD, NUMBER}:
            raise Unreadable(f"field {field!r} has numbers and words: {[name for name, _ in found]}")
        return json.dumps(sorted({name for name, _ in found}), ensure_ascii=False), min(forms, default=EITHER) | blanks


def _members(value: Any, field: str, separator: str) -> list[Any]:
    if isinstance(value, np.ndarray):
        return value.reshape(-1).tolist()
    if isinstance(value, list | tuple):
        return list(value)
    if not isinstance(value, str):
        return [value]
    if value.lstrip().startswith("["):
        try:
            listed = json.loads(value)
        except ValueError as error:
            raise Unreadable(f"field {field!r} begins like a JSON list and is none: {error}") from error
        return list(listed)
    return [part for part in map(str.strip, value.split(separator)) if part]


def _named(value: Any, field: str) -> tuple[str, int]:
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(-1)[0]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return str(value).lower(), WORD
    if isinstance(value, float) and not math.isfinite(value):
        raise Unreadable(f"field {field!r} is {value}, and it is the label; {GIVE}")
    text = normalize_label(value, field)
    form = NUMBER if isinstance(value, int | float) else EITHER if is_integer_label(text) else WORD
    return text, form | (BLANKS if isinstance(value, str) and value != text else 0)
