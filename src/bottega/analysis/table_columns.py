"""Describe the columns of a table, so that a user can choose which holds the text, the label or the numbers."""

from __future__ import annotations

import itertools
import re
import shlex
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bottega.data.formats import SourceFiles
from bottega.data.records.fields import TEXT_FIELDS
from bottega.data.records.record import BadRecord

TABLE_KINDS = ("csv", "jsonl", "json", "parquet", "arrow", "huggingface", "tfrecord")
"""Kinds of files whose records have named fields."""
MAX_ROWS, MAX_DISTINCT_VALUES = 100_000, 1_000
"""Maximum number of rows that are read, and of distinct values that are counted per column."""


def describe_columns(files: SourceFiles) -> dict[str, Any]:
    """Return for each column of a table its type, number of values, number of distinct values, and examples."""
    num_rows, columns, num_bad = 0, dict[str, _Column](), 0
    records = (record for piece in files.list_pieces(1 << 20) for record in files.read(piece))
    for record in itertools.islice(records, MAX_ROWS):
        if isinstance(record, BadRecord):
            num_bad += 1
            continue
        num_rows += 1
        for name, value in record.fields.items():
            columns.setdefault(name, _Column()).add(value)
    return {
        "path": str(files.root),
        "kind": files.kind,
        "rows": num_rows,
        "bad": num_bad,
        "columns": [{"name": name, **column.report()} for name, column in columns.items()],
    }


@dataclass
class _Column:
    """Running statistics of a column."""

    num_filled: int = 0
    types: Counter[str] = field(default_factory=Counter)
    values: dict[str, None] = field(default_factory=dict)
    """Distinct values in the order of occurrence, up to MAX_DISTINCT_VALUES."""

    def add(self, value: Any) -> None:
        text = str(value) if not isinstance(value, bytes) else f"{len(value):,} bytes"
        if value is None or not text.strip():
            return
        self.num_filled += 1
        is_number = isinstance(value, int | float | np.number) or re.fullmatch(
            r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text
        )
        self.types["number" if is_number else "text" if isinstance(value, str) else type(value).__name__] += 1
        if len(self.values) < MAX_DISTINCT_VALUES:
            self.values.setdefault(text[:200])

    def report(self) -> dict[str, Any]:
        is_full = len(self.values) >= MAX_DISTINCT_VALUES
        return {
            "type": self.types.most_common(1)[0][0] if self.types else "empty",
            "filled": self.num_filled,
            "distinct": f"{MAX_DISTINCT_VALUES} or more" if is_full else len(self.values),
            "examples": list(self.values)[:3],
        }


def format_columns(report: dict[str, Any]) -> str:
    """Format a table's columns for the terminal, with commands that name the columns to read."""
    width = max([6, *(len(column["name"]) for column in report["columns"])]) + 2
    lines = [f"{report['path']}: {report['kind']}, {report['rows']:,} rows, {len(report['columns'])} columns", ""]
    lines.append(f"{'number':<8}{'column':<{width}}{'type':<8}{'filled':>10}{'distinct':>14}  examples")
    for number, column in enumerate(report["columns"]):
        examples = ", ".join(_shorten(example) for example in column["examples"])
        distinct = column["distinct"] if isinstance(column["distinct"], str) else f"{column['distinct']:,}"
        prefix = f"{number:<8}{' '.join(column['name'].split()):<{width}}{column['type']:<8}"
        lines.append(f"{prefix}{column['filled']:>10,}{distinct:>14}  {examples}")
    path = shlex.quote(report["path"])
    text, label = _guess_columns(report["columns"])
    hints = [
        f"no column is named like a text column ({', '.join(TEXT_FIELDS)}); choose the columns yourself:",
        "to classify texts:",
        f"  bottega data classify --data {path} data.train.field={text} data.train.label={label}",
        "to classify rows of numbers:",
        f"  bottega data routing --data {path} data.train.label={label}",
    ]
    return "\n".join([*lines, "", *hints])


def _guess_columns(columns: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the names of the likeliest text and label columns; COLUMN if there is none."""
    names = [column["name"] for column in columns]
    lengths = [sum(map(len, column["examples"])) * (column["type"] == "text") for column in columns]
    distinct_counts = [
        column["distinct"] if isinstance(column["distinct"], int) else MAX_DISTINCT_VALUES for column in columns
    ]
    text_index = max(range(len(columns)), key=lambda i: (lengths[i], distinct_counts[i]), default=0)
    label_indices = [
        i for i in range(len(columns)) if i != text_index and 1 < distinct_counts[i] <= columns[i]["filled"] / 4
    ]
    label_index = min(label_indices, key=lambda i: distinct_counts[i], default=None)
    return (
        shlex.quote(names[text_index]) if any(lengths) else "COLUMN",
        shlex.quote(names[label_index]) if label_index is not None else "COLUMN",
    )


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 36 else f"{text[:35]}…")
