"""Prepared tokens as samples: windows over one long memory-mapped array, or one document each.

T: the sequence length. A sample is T + 1 tokens, so that each of the first T has its successor as target.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, final

import numpy as np

from bottega.core.errors import DataError
from bottega.core.noise import derive_key
from bottega.data.sources.source import Source
from bottega.data.tables.shards import Table

BYTE_LENGTHS = "byte_lengths.bin"
"""File beside the tables with the number of bytes of each token of the vocabulary."""
SPLIT_NAMES = {"validation": "validation", "test": "test", "replay": "earlier"}
"""Names of tables in messages; all other tables are training tables."""


class TokenSource(Source):
    """Base of windows and documents: a table of tokens in a prepared folder."""

    def __init__(self, folder: Path, table: str, *, with_document_ids: bool, with_bytes: bool) -> None:
        self.folder, self.table_name = Path(folder), table
        self.with_document_ids, self.with_bytes = with_document_ids, with_bytes
        self.table = Table(self.folder / table)

    @property
    def name(self) -> str:
        return SPLIT_NAMES.get(self.table_name, "training")

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        """Return `input_ids`, `attention_mask` and `documents` (number of the document within the sample), int32
        `(batch, T + 1)`, and `bytes` int64 `(batch,)`, the UTF-8 bytes of all targets of a sample."""
        ids, mask = self._load_tokens(index, epoch)
        rows = {"input_ids": ids, "attention_mask": mask}
        if self.with_document_ids:
            # The end-of-text token belongs to the document that it ends, so the index increases one token later.
            rows["documents"] = np.zeros_like(ids)
            np.cumsum(ids[:, :-1] == self.meta["end_of_text"], axis=1, out=rows["documents"][:, 1:])
        if self.with_bytes:
            sizes = self._byte_lengths[ids[:, 1:]] * mask[:, 1:]
            rows["bytes"] = sizes.sum(axis=1, dtype=np.int64)
        return rows

    @abstractmethod
    def _load_tokens(self, index: np.ndarray, epoch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of each sample and their mask, both int32 `(batch, T + 1)`."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out arrays: worker processes map the files again."""
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("_windows", "_byte_lengths", "_sample_ends")
        }

    @cached_property
    def meta(self) -> dict[str, Any]:
        """The preparation's meta.json."""
        return json.loads((self.folder / "meta.json").read_text())

    @cached_property
    def _byte_lengths(self) -> np.ndarray:
        return np.fromfile(self.folder / BYTE_LENGTHS, dtype="<i4")

    def _decode_text(self, tokens: np.ndarray) -> str:
        from bottega.data.text.tokenizer import Tokenizer

        return Tokenizer.load(self.folder / "tokenizer").decode(tokens)


