"""Contrastive samples: each image with its own caption and captions of others, drawn with the sample.

The usual negatives are whatever else is in the batch. A loss over those changes with every split of the batch into
micro-batches and ranks; with negatives that are a function of (seed, row, epoch), it is a plain mean over rows.
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

# Most cached tokens of distinct captions; there are rarely more, and a step needs thousands of captions.
MAX_CACHED_TOKENS = 1 << 25


@final
class ContrastiveRows(Source):
    """Samples of a medium with `texts` int32 `(batch, 1 + N, L)`: the tokens of their own caption, then of N negatives.

    `caption` int64 `(batch, 1 + N)` is a hash of each, so that equal ones, also of other tables, are encoded once. `counts`
    bool `(batch, 1 + N)` is false for captions equal to the own one, which are not negatives.
    """

    def __init__(
        self,
        source: Source,
        table: Table,
        tokens: CaptionTokenizer,
        *,
        count: int,
        seed: int,
        hard_fraction: float = 0.0,
    ) -> None:
        """`table` holds the rows of the samples; `hard_fraction` of the negatives differ from the caption in one word."""
        assert len(source) == len(table), "captions of other samples"
        self.source, self.table, self.caption_tokenizer, self.count, self.seed = source, table, tokens, count, seed
        self.num_hard = round(hard_fraction * count)
        missing = np.flatnonzero(self._numbers == self._distinct.get("", -1))
        if len(missing):
            raise DataError(
                f"{table.row('key', int(missing[0]))}: has neither caption nor label, like {len(missing):,} of "
                f"{len(table):,} records; add captions, such as a row of metadata.jsonl with file_name and text"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what a worker computes from the table itself."""
        own = ("_numbers", "_distinct", "_hashes", "_hard_negatives", "_token_cache", "texts")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __len__(self) -> int:
        return len(self.table)

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        caption = np.concatenate([self._numbers[index][:, None], self.sample_negatives(index, epoch)], axis=1)
        counts = caption != caption[:, :1]
        counts[:, 0] = True
        captions = {"texts": self._encode_cached(caption), "caption": self._hashes[caption], "counts": counts}
        return {**self.source.rows(index, epoch), **captions}

    def sample_negatives(self, index: np.ndarray, epoch: np.ndarray) -> np.ndarray:
        """Return caption indices `(samples, negatives)`: hard negatives first, then those of uniformly drawn rows."""
        own = self._numbers[index].astype(np.int64)
        negatives, rest = np.repeat(own[:, None], self.count, axis=1), len(self) - 1
        for number in np.unique(epoch):
            rows = np.flatnonzero(epoch == number)
            low, high = Noise(self.seed, int(number), index[rows].astype(np.int64), np).bits("negatives", self.count)
            if rest:
                # 63 bits of randomness, because the integers are signed.
                chosen = (low | (high & 0x7FFFFFFF) << 32) % rest
                negatives[rows] = self._numbers[chosen + (chosen >= index[rows, None])]
            if self.num_hard:
                hard = slice(0, self.num_hard)
                own_captions = np.repeat(own[rows, None], self.num_hard, axis=1)
                near = self._hard_negatives.sample(own_captions, low[:, hard], high[:, hard])
                negatives[rows, hard] = np.where(near != own_captions, near, negatives[rows, hard])
        return negatives

    @cached_property
    def texts(self) -> list[str]:
        """The distinct captions, by index."""
        return list(self._distinct)

    @property
    def fingerprint(self) -> str:
        parts = (self.source.fingerprint, self.caption_tokenizer.fingerprint, self.count, self.num_hard, self.seed)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        drawn = self.sample_negatives(np.array([index]), np.array([epoch]))[0]
        some = ", ".join(repr(self.texts[number]) for number in drawn[:5])
        return f"{self.source.describe(index, epoch)}\nnegatives: {some}{', ...' if len(drawn) > 5 else ''}"

    @cached_property
    def _distinct(self) -> dict[str, int]:
        return {text: number for number, text in enumerate(dict.fromkeys(read_captions(self.table)))}

    @cached_property
    def _numbers(self) -> np.ndarray:
        """The index of each row's caption, int32 `(rows,)`."""
        return np.array([self._distinct[text] for text in read_captions(self.table)], np.int32)

    @cached_property
    def _hashes(self) -> np.ndarray:
        return np.array([derive_seed("caption", text) for text in self._distinct], np.int64)

    @cached_property
    def _hard_negatives(self) -> HardNegativeSampler:
        return HardNegativeSampler(self.texts)

    @cached_property
    def _token_cache(self) -> np.ndarray:
        """Cached tokens `(distinct captions, length)`; -1 until computed."""
        return np.full((len(self._distinct), self.caption_tokenizer.length), -1, np.int32)

    def _encode_cached(self, caption: np.ndarray) -> np.ndarray:
        unique, inverse = np.unique(caption, return_inverse=True)
        if len(self._distinct) * self.caption_tokenizer.length > MAX_CACHED_TOKENS:
            tokens = self._tokens(unique)
        else:
            new = unique[self._token_cache[unique, 0] < 0]
            if len(new):
                self._token_cache[new] = self._tokens(new)
            tokens = self._token_cache[unique]
        return tokens[inverse.reshape(-1)].reshape(*caption.shape, self.caption_tokenizer.length)

    def _tokens(self, numbers: np.ndarray) -> np.ndarray:
        return self.caption_tokenizer.encode([self.texts[number] for number in numbers.tolist()])["input_ids"]
