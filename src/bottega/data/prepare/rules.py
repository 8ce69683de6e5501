"""What is done to a record between reading and encoding: its text is found and cleaned, or it is left out for a reason."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from bottega.data.fields import GOES_ON, TEXTS, Renamed, listed, usual
from bottega.data.prepare.inputs import Input, Item
from bottega.data.prepare.labels import LabelReader
from bottega.data.record import Bad, Record, Unreadable
from bottega.data.text import filters
from bottega.data.text.clean import clean
from bottega.schema.data import Cleaning, Filter, Source, TextData

OTHER_CLASS = "of another class"
"""Why a record is left out that `labels` does not ask for."""


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

    def apply(
        self, record: Record, source: Source, *, starts: bool = True, ends: bool = True
    ) -> Record | Bad | Dropped:
        """`starts` and `ends` say whether the text of the record does so in it, or whether it is a piece of a longer one."""
        renamed = {}
        for named, own in ((self.medium, source.field), (self.label, source.label)):
            if own is not None:
                if own not in record.fields:
                    return Bad(record.key, record.where, _no_field(own, record.fields))
                # Under its own name as well: a split or a curriculum may go by it.
                renamed[named] = record.fields[own]
        aliases = {own for own in (source.field, source.label) if own is not None} - renamed.keys()
        record = record._replace(fields=Renamed({**record.fields, **renamed}, own=aliases))
        if source.labels is not None:
            try:
                if LabelReader(self.label).read(record)[0] not in source.labels:
                    return Dropped(record.key, OTHER_CLASS)
            except Unreadable as error:
                return Bad(record.key, record.where, str(error))
        return self._text(record, starts=starts, ends=ends) if self.is_text else record

    def _text(self, record: Record, *, starts: bool, ends: bool) -> Record | Bad | Dropped:
        text = _text(record)
        if isinstance(text, Bad):
            return text
        if self.clean is not None:
            text = clean(text, self.clean, starts=starts, ends=ends)
        # A piece always stays: without the last one, short as it may be, the text would lose its end.
        if starts and ends:
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
        # Only a text file is read in pieces; in a table, `continued` is a column like any other.
        pieces = found.kind == "text"
        starts = not pieces or record.key == item.piece.name
        ends = not pieces or not record.fields["continued"]
        ruled = rules.apply(record, found.source, starts=starts, ends=ends)
        if pieces and isinstance(ruled, Record):
            ruled.fields[GOES_ON] = not ends
        yield ruled


def _text(record: Record) -> str | Bad:
    fields = record.fields
    name = usual(fields, TEXTS)
    if name is None:
        return Bad(record.key, record.where, f"{_no_field('text', fields)}; name the right one with data.train.field")
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
    return f"no field {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"the row has {listed(fields)}")
