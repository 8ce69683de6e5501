"""Find duplicate texts: equal ones by a hash, similar ones by MinHash (Broder, 1997) with banding.

Similarity is the Jaccard index of the sets of shingles (word n-grams). A signature holds the smallest hash of the set under
each of 128 permutations; two sets agree in each with probability equal to their similarity, so the fraction of agreements
estimates it with a standard error of sqrt(s (1 - s) / 128): 0.035 at 0.8.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Sequence

import numpy as np

from bottega.core.noise import numpy_generator

PERMUTATIONS = 128
SHINGLE_WORDS = 5  # Words in a shingle; texts of fewer than twice as many are compared as a whole.

# h -> (a h + b) mod 2^64, of which the high 32 bits are kept: pairwise independent for h < 2^32 (Dietzfelbinger, 1996),
# as is the usual (a h + b) mod a prime, and three passes of numpy in place of seven.
_DRAWN = numpy_generator(0, "minhash").integers(0, 2**64, size=(2, PERMUTATIONS), dtype=np.uint64)
_A, _B = _DRAWN[0] | np.uint64(1), _DRAWN[1]
_BLOCK = 256  # Shingles hashed at once: 128 x 256 numbers of 8 bytes stay in the second-level cache.

# Han and kana have no spaces between words, so each sign is one.
_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
_ASCII_WORD = re.compile(rb"[0-9a-z_]+")

_BAND_RECALL = 0.99  # Fraction of the pairs at the threshold that share a band.
_CHUNK = 1 << 14  # Pairs of signatures compared at once: 16 MiB.


def hash_content(text: str) -> int:
    """Return a 64-bit hash of the text with case and white space folded.

    The probability of any collision among 100 million texts is 1 in 3,700.
    """
    folded = " ".join(text.casefold().split())
    return int.from_bytes(hashlib.blake2b(folded.encode("utf-8", "replace"), digest_size=8).digest(), "little")


def find_exact_unique(keys: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return bool `(texts,)`: the first text of each key."""
    is_first = np.zeros(len(keys), dtype=bool)
    is_first[np.unique(np.asarray(keys, dtype=np.uint64), return_index=True)[1]] = True
    return is_first


def minhash_signature(text: str) -> np.ndarray:
    """Return the MinHash signature, uint32 `(128,)`; a text without words equals only itself."""
    shingles = _shingles(text)
    least = np.full(PERMUTATIONS, np.iinfo(np.uint64).max, dtype=np.uint64)
    for start in range(0, len(shingles), _BLOCK):
        hashed = np.multiply.outer(_A, shingles[start : start + _BLOCK])
        hashed += _B[:, None]
        np.minimum(least, hashed.min(axis=1), out=least)
    return (least >> np.uint64(32)).astype(np.uint32)


def estimate_similarity(first: np.ndarray, second: np.ndarray) -> float:
    """Return the estimated Jaccard similarity of two signatures."""
    return float(np.mean(first == second))


def _shingles(text: str) -> np.ndarray:
    """Return a hash below 2^32 of each distinct shingle, as uint64."""
    words = _word_hashes(text)
    if not len(words):
        return np.array([hash_content(text) >> 32], dtype=np.uint64)
    if len(words) >= 2 * SHINGLE_WORDS:
        return np.unique(_runs(words, SHINGLE_WORDS))
    # "One of the best movies" and "one of the worst movies" share most words: such short texts must agree in all words.
    return _runs(words, len(words))


def _word_hashes(text: str) -> np.ndarray:
    folded = text.lower()
    if folded.isascii():
        words = _ASCII_WORD.findall(folded.encode())
    else:
        words = [word.encode("utf-8", "replace") for word in _WORD.findall(folded)]
    # Python's own hash of a string differs from process to process.
    return np.fromiter(map(zlib.crc32, words), dtype=np.uint64, count=len(words))


def _runs(words: np.ndarray, length: int) -> np.ndarray:
    """Return a hash of each run of words: a polynomial in the words' hashes, mixed so that its high bits depend on all of it."""
    number = len(words) - length + 1
    value = np.zeros(number, dtype=np.uint64)
    for offset in range(length):
        value = value * np.uint64(0x9E3779B97F4A7C15) + words[offset : offset + number] + np.uint64(1)
    value ^= value >> np.uint64(29)
    value *= np.uint64(0xBF58476D1CE4E5B9)
    return value >> np.uint64(32)


def choose_bands(threshold: float) -> tuple[int, int]:
    """Return (bands, rows per band): the most selective that still find 99 % of the pairs at the threshold.

    More candidates only cost time, since each pair is compared by its whole signature.
    """
    for rows in range(PERMUTATIONS, 1, -1):
        number = PERMUTATIONS // rows
        if 1 - (1 - threshold**rows) ** number >= _BAND_RECALL:
            return number, rows
    return PERMUTATIONS, 1


def find_near_unique(signatures: np.ndarray, threshold: float) -> np.ndarray:
    """Return bool `(texts,)`: the first text of each group of similar ones, from signatures `(texts, 128)`.

    Similarity is transitive within a group. Memory grows with n: the bands are looked at one after the other.
    """
    signatures = np.ascontiguousarray(signatures, dtype=np.uint32)
    root = np.arange(len(signatures))
    number, rows = choose_bands(threshold)
    least = int(np.ceil(threshold * PERMUTATIONS - 1e-9))
    for band in range(number):
        keys = _band_keys(signatures[:, band * rows : (band + 1) * rows])
        _join(root, signatures, np.argsort(keys, kind="stable"), keys, least)
    return _roots(root) == np.arange(len(signatures))


def _band_keys(part: np.ndarray) -> np.ndarray:
    """Return a hash of each row; collisions are resolved by comparing whole signatures."""
    keys = np.zeros(len(part), dtype=np.uint64)
    for column in part.T:
        keys = (keys ^ column) * np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(32)
    return keys


def _join(root: np.ndarray, signatures: np.ndarray, order: np.ndarray, keys: np.ndarray, least: int) -> None:
    """Join the groups of texts that share a key and agree in `least` hashes. `order` sorts the keys, first text first.

    All are compared with the first of their key, and those that differ from it are compared again among themselves, so
    that no list of pairs is built. A text that differs from the first but resembles another of its group is found where
    those two share another band.
    """
    while len(order):
        sorted_keys = keys[order]
        begins = np.flatnonzero(np.r_[True, sorted_keys[1:] != sorted_keys[:-1]])
        first = np.repeat(order[begins], np.diff(np.r_[begins, len(order)]))
        order, first = order[order != first], first[order != first]
        roots = _roots(root)
        same = roots[order] == roots[first]
        unknown = np.flatnonzero(~same)
        for start in range(0, len(unknown), _CHUNK):
            some = unknown[start : start + _CHUNK]
            agree = np.count_nonzero(signatures[order[some]] == signatures[first[some]], axis=1)
            same[some] = agree >= least
        for index, first_index in zip(order[same].tolist(), first[same].tolist(), strict=True):
            _unite(root, index, first_index)
        order = order[~same]


def _unite(root: np.ndarray, first: int, second: int) -> None:
    first, second = _root(root, first), _root(root, second)
    # The earlier text is the root, so that the root of a group is the one that stays.
    root[max(first, second)] = min(first, second)


def _root(root: np.ndarray, index: int) -> int:
    while root[index] != index:
        root[index] = root[root[index]]
        index = int(root[index])
    return index


def _roots(root: np.ndarray) -> np.ndarray:
    """Return the root of each text, compressing all paths."""
    while not np.array_equal(above := root[root], root):
        root[:] = above
    return root
