"""The numbers of a record: which of its fields are inputs, which is the rule, and what is no number."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.data.formats import find_files
from bottega.data.records.fields import find_label_field, original_names
from bottega.data.records.record import BadRecord, Record, Unreadable

VECTOR_FIELDS = ("x", "inputs", "features", "vector", "array")
RULE_FIELDS = ("rule", "expert")
MAX_FLOAT32 = float(np.finfo(np.float32).max)


@final
@dataclass(frozen=True)
class Layout:
    """Which columns of a table are inputs, by name, and which hold no numbers; told by its first rows."""

    inputs: tuple[str, ...]
    left_out: tuple[str, ...] = ()


def infer_layout(records: Iterable[Record]) -> Layout | None:
    """None where a row's numbers are in one field, or where there is no row.

    A column is an input where most of its values are numbers, so that a slip in the first row is still one.
    """
    seen: dict[str, list[bool]] = {}
    for record in records:
        fields = record.fields
        try:
            field, label, rule = assign_field_roles(fields)
        except Unreadable:
            continue  # whoever reads the row says why
        if field is not None:
            return None
        for name in list_input_fields(fields, excluded=(label, rule)):
            is_told = seen.setdefault(name, [])
            if not is_empty(fields[name]):
                is_told.append(_is_numeric(fields[name]))
    names = {name: 2 * sum(told) >= len(told) for name, told in seen.items()}
    inputs = tuple(sorted(name for name, is_input in names.items() if is_input))
    left_out = tuple(sorted(name for name, is_input in names.items() if not is_input))
    return Layout(inputs, left_out) if inputs else None


def list_input_fields(fields: Mapping[str, Any], *, excluded: Collection[str | None] = ()) -> list[str]:
    """By name, because some formats (TFRecord) keep no order: feature 3 of one row would be feature 5 of the next."""
    own = original_names(fields)
    return [name for name in sorted(fields) if name not in excluded and name not in own and not _is_rule(name)]


def assign_field_roles(
    fields: Mapping[str, Any], *, field: str | None = None, label_field: str | None = None
) -> tuple[str | None, str | None, str | None]:
    """The fields that hold all numbers, the label, and the rule, where there is one."""
    label = find_label_field(fields, label_field, exclude=field)
    field = field or next((name for name in VECTOR_FIELDS if fields.get(name) is not None and name != label), None)
    own = original_names(fields)
    rules = [name for name in fields if _is_rule(name) and name not in (field, label) and name not in own]
    if len(rules) > 1:
        raise Unreadable(f"{' and '.join(map(repr, rules))} both name the right expert of a row; keep one of them")
    return field, label, rules[0] if rules else None


def _is_rule(name: str) -> bool:
    return name.strip().lower() in RULE_FIELDS


def is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def read_inputs(fields: Mapping[str, Any], layout: Layout, *, excluded: Collection[str | None] = ()) -> np.ndarray:
    """The inputs of one row, which has just these columns; others may be there where they hold no numbers."""
    there = list_input_fields(fields, excluded=excluded)
    extra = [
        name
        for name in there
        if name not in layout.inputs and name not in layout.left_out and _is_numeric(fields[name])
    ]
    problem = describe_column_mismatch([name for name in there if name in layout.inputs] + extra, layout.inputs)
    if problem is not None:
        raise Unreadable(problem)
    return np.concatenate([_cell(fields[name], name) for name in layout.inputs])


def describe_column_mismatch(actual: Sequence[str], expected: Sequence[str]) -> str | None:
    """What is wrong with these columns in place of those, in words."""
    missing, unknown = ([n for n in one if n not in other] for one, other in ((expected, actual), (actual, expected)))
    if not missing and not unknown:
        return None
    told = [f"has no column {_listed(missing)}"] if missing else []
    told += [f"has {_listed(unknown)}, which no input is called"] if unknown else []
    both = missing and unknown
    remedy = "rename what differs" if both else "add what is missing" if missing else "leave out what is too many"
    return f"{' and '.join(told)}; the inputs are {_listed(expected)}: {remedy}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def read_all_numbers(fields: Mapping[str, Any], *, excluded: Collection[str | None]) -> np.ndarray:
    found = []
    for name in list_input_fields(fields, excluded=excluded):
        if is_empty(fields[name]):
            raise Unreadable(_no_value(name))
        numbers = to_float_vector(fields[name], f"column {name!r}")
        if numbers is not None:
            found.append(numbers)
    if not found:
        raise Unreadable(f"no numbers among its fields ({', '.join(fields) or 'none'})")
    return np.concatenate(found)


def _cell(value: Any, name: str) -> np.ndarray:
    if is_empty(value):
        raise Unreadable(_no_value(name))
    numbers = to_float_vector(value, f"column {name!r}")
    if numbers is None:
        shown = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:37]}..."
        raise Unreadable(f"column {name!r} is {shown}, which is no number; correct it, or leave the column out")
    return numbers


def _no_value(name: str) -> str:
    return f"column {name!r} has no value; fill it, leave it out, or name one field of numbers"


def _array(value: Any) -> np.ndarray | None:
    """[d] of any type of number, or None where it is no number, no array and no list of numbers. A number written out
    counts."""
    try:
        array = np.asarray(float(value) if isinstance(value, str) else value).reshape(-1)
    except (ValueError, OverflowError):
        return None
    return array if array.dtype.kind in "biuf" and len(array) else None


def _is_numeric(value: Any) -> bool:
    return _array(value) is not None


def to_float_vector(value: Any, name: str) -> np.ndarray | None:
    """float32 [d], or None where it holds no numbers; `name` is what it is called in an error."""
    given = _array(value)
    if given is None:
        return None
    with np.errstate(over="ignore"):
        array = given.astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(array))
    if len(wrong):
        place = f"{name}: its number {wrong[0] + 1}" if len(array) > 1 else name
        number = given[wrong[0]]
        if np.isfinite(number):
            raise Unreadable(
                f"{place} is {number:g}, and numbers are kept up to {MAX_FLOAT32:.2g} (float32); scale them"
            )
        raise Unreadable(f"{place} is {number}, which is not finite; give it a number, or leave the row out")
    return array


def read_number_rows(source: Source, columns: tuple[str, ...] | None) -> tuple[list[str], np.ndarray]:
    """The names of a file's rows and their numbers [n, d]: of these columns, or as an encoder finds them.

    Other columns may be there: by their names, inputs are told from them.
    """
    found, keys, rows = find_files(source), [], []
    for piece in found.list_pieces(64 << 20):
        for record in found.read(piece):
            if isinstance(record, BadRecord):
                raise DataError(str(record))
            try:
                rows.append(_told(record.fields, source, columns))
            except Unreadable as error:
                raise DataError(f"{record.where}: {error}") from None
            keys.append(record.key)
            if len(rows[-1]) != len(rows[0]):
                raise DataError(f"{record.where}: has {len(rows[-1])} numbers, and {keys[0]} has {len(rows[0])}")
    if not rows:
        raise DataError(f"{found.root} is empty; give a file with rows in it")
    return keys, np.stack(rows)


def _told(fields: Mapping[str, Any], source: Source, columns: tuple[str, ...] | None) -> np.ndarray:
    if columns is not None:
        problem = describe_column_mismatch([name for name in fields if name in columns], columns)
        if problem is not None:
            raise Unreadable(problem)
        return np.concatenate([_cell(fields[name], name) for name in columns])
    field, label, rule = assign_field_roles(
        fields, field=source.field if isinstance(source.field, str) and source.field in fields else None
    )
    if field is None:
        return read_all_numbers(fields, excluded=(label, rule, source.label))
    numbers = to_float_vector(fields[field], f"field {field!r}")
    if numbers is None:
        raise Unreadable(f"field {field!r} holds no numbers")
    return numbers
