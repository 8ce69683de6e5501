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

# Tokens of distinct captions are kept up to so many; there are rarely more, and a step asks for thousands of captions.
MAX_CACHED_TOKENS = 1 << 25


@final
class ContrastiveRows(Source):
    """The samples of a medium with "texts" int32 [b, 1 + N, L]: the tokens of its own caption, then of N others.

    "caption" int64 [b, 1 + N] is a hash of each, so that equal ones, also of other tables, can be encoded once. "counts"
    bool [b, 1 + N] is false for others that say the same as its own, which are no negatives.
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
        silent = np.flatnonzero(self._numbers == self._distinct.get("", -1))
        if len(silent):
            raise DataError(
                f"{table.row('key', int(silent[0]))}: has neither caption nor label, like {len(silent):,} of "
                f"{len(table):,} records; give it one, such as a row of metadata.jsonl with file_name and text"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what a worker computes from the table itself."""
        own = ("_numbers", "_distinct", "_hashes", "_near", "_known", "texts")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __len__(self) -> int:
        return len(self.table)

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        caption = np.concatenate([self._numbers[index][:, None], self.sample_negatives(index, epoch)], axis=1)
        counts = caption != caption[:, :1]
        counts[:, 0] = True
        said = {"texts": self._encoded(caption), "caption": self._hashes[caption], "counts": counts}
        return {**self.source.rows(index, epoch), **said}

    def sample_negatives(self, index: np.ndarray, epoch: np.ndarray) -> np.ndarray:
        """Return caption indices `(samples, negatives)`: hard negatives first, then those of uniformly drawn rows."""
        own = self._numbers[index].astype(np.int64)
        found, rest = np.repeat(own[:, None], self.count, axis=1), len(self) - 1
        for one in np.unique(epoch):
            at = np.flatnonzero(epoch == one)
            low, high = Noise(self.seed, int(one), index[at].astype(np.int64), np).bits("negatives", self.count)
            if rest:
                # 64 bits of randomness, less the one that a signed number has no room for.
                chosen = (low | (high & 0x7FFFFFFF) << 32) % rest
                found[at] = self._numbers[chosen + (chosen >= index[at, None])]
            if self.num_hard:
                hard = slice(0, self.num_hard)
                asked = np.repeat(own[at, None], self.num_hard, axis=1)
                near = self._near.sample(asked, low[:, hard], high[:, hard])
                found[at, hard] = np.where(near != asked, near, found[at, hard])
        return found

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
        return f"{self.source.describe(index, epoch)}\ntold apart from {some}{', ...' if len(drawn) > 5 else ''}"

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
    def _near(self) -> HardNegativeSampler:
        return HardNegativeSampler(self.texts)

    @cached_property
    def _known(self) -> np.ndarray:
        """Cached tokens `(distinct captions, length)`; -1 until computed."""
        return np.full((len(self._distinct), self.caption_tokenizer.length), -1, np.int32)

    def _encoded(self, caption: np.ndarray) -> np.ndarray:
        wanted, places = np.unique(caption, return_inverse=True)
        if len(self._distinct) * self.caption_tokenizer.length > MAX_CACHED_TOKENS:
            found = self._tokens(wanted)
        else:
            new = wanted[self._known[wanted, 0] < 0]
            if len(new):
                self._known[new] = self._tokens(new)
            found = self._known[wanted]
        return found[places.reshape(-1)].reshape(*caption.shape, self.caption_tokenizer.length)

    def _tokens(self, numbers: np.ndarray) -> np.ndarray:
        return self.caption_tokenizer.encode([self.texts[number] for number in numbers.tolist()])["input_ids"]
