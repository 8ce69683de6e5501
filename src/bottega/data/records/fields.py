"""Where a record keeps what: the usual names of label, caption and text, and their values in one form for all media.

A split by class asks the same function as the encoder that stores the class; with lists of their own they disagreed,
and a rare class had no row in validation.
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
"""Set on a piece of a text whose next piece follows; no column can have that name."""


class RenamedFields(dict[str, Any]):
    """Fields of which some stand under two names: ours, and `own`, as their source calls them.

    Both can be asked for by name. Whoever goes through all fields, or looks for a usual name, leaves `own` out, so that
    nothing is taken twice.
    """

    def __init__(self, fields: Mapping[str, Any], *, own: Iterable[str]) -> None:
        super().__init__(fields)
        self.own = frozenset(own)


def original_names(fields: Mapping[str, Any]) -> frozenset[str]:
    return fields.own if isinstance(fields, RenamedFields) else frozenset()


def find_field(fields: Mapping[str, Any], names: tuple[str, ...], *, exclude: str | None = None) -> str | None:
    """The first of `names` that is a field.

    Also where it has no value: else a row without a class would take one from another column than its neighbours.
    """
    own = original_names(fields)
    return next((name for name in names if name in fields and name != exclude and name not in own), None)


def find_label_field(fields: Mapping[str, Any], field: str | None, *, exclude: str | None = None) -> str | None:
    """The field with the class. A name that is asked for must be there; `label` may be any of the usual ones."""
    if field is not None and field in fields:
        return field
    found = find_field(fields, LABEL_FIELDS, exclude=exclude) if field in (None, LABEL_FIELDS[0]) else None
    if found is None and field is not None:
        raise Unreadable(f"has no field {field!r} for its label; it has {list_fields(fields)}")
    return found


def read_label(record: Record, field: str | None, *, exclude: str | None = None) -> str:
    """The class as it is stored; empty where no field is asked for and none is there.

    `besides` is a field that is something else.
    """
    name = find_label_field(record.fields, field, exclude=exclude)
    if name is None:
        return ""
    value = record.fields[name]
    text = normalize_label(value, name)
    if field is not None and not text:
        raise Unreadable(f"field {name!r} has no value, and it is the label")
    return text


def normalize_label(value: Any, field: str) -> str:
    """The name of a class: blanks around it and runs of blanks within it do not count."""
    return " ".join(to_text(value, field).split())


def read_caption(record: Record, field: str | None = None, *, exclude: str | None = None) -> str:
    """What is said about a medium; empty where nothing is."""
    if field is not None and field not in record.fields:
        raise Unreadable(f"has no field {field!r} for its caption; it has {list_fields(record.fields)}")
    name = field or find_field(record.fields, CAPTION_FIELDS, exclude=exclude)
    return "" if name is None else to_text(record.fields[name], name)


def read_annotations(record: Record, *, label_field: str | None) -> dict[str, str]:
    """The columns `key`, `label` and `caption`; the latter two are empty where the record has none."""
    label = find_label_field(record.fields, label_field)
    return {
        "key": record.key,
        "label": read_label(record, label_field),
        "caption": read_caption(record, exclude=label),
    }


def to_text(value: Any, field: str) -> str:
    """Text, or a number as text; the members of an archive are bytes."""
    if value is None:
        return ""
    if isinstance(value, bytes):
        try:
            value = value.decode().strip()
        except UnicodeDecodeError as error:
            raise Unreadable(f"field {field!r} is no text: byte {error.start} is not UTF-8") from error
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(-1)[0]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 3.0 is the class 3, as a table may have turned the one into the other
    if not isinstance(value, str | int | float):
        raise Unreadable(f"field {field!r} must be text or a number, not {type(value).__name__}")
    return str(value)


def read_condition(record: Record, field: str | None) -> np.ndarray:
    """The condition as float32 [d]: a number, a list, an array, or numbers in a text, apart by spaces or commas."""
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
        raise Unreadable(f"field {name!r} is no list of numbers") from error
    if not np.isfinite(numbers).all():
        raise Unreadable(f"field {name!r} has a number that is not finite")
    return numbers


def list_fields(fields: Mapping[str, Any]) -> str:
    """What a record has, in words; without what only we put there."""
    return ", ".join(repr(field) for field in fields if field not in ("continued", HAS_NEXT_PIECE)) or "no fields"
