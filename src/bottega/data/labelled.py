"""Prepared texts with a class each, as samples filled up to one length."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np

from bottega.core.errors import DataError
from bottega.data.shards import Table
from bottega.data.source import Source


@final
class LabelledTexts(Source):
    """input_ids and attention_mask [n, T], label [n]. Longer texts are cut at T tokens."""

    def __init__(self, folder: Path, table: str, *, labels: np.ndarray, sequence_length: int | None = None) -> None:
        """`labels` [rows] are class numbers; T is the longest text where no length is given."""
        self.folder, self.table_name, self.labels = Path(folder), table, labels.astype(np.int32)
        self.table = Table(self.folder / table)
        longest = int(self.table.lengths("input_ids").max(initial=1))
        self.sequence_length = min(sequence_length, longest) if sequence_length is not None else longest

    def __len__(self) -> int:
        return len(self.table)

    def lengths(self) -> np.ndarray:
        return np.minimum(self.table.lengths("input_ids"), self.sequence_length)

    def scores(self, name: str) -> np.ndarray:
        if self.meta.get("score_field") != name:
            raise DataError(f"data.curriculum.by: the data was prepared with no field {name!r}; prepare it again")
        return self.table.values("score")

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        values, ends = self.table.values("input_ids"), self.table.ends("input_ids")
        start = np.where(index > 0, ends[index - 1], 0)
        places = start[:, None] + np.arange(self.sequence_length)
        mask = places < ends[index][:, None]
        ids = values[np.minimum(places, len(values) - 1)].astype(np.int32)
        filled = np.where(mask, ids, np.int32(self.meta["end_of_text"]))
        return {"input_ids": filled, "attention_mask": mask.astype(np.int32), "label": self.labels[index]}

    @property
    def fingerprint(self) -> str:
        parts = (self.meta["key"], self.table_name, self.sequence_length)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        key, label, text = (self.table.row(name, index) for name in ("key", "label", "text"))
        return f"{self.table_name} text {key}, class {label}\n{text}"

    @cached_property
    def meta(self) -> dict[str, Any]:
        return json.loads((self.folder / "meta.json").read_text())
