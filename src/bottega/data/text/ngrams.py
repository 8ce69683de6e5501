"""Hashed n-grams of words and characters, weighted by TF-IDF, as features of a linear text classifier.

Words are lower-cased and split as the tokenizer of kind `words` splits them. N-grams of characters lie within a word, with a space
at its start and its end. Each n-gram is hashed to 64 bits and reduced to a bucket: a polynomial with the odd multiplier
MULTIPLIER modulo 2^64 over code points (or over the hashes of words), then MurmurHash3's final mix. Python's own hash differs from
process to process. The lower half of the buckets has n-grams of words, the upper half those of characters.

L: the largest number of different n-grams of a text in a batch
"""

from __future__ import annotations

import io
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np

from bottega.data.text.ngram_spec import NgramSpec
from bottega.data.text.vocabulary import WORD_PATTERN

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
MAX_COUNT = np.iinfo(np.uint16).max
LENGTH_MULTIPLE = 32
"""Batches are padded to a multiple of this many n-grams, so that few lengths occur."""
IDF_FILE = "ngrams.npy"
_WORDS = re.compile(WORD_PATTERN)


@final
@dataclass(frozen=True)
class NgramCounts:
    """The different n-grams of several texts end to end, sorted by bucket within each text."""

    buckets: np.ndarray
    """uint32"""
    counts: np.ndarray
    """uint16, how often each occurs in its text"""
    ends: np.ndarray
    """int64 (texts,), the end of each text"""