@final
class TokenWindows(TokenSource):
    """Windows of T + 1 tokens at stride T, so that each token is a target once.

    Training shifts all borders by an offset that is f(seed, epoch), so that each epoch cuts the text in different places;
    up to 2 T tokens at the two ends are left out of an epoch. Held-out text is never shifted: the tokens after its last
    whole window are dropped, and if it is shorter than one window, T is reduced to fit it.
    """

    def __init__(
        self,
        folder: Path,
        table: str,
        *,
        sequence_length: int,
        seed: int | None = None,
        with_document_ids: bool = False,
        with_bytes: bool = False,
    ) -> None:
        """`seed` is None for held-out text."""
        super().__init__(folder, table, with_document_ids=with_document_ids, with_bytes=with_bytes)
        self.seed = seed
        total = len(self.table.values("tokens"))
        self.sequence_length = T = sequence_length if seed is not None else min(sequence_length, total - 1)
        if T < 1 or total < T + 1:
            raise DataError(
                f"the {self.name} text has {total} tokens, fewer than one window of {max(T, 1) + 1} "
                "(sequence_length + 1); lower sequence_length or add text"
            )
        self.length = (total - 1) // T if seed is None else max(1, (total - T) // T)
        self.num_offsets = 1 if seed is None else min(T, total - self.length * T)

    def __len__(self) -> int:
        return self.length

    def _load_tokens(self, index: np.ndarray, epoch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids = self._windows[index * self.sequence_length + self._compute_offset(epoch)].astype(np.int32)
        return ids, np.ones_like(ids)

    @property
    def fingerprint(self) -> str:
        parts = (self.meta["key"], self.table_name, self.sequence_length, self.seed if self.num_offsets > 1 else None)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        start = index * self.sequence_length + int(self._compute_offset(np.array([epoch])))
        ends = self.table.ends("tokens")
        document = int(np.searchsorted(ends, start, side="right"))
        position = (
            f"{self.table.row('key', document)}, its token {start - (int(ends[document - 1]) if document else 0)}"
        )
        head = f"{self.name} tokens {start} to {start + self.sequence_length}, from {position}"
        return f"{head}\n{self._decode_text(self._windows[start])}"

    def documents_at(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of the documents in which each window begins and ends, in epoch 0."""
        start = index * self.sequence_length + int(self._compute_offset(np.array([0])))
        ends = self.table.ends("tokens")
        first, last = (
            np.searchsorted(ends, position, side="right") for position in (start, start + self.sequence_length)
        )
        return first, last

    def _compute_offset(self, epoch: np.ndarray) -> Any:
        if self.num_offsets == 1 or self.seed is None:
            return 0
        # Nearly every batch lies in one epoch, and the offset of an epoch is cached.
        first_epoch = int(epoch[0]) if len(epoch) else 0
        if (epoch == first_epoch).all():
            return _draw_offset(self.seed, first_epoch, self.num_offsets)
        return np.array([_draw_offset(self.seed, int(number), self.num_offsets) for number in epoch])

    def scores(self, name: str) -> np.ndarray:
        """Return the score of the document in the middle of each window, in epoch 0."""
        _check_score(self.meta, name)
        start = np.arange(len(self)) * self.sequence_length + int(self._compute_offset(np.array([0])))
        middle = np.searchsorted(self.table.ends("tokens"), start + self.sequence_length // 2, side="right")
        return self.table.values("score")[middle]

    @cached_property
    def _windows(self) -> np.ndarray:
        return np.lib.stride_tricks.sliding_window_view(self.table.values("tokens"), self.sequence_length + 1)


@final
class TokenDocuments(TokenSource):
    """One document per sample, padded with masked end-of-text tokens; a longer one becomes several samples.

    Consecutive samples of a document share one token, the last target of the earlier sample, so that each token of the
    document except the first is a target once.
    """

    def __init__(self, folder: Path, table: str, *, sequence_length: int, with_bytes: bool = False) -> None:
        super().__init__(folder, table, with_document_ids=False, with_bytes=with_bytes)
        self.sequence_length = sequence_length
        if not len(self):
            raise DataError(f"no document of the {self.name} text has two tokens; add text")

    @cached_property
    def _sample_ends(self) -> np.ndarray:
        """Cumulative number of samples by document."""
        # A single token has no successor to predict.
        return np.cumsum(-(-np.maximum(self.table.lengths("tokens") - 1, 0) // self.sequence_length))

    def __len__(self) -> int:
        return int(self._sample_ends[-1]) if len(self._sample_ends) else 0

    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each sample without padding."""
        index = np.arange(len(self))
        start, stop = self._find_spans(index)
        return stop - start

    def scores(self, name: str) -> np.ndarray:
        """Return the score of each sample, which is the score of its document."""
        _check_score(self.meta, name)
        document = np.searchsorted(self._sample_ends, np.arange(len(self)), side="right")
        return self.table.values("score")[document]

    def documents_at(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the index of each sample's document, twice: a sample begins and ends in the same document."""
        document = np.searchsorted(self._sample_ends, index, side="right")
        return document, document

    def _find_spans(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first token of each sample and the end of its tokens, as positions in the table."""
        document = np.searchsorted(self._sample_ends, index, side="right")
        number_in_document = index - np.where(document > 0, self._sample_ends[document - 1], 0)
        ends = self.table.ends("tokens")
        start = np.where(document > 0, ends[document - 1], 0) + number_in_document * self.sequence_length
        return start, np.minimum(start + self.sequence_length + 1, ends[document])

    def _load_tokens(self, index: np.ndarray, epoch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        start, stop = self._find_spans(np.asarray(index))
        values = self.table.values("tokens")
        positions = start[:, None] + np.arange(self.sequence_length + 1)
        mask = positions < stop[:, None]
        ids = values[np.minimum(positions, len(values) - 1)].astype(np.int32)
        return np.where(mask, ids, np.int32(self.meta["end_of_text"])), mask.astype(np.int32)

    @property
    def fingerprint(self) -> str:
        parts = (self.meta["key"], self.table_name, self.sequence_length, "documents")
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        document = int(np.searchsorted(self._sample_ends, index, side="right"))
        start, stop = self._find_spans(np.array([index]))
        text = self._decode_text(self.table.values("tokens")[int(start[0]) : int(stop[0])])
        return f"{self.name} document {self.table.row('key', document)}, {stop[0] - start[0]} tokens\n{text}"


def _check_score(meta: dict[str, Any], name: str) -> None:
    if meta.get("score_field") != name:
        raise DataError(f"data.curriculum.by: the data was prepared without the field {name!r}; prepare it again")


@lru_cache(maxsize=1024)
def _draw_offset(seed: int, epoch: int, num_offsets: int) -> int:
    return derive_key("window offset", seed, epoch)[0] % num_offsets
