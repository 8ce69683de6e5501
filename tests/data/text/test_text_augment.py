"""Text augmentation: the fraction of changed words, the chosen techniques, and preserved punctuation."""

from __future__ import annotations

import sys
from collections import Counter
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.core.noise import numpy_generator
from bottega.data.text import synonyms as synonym_module
from bottega.data.text.augment import augment_text, make_augmented_copies
from bottega.data.text.synonyms import find_synonym_source, find_synonyms

TECHNIQUES = ("synonym_replacement", "random_insertion", "random_swap", "random_deletion")
# All words differ, and three have synonyms.
REVIEW = "It was a good story, told by an (old) friend of mine; nobody else could have done this quite so quickly."


@pytest.fixture(autouse=True)
def _clear_caches() -> Any:
    synonym_module._load_lookup.cache_clear()
    find_synonyms.cache_clear()
    yield
    synonym_module._load_lookup.cache_clear()
    find_synonyms.cache_clear()


def count_changes(before: str, after: str) -> int:
    """Return the number of words deleted, inserted or moved, as the techniques count them."""
    old_words, new_words = before.split(), after.split()
    if len(old_words) == len(new_words):
        return sum(before != after for before, after in zip(old_words, new_words, strict=True))
    return abs(len(old_words) - len(new_words))


@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize(("probability", "words"), [(0.1, 7), (0.1, 30), (0.25, 21), (0.5, 11)])
def test_fraction_of_changed_words_is_the_probability(technique: str, probability: float, words: int) -> None:
    vocabulary = sorted(synonym_module._build_table())
    total = changed = 0
    for number in range(2000):
        start = number % (len(vocabulary) - words)
        text = " ".join(vocabulary[start : start + words])
        after = augment_text(text, techniques=[technique], probability=probability, rng=numpy_generator(number))
        total, changed = total + words, changed + count_changes(text, after)
    assert changed / total == pytest.approx(probability, rel=0.05)


def test_changes_are_divided_equally_among_the_techniques() -> None:
    before, counts = [*(f"w{number}" for number in range(36)), "good", "bad", "big", "small"], Counter[str]()
    for number in range(1000):
        rng = numpy_generator(number)
        after = augment_text(" ".join(before), techniques=TECHNIQUES[1:], probability=0.3, rng=rng).split()
        deleted = set(before) - set(after)
        remaining = [word for word in before if word not in deleted]
        added = len(after) - len(remaining)
        counts.update(deleted=len(deleted), added=added)
    # 12 changes, a third for each technique.
    assert counts["deleted"] / 1000 == pytest.approx(4, rel=0.05)
    assert counts["added"] / 1000 == pytest.approx(4, rel=0.05)


def test_swaps_are_an_equal_part_of_the_changes() -> None:
    text, swapped = " ".join(f"w{number}" for number in range(40)), 0
    for number in range(1000):
        after = augment_text(
            text, techniques=("random_swap", "random_deletion"), probability=0.3, rng=numpy_generator(number)
        ).split()
        swapped += sum(map(str.__ne__, [word for word in text.split() if word in after], after))
    # The texts are compared without the deleted words, so that deletions do not hide swaps.
    assert swapped / 1000 == pytest.approx(6, rel=0.05)


def test_other_techniques_replace_missing_synonyms() -> None:
    text = " ".join(f"w{number}" for number in range(20))
    lengths = [
        len(
            augment_text(
                text, techniques=["synonym_replacement", "random_deletion"], probability=0.2, rng=numpy_generator(n)
            ).split()
        )
        for n in range(50)
    ]
    assert lengths == [16] * 50
    assert augment_text(text, techniques=["synonym_replacement"], probability=0.2, rng=numpy_generator(0)) == text
    replaced = augment_text(REVIEW, techniques=["synonym_replacement"], probability=1.0, rng=numpy_generator(0))
    assert len(replaced.split()) == len(REVIEW.split())
    assert 3 <= count_changes(REVIEW, replaced) < len(REVIEW.split())


def test_replacement_and_swaps_preserve_punctuation_and_spaces() -> None:
    def list_separators(text: str) -> list[str]:
        words_masked = "".join("w" if character.isalnum() else character for character in text)
        return [separator for separator in words_masked.split("w") if separator]

    for technique in ("synonym_replacement", "random_swap"):
        after = augment_text(REVIEW, techniques=[technique], probability=0.5, rng=numpy_generator(3))
        assert after != REVIEW
        assert list_separators(after) == list_separators(REVIEW)
    swapped = augment_text("a, b\n\n(c) d!", techniques=["random_swap"], probability=1.0, rng=numpy_generator(1))
    assert Counter(swapped) == Counter("a, b\n\n(c) d!")


