"""Contrastive samples: each image with its own caption and negatives, which are captions of other samples.

The usual negatives are the other samples of the batch, so that the loss depends on how the batch is split into
micro-batches and ranks. Here the negatives are a function of (seed, row, epoch), and the loss is a mean over rows.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any, final

import numpy as np

from bottega.core.errors import DataError
from bottega.core.noise import Noise, derive_seed
from bottega.data.sources.source import Source
from bottega.data.tables.shards import Table
from bottega.data.text.captions import CaptionTokenizer, read_captions
from bottega.data.text.hard_negatives import HardNegativeSampler

# Captions are cached if the tokens of all distinct ones are at most this many: a step needs thousands of captions.
MAX_CACHED_TOKENS = 1 << 25


@final
class ContrastiveRows(Source):
    """Samples of a medium with `texts` int32 `(batch, 1 + N, L)`: the tokens of their own caption, then of N negatives.

    `caption` int64 `(batch, 1 + N)` is a hash of each caption, so that equal captions, even of different tables, are encoded
    once. `counts` bool `(batch, 1 + N)` is false for drawn captions that equal the sample's own, which are not negatives.
    """

    def __init__(
        self,
        source: Source,
        table: Table,
        caption_tokenizer: CaptionTokenizer,
        *,
        count: int,
        seed: int,
        hard_fraction: float = 0.0,
    ) -> None:
        """`table` holds the rows of the samples; `count` is N, and `hard_fraction` of the negatives differ in one word only."""
        assert len(source) == len(table), f"{len(source)} samples, but {len(table)} table rows"
        self.source, self.table, self.caption_tokenizer = source, table, caption_tokenizer
        self.count, self.seed = count, seed
        self.num_hard = round(hard_fraction * count)
        missing = np.flatnonzero(self._caption_index == self._index_by_caption.get("", -1))
        if len(missing):
            raise DataError(
                f"{table.row('key', int(missing[0]))}: has neither caption nor label ({len(missing):,} of "
                f"{len(table):,} records have none); add captions, such as a row of metadata.jsonl with file_name and text"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the caches: a worker computes them from the table again."""
        cached_names = ("_caption_index", "_index_by_caption", "_hashes", "_hard_negatives", "_token_cache", "texts")
        return {name: value for name, value in self.__dict__.items() if name not in cached_names}

    def __len__(self) -> int:
        return len(self.table)

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        caption_index = np.concatenate(
            [self._caption_index[index][:, None], self.sample_negatives(index, epoch)], axis=1
        )
        counts = caption_index != caption_index[:, :1]
        counts[:, 0] = True
        captions = {
            "texts": self._encode_cached(caption_index),
            "caption": self._hashes[caption_index],
            "counts": counts,
        }
        return {**self.source.rows(index, epoch), **captions}

    def sample_negatives(self, index: np.ndarray, epoch: np.ndarray) -> np.ndarray:
        """Return caption indices `(samples, negatives)`: hard negatives first, then captions of uniformly drawn rows."""
        own_caption = self._caption_index[index].astype(np.int64)
        negatives, num_other_rows = np.repeat(own_caption[:, None], self.count, axis=1), len(self) - 1
        for number in np.unique(epoch):
            rows = np.flatnonzero(epoch == number)
            low, high = Noise(self.seed, int(number), index[rows].astype(np.int64), np).bits("negatives", self.count)
            if num_other_rows:
                # 63 bits of randomness, because the integers are signed.
                other_rows = (low | (high & 0x7FFFFFFF) << 32) % num_other_rows
                negatives[rows] = self._caption_index[other_rows + (other_rows >= index[rows, None])]
            if self.num_hard:
                hard_columns = slice(0, self.num_hard)
                own_captions = np.repeat(own_caption[rows, None], self.num_hard, axis=1)
                hard_negatives = self._hard_negatives.sample(own_captions, low[:, hard_columns], high[:, hard_columns])
                negatives[rows, hard_columns] = np.where(
                    hard_negatives != own_captions, hard_negatives, negatives[rows, hard_columns]
                )
        return negatives

    @cached_property
    def texts(self) -> list[str]:
        """The distinct captions, by index."""
        return list(self._index_by_caption)

    @property
    def fingerprint(self) -> str:
        parts = (self.source.fingerprint, self.caption_tokenizer.fingerprint, self.count, self.num_hard, self.seed)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        negatives = self.sample_negatives(np.array([index]), np.array([epoch]))[0]
        listed = ", ".join(repr(self.texts[number]) for number in negatives[:5])
        return f"{self.source.describe(index, epoch)}\nnegatives: {listed}{', ...' if len(negatives) > 5 else ''}"

    @cached_property
    def _index_by_caption(self) -> dict[str, int]:
        return {text: number for number, text in enumerate(dict.fromkeys(read_captions(self.table)))}

    @cached_property
    def _caption_index(self) -> np.ndarray:
        """The index of each row's caption, int32 `(rows,)`."""
        return np.array([self._index_by_caption[text] for text in read_captions(self.table)], np.int32)

    @cached_property
    def _hashes(self) -> np.ndarray:
        return np.array([derive_seed("caption", text) for text in self._index_by_caption], np.int64)

    @cached_property
    def _hard_negatives(self) -> HardNegativeSampler:
        return HardNegativeSampler(self.texts)

    @cached_property
    def _token_cache(self) -> np.ndarray:
        """Cached tokens `(distinct captions, length)`; -1 until computed."""
        return np.full((len(self._index_by_caption), self.caption_tokenizer.length), -1, np.int32)

    def _encode_cached(self, caption_index: np.ndarray) -> np.ndarray:
        unique, inverse = np.unique(caption_index, return_inverse=True)
        if len(self._index_by_caption) * self.caption_tokenizer.length > MAX_CACHED_TOKENS:
            tokens = self._tokenize(unique)
        else:
            uncached = unique[self._token_cache[unique, 0] < 0]
            if len(uncached):
                self._token_cache[uncached] = self._tokenize(uncached)
            tokens = self._token_cache[unique]
        return tokens[inverse.reshape(-1)].reshape(*caption_index.shape, self.caption_tokenizer.length)

    def _tokenize(self, caption_index: np.ndarray) -> np.ndarray:
        return self.caption_tokenizer.encode([self.texts[number] for number in caption_index.tolist()])["input_ids"]
