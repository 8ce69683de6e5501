"""Rows of prepared tables for people and for other programs: in words, as pictures, and as files that anyone reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bottega.data.prepare.prepared import PreparedData
from bottega.data.records.record import Record
from bottega.data.tables.shards import Table


class Preview:
    """Rows of numbers and texts; the media add what they know of theirs."""

    column: str | None = None
    """What a sample is; None where rows have no one content."""
    unit: str | None = None
    """What its length is counted in; None where all are of one length."""

    def __init__(self, prepared: PreparedData) -> None:
        self.prepared = prepared

    def content_columns(self, tables: dict[str, Table]) -> list[str]:
        """The columns by which two rows are the same: their content, or all but the name. Two texts may have the same ids, so
        it is the text where there is one."""
        whole = (name for name in ("text", "record") if all(name in table.columns for table in tables.values()))
        content = next(whole, self.column)
        first = next(iter(tables.values()), None)
        return (
            [content] if content is not None else [name for name in (first.columns if first else ()) if name != "key"]
        )

    @property
    def per_unit(self) -> float:
        """Entries of the column in one unit of length."""
        return 1

    def describe(self, row: dict[str, Any]) -> str:
        """A row in words."""
        if self.column is None:
            values = {name: value for name, value in row.items() if name not in ("key", "label", "caption")}
            return ", ".join(f"{name} {_short(value)}" for name, value in values.items())
        content = row[self.column]
        if isinstance(content, bytes):
            return f"{len(content):,} bytes"
        return self.describe_array(content) if isinstance(content, np.ndarray) else str(content)

    def describe_array(self, content: np.ndarray) -> str:
        return " x ".join(map(str, content.shape))

    def public_fields(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row as fields that other programs read."""
        plain = {name: np.asarray(value) if isinstance(value, np.ndarray) else value for name, value in row.items()}
        return {**{name: value for name, value in plain.items() if name != "key"}, "source": row["key"]}

    def draw(self, table: Table, count: int, folder: Path) -> list[Path]:
        """Pictures of about `count` rows; none where there is nothing to look at."""
        return []


def image_path(folder: Path, name: str) -> Path:
    """A file for a picture, in a folder that is made for it."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


def _short(value: Any) -> str:
    return np.array2string(np.asarray(value), threshold=8, precision=4) if not isinstance(value, str) else value


def read_rows(table: Table, numbers: list[int]) -> list[dict[str, Any]]:
    return [{name: table.row(name, number) for name in table.columns} for number in numbers]


def evenly_spaced_rows(table: Table, count: int) -> list[int]:
    """Numbers of `count` rows from the first to the last."""
    return [int(n) for n in np.unique(np.linspace(0, len(table) - 1, min(count, len(table))).astype(int))]


def row_caption(row: dict[str, Any]) -> str:
    named = [row[name] for name in ("label", "caption", "key") if name in row]
    return next((text for text in named if text), "")


def row_annotations(row: dict[str, Any]) -> dict[str, Any]:
    """The label, caption, source and condition of a row, without those that are empty."""
    named = {"label": row.get("label"), "caption": row.get("caption"), "source": row["key"]}
    annotations: dict[str, Any] = {name: value for name, value in named.items() if value}
    if "condition" in row:
        annotations["condition"] = np.asarray(row["condition"])
    return annotations


def iter_public_records(preview: Preview, table: str, progress: Callable[[int], None]) -> Iterator[Record]:
    """The rows of a table in order, their numbers as keys."""
    rows = preview.prepared.table(table)
    for number in range(len(rows)):
        row = {name: rows.row(name, number) for name in rows.columns}
        fields = {name: value for name, value in preview.public_fields(row).items() if value is not None}
        yield Record(f"{number:08d}", f"{table} row {number}", fields)
        progress(number + 1)
