"""What is done to a record between reading and encoding: its text is found and cleaned, or it is left out for a reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bottega.config.data import Cleaning, Filter, Source, TextData
from bottega.core.errors import UsageError
from bottega.data.prepare.inputs import Input, Item
from bottega.data.prepare.labels import LabelReader
from bottega.data.records.fields import (
    HAS_NEXT_PIECE,
    TEXT_FIELDS,
    RenamedFields,
    find_field,
    find_label_field,
    list_fields,
    normalize_label,
    to_text,
)
from bottega.data.records.record import BadRecord, Record, Unreadable
from bottega.data.text import filters
from bottega.data.text.clean import clean_text
from bottega.similar_names import find_similar_names

OTHER_CLASS = "of another class"
"""Why a record is left out that `labels` does not ask for."""


class DroppedRecord(NamedTuple):
    key: str
    reason: str


@dataclass(frozen=True)
class Rules:
    """`medium` is the field that holds what is learned from, once a source's own name for it is resolved."""

    medium: str
    label: str = "label"
    clean: Cleaning | None = None
    filter: Filter | None = None
    # Left out of the text form, so that data without it has the key that it had before this could be said.
    class_names: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Number of a class -> its name."""

    @classmethod
    def for_text(cls, data: TextData, *, label: str = "label", class_names: Mapping[str, str] | None = None) -> Rules:
        if data.filter is not None:
            filters.check_filter(data.filter)
        return cls("text", label, clean=data.clean, filter=data.filter, class_names=class_names or {})

    @property
    def class_names_key(self) -> tuple[Any, ...]:
        """What of it a key of prepared data holds beside its text form."""
        return (tuple(sorted(self.class_names.items())),) if self.class_names else ()

    @property
    def is_text(self) -> bool:
        return self.medium == "text"

    def apply(
        self, record: Record, source: Source, *, starts: bool = True, ends: bool = True, by_number: bool = False
    ) -> Record | BadRecord | DroppedRecord:
        """`starts` and `ends` say whether the text of the record does so in it, or whether it is a piece of a longer one.

        `by_number` is for a table, whose fields can be named by their number as well.
        """
        try:
            record = record._replace(fields=self._renamed(record.fields, source, by_number=by_number))
        except Unreadable as error:
            return BadRecord(record.key, record.where, str(error))
        if source.labels is not None:
            try:
                if LabelReader(self.label).read(record)[0] not in source.labels:
                    return DroppedRecord(record.key, OTHER_CLASS)
            except Unreadable as error:
                return BadRecord(record.key, record.where, str(error))
        return self._text(record, starts=starts, ends=ends) if self.is_text else record

    def _renamed(self, fields: dict[str, Any], source: Source, *, by_number: bool) -> RenamedFields:
        """The fields with what is learned from and its label under our names. Raises Unreadable where one is missing."""
        known = Columns(fields, by_number)
        renamed: dict[str, Any] = {}
        own = {source.label} if source.label is not None else set()
        if isinstance(source.field, tuple):
            renamed[self.medium] = self._joined(known, source.field)
        elif source.field is not None:
            # Under its own name as well: a split or a curriculum may go by it.
            renamed[self.medium] = known.value(source.field)
            own.add(source.field)
        if source.label is not None:
            renamed[self.label] = known.value(source.label)
        elif by_number and self.label.isdecimal() and self.label not in fields:
            renamed[self.label] = known.value(self.label)
        found = RenamedFields({**fields, **renamed}, own=own - renamed.keys())
        if self.class_names:
            name = find_label_field(found, self.label)
            if name is not None:
                found[name] = self._named_class(found[name], name)
        return found

    def _joined(self, known: Columns, names: tuple[str, ...]) -> str:
        if not self.is_text:
            raise UsageError(f"data.train.field: {len(names)} fields are given, and only texts can be joined; name one")
        texts = (to_text(known.value(name), name).strip() for name in names)
        return "\n".join(text for text in texts if text)

    def _named_class(self, value: Any, field: str) -> Any:
        if isinstance(value, list | tuple):
            return [self._named_class(one, field) for one in value]
        label = normalize_label(value, field)
        if label in self.class_names or label in self.class_names.values():
            return self.class_names.get(label, label)
        numbers = ", ".join(list(self.class_names)[:6]) + (", ..." if len(self.class_names) > 6 else "")
        raise Unreadable(
            f"label {label!r} has no name in data.class_names, which names {numbers}; write {{number: name}} where classes "
            "are not counted from 0"
        )

    def _text(self, record: Record, *, starts: bool, ends: bool) -> Record | BadRecord | DroppedRecord:
        text = _text(record)
        if isinstance(text, BadRecord):
            return text
        if self.clean is not None:
            text = clean_text(text, self.clean, is_start=starts, is_end=ends)
        # A piece always stays: without the last one, short as it may be, the text would lose its end.
        if starts and ends:
            if not text:
                return DroppedRecord(record.key, "empty")
            if self.filter is not None:
                reason = filters.find_drop_reason(text, self.filter)
                if reason is not None:
                    return DroppedRecord(record.key, reason)
        record.fields["text"] = text
        return record


class Columns(NamedTuple):
    """The fields of a row, by name or, in a table, by number."""

    fields: Mapping[str, Any]
    by_number: bool

    def value(self, name: str) -> Any:
        if name in self.fields:
            return self.fields[name]
        columns = [field for field in self.fields if field not in ("continued", HAS_NEXT_PIECE)]
        if self.by_number and name.isdecimal():
            if int(name) < len(columns):
                return self.fields[columns[int(name)]]
            raise Unreadable(f"no column {name}; its columns are numbered 0 to {len(columns) - 1}")
        raise Unreadable(_no_field(name, self.fields))


def read_records(inputs: tuple[Input, ...], item: Item, rules: Rules) -> Iterator[Record | BadRecord | DroppedRecord]:
    found = inputs[item.input].found
    for record in found.read(item.piece):
        if isinstance(record, BadRecord):
            yield record
            continue
        if item.table is not None:
            record.fields["continued"] = not item.ends
        # Only a text file is read in pieces; in a table, `continued` is a column like any other.
        pieces = found.kind == "text"
        starts = not pieces or record.key == item.piece.name
        ends = not pieces or not record.fields["continued"]
        ruled = rules.apply(record, found.source, starts=starts, ends=ends, by_number=found.kind == "csv")
        if pieces and isinstance(ruled, Record):
            ruled.fields[HAS_NEXT_PIECE] = not ends
        yield ruled


def _text(record: Record) -> str | BadRecord:
    fields = record.fields
    name = find_field(fields, TEXT_FIELDS)
    if name is None:
        return BadRecord(
            record.key,
            record.where,
            f"{_no_field('text', fields)}; name the right one with data.train.field (`bottega data FILE` lists all)",
        )
    text = fields[name]
    if not isinstance(text, str):
        return BadRecord(record.key, record.where, f"field {name!r} must be text, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"half a surrogate pair ({text[error.start]!r}) at character {error.start}"
        return BadRecord(record.key, record.where, f"field {name!r} has {half}")
    return text


def _no_field(name: str, fields: Mapping[str, Any]) -> str:
    near = find_similar_names(name, fields)
    return f"no field {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"the row has {list_fields(fields)}")
