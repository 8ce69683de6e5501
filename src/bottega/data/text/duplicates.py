"""Find duplicate texts: equal ones by a hash, similar ones by MinHash (Broder, 1997) with banding.

Similarity is the Jaccard index of the sets of shingles (word n-grams). A signature holds the smallest hash of the set under
each of 128 permutations. Under each permutation, two sets agree with a probability equal to their similarity s, so the
fraction of agreements estimates s with a standard error of sqrt(s (1 - s) / 128): 0.035 at s = 0.8.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Sequence

import numpy as np

from bottega.core.noise import numpy_generator

NUM_PERMUTATIONS = 128
SHINGLE_WORDS = 5  # Words in a shingle; texts of fewer than twice as many are compared as a whole.

# h -> (a h + b) mod 2^64, of which the high 32 bits are kept. It is pairwise independent for h < 2^32 (Dietzfelbinger,
# 1996), as is the usual (a h + b) mod a prime, but takes three passes of numpy where that takes seven.
_COEFFICIENTS = numpy_generator(0, "minhash").integers(0, 2**64, size=(2, NUM_PERMUTATIONS), dtype=np.uint64)
_A, _B = _COEFFICIENTS[0] | np.uint64(1), _COEFFICIENTS[1]
_SHINGLES_AT_ONCE = 256  # Shingles hashed at once: 128 x 256 numbers of 8 bytes stay in the second-level cache.

# Scripts without spaces between words (kana, Han, Thai, Lao, Burmese, Khmer), so each character counts as a word.
_UNSPACED_SCRIPTS = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
_WORD = re.compile(rf"[{_UNSPACED_SCRIPTS}]|[^\W{_UNSPACED_SCRIPTS}]+")
_ASCII_WORD = re.compile(rb"[0-9a-z_]+")

_BAND_RECALL = 0.99  # Fraction of the pairs at the threshold that share a band.
_PAIRS_AT_ONCE = 1 << 14  # Pairs of signatures compared at once: 16 MiB.


def hash_content(text: str) -> int:
    """Return a 64-bit hash of the text with case and white space folded.

    The probability of any collision among 100 million texts is 1 in 3,700.
    """
    return int.from_bytes(hashlib.blake2b(fold_text(text).encode("utf-8", "replace"), digest_size=8).digest(), "little")


def fold_text(text: str) -> str:
    """Return the text in one case and with single spaces: two texts are equal if these are."""
    return " ".join(text.casefold().split())


def find_exact_unique(keys: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return bool `(texts,)`, true for the first text of each key."""
    is_first = np.zeros(len(keys), dtype=bool)
    is_first[np.unique(np.asarray(keys, dtype=np.uint64), return_index=True)[1]] = True
    return is_first


def minhash_signature(text: str) -> np.ndarray:
    """Return the MinHash signature, uint32 `(128,)`; a text without words equals only itself."""
    shingles = _hash_shingles(text)
    smallest = np.full(NUM_PERMUTATIONS, np.iinfo(np.uint64).max, dtype=np.uint64)
    for start in range(0, len(shingles), _SHINGLES_AT_ONCE):
        hashed = np.multiply.outer(_A, shingles[start : start + _SHINGLES_AT_ONCE])
        hashed += _B[:, None]
        np.minimum(smallest, hashed.min(axis=1), out=smallest)
    return (smallest >> np.uint64(32)).astype(np.uint32)


def estimate_similarity(first: np.ndarray, second: np.ndarray) -> float:
    """Return the estimated Jaccard similarity of two signatures."""
    return float(np.mean(first == second))


def _hash_shingles(text: str) -> np.ndarray:
    """Return a hash below 2^32 of each distinct shingle, as uint64."""
    words = _hash_words(text)
    if not len(words):
        return np.array([hash_content(text) >> 32], dtype=np.uint64)
    if len(words) >= 2 * SHINGLE_WORDS:
        return np.unique(_hash_runs(words, SHINGLE_WORDS))
    # "One of the best movies" and "one of the worst movies" share most words: such short texts must agree in all words.
    return _hash_runs(words, len(words))


def _hash_words(text: str) -> np.ndarray:
    folded = text.lower()
    if folded.isascii():
        words = _ASCII_WORD.findall(folded.encode())
    else:
        words = [word.encode("utf-8", "replace") for word in _WORD.findall(folded)]
    # Python's own hash of a string differs from process to process.
    return np.fromiter(map(zlib.crc32, words), dtype=np.uint64, count=len(words))


