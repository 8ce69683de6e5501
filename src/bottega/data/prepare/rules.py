"""What is done to a record between reading and encoding: its text is found and cleaned, or it is left out for a reason."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from bottega.core.errors import DataError
from bottega.data.prepare.inputs import Input, Item
from bottega.data.record import Bad, Record
from bottega.data.text import filters
from bottega.data.text.clean import clean
from bottega.schema.data import Cleaning, Filter, Source, TextData

USUAL_TEXT = ("text", "content", "document", "sentence", "txt")
USUAL_LABEL = ("label", "cls", "class", "category", "target", "y")


class Dropped(NamedTuple):
    key: str
    reason: str


@dataclass(frozen=True)
class Rules:
    """`medium` is the field that holds what is learned from, once a source's own name for it is resolved."""

    medium: str
    label: str = "label"
    clean: Cleaning | None = None
    filter: Filter | None = None

    @classmethod
    def of_text(cls, data: TextData, *, label: str = "label") -> Rules:
        if data.filter is not None:
            filters.check(data.filter)
        return cls("text", label, clean=data.clean, filter=data.filter)

    @property
    def is_text(self) -> bool:
        return self.medium == "text"

    def apply(self, record: Record, source: Source) -> Record | Bad | Dropped:
        # In a tar an array is a member video.npy.
        fields = {name.removesuffix(".npy"): value for name, value in record.fields.items()}
        if isinstance(fields.get("json"), dict):
            # In a tar, plain values stand together in a member .json.
            fields = {**fields["json"], **fields}
        for named, own in ((self.medium, source.field), (self.label, source.label)):
            if own is not None:
                if own not in fields:
                    return Bad(record.key, record.where, _no_field(own, fields))
                fields[named] = fields[own] if own == named else fields.pop(own)
        record = record._replace(fields=fields)
        return self._text(record) if self.is_text else record

    def _text(self, record: Record) -> Record | Bad | Dropped:
        text = _text(record)
        if isinstance(text, Bad):
            return text
        if self.clean is not None:
            text = clean(text, self.clean)
        if not text:
            return Dropped(record.key, "empty")
        if self.filter is not None:
            reason = filters.reason_to_drop(text, self.filter)
            if reason is not None:
                return Dropped(record.key, reason)
        record.fields["text"] = text
        return record


def records(inputs: tuple[Input, ...], item: Item, rules: Rules) -> Iterator[Record | Bad | Dropped]:
    found = inputs[item.input].found
    for record in found.read(item.piece):
        if isinstance(record, Bad):
            yield record
            continue
        if item.table is not None:
            record.fields["continued"] = not item.ends
        yield rules.apply(record, found.source)


def _text(record: Record) -> str | Bad:
    fields = record.fields
    name = next((name for name in USUAL_TEXT if name in fields), None)
    if name is None:
        return Bad(record.key, record.where, f"{_no_field('text', fields)}; name the right one with `field`")
    text = fields[name]
    if not isinstance(text, str):
        return Bad(record.key, record.where, f"field {name!r} must be text, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"half a surrogate pair ({text[error.start]!r}) at character {error.start}"
        return Bad(record.key, record.where, f"field {name!r} has {half}")
    return text


def _no_field(name: str, fields: dict[str, Any]) -> str:
    near = difflib.get_close_matches(name, fields, n=1)
    named = ", ".join(repr(field) for field in fields if field != "continued") or "no fields"
    return f"no field {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"the row has {named}")


def label_of(record: Record, field: str | None) -> Any:
    """The class of a record, or None where nothing says that it has one."""
    if field is not None and field in record.fields:
        return record.fields[field]
    found = next((record.fields[name] for name in USUAL_LABEL if name in record.fields), None)
    if found is None and field is not None:
        raise DataError(f"{record.where}: {_no_field(field, record.fields)}")
    return found
