"""Labels of texts as they are stored: a class name, or a JSON list of names; and their form, a word or a number.

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
"""Form of a label in the data; "1" and an empty list are compatible with words and numbers. An augmented copy (COPY) is
not checked again."""
STRIPPED_FLAG = 8
"""Flag added to the form if white space was removed from the label."""


LABEL_FIELD_REMEDY = "set data.label_field to the right field"
SKIP_REMEDY = ", or set data.bad_records=skip"
"""Helps if some rows have no label, but not if all lack one."""
CLASS_REMEDY = "give it a class, or set data.bad_records=skip"


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
            raise Unreadable(f"{error}; {LABEL_FIELD_REMEDY}") from None
        assert name is not None, "a given field exists, or find_label_field raises"
        if self.separator is not None:
            return self._read_classes(fields[name], name, self.separator)
        if isinstance(fields[name], list | tuple):
            raise Unreadable(
                f"the label field {name!r} is a list; set data.multi_label=true if a text may have several classes"
            )
        text, form = _read_class_name(fields[name], name)
        if not text:
            raise Unreadable(f"the label field {name!r} has no value; {CLASS_REMEDY}")
        return text, form

    def _read_classes(self, value: Any, field: str, separator: str) -> tuple[str, int]:
        """Return a JSON list of the class names and their common form."""
        if isinstance(value, bytes):
            value = to_text(value, field)
        if value is None:
            raise Unreadable(
                f"the label field {field!r} has no value; write [] for a text without a class, or set data.bad_records=skip"
            )
        classes = [_read_class_name(item, field) for item in _split_classes(value, field, separator)]
        if any(not name for name, _ in classes):
            raise Unreadable(f"the label field {field!r} has a class with an empty name; remove it")
        stripped_flag = max((form & STRIPPED_FLAG for _, form in classes), default=0)
        forms = {form & ~STRIPPED_FLAG for _, form in classes}
        if forms >= {WORD, NUMBER}:
            raise Unreadable(
                f"the label field {field!r} mixes numbers and words: {[name for name, _ in classes]}; use one form "
                "for all labels"
            )
        return json.dumps(sorted({name for name, _ in classes}), ensure_ascii=False), min(
            forms, default=EITHER
        ) | stripped_flag


def _split_classes(value: Any, field: str, separator: str) -> list[Any]:
    if isinstance(value, np.ndarray):
        return value.reshape(-1).tolist()
    if isinstance(value, list | tuple):
        return list(value)
    if not isinstance(value, str):
        return [value]
    if value.lstrip().startswith("["):
        try:
            classes = json.loads(value)
        except ValueError as error:
            raise Unreadable(
                f"the label field {field!r} begins like a JSON list but is not valid JSON: {error}; correct it"
            ) from error
        return list(classes)
    return [part for part in map(str.strip, value.split(separator)) if part]


def _read_class_name(value: Any, field: str) -> tuple[str, int]:
    """Return the name of one class and its form."""
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(-1)[0]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return str(value).lower(), WORD
    if isinstance(value, float) and not math.isfinite(value):
        raise Unreadable(f"the label field {field!r} is {value}; {CLASS_REMEDY}")
    text = normalize_label(value, field)
    form = NUMBER if isinstance(value, int | float) else EITHER if is_integer_label(text) else WORD
    return text, form | (STRIPPED_FLAG if isinstance(value, str) and value != text else 0)
