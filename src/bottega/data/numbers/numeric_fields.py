"""Find and read the numeric fields of a record: inputs, label and rule."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.data.formats import find_files
from bottega.data.records.fields import find_label_field, get_original_names
from bottega.data.records.record import BadRecord, Record, Unreadable

VECTOR_FIELDS = ("x", "inputs", "features", "vector", "array")
RULE_FIELDS = ("rule", "expert")
MAX_FLOAT32 = float(np.finfo(np.float32).max)


@final
@dataclass(frozen=True)
class Layout:
    """Which columns of a table are inputs, by name, and which are left out because they are not numeric."""

    inputs: tuple[str, ...]
    left_out: tuple[str, ...] = ()


def infer_layout(records: Iterable[Record]) -> Layout | None:
    """Infer the layout from the first rows; None if the numbers of a row are in one field, or there are no rows.

    A column is an input if at least half of its values are numbers, so that a typo in the first row does not matter.
    """
    is_numeric_by_column: dict[str, list[bool]] = {}
    for record in records:
        fields = record.fields
        try:
            field, label, rule = assign_field_roles(fields)
        except Unreadable:
            continue  # reading the row will raise the error
        if field is not None:
            return None
        for name in list_input_fields(fields, excluded=(label, rule)):
            flags = is_numeric_by_column.setdefault(name, [])
            if not is_empty(fields[name]):
                flags.append(_is_numeric(fields[name]))
    is_input_by_column = {name: 2 * sum(flags) >= len(flags) for name, flags in is_numeric_by_column.items()}
    inputs = tuple(sorted(name for name, is_input in is_input_by_column.items() if is_input))
    left_out = tuple(sorted(name for name, is_input in is_input_by_column.items() if not is_input))
    return Layout(inputs, left_out) if inputs else None


def list_input_fields(fields: Mapping[str, Any], *, excluded: Collection[str | None] = ()) -> list[str]:
    """Return the possible input fields, sorted by name, because some formats (TFRecord) have no order of fields."""
    original = get_original_names(fields)
    return [name for name in sorted(fields) if name not in excluded and name not in original and not _is_rule(name)]


def assign_field_roles(
    fields: Mapping[str, Any], *, field: str | None = None, label_field: str | None = None
) -> tuple[str | None, str | None, str | None]:
    """Return the names of the fields that hold all inputs, the label, and the rule; None for each that is missing."""
    label = find_label_field(fields, label_field, exclude=field)
    field = field or next((name for name in VECTOR_FIELDS if fields.get(name) is not None and name != label), None)
    original = get_original_names(fields)
    rules = [name for name in fields if _is_rule(name) and name not in (field, label) and name not in original]
    if len(rules) > 1:
        raise Unreadable(f"{' and '.join(map(repr, rules))} both contain the index of the correct expert; keep one")
    return field, label, rules[0] if rules else None


def _is_rule(name: str) -> bool:
    return name.strip().lower() in RULE_FIELDS


def is_empty(value: Any) -> bool:
    """Return whether a cell is missing or blank."""
    return value is None or (isinstance(value, str) and not value.strip())


def read_inputs(fields: Mapping[str, Any], layout: Layout, *, excluded: Collection[str | None] = ()) -> np.ndarray:
    """Return the inputs of a row, `(inputs,)`; raise `Unreadable` if its numeric columns differ from the layout."""
    available = list_input_fields(fields, excluded=excluded)
    extra = [
        name
        for name in available
        if name not in layout.inputs and name not in layout.left_out and _is_numeric(fields[name])
    ]
    problem = describe_column_mismatch([name for name in available if name in layout.inputs] + extra, layout.inputs)
    if problem is not None:
        raise Unreadable(problem)
    return np.concatenate([_read_cell(fields[name], name) for name in layout.inputs])


def describe_column_mismatch(actual: Sequence[str], expected: Sequence[str]) -> str | None:
    """Describe how columns differ from the expected ones; None if they agree."""
    missing, unknown = (
        [name for name in names if name not in known_names]
        for names, known_names in ((expected, actual), (actual, expected))
    )
    if not missing and not unknown:
        return None
    problems = [f"has no {'column' if len(missing) == 1 else 'columns'} {_list_names(missing)}"] if missing else []
    problems += (
        [f"has {'an unknown column' if len(unknown) == 1 else 'unknown columns'} {_list_names(unknown)}"]
        if unknown
        else []
    )
    has_both = bool(missing and unknown)
    removal = "remove it" if len(unknown) == 1 else "remove them"
    remedy = "rename the columns" if has_both else "add what is missing" if missing else removal
    return f"{' and '.join(problems)}; the inputs are {_list_names(expected)}: {remedy}"


def _list_names(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def read_all_numbers(fields: Mapping[str, Any], *, excluded: Collection[str | None]) -> np.ndarray:
    """Return all numbers of a record, `(inputs,)`, ordered by field name."""
    parts = []
    for name in list_input_fields(fields, excluded=excluded):
        if is_empty(fields[name]):
            raise Unreadable(_describe_missing_value(name))
        numbers = to_float_vector(fields[name], f"column {name!r}")
        if numbers is not None:
            parts.append(numbers)
    if not parts:
        raise Unreadable(f"no field contains numbers ({', '.join(fields) or 'none'}); set data.train.field")
    return np.concatenate(parts)


def _read_cell(value: Any, name: str) -> np.ndarray:
    if is_empty(value):
        raise Unreadable(_describe_missing_value(name))
    numbers = to_float_vector(value, f"column {name!r}")
    if numbers is None:
        short_value = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:37]}..."
        raise Unreadable(f"column {name!r} is {short_value}, which is not a number; correct it, or remove the column")
    return numbers


def _describe_missing_value(name: str) -> str:
    return f"column {name!r} has no value; fill it, remove the column, or set data.train.field"


def _to_array(value: Any) -> np.ndarray | None:
    """Return numbers of any type as `(d,)`, also a number given as text; None if the value is not numeric."""
    try:
        array = np.asarray(float(value) if isinstance(value, str) else value).reshape(-1)
    except (ValueError, OverflowError):
        return None
    return array if array.dtype.kind in "biuf" and len(array) else None


def _is_numeric(value: Any) -> bool:
    return _to_array(value) is not None


def to_float_vector(value: Any, name: str) -> np.ndarray | None:
    """Return float32 `(d,)`, or None if the value is not numeric; `name` is for error messages."""
    values = _to_array(value)
    if values is None:
        return None
    with np.errstate(over="ignore"):
        array = values.astype(np.float32)
    non_finite = np.flatnonzero(~np.isfinite(array))
    if len(non_finite):
        location = f"{name}: element {non_finite[0] + 1}" if len(array) > 1 else name
        number = values[non_finite[0]]
        if np.isfinite(number):
            raise Unreadable(
                f"{location} is {number:g}, above the largest float32, {MAX_FLOAT32:.2g}; scale the numbers"
            )
        raise Unreadable(f"{location} is {number}, which is not finite; replace it, or remove the row")
    return array


def read_number_rows(source: Source, columns: tuple[str, ...] | None) -> tuple[list[str], np.ndarray]:
    """Return the keys of all rows of a source and their inputs `(rows, d)`.

    The inputs are the values of `columns`; with None, those that VectorEncoder would use.
    """
    files, keys, rows = find_files(source), [], []
    for piece in files.list_pieces(64 << 20):
        for record in files.read(piece):
            if isinstance(record, BadRecord):
                raise DataError(str(record))
            try:
                rows.append(_read_row(record.fields, source, columns))
            except Unreadable as error:
                raise DataError(f"{record.where}: {error}") from None
            keys.append(record.key)
            if len(rows[-1]) != len(rows[0]):
                raise DataError(
                    f"{record.where}: has {len(rows[-1])} numbers, but {keys[0]} has {len(rows[0])}; make all rows equally long"
                )
    if not rows:
        raise DataError(f"{files.root} is empty; give a file with data in it")
    return keys, np.stack(rows)


def _read_row(fields: Mapping[str, Any], source: Source, columns: tuple[str, ...] | None) -> np.ndarray:
    if columns is not None:
        problem = describe_column_mismatch([name for name in fields if name in columns], columns)
        if problem is not None:
            raise Unreadable(problem)
        return np.concatenate([_read_cell(fields[name], name) for name in columns])
    field, label, rule = assign_field_roles(
        fields, field=source.field if isinstance(source.field, str) and source.field in fields else None
    )
    if field is None:
        return read_all_numbers(fields, excluded=(label, rule, source.label))
    numbers = to_float_vector(fields[field], f"field {field!r}")
    if numbers is None:
        raise Unreadable(f"field {field!r} contains no numbers; set data.train.field to one that does")
    return numbers
