"""Rules applied to records between reading and encoding: rename fields, select classes, clean and filter texts."""

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
"""Reason for dropping a record whose class is not in `labels`."""


class DroppedRecord(NamedTuple):
    """A readable record that is left out, and why."""

    key: str
    reason: str


@dataclass(frozen=True)
class Rules:
    """Rules of one preparation. `medium` is the field that holds the content, after renaming.

    The class and field names are part of the key of prepared data, through repr.
    """

    medium: str
    label: str = "label"
    clean: Cleaning | None = None
    filter: Filter | None = None
    # Not in repr, so that data without class names has the key that it had before this option.
    class_names: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Class id to class name."""

    @classmethod
    def for_text(cls, data: TextData, *, label: str = "label", class_names: Mapping[str, str] | None = None) -> Rules:
        """Return the rules of a text recipe."""
        if data.filter is not None:
            filters.check_filter(data.filter)
        return cls("text", label, clean=data.clean, filter=data.filter, class_names=class_names or {})

    @property
    def class_names_key(self) -> tuple[Any, ...]:
        """The class names as a part of the key of prepared data; empty without any."""
        return (tuple(sorted(self.class_names.items())),) if self.class_names else ()

    @property
    def is_text(self) -> bool:
        return self.medium == "text"

    def apply(
        self, record: Record, source: Source, *, is_start: bool = True, is_end: bool = True, by_number: bool = False
    ) -> Record | BadRecord | DroppedRecord:
        """Apply the rules to a record.

        `is_start` and `is_end` say whether the text begins and ends in this record, rather than in another piece of the text.
        `by_number` allows fields to be given by column number, for tables.
        """
        try:
            record = record._replace(fields=self._rename_fields(record.fields, source, by_number=by_number))
        except Unreadable as error:
            return BadRecord(record.key, record.where, str(error))
        if source.labels is not None:
            try:
                if LabelReader(self.label).read(record)[0] not in source.labels:
                    return DroppedRecord(record.key, OTHER_CLASS)
            except Unreadable as error:
                return BadRecord(record.key, record.where, str(error))
        return self._clean_and_filter(record, is_start=is_start, is_end=is_end) if self.is_text else record

    def _rename_fields(self, fields: dict[str, Any], source: Source, *, by_number: bool) -> RenamedFields:
        """Return the fields with content and label under our names. Raises Unreadable if one is missing."""
        columns = Columns(fields, by_number)
        renamed: dict[str, Any] = {}
        source_names = {source.label} if source.label is not None else set()
        if isinstance(source.field, tuple):
            renamed[self.medium] = self._join_fields(columns, source.field)
        elif source.field is not None:
            # Kept under its original name as well: a split or a curriculum may use it.
            renamed[self.medium] = columns.value(source.field)
            source_names.add(source.field)
        if source.label is not None:
            renamed[self.label] = columns.value(source.label)
        elif by_number and self.label.isdecimal() and self.label not in fields:
            renamed[self.label] = columns.value(self.label)
        result = RenamedFields({**fields, **renamed}, original_names=source_names - renamed.keys())
        if self.class_names:
            name = find_label_field(result, self.label)
            if name is not None:
                result[name] = self._map_class_name(result[name], name)
        return result

    def _join_fields(self, columns: Columns, names: tuple[str, ...]) -> str:
        if not self.is_text:
            raise UsageError(
                f"data.train.field lists {len(names)} fields, but only text fields can be joined; give one"
            )
        texts = (to_text(columns.value(name), name).strip() for name in names)
        return "\n".join(text for text in texts if text)

    def _map_class_name(self, value: Any, field: str) -> Any:
        if isinstance(value, list | tuple):
            return [self._map_class_name(item, field) for item in value]
        label = normalize_label(value, field)
        if label in self.class_names or label in self.class_names.values():
            return self.class_names.get(label, label)
        class_ids = ", ".join(list(self.class_names)[:6]) + (", ..." if len(self.class_names) > 6 else "")
        raise Unreadable(
            f"label {label!r} has no name in data.class_names, which has names for {class_ids}; "
            "add one, or write data.class_names as {number: name} if classes are not counted from 0"
        )

    def _clean_and_filter(self, record: Record, *, is_start: bool, is_end: bool) -> Record | BadRecord | DroppedRecord:
        text = _find_text(record)
        if isinstance(text, BadRecord):
            return text
        if self.clean is not None:
            text = clean_text(text, self.clean, is_start=is_start, is_end=is_end)
        # Pieces of a longer text are never dropped: without a short last piece the text would lose its end.
        if is_start and is_end:
            if not text:
                return DroppedRecord(record.key, "empty")
            if self.filter is not None:
                reason = filters.find_drop_reason(text, self.filter)
                if reason is not None:
                    return DroppedRecord(record.key, reason)
        record.fields["text"] = text
        return record


class Columns(NamedTuple):
    """The fields of a row, by name or by column number."""

    fields: Mapping[str, Any]
    by_number: bool

    def value(self, name: str) -> Any:
        """Return the value of a field. Raises Unreadable if there is none."""
        if name in self.fields:
            return self.fields[name]
        columns = [field for field in self.fields if field not in ("continued", HAS_NEXT_PIECE)]
        if self.by_number and name.isdecimal():
            if int(name) < len(columns):
                return self.fields[columns[int(name)]]
            raise Unreadable(f"has no column {name}; its columns are numbered 0 to {len(columns) - 1}")
        raise Unreadable(_explain_missing_field(name, self.fields))


def read_records(inputs: tuple[Input, ...], item: Item, rules: Rules) -> Iterator[Record | BadRecord | DroppedRecord]:
    """Read the records of an item and apply the rules to each."""
    files = inputs[item.input].source_files
    for record in files.read(item.piece):
        if isinstance(record, BadRecord):
            yield record
            continue
        if item.table is not None:
            record.fields["continued"] = not item.is_text_end
        # Only text files are read in pieces; in a table, `continued` is a column like any other.
        is_piece = files.kind == "text"
        is_start = not is_piece or record.key == item.piece.name
        is_end = not is_piece or not record.fields["continued"]
        result = rules.apply(record, files.source, is_start=is_start, is_end=is_end, by_number=files.kind == "csv")
        if is_piece and isinstance(result, Record):
            result.fields[HAS_NEXT_PIECE] = not is_end
        yield result


def _find_text(record: Record) -> str | BadRecord:
    fields = record.fields
    name = find_field(fields, TEXT_FIELDS)
    if name is None:
        return BadRecord(
            record.key,
            record.where,
            f"{_explain_missing_field('text', fields)}; set data.train.field to the right one (`bottega data FILE` lists all)",
        )
    text = fields[name]
    if not isinstance(text, str):
        return BadRecord(record.key, record.where, f"field {name!r} must be text, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"an unpaired surrogate ({text[error.start]!r}) at character {error.start}"
        return BadRecord(record.key, record.where, f"field {name!r} has {problem}")
    return text


def _explain_missing_field(name: str, fields: Mapping[str, Any]) -> str:
    similar_names = find_similar_names(name, fields)
    return f"no field {name!r}; " + (
        f"did you mean {similar_names[0]!r}?" if similar_names else f"the row has {list_fields(fields)}"
    )
