"""Previews of prepared tables: rows as text, as images, and as records in public formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bottega.data.prepare.prepared import PreparedData
from bottega.data.records.record import Record
from bottega.data.tables.shards import Table


class Preview:
    """Preview of rows of numbers and texts; subclasses add the preview of their medium."""

    column: str | None = None
    """The column that holds the content of a sample; None if several columns hold it."""
    unit: str | None = None
    """Unit of its length; None if all samples have the same length."""

    def __init__(self, prepared: PreparedData) -> None:
        self.prepared = prepared

    def content_columns(self, tables: dict[str, Table]) -> list[str]:
        """Return the columns by which two rows are duplicates: their content, or all but the key.

        A text column is preferred to token ids, because two texts may have the same ids.
        """
        text_columns = (name for name in ("text", "record") if all(name in table.columns for table in tables.values()))
        content = next(text_columns, self.column)
        first_table = next(iter(tables.values()), None)
        return (
            [content]
            if content is not None
            else [name for name in (first_table.columns if first_table else ()) if name != "key"]
        )

    @property
    def entries_per_unit(self) -> float:
        """Entries of the column per unit of length."""
        return 1

    def describe(self, row: dict[str, Any]) -> str:
        """Return a row as text."""
        if self.column is None:
            values = {name: value for name, value in row.items() if name not in ("key", "label", "caption")}
            return ", ".join(f"{name} {_format_value(value)}" for name, value in values.items())
        content = row[self.column]
        if isinstance(content, bytes):
            return f"{len(content):,} bytes"
        return self.describe_array(content) if isinstance(content, np.ndarray) else str(content)

    def describe_array(self, content: np.ndarray) -> str:
        """Return a short text for an array, by default its shape."""
        return " x ".join(map(str, content.shape))

    def public_fields(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a row as fields for public formats."""
        values = {name: np.asarray(value) if isinstance(value, np.ndarray) else value for name, value in row.items()}
        return {**{name: value for name, value in values.items() if name != "key"}, "source": row["key"]}

    def draw(self, table: Table, count: int, folder: Path) -> list[Path]:
        """Write images of about `count` rows and return their paths; none if there is nothing to draw."""
        return []


def make_image_path(folder: Path, name: str) -> Path:
    """Return the path of an image, creating its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


def _format_value(value: Any) -> str:
    return np.array2string(np.asarray(value), threshold=8, precision=4) if not isinstance(value, str) else value


def read_rows(table: Table, numbers: list[int]) -> list[dict[str, Any]]:
    """Return the rows with these numbers, each as column -> value."""
    return [{name: table.row(name, number) for name in table.columns} for number in numbers]


def choose_evenly_spaced_rows(table: Table, count: int) -> list[int]:
    """Return `count` row numbers evenly spaced from the first to the last."""
    return [int(n) for n in np.unique(np.linspace(0, len(table) - 1, min(count, len(table))).astype(int))]


def get_row_caption(row: dict[str, Any]) -> str:
    """Return the first non-empty one of label, caption and key."""
    texts = [row[name] for name in ("label", "caption", "key") if name in row]
    return next((text for text in texts if text), "")


def get_row_annotations(row: dict[str, Any]) -> dict[str, Any]:
    """Return label, caption, source and condition of a row, without empty ones."""
    values = {"label": row.get("label"), "caption": row.get("caption"), "source": row["key"]}
    annotations: dict[str, Any] = {name: value for name, value in values.items() if value}
    if "condition" in row:
        annotations["condition"] = np.asarray(row["condition"])
    return annotations


def iter_public_records(preview: Preview, table: str, progress: Callable[[int], None]) -> Iterator[Record]:
    """Yield the rows of a table as records in public fields, with their numbers as keys."""
    rows = preview.prepared.table(table)
    for number in range(len(rows)):
        row = {name: rows.row(name, number) for name in rows.columns}
        fields = {name: value for name, value in preview.public_fields(row).items() if value is not None}
        yield Record(f"{number:08d}", f"{table} row {number}", fields)
        progress(number + 1)
