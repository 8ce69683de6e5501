"""Comparison of the splits of prepared data: duplicates among the training rows, and held-out rows that are also trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bottega.data.prepare.labels import COPY
from bottega.data.tables.content import CONTENT_COLUMNS, hash_table, select_rows
from bottega.data.tables.shards import Table


def compare_tables(
    training: Sequence[Table], held_out: Mapping[str, Table], *, limits: Mapping[str, int | None] | None = None
) -> dict[str, Any]:
    """Return, as plain values, what the tables have in common; {} for tables without content that can be compared.

    `train` has `compared` and `duplicates`, the number of rows that repeat an earlier one, and if the rows are too many `sampled`,
    the fraction of them that was compared; each held-out table has `compared`,
    `in_train`, and as `example` the keys of such a row and of its copy in the training data. `share` is the fraction of the
    compared rows that these are; of the tokens for a language model, whose short texts may well be equal. `limits`
    (name -> number of rows) are for tables of which only the first rows are used; that of `train` is for a single table.
    """
    limits = limits or {}
    if not training or not all(any(name in table.columns for name in CONTENT_COLUMNS) for table in training):
        return {}
    train_limit = limits.get("train") if len(training) == 1 else None
    selected = [select_rows(table, train_limit) for table in training]
    num_rows = sum(len(table) if train_limit is None else min(train_limit, len(table)) for table in training)
    rows = [_drop_augmented_copies(table, part) for table, part in zip(training, selected, strict=True)]
    hashes = np.concatenate([hash_table(table, part) for table, part in zip(training, rows, strict=True)])
    first_hashes, first_positions = np.unique(hashes, return_index=True)
    is_duplicate = np.ones(len(hashes), bool)
    is_duplicate[first_positions] = False
    sizes = np.concatenate([_measure_rows(table, part) for table, part in zip(training, rows, strict=True)])
    train = {
        "compared": len(hashes),
        "duplicates": int(is_duplicate.sum()),
        "share": _measure_share(is_duplicate, sizes),
    }
    if (num_selected := sum(map(len, selected))) < num_rows:
        train["sampled"] = round(num_selected / num_rows, 6)
    comparison: dict[str, Any] = {"train": train}
    for name, table in held_out.items():
        held_out_rows = select_rows(table, limits.get(name))
        held_out_hashes = hash_table(table, held_out_rows)
        is_shared = np.isin(held_out_hashes, first_hashes)
        share = _measure_share(is_shared, _measure_rows(table, held_out_rows))
        counts: dict[str, Any] = {"compared": len(held_out_hashes), "in_train": int(is_shared.sum()), "share": share}
        comparison[name] = counts
        if is_shared.any():
            first = int(np.flatnonzero(is_shared)[0])
            position = int(first_positions[np.searchsorted(first_hashes, held_out_hashes[first])])
            counts["example"] = [_read_key(table, int(held_out_rows[first])), _find_key(training, rows, position)]
    return comparison


def _drop_augmented_copies(table: Table, rows: np.ndarray) -> np.ndarray:
    """Return the rows without augmented copies of texts, some of which equal their original."""
    return rows if "form" not in table.columns else rows[table.values("form")[rows] != COPY]


def _measure_rows(table: Table, rows: np.ndarray) -> np.ndarray:
    """Return the size of each row: its tokens for a language model, else 1."""
    return table.lengths("tokens")[rows] if "tokens" in table.columns else np.ones(len(rows), np.int64)


def _measure_share(is_selected: np.ndarray, sizes: np.ndarray) -> float:
    return round(float(sizes[is_selected].sum() / max(1, sizes.sum())), 6)


def _find_key(tables: Sequence[Table], rows: Sequence[np.ndarray], position: int) -> str:
    """Return the key of the row at a position of all compared rows."""
    for table, part in zip(tables, rows, strict=True):
        if position < len(part):
            return _read_key(table, int(part[position]))
        position -= len(part)
    raise AssertionError(f"position {position} is beyond the last row")


def _read_key(table: Table, row: int) -> str:
    return str(table.row("key", row)) if "key" in table.columns else f"row {row}"
