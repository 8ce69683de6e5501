"""Prepared tokens as samples: windows over one long memory-mapped array.

T: the sequence length. A window is T + 1 tokens, so that each of the first T has its successor as target.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, final

import numpy as np

from bottega.core.errors import DataError
from bottega.core.noise import key_of
from bottega.data.source import Source

Split = Literal["train", "validation"]
NAMES = {"train": "training", "validation": "validation"}


@final
class TokenWindows(Source):
    """Windows at stride T, so that each token is a target once.

    Training shifts all borders by an offset that is f(seed, epoch), so that epochs cut the text in other places; up to
    2 T tokens at the two ends are left out of an epoch. Validation never shifts, drops what is left after the last
    whole window, and where the whole text is shorter than one window T shrinks to fit it.
    """

    def __init__(
        self,
        folder: Path,
        split: Split,
        *,
        sequence_length: int,
        seed: int = 0,
        documents: bool = False,
        with_bytes: bool = False,
    ) -> None:
        self.folder, self.split, self.seed = Path(folder), split, seed
        self.documents, self.with_bytes = documents, with_bytes
        total: int = self.meta["splits"][split]["tokens"]
        self.sequence_length = T = sequence_length if split == "train" else min(sequence_length, total - 1)
        if T < 1 or total < T + 1:
            raise DataError(
                f"the {NAMES[split]} text has {total} tokens, fewer than one window of {max(T, 1) + 1} "
                "(sequence_length + 1); lower sequence_length or add text"
            )
        self.length = (total - 1) // T if split == "validation" else max(1, (total - T) // T)
        self.offsets = 1 if split == "validation" else min(T, total - self.length * T)

    def __len__(self) -> int:
        return self.length

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        """tokens [n, T+1]; documents [n, T+1] counts the documents begun in the window; bytes [n] of the T targets."""
        tokens = self._windows[index * self.sequence_length + self._offset(epoch)].astype(np.int32)
        rows = {"tokens": tokens}
        if self.documents:
            # The token that ends a document belongs to it, so the count goes up one place later.
            rows["documents"] = np.zeros_like(tokens)
            np.cumsum(tokens[:, :-1] == self.meta["end_of_text"], axis=1, out=rows["documents"][:, 1:])
        if self.with_bytes:
            rows["bytes"] = self._byte_lengths[tokens[:, 1:]].sum(axis=1, dtype=np.int64)
        return rows

    @property
    def fingerprint(self) -> str:
        parts = (self.meta["key"], self.split, self.sequence_length, self.seed if self.offsets > 1 else None)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        from bottega.data.tokenizer import Tokenizer

        start = index * self.sequence_length + int(self._offset(np.array([epoch])))
        table = json.loads((self.folder / f"{self.split}.documents.json").read_text())
        at = bisect.bisect_right(table["starts"], start) - 1
        where = f"{table['names'][at]}, its token {start - table['starts'][at]}"
        head = f"{NAMES[self.split]} tokens {start} to {start + self.sequence_length}, from {where}"
        return f"{head}\n{Tokenizer.load(self.folder / 'tokenizer').decode(self._windows[start])}"

    def __getstate__(self) -> dict[str, Any]:
        """Worker processes map the files again; no token travels."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_windows", "_byte_lengths")}

    def _offset(self, epoch: np.ndarray) -> Any:
        if self.offsets == 1:
            return 0
        # Nearly every batch lies in one epoch, and the offset of an epoch is remembered.
        first = int(epoch[0]) if len(epoch) else 0
        if (epoch == first).all():
            return _offset_of(self.seed, first, self.offsets)
        return np.array([_offset_of(self.seed, int(number), self.offsets) for number in epoch])

    @cached_property
    def meta(self) -> dict[str, Any]:
        return json.loads((self.folder / "meta.json").read_text())

    @cached_property
    def _windows(self) -> np.ndarray:
        tokens = np.memmap(self.folder / f"{self.split}.bin", dtype=self.meta["dtype"], mode="r")
        return np.lib.stride_tricks.sliding_window_view(np.asarray(tokens), self.sequence_length + 1)

    @cached_property
    def _byte_lengths(self) -> np.ndarray:
        return np.fromfile(self.folder / "byte_lengths.bin", dtype="<i4")


@lru_cache(maxsize=1024)
def _offset_of(seed: int, epoch: int, offsets: int) -> int:
    return key_of("window offset", seed, epoch)[0] % offsets
