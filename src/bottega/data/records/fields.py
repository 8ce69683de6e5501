"""Label, caption, text and condition of a record: the usual field names, and values in one form for all media.

A stratified split reads the label with the same function as the encoder that stores it; when each had its own list
of names, they disagreed, and a rare class had no row in validation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from bottega.data.records.record import Record, Unreadable

LABEL_FIELDS = ("label", "cls", "class", "category", "target", "digit", "genre", "speaker", "y")
CAPTION_FIELDS = ("caption", "text", "txt", "transcript", "transcription", "normalised", "sentence")
TEXT_FIELDS = ("text", "content", "document", "sentence", "txt")
HAS_NEXT_PIECE = "\0goes on"
"""Field set on a piece of a text that another piece continues; no column can have that name."""


class RenamedFields(dict[str, Any]):
    """Fields, some of which are present under two names: ours, and their original name, listed in `original_names`.

    Both can be looked up. Code that iterates over all fields, or searches for a usual name, skips `original_names`, so
    that no value is used twice.
    """

    def __init__(self, fields: Mapping[str, Any], *, original_names: Iterable[str]) -> None:
        super().__init__(fields)
        self.original_names = frozenset(original_names)


def get_original_names(fields: Mapping[str, Any]) -> frozenset[str]:
    """Return the original names of renamed fields, which iteration over fields must skip."""
    return fields.original_names if isinstance(fields, RenamedFields) else frozenset()


def find_field(fields: Mapping[str, Any], names: tuple[str, ...], *, exclude: str | None = None) -> str | None:
    """Return the first of `names` that is a field, or None.

    An empty field counts too: otherwise a row without a class would take its class from another column than its neighbours.
    """
    originals = get_original_names(fields)
    return next((name for name in names if name in fields and name != exclude and name not in originals), None)


def find_label_field(fields: Mapping[str, Any], field: str | None, *, exclude: str | None = None) -> str | None:
    """Return the field that holds the class. A given `field` must exist, except that `label` stands for any usual name."""
    if field is not None and field in fields:
        return field
    name = find_field(fields, LABEL_FIELDS, exclude=exclude) if field in (None, LABEL_FIELDS[0]) else None
    if name is None and field is not None:
        raise Unreadable(f"has no field {field!r} for its label; it has {list_fields(fields)}")
    return name


def read_label(record: Record, field: str | None, *, exclude: str | None = None) -> str:
    """Return the class of a record as it is stored; empty if no `field` is given and there is none.

    `exclude` is a field with another meaning.
    """
    name = find_label_field(record.fields, field, exclude=exclude)
    if name is None:
        return ""
    value = record.fields[name]
    text = normalize_label(value, name)
    if field is not None and not text:
        raise Unreadable(f"the label field {name!r} has no value")
    return text


def normalize_label(value: Any, field: str) -> str:
    """Return the class name of a value, with runs of white space collapsed."""
    return " ".join(to_text(value, field).split())


def read_caption(record: Record, field: str | None = None, *, exclude: str | None = None) -> str:
    """Return the caption of a medium; empty if it has none."""
    if field is not None and field not in record.fields:
        raise Unreadable(f"has no field {field!r} for its caption; it has {list_fields(record.fields)}")
    name = field or find_field(record.fields, CAPTION_FIELDS, exclude=exclude)
    return "" if name is None else to_text(record.fields[name], name)


def read_annotations(record: Record, *, label_field: str | None) -> dict[str, str]:
    """Return the columns `key`, `label` and `caption`; the latter two are empty if the record has none."""
    label = find_label_field(record.fields, label_field)
    return {
        "key": record.key,
        "label": read_label(record, label_field),
        "caption": read_caption(record, exclude=label),
    }


def to_text(value: Any, field: str) -> str:
    """Return a value as text: text, a number, or the bytes of an archive member. Raises Unreadable for other types."""
    if value is None:
        return ""
    if isinstance(value, bytes):
        try:
            value = value.decode().strip()
        except UnicodeDecodeError as error:
            raise Unreadable(f"field {field!r} is not text: byte {error.start} is not UTF-8") from error
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(-1)[0]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # tables may turn the class 3 into 3.0
    if not isinstance(value, str | int | float):
        raise Unreadable(f"field {field!r} must be text or a number, not {type(value).__name__}")
    return str(value)


def read_condition(record: Record, field: str | None) -> np.ndarray:
    """Return the condition vector, float32 (d,), from a number, a list, an array, or text separated by spaces or commas."""
    name = field or "condition"
    if name not in record.fields:
        raise Unreadable(f"has no field {name!r} for its condition; it has {list_fields(record.fields)}")
    value = record.fields[name]
    try:
        if isinstance(value, str | bytes):
            text = value if isinstance(value, str) else value.decode()
            value = [float(part) for part in re.split(r"[,\s]+", text.strip(" \t\n[]()"))]
        numbers = np.atleast_1d(np.asarray(value, dtype=np.float32)).reshape(-1)
    except (TypeError, ValueError) as error:
        raise Unreadable(f"field {name!r} is not a list of numbers") from error
    if not np.isfinite(numbers).all():
        raise Unreadable(f"field {name!r} has a number that is not finite")
    return numbers


def list_fields(fields: Mapping[str, Any]) -> str:
    """Return the field names of a record for messages, without our internal ones."""
    return ", ".join(repr(field) for field in fields if field not in ("continued", HAS_NEXT_PIECE)) or "no fields"