def _hash_runs(words: np.ndarray, length: int) -> np.ndarray:
    """Return a hash of each run of `length` words: a polynomial in their hashes, mixed so that its high bits depend on all of it."""
    num_runs = len(words) - length + 1
    value = np.zeros(num_runs, dtype=np.uint64)
    for offset in range(length):
        value = value * np.uint64(0x9E3779B97F4A7C15) + words[offset : offset + num_runs] + np.uint64(1)
    value ^= value >> np.uint64(29)
    value *= np.uint64(0xBF58476D1CE4E5B9)
    return value >> np.uint64(32)


def choose_bands(threshold: float) -> tuple[int, int]:
    """Return (bands, rows per band): the most selective choice that still finds 99 % of the pairs at the threshold.

    More candidates only cost time, since each pair is compared by its whole signature.
    """
    for rows_per_band in range(NUM_PERMUTATIONS, 1, -1):
        num_bands = NUM_PERMUTATIONS // rows_per_band
        if 1 - (1 - threshold**rows_per_band) ** num_bands >= _BAND_RECALL:
            return num_bands, rows_per_band
    return NUM_PERMUTATIONS, 1


def find_near_unique(signatures: np.ndarray, threshold: float) -> np.ndarray:
    """Return bool `(texts,)`, true for the first text of each group of similar ones, from signatures `(texts, 128)`.

    Texts that are similar to one text of a group belong to the group. Bands are processed one at a time, so that memory does
    not grow with their number.
    """
    signatures = np.ascontiguousarray(signatures, dtype=np.uint32)
    parents = np.arange(len(signatures))
    num_bands, rows_per_band = choose_bands(threshold)
    min_agreements = int(np.ceil(threshold * NUM_PERMUTATIONS - 1e-9))
    for band in range(num_bands):
        keys = _hash_band(signatures[:, band * rows_per_band : (band + 1) * rows_per_band])
        _join_groups(parents, signatures, np.argsort(keys, kind="stable"), keys, min_agreements)
    return _find_all_roots(parents) == np.arange(len(signatures))


def _hash_band(band: np.ndarray) -> np.ndarray:
    """Return a hash of each text's values in one band `(texts, rows_per_band)`; whole signatures are compared afterwards."""
    keys = np.zeros(len(band), dtype=np.uint64)
    for column in band.T:
        keys = (keys ^ column) * np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(32)
    return keys


def _join_groups(
    parents: np.ndarray, signatures: np.ndarray, order: np.ndarray, keys: np.ndarray, min_agreements: int
) -> None:
    """Join the groups of texts that share a key and agree in `min_agreements` hashes. `order` sorts texts by key, then by index.

    All texts of a key are compared with the first of them, and those that differ from it are compared again among
    themselves, so that no list of pairs is built. Two similar texts of which only one resembles the first are found by
    another band that they share.
    """
    while len(order):
        sorted_keys = keys[order]
        group_starts = np.flatnonzero(np.r_[True, sorted_keys[1:] != sorted_keys[:-1]])
        first_texts = np.repeat(order[group_starts], np.diff(np.r_[group_starts, len(order)]))
        order, first_texts = order[order != first_texts], first_texts[order != first_texts]
        roots = _find_all_roots(parents)
        is_similar = roots[order] == roots[first_texts]
        uncompared = np.flatnonzero(~is_similar)
        for start in range(0, len(uncompared), _PAIRS_AT_ONCE):
            chunk = uncompared[start : start + _PAIRS_AT_ONCE]
            num_agreements = np.count_nonzero(signatures[order[chunk]] == signatures[first_texts[chunk]], axis=1)
            is_similar[chunk] = num_agreements >= min_agreements
        for index, first_index in zip(order[is_similar].tolist(), first_texts[is_similar].tolist(), strict=True):
            _unite(parents, index, first_index)
        order = order[~is_similar]


def _unite(parents: np.ndarray, first: int, second: int) -> None:
    first, second = _find_root(parents, first), _find_root(parents, second)
    # The earlier text becomes the root, because the root of a group is the text that stays.
    parents[max(first, second)] = min(first, second)


def _find_root(parents: np.ndarray, index: int) -> int:
    while parents[index] != index:
        parents[index] = parents[parents[index]]
        index = int(parents[index])
    return index


def _find_all_roots(parents: np.ndarray) -> np.ndarray:
    """Return the root of each text, compressing all paths."""
    while not np.array_equal(grandparents := parents[parents], parents):
        parents[:] = grandparents
    return parents