def test_deleted_word_removes_one_space() -> None:
    results = {
        augment_text("one two, three\n\nfour", techniques=["random_deletion"], probability=0.25, rng=numpy_generator(n))
        for n in range(60)
    }
    assert results == {"two, three\n\nfour", "one, three\n\nfour", "one two,\n\nfour", "one two, three"}
    for number in range(100):
        remaining = augment_text(
            "a b c d e", techniques=["random_deletion"], probability=1.0, rng=numpy_generator(number)
        )
        assert remaining in set("abcde")


def test_inserted_word_is_a_synonym_or_a_word_of_the_text() -> None:
    for number in range(50):
        after = augment_text(
            "A Good plot", techniques=["random_insertion"], probability=0.34, rng=numpy_generator(number)
        ).split()
        extra = Counter(after) - Counter(["A", "Good", "plot"])
        assert set(extra) <= set(find_synonyms("good"))
        after = augment_text(
            "xa xb xc", techniques=["random_insertion"], probability=0.34, rng=numpy_generator(number)
        ).split()
        assert set(after) == {"xa", "xb", "xc"}


TEXTS = st.text() | st.lists(
    st.sampled_from(["good", "the", "The", "bad,", "(x)", "é", "नमस्ते", "👍", "--", "\n", "ß"])
).map(" ".join)


@given(TEXTS, st.lists(st.sampled_from(TECHNIQUES), unique=True), st.floats(0, 1), st.integers(0, 2**31))
def test_augmented_text_is_empty_only_if_the_text_is(
    text: str, techniques: list[str], probability: float, seed: int
) -> None:
    after = augment_text(text, techniques=techniques, probability=probability, rng=numpy_generator(seed))
    assert bool(after.strip()) == bool(text.strip())
    if not techniques or probability == 0:
        assert after == text


@given(
    st.lists(st.sampled_from(["good", "the", "The", "bad", "x", "é", "नमस्ते", "👍"]), min_size=1).map(tuple),
    st.lists(st.sampled_from(TECHNIQUES[1:]), min_size=1, unique=True),
    st.booleans(),
    st.floats(0.001, 1) | st.just(0.001),
)
def test_copies_differ_from_the_text(
    words: tuple[str, ...], techniques: list[str], with_synonyms: bool, probability: float
) -> None:
    techniques = [*techniques, *TECHNIQUES[:1]] if with_synonyms else techniques
    text = "(" + ", ".join(words) + ")."
    copies = make_augmented_copies(text, factor=3, techniques=techniques, probability=probability, seed=1, key="a:1")
    assert len(copies) == 3
    assert text not in copies or len(set(words)) < 2


def test_copy_depends_on_seed_key_and_number() -> None:
    def make(factor: int, seed: int, key: str) -> list[str]:
        return make_augmented_copies(REVIEW, factor=factor, techniques=TECHNIQUES, probability=0.3, seed=seed, key=key)

    assert make(3, 1, "k") == make(5, 1, "k")[:3]
    assert len({*make(5, 1, "k"), *make(5, 2, "k"), *make(5, 1, "l")}) == 15


def test_synonym_table_is_symmetric_and_lower_case() -> None:
    table = synonym_module._build_table()
    assert len(table) >= 400
    assert find_synonym_source() == "table"
    for word, others in table.items():
        assert others, word
        assert word not in others
        assert all(word in table[other] for other in others)
        assert all(other.isalpha() and other.islower() for other in (word, *others))


def test_synonyms_preserve_case() -> None:
    assert "great" in find_synonyms("good")
    assert "Great" in find_synonyms("Good")
    assert "GREAT" in find_synonyms("GOOD")
    assert find_synonyms("gOOd") == ()
    assert find_synonyms("xyzzy") == ()


def _fake_nltk(monkeypatch: pytest.MonkeyPatch, lookup: Any) -> None:
    corpus = ModuleType("nltk.corpus")
    corpus.wordnet = SimpleNamespace(synsets=lookup)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nltk", ModuleType("nltk"))
    monkeypatch.setitem(sys.modules, "nltk.corpus", corpus)


def test_wordnet_is_used_where_available(monkeypatch: pytest.MonkeyPatch) -> None:
    sense = SimpleNamespace(lemma_names=lambda: ["good", "goodness", "well_done", "Well", "sound"])
    _fake_nltk(monkeypatch, lambda word: [sense] if word == "good" else [])
    assert find_synonym_source() == "nltk"
    assert find_synonyms("Good") == ("Goodness", "Sound")


def test_wordnet_without_data_falls_back_to_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(word: str) -> Any:
        raise LookupError("Resource wordnet not found")

    _fake_nltk(monkeypatch, missing)
    assert find_synonym_source() == "table"
    assert find_synonyms("good")


def test_swaps_of_equal_words_do_not_count_as_changes() -> None:
    text = "the the the the cat"
    for number in range(20):
        after = augment_text(
            text, techniques=["random_swap"], probability=0.4, rng=np.random.Generator(np.random.Philox(number))
        )
        assert after != text