def count_ngrams(texts: Sequence[str], spec: NgramSpec) -> NgramCounts:
    """Return the hashed n-grams of each text; a text without words has none."""
    words_of_texts = [
        _WORDS.findall(unicodedata.normalize("NFC", text.lower()).replace("\u2019", "'")) for text in texts
    ]
    word_ids: dict[str, int] = {}
    token_words = np.array(
        [word_ids.setdefault(word, len(word_ids)) for words in words_of_texts for word in words], int
    )
    token_texts = np.repeat(np.arange(len(texts)), [len(words) for words in words_of_texts])
    if not word_ids:
        return NgramCounts(np.zeros(0, np.uint32), np.zeros(0, np.uint16), np.zeros(len(texts), np.int64))
    keys = []
    num_word_buckets = spec.num_word_buckets
    codes, starts, lengths = _join_words(list(word_ids))
    if spec.words:
        token_hashes = _hash_words(codes, starts, lengths)[token_words]
        for texts_of_grams, hashes in _hash_word_ngrams(token_hashes, token_texts, spec.words):
            keys.append(_build_keys(texts_of_grams, hashes, num_word_buckets, 0))
    if spec.characters is not None:
        hashes, counts = _hash_character_ngrams(codes, starts, lengths, spec.characters)
        first = np.cumsum(counts) - counts
        texts_of_grams = np.repeat(token_texts, counts[token_words])
        occurrences = hashes[_expand(first[token_words], counts[token_words])]
        keys.append(_build_keys(texts_of_grams, occurrences, spec.buckets - num_word_buckets, num_word_buckets))
    unique_keys, counts = np.unique(np.concatenate(keys), return_counts=True)
    ends = np.searchsorted(unique_keys, np.arange(1, len(texts) + 1, dtype=np.uint64) << np.uint64(32))
    buckets = (unique_keys & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    return NgramCounts(buckets, np.minimum(counts, MAX_COUNT).astype(np.uint16), ends.astype(np.int64))


def _join_words(words: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the code points of all words with a space before and after each, and the start and length of each word."""
    codes = np.frombuffer(" ".join(["", *words, ""]).encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
    lengths = np.array([len(word) for word in words])
    return codes, np.cumsum(lengths + 1) - lengths, lengths


def _hash_words(codes: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    powers = np.cumprod(np.full(int(lengths.max()), MULTIPLIER))
    firsts = np.cumsum(lengths) - lengths
    positions = np.arange(int(lengths.sum())) - np.repeat(firsts, lengths)
    return _mix(np.add.reduceat(codes[_expand(starts, lengths)] * powers[positions], firsts))


def _hash_word_ngrams(
    token_hashes: np.ndarray, token_texts: np.ndarray, longest: int
) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """Yield the texts and the hashes of all n-grams of each length."""
    hashes = token_hashes
    yield token_texts, hashes
    for length in range(2, min(longest, len(token_hashes)) + 1):
        hashes = hashes[:-1] * MULTIPLIER + token_hashes[length - 1 :]
        is_within_text = token_texts[: 1 - length] == token_texts[length - 1 :]
        yield token_texts[: 1 - length][is_within_text], _mix(hashes[is_within_text] + np.uint64(length))


def _hash_character_ngrams(
    codes: np.ndarray, starts: np.ndarray, lengths: np.ndarray, limits: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of the n-grams of each word, word after word, and their number for each word."""
    shortest, longest = limits
    num_grams = [np.maximum(lengths + 3 - length, 0) for length in range(shortest, longest + 1)]
    hashes_of_lengths, words_of_lengths = [], []
    rolling = codes
    for length in range(1, min(longest, len(codes)) + 1):
        if length > 1:
            rolling = rolling[:-1] * MULTIPLIER + codes[length - 1 :]
        if length >= shortest:
            counts = num_grams[length - shortest]
            hashes_of_lengths.append(_mix(rolling[_expand(starts - 1, counts)] + np.uint64(length)))
            words_of_lengths.append(np.repeat(np.arange(len(lengths)), counts))
    if not hashes_of_lengths:  # all texts together are shorter than the shortest n-gram
        return np.zeros(0, np.uint64), np.sum(num_grams, axis=0)
    order = np.argsort(np.concatenate(words_of_lengths), kind="stable")
    return np.concatenate(hashes_of_lengths)[order], np.sum(num_grams, axis=0)


def _expand(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return start, start + 1, ... for each start, `count` indices of each."""
    firsts = np.cumsum(counts) - counts
    return np.repeat(starts - firsts, counts) + np.arange(int(counts.sum()))


def _build_keys(texts: np.ndarray, hashes: np.ndarray, num_buckets: int, first_bucket: int) -> np.ndarray:
    """Return text and bucket as one integer, so that sorting brings equal n-grams of a text together."""
    buckets = hashes % np.uint64(num_buckets) + np.uint64(first_bucket)
    return (texts.astype(np.uint64) << np.uint64(32)) | buckets


def _mix(hashes: np.ndarray) -> np.ndarray:
    """MurmurHash3's final mix of 64 bits, after which all bits of the input influence all bits of the output."""
    shift = np.uint64(33)
    hashes = (hashes ^ (hashes >> shift)) * np.uint64(0xFF51AFD7ED558CCD)
    hashes = (hashes ^ (hashes >> shift)) * np.uint64(0xC4CEB9FE1A85EC53)
    return hashes ^ (hashes >> shift)


@final
@dataclass(frozen=True, eq=False)
class NgramWeighting:
    """TF-IDF weights of hashed n-grams: (1 + log count) * idf, of length 1 for each text, over words and characters apart.

    `idf` (buckets,) float32 is 0 for a bucket without an n-gram of the training texts: it has no weight.
    """

    spec: NgramSpec
    idf: np.ndarray

    @classmethod
    def fit(cls, spec: NgramSpec, buckets: Iterable[np.ndarray], num_texts: int) -> NgramWeighting:
        """Compute idf = 1 + log((1 + texts) / (1 + texts with the n-gram)) from the n-grams of the training texts."""
        frequencies = np.zeros(spec.buckets, np.int64)
        for part in buckets:
            frequencies += np.bincount(part, minlength=spec.buckets)
        idf = np.where(frequencies > 0, 1 + np.log((1 + num_texts) / (1 + frequencies)), 0)
        return cls(spec, idf.astype(np.float32))

    @classmethod
    def parse(cls, spec: NgramSpec, content: bytes) -> NgramWeighting:
        """Read the file that `save` writes; raises ValueError if it is damaged or does not fit the spec."""
        try:
            idf = np.load(io.BytesIO(content), allow_pickle=False)
        except EOFError as error:
            raise ValueError(f"cannot read the n-gram weights: {error}") from None
        if idf.shape != (spec.buckets,) or idf.dtype != np.float32:
            raise ValueError(f"expected {spec.buckets} float32 numbers, got {idf.dtype} of shape {idf.shape}")
        return cls(spec, idf)

    def save(self, folder: Path) -> None:
        """Write the idf into a folder."""
        np.save(folder / IDF_FILE, self.idf, allow_pickle=False)

    def equals(self, other: NgramWeighting | None) -> bool:
        """Return whether another weighting gives the same features."""
        return other is not None and self.spec == other.spec and np.array_equal(self.idf, other.idf)

    def collate_texts(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the batch of `collate` for texts."""
        ngrams = count_ngrams(texts, self.spec)
        return self.collate(ngrams.buckets, ngrams.counts, np.r_[0, ngrams.ends[:-1]], ngrams.ends)

    def collate(
        self, buckets: np.ndarray, counts: np.ndarray, starts: np.ndarray, ends: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return `ngram_ids` int32 and `ngram_weights` float32, both `(batch, L)`, of the texts [start:end]."""
        lengths = ends - starts
        L = max(1, -(-int(lengths.max(initial=0)) // LENGTH_MULTIPLE)) * LENGTH_MULTIPLE
        is_ngram = np.arange(L) < lengths[:, None]
        indices = _expand(starts, lengths)
        ids = np.zeros(is_ngram.shape, np.int32)
        ids[is_ngram] = buckets[indices]
        weights = np.zeros(is_ngram.shape)
        # In float64, so that the weights of a text do not depend on the length of its batch.
        weights[is_ngram] = 1 + np.log(counts[indices].astype(np.float64))
        weights *= self.idf[ids]
        is_word = ids < self.spec.num_word_buckets
        for is_block in (is_word, ~is_word):
            norms = np.sqrt((np.square(weights) * is_block).sum(1, keepdims=True))
            np.divide(weights, norms, out=weights, where=is_block & (norms > 0))
        return {"ngram_ids": ids, "ngram_weights": weights.astype(np.float32)}
