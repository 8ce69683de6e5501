"""Hashes of the content of rows, by which duplicates and samples of two splits are found."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from bottega.data.tables.shards import Table
from bottega.data.text.duplicates import fold_text

CONTENT_COLUMNS = ("text", "tokens", "image", "audio", "video", "x", "caption")
"""Columns that are the content of a sample, as far as a table has them; labels, keys and conditions are not.

An image under two captions is two samples."""
MAX_COMPARED_ROWS = 200_000
"""Rows of a table that are hashed; 200,000 short texts take 0.6 s."""
MAX_COMPARED_BYTES = 256 << 20
"""Bytes of a table that are hashed, which takes 0.3 s."""


def hash_rows(rows: Iterable[Mapping[str, Any]]) -> int:
    """Return a 64-bit hash of the content of one record, which an encoder has turned into rows."""
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        for name in CONTENT_COLUMNS:
            if name in row:
                _update(digest, row[name])
    return int.from_bytes(digest.digest(), "little")


def select_rows(table: Table, num_rows: int | None = None) -> np.ndarray:
    """Return the rows (n,) of a table to hash: the first `num_rows`, or if these are too many or too large, some evenly spaced ones."""
    num_rows = len(table) if num_rows is None else min(num_rows, len(table))
    row_bytes = sum(table.values(name).nbytes for name in _list_content_columns(table)) / max(1, len(table))
    count = min(num_rows, MAX_COMPARED_ROWS, int(MAX_COMPARED_BYTES / max(1.0, row_bytes)))
    return np.linspace(0, num_rows - 1, count).astype(np.int64) if count else np.empty(0, np.int64)


def hash_table(table: Table, rows: np.ndarray) -> np.ndarray:
    """Return the content hashes of some rows of a table, uint64 (n,); equal to those of `hash_rows` for records of one row."""
    columns = _list_content_columns(table)
    hashes = (hash_rows([{name: table.row(name, row) for name in columns}]) for row in rows.tolist())
    return np.fromiter(hashes, dtype=np.uint64, count=len(rows))


def _list_content_columns(table: Table) -> list[str]:
    return [name for name in CONTENT_COLUMNS if name in table.columns]


def _update(digest: Any, value: Any) -> None:
    """Add a value, with its length, so that no two lists of values are hashed alike."""
    if isinstance(value, str):
        content: Any = fold_text(value).encode("utf-8", "replace")
    elif isinstance(value, bytes):
        content = value
    else:
        content = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    digest.update(len(content).to_bytes(8, "little"))
    digest.update(content)
