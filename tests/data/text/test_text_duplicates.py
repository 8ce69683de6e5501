"""Exact and near duplicates of texts: detection, and the first of each group is retained."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.core.noise import numpy_generator
from bottega.data.text.duplicates import (
    NUM_PERMUTATIONS,
    SHINGLE_WORDS,
    choose_bands,
    estimate_similarity,
    find_exact_unique,
    find_near_unique,
    hash_content,
    minhash_signature,
)
from operations import count_operations

RNG = numpy_generator(1, "words")
VOCABULARY = np.array(
    ["".join(RNG.choice(list("abcdefghijklmnopqrstuvwxyz"), RNG.integers(3, 9))) for _ in range(4000)]
)


def make_document(seed: int, words: int = 400) -> list[str]:
    return numpy_generator(seed, "document").choice(VOCABULARY, words).tolist()


def change_words(words: list[str], fraction: float, seed: int = 0) -> list[str]:
    rng, changed = numpy_generator(seed, "changes"), list(words)
    for index in rng.choice(len(words), round(fraction * len(words)), replace=False):
        changed[index] = str(rng.choice(VOCABULARY))
    return changed


def jaccard(first: list[str], second: list[str]) -> float:
    first_shingles, second_shingles = (
        {tuple(words[i : i + SHINGLE_WORDS]) for i in range(len(words) - SHINGLE_WORDS + 1)}
        for words in (first, second)
    )
    return len(first_shingles & second_shingles) / len(first_shingles | second_shingles)


def compute_signatures(documents: list[list[str]]) -> np.ndarray:
    return np.stack([minhash_signature(" ".join(words)) for words in documents])


@given(st.lists(st.sampled_from(["a", "B", "ß", "é", "long"]), min_size=1), st.sampled_from([" ", "\n\n", " \t "]))
def test_content_hash_ignores_case_and_white_space(words: list[str], space: str) -> None:
    assert hash_content(" ".join(words)) == hash_content(f" {space.join(words).upper()} \n")
    assert 0 <= hash_content(space.join(words)) < 2**64


def test_hashes_are_the_same_in_every_process() -> None:
    # Python's own hash() differs between processes; a resumed preparation needs hashes that do not.
    code = "from bottega.data.text.duplicates import *; print(hash_content('Hello  World'), minhash_signature('Hello  World wide')[:3])"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == f"{hash_content('hello world')} {minhash_signature('hello world wide')[:3]}"
    assert hash_content("a") != hash_content("b")


@given(st.lists(st.integers(0, 5) | st.just(2**64 - 1), max_size=30))
def test_first_of_equal_keys_is_unique(keys: list[int]) -> None:
    assert find_exact_unique(keys).tolist() == [key not in keys[:index] for index, key in enumerate(keys)]


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.05, 0.1, 0.2, 0.4])
def test_similarity_estimate_is_within_three_standard_errors(fraction: float) -> None:
    errors, num_outliers = [], 0
    for seed in range(40):
        first = make_document(seed)
        second = change_words(first, fraction, seed)
        true, estimated = jaccard(first, second), estimate_similarity(*compute_signatures([first, second]))
        scale = np.sqrt(true * (1 - true) / NUM_PERMUTATIONS)
        errors.append(estimated - true)
        num_outliers += abs(estimated - true) > 3 * scale + 1e-12
    # A normal error exceeds three standard errors with a probability of 1/370, so two of 40 do with one of 0.5 %.
    assert num_outliers <= 1
    # Unbiased: the mean of 40 errors has a standard error of sqrt(s (1 - s) / (128 x 40)), and sqrt(s (1 - s)) <= 0.5.
    assert abs(np.mean(errors)) <= 3 * 0.5 / np.sqrt(NUM_PERMUTATIONS * 40)


def test_near_duplicates_are_detected_and_others_are_not() -> None:
    originals = [make_document(seed) for seed in range(60)]
    # A shingle of five words remains with the probability p = 0.95^5 = 0.77 if 5 % of the words change, and two texts that
    # share a fraction p of their shingles have the similarity p / (2 - p) = 0.63; if 1 % change, 0.91.
    signatures = compute_signatures(
        [*originals, *(change_words(words, 0.05, seed) for seed, words in enumerate(originals))]
    )
    assert find_near_unique(signatures, 0.5).tolist() == [True] * 60 + [False] * 60
    assert find_near_unique(signatures, 0.8).all()
    signatures = compute_signatures(
        [*originals, *(change_words(words, 0.01, seed) for seed, words in enumerate(originals))]
    )
    assert find_near_unique(signatures, 0.8).tolist() == [True] * 60 + [False] * 60


def test_near_duplicates_match_comparing_all_pairs() -> None:
    documents = [make_document(seed, 60) for seed in range(30)]
    rng = numpy_generator(7, "mix")
    for copy in range(120):
        documents.append(change_words(documents[int(rng.integers(30))], float(rng.random() * 0.15), copy))
    order = rng.permutation(len(documents))
    signatures = compute_signatures([documents[index] for index in order])
    for threshold in (0.3, 0.5, 0.8, 1.0):
        group = np.arange(len(order))
        for i in range(len(order)):
            for j in np.flatnonzero(np.mean(signatures == signatures[i], axis=1) >= threshold):
                group[group == max(group[i], group[j])] = min(group[i], group[j])
        expected = group == np.arange(len(order))
        unique = find_near_unique(signatures, threshold)
        # A pair at the threshold is missed once in a hundred.
        assert np.count_nonzero(unique != expected) <= 2
        assert np.array_equal(unique, find_near_unique(signatures, threshold))


def test_many_equal_texts_leave_one_with_few_comparisons() -> None:
    signatures = np.repeat(compute_signatures([make_document(1), make_document(2)]), 20_000, axis=0)
    assert np.flatnonzero(find_near_unique(signatures, 0.8)).tolist() == [0, 20_000]
    few, many = (count_operations(lambda step=step: find_near_unique(signatures[::step], 0.8)) for step in (40, 10))
    assert many < 5 * few


def test_duplicates_are_found_although_the_first_text_of_their_band_differs() -> None:
    num_bands, rows = choose_bands(0.8)
    second = numpy_generator(0, "row").integers(0, 2**32, NUM_PERMUTATIONS, dtype=np.uint32)
    third = second.copy()
    # One value in each band but the first differs: 108 of 128 values are equal, a similarity of 0.84.
    third[rows : num_bands * rows : rows] += 1
    # Equal in the first band only: in it, second and third are both compared with this text, and differ from it.
    first = second + np.uint32(7)
    first[:rows] = second[:rows]
    assert find_near_unique(np.stack([first, second, third]), 0.8).tolist() == [True, True, False]


def test_bands_detect_pairs_at_the_threshold() -> None:
    for threshold in (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.99, 1.0):
        num_bands, rows = choose_bands(threshold)
        assert num_bands * rows <= NUM_PERMUTATIONS
        assert 1 - (1 - threshold**rows) ** num_bands >= 0.99
    assert choose_bands(1.0) == (1, NUM_PERMUTATIONS)
    assert choose_bands(0.8)[1] > choose_bands(0.5)[1]


def test_signatures_of_short_and_wordless_texts() -> None:
    assert estimate_similarity(minhash_signature("A good film!"), minhash_signature("a  good film")) == 1
    # A text of fewer than ten words is a single shingle, so texts that differ in one word agree only by chance.
    assert estimate_similarity(minhash_signature("a good film"), minhash_signature("quite another thing")) < 0.1
    assert estimate_similarity(minhash_signature("a really good film"), minhash_signature("a really bad film")) < 0.1
    assert estimate_similarity(minhash_signature("good not bad"), minhash_signature("bad not good")) < 0.1
    assert estimate_similarity(minhash_signature("!!!"), minhash_signature("???")) < 0.1
    assert estimate_similarity(minhash_signature(""), minhash_signature(" \n")) == 1
    assert find_near_unique(np.empty((0, NUM_PERMUTATIONS), np.uint32), 0.8).tolist() == []
    assert minhash_signature("x").dtype == np.uint32


def test_chinese_is_compared_by_characters() -> None:
    text = "我们晚上回到家的时候，没有人想到要为第二天买面包。然后我们又出去了一次，可是商店已经关门了。"
    assert estimate_similarity(minhash_signature(text), minhash_signature(text.replace("面包", "米饭"))) > 0.4


@given(st.text(max_size=100))
def test_any_text_has_a_signature(text: str) -> None:
    assert np.array_equal(minhash_signature(text), minhash_signature(text))
    assert minhash_signature(text).shape == (NUM_PERMUTATIONS,)


def test_signatures_do_not_loop_over_words() -> None:
    long = " ".join(make_document(5, 5000))
    short = long[: len(long) // 10]
    minhash_signature(short)
    counts = [count_operations(lambda text=text: minhash_signature(text)) for text in (short, long)]
    assert counts[1] < 2 * counts[0] + 100
