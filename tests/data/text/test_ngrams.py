"""Hashed n-grams: a reference in plain Python, TF-IDF as scikit-learn computes it, and texts that have none."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.data.text.ngram_spec import NgramSpec
from bottega.data.text.ngrams import IDF_FILE, MULTIPLIER, NgramWeighting, count_ngrams
from bottega.data.text.vocabulary import WORD_PATTERN

MASK = (1 << 64) - 1
TEXTS = ["the cat sat on the mat", "", "A cat, isn't it?", "日本語 text", "on the mat the cat sat", "!"]
SPECS = [
    NgramSpec(),
    NgramSpec(words=3, characters=None, buckets=97),
    NgramSpec(words=0, characters=(1, 6), buckets=1000),
]


def mix(value: int) -> int:
    value = ((value ^ (value >> 33)) * 0xFF51AFD7ED558CCD) & MASK
    value = ((value ^ (value >> 33)) * 0xC4CEB9FE1A85EC53) & MASK
    return value ^ (value >> 33)


def roll(values: list[int]) -> int:
    total = values[0]
    for value in values[1:]:
        total = (total * int(MULTIPLIER) + value) & MASK
    return total


def count_in_python(text: str, spec: NgramSpec) -> Counter[int]:
    """Count the n-grams of one text without arrays."""
    words = re.findall(WORD_PATTERN, text.lower())
    hashes = [
        mix(sum(ord(c) * pow(int(MULTIPLIER), i + 1, 1 << 64) for i, c in enumerate(word)) & MASK) for word in words
    ]
    half = spec.num_word_buckets
    buckets: Counter[int] = Counter()
    for length in range(1, spec.words + 1):
        for i in range(len(words) - length + 1):
            value = hashes[i] if length == 1 else mix((roll(hashes[i : i + length]) + length) & MASK)
            buckets[value % half] += 1
    if spec.characters is not None:
        for word in (f" {word} " for word in words):
            for length in range(spec.characters[0], spec.characters[1] + 1):
                for i in range(len(word) - length + 1):
                    value = mix((roll([ord(c) for c in word[i : i + length]]) + length) & MASK)
                    buckets[half + value % (spec.buckets - half)] += 1
    return buckets


def to_counters(texts: list[str], spec: NgramSpec) -> list[Counter[int]]:
    ngrams = count_ngrams(texts, spec)
    starts = [0, *ngrams.ends[:-1].tolist()]
    return [
        Counter(dict(zip(ngrams.buckets[start:end].tolist(), ngrams.counts[start:end].tolist(), strict=True)))
        for start, end in zip(starts, ngrams.ends.tolist(), strict=True)
    ]


@pytest.mark.parametrize("spec", SPECS)
@given(texts=st.lists(st.text("ab c'ts.é日", max_size=12), min_size=1, max_size=4))
def test_ngrams_of_a_text_equal_those_of_the_reference_whatever_the_other_texts(
    texts: list[str], spec: NgramSpec
) -> None:
    assert to_counters(texts, spec) == [count_in_python(text, spec) for text in texts]


def test_texts_shorter_than_the_shortest_ngram_have_none() -> None:
    spec = NgramSpec(words=0, characters=(7, 8))
    for texts in (["ok"], [""], ["ok", "", "no"]):
        assert to_counters(texts, spec) == [Counter()] * len(texts)
    assert to_counters(["ok", "apprentice"], spec)[1]


def test_hashes_never_change() -> None:
    """A saved run predicts with the buckets that it was trained with, so that another hash would make it useless."""
    ngrams = count_ngrams(["the cat"], NgramSpec(buckets=1 << 18))
    words, characters = [6681, 53358, 103252], [135566, 139191, 165684, 175448, 176263, 176637, 189093, 205484, 205757]
    assert ngrams.buckets.tolist() == [*words, *characters, 207532, 227957, 240337]


def test_weights_are_those_of_scikit_learn() -> None:
    vectorizer_class = pytest.importorskip("sklearn.feature_extraction.text").TfidfVectorizer
    spec = NgramSpec(words=2, characters=None, buckets=1 << 24)
    vectorizer = vectorizer_class(ngram_range=(1, 2), token_pattern=f"(?:{WORD_PATTERN})", sublinear_tf=True)
    training, new = TEXTS[:4] * 2 + ["cat cat cat sat"], ["the cat sat where no dog sat", "", "a dog"]
    vectorizer.fit(training)
    expected = vectorizer.transform(new)
    weighting = NgramWeighting.fit(spec, [count_ngrams(training, spec).buckets], len(training))
    batch = weighting.collate_texts(new)
    for row in range(len(new)):
        weights = batch["ngram_weights"][row]
        np.testing.assert_allclose(sorted(weights[weights > 0]), sorted(expected[row].data), rtol=1e-6)


def test_words_and_characters_have_length_1_each() -> None:
    spec = NgramSpec()
    weighting = NgramWeighting.fit(spec, [count_ngrams(TEXTS, spec).buckets], len(TEXTS))
    batch = weighting.collate_texts(TEXTS)
    is_word = batch["ngram_ids"] < spec.num_word_buckets
    for is_block in (is_word, ~is_word):
        norms = np.square(batch["ngram_weights"] * is_block).sum(1)
        np.testing.assert_allclose(norms, [float(bool(text)) for text in TEXTS], atol=1e-6)


def test_weights_do_not_depend_on_the_batch() -> None:
    spec = NgramSpec()
    weighting = NgramWeighting.fit(spec, [count_ngrams(TEXTS, spec).buckets], len(TEXTS))
    together = weighting.collate_texts([*TEXTS, "a much longer text " * 40])
    for row, text in enumerate(TEXTS):
        alone = weighting.collate_texts([text])
        L = alone["ngram_ids"].shape[1]
        np.testing.assert_array_equal(alone["ngram_ids"][0], together["ngram_ids"][row, :L])
        np.testing.assert_array_equal(alone["ngram_weights"][0], together["ngram_weights"][row, :L])
        assert not together["ngram_weights"][row, L:].any()


def test_an_ngram_that_training_has_not_seen_has_no_weight() -> None:
    spec = NgramSpec(buckets=1 << 24)
    weighting = NgramWeighting.fit(spec, [count_ngrams(["salt"], spec).buckets], 1)
    batch = weighting.collate_texts(["xyz", "salt", "..."])
    assert (batch["ngram_weights"] > 0).any(1).tolist() == [False, True, False]


def test_the_file_of_a_weighting_is_read_back_and_a_damaged_one_refused(tmp_path: Path) -> None:
    spec = NgramSpec(buckets=512)
    weighting = NgramWeighting.fit(spec, [count_ngrams(TEXTS, spec).buckets], len(TEXTS))
    weighting.save(tmp_path)
    content = (tmp_path / IDF_FILE).read_bytes()
    assert weighting.equals(NgramWeighting.parse(spec, content))
    for damaged, read_spec in ((content[:40], spec), (b"", spec), (content, NgramSpec(buckets=1024))):
        with pytest.raises(ValueError, match=r"expected 1024|read|reshape|end"):
            NgramWeighting.parse(read_spec, damaged)


@pytest.mark.parametrize(
    "values", [{"words": 0, "characters": None}, {"characters": (5, 3)}, {"characters": (0, 3)}, {"buckets": 1}]
)
def test_a_spec_without_ngrams_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"n-grams|length|greater"):
        NgramSpec.model_validate(values)
