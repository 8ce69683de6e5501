"""Labels of texts as they are stored: a class name, or a JSON list of names; and whether the data has it as a number.

1, "1" and 1.0 are the same class, named 1. true and false are classes of those names.
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
"""Form of a label in the data; "1" and an empty list are compatible with both. An augmented copy is not checked again."""
BLANKS = 8
"""Flag added to the form if white space was removed from the label."""


NAME_IT = "set data.label_field to the right field"
SKIP = ", or set data.bad_records=skip"
"""Helps if some rows have no label, but not if all lack one."""
GIVE = "give it a class, or set data.bad_records=skip"


@final
@dataclass(frozen=True)
class LabelReader:
    """Reads the label of a record."""

    field: str
    separator: str | None = None
    """Separator of several classes in a text; None if each text has one class."""

    def read(self, record: Record) -> tuple[str, int]:
        """Return the label of a record and its form. Raises Unreadable if it has none."""
        fields = record.fields
        is_plural = self.separator is not None and self.field == "label" and "label" not in fields
        try:
            name = "labels" if is_plural and "labels" in fields else find_label_field(fields, self.field)
        except Unreadable as error:
            raise Unreadable(f"{error}; {NAME_IT}") from None
        assert name is not None, "a given field exists, or find_label_field raises"
        if self.separator is not None:
            return self._read_several(fields[name], name, self.separator)
        if isinstance(fields[name], list | tuple):
            raise Unreadable(
                f"the label field {name!r} is a list; set data.multi_label=true if a text may have several classes"
            )
        text, form = _class_name(fields[name], name)
        if not text:
            raise Unreadable(f"the label field {name!r} has no value; {GIVE}")
        return text, form

    def _read_several(self, value: Any, field: str, separator: str) -> tuple[str, int]:
        if isinstance(value, bytes):
            value = to_text(value, field)
        if value is None:
            raise Unreadable(
                f"the label field {field!r} has no value; write [] for a text without a class, or set data.bad_records=skip"
            )
        classes = [_class_name(item, field) for item in _split_classes(value, field, separator)]
        if any(not name for name, _ in classes):
            raise Unreadable(f"the label field {field!r} has a class with an empty name; remove it")
        blanks = max((form & BLANKS for _, form in classes), default=0)
        forms = {form & ~BLANKS for _, form in classes}
        if forms >= {WORD, NUMBER}:
            raise Unreadable(
                f"the label field {field!r} mixes numbers and words: {[name for name, _ in classes]}; use one form "
                "for all labels"
            )
        return json.dumps(sorted({name for name, _ in classes}), ensure_ascii=False), min(
            forms, default=EITHER
        ) | blanks


def _split_classes(value: Any, field: str, separator: str) -> list[Any]:
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
            raise Unreadable(
                f"the label field {field!r} begins like a JSON list but is not valid JSON: {error}"
            ) from error
        return list(listed)
    return [part for part in map(str.strip, value.split(separator)) if part]


def _class_name(value: Any, field: str) -> tuple[str, int]:
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(-1)[0]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return str(value).lower(), WORD
    if isinstance(value, float) and not math.isfinite(value):
        raise Unreadable(f"the label field {field!r} is {value}; {GIVE}")
    text = normalize_label(value, field)
    form = NUMBER if isinstance(value, int | float) else EITHER if is_integer_label(text) else WORD
    return text, form | (BLANKS if isinstance(value, str) and value != text else 0)
