"""Negative captions for contrastive training, and the CLIP tokenizer."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.core.errors import DataError, UsageError
from bottega.data.sources.source import ArraySource
from bottega.data.tables.shards import TEXT, ShardWriter, Table
from bottega.data.text.captions import CaptionTokenizer
from bottega.data.text.clip_tokenizer import train_clip_bpe
from bottega.data.text.hard_negatives import HardNegativeSampler
from bottega.data.text.negatives import ContrastiveRows

CAPTIONS = (
    *(
        "a red star",
        "a red heart",
        "a blue star",
        "a blue heart",
        "a green moon",
        "red, star",
        "blue, star",
        "a red star",
    ),
    *("a yellow moon beside the sea", "A red star", "it's 12 o'clock, déjà vu"),
)


@pytest.fixture(scope="module")
def caption_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> CaptionTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_clip_bpe(CAPTIONS, vocab_size=600).save(folder)
    return CaptionTokenizer(folder, 12)


def write_table(folder: Path, captions: tuple[str, ...]) -> Table:
    with ShardWriter(folder, {"key": TEXT, "caption": TEXT, "label": TEXT}) as out:
        for number, caption in enumerate(captions):
            out.add({"key": f"{number}.png", "caption": caption, "label": ""})
    return Table(folder)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    return write_table(tmp_path_factory.mktemp("table") / "train", CAPTIONS)


def make_source(
    table: Table, caption_tokenizer: CaptionTokenizer, *, count: int = 5, seed: int = 0, hard: float = 0.0
) -> ContrastiveRows:
    rows = ArraySource({"image": np.arange(len(table))})
    return ContrastiveRows(rows, table, caption_tokenizer, count=count, seed=seed, hard_fraction=hard)


@given(
    index=st.lists(st.integers(0, len(CAPTIONS) - 1), min_size=1, max_size=6),
    epochs=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    hard=st.sampled_from([0.0, 0.4, 1.0]),
)
def test_negatives_depend_on_row_and_epoch_and_not_on_the_batch(
    table: Table, caption_tokenizer: CaptionTokenizer, index: list[int], epochs: list[int], hard: float
) -> None:
    source, epoch = make_source(table, caption_tokenizer, hard=hard), np.array(epochs[: len(index)])
    batch = source.rows(np.array(index), epoch)
    for position, number in enumerate(index):
        alone = source.rows(np.array([number]), epoch[position : position + 1])
        for name in ("texts", "caption", "counts"):
            np.testing.assert_array_equal(alone[name][0], batch[name][position])


@pytest.mark.parametrize("hard", [0.0, 0.5, 1.0])
def test_first_text_is_the_rows_own_caption_and_equal_ones_are_masked(
    table: Table, caption_tokenizer: CaptionTokenizer, hard: float
) -> None:
    source, index = make_source(table, caption_tokenizer, count=20, hard=hard), np.arange(len(CAPTIONS))
    rows = source.rows(index, np.zeros_like(index))
    own = caption_tokenizer.encode(CAPTIONS)["input_ids"]
    np.testing.assert_array_equal(rows["texts"][:, 0], own)
    assert rows["counts"][:, 0].all()
    same = (rows["texts"] == own[:, None]).all(-1)[:, 1:]
    # "A red star" has the tokens of "a red star" but is a different text.
    lower_case = np.flatnonzero([text.lower() == text for text in CAPTIONS])
    equal = rows["caption"][:, 1:] == rows["caption"][:, :1]
    np.testing.assert_array_equal(~rows["counts"][:, 1:], equal)
    assert (same | ~equal)[lower_case].all()
    assert rows["counts"].any(axis=1).all()


def test_negatives_are_uniform_over_the_other_rows(table: Table, caption_tokenizer: CaptionTokenizer) -> None:
    folder = table.folder.parent / "distinct"
    distinct = write_table(folder, tuple(f"number {n}" for n in range(8)))
    source = make_source(distinct, caption_tokenizer, count=4000)
    negatives = source.sample_negatives(np.array([3]), np.array([0]))[0]
    fractions = np.bincount(negatives, minlength=8) / len(negatives)
    assert fractions[3] == 0
    # 4000 draws with probability 1/7 have a standard deviation of 0.0055.
    np.testing.assert_allclose(np.delete(fractions, 3), 1 / 7, atol=0.025)


def test_negatives_differ_between_epochs_and_seeds(table: Table, caption_tokenizer: CaptionTokenizer) -> None:
    index = np.arange(len(CAPTIONS))
    drawn = [
        make_source(table, caption_tokenizer, count=8, seed=seed).sample_negatives(index, np.full_like(index, epoch))
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert not np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])
    assert (
        make_source(table, caption_tokenizer, seed=0).fingerprint
        != make_source(table, caption_tokenizer, seed=1).fingerprint
    )


def test_contrastive_rows_pickle_small_and_round_trip(table: Table, caption_tokenizer: CaptionTokenizer) -> None:
    source, index = make_source(table, caption_tokenizer, hard=0.5), np.arange(5)
    before = source.rows(index, np.zeros_like(index))
    pickled = pickle.dumps(source)
    assert len(pickled) < 20_000
    after = pickle.loads(pickled).rows(index, np.zeros_like(index))
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])


def test_negatives_of_a_single_row_are_masked(caption_tokenizer: CaptionTokenizer, tmp_path: Path) -> None:
    source = make_source(write_table(tmp_path / "single", ("a red star",)), caption_tokenizer, hard=0.5)
    assert source.rows(np.array([0]), np.array([0]))["counts"].tolist() == [[True] + [False] * 5]


def test_image_without_caption_is_named(caption_tokenizer: CaptionTokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^1\.png: has neither caption nor label \(1 of 2"):
        make_source(write_table(tmp_path / "some", ("a red star", " ")), caption_tokenizer)


@given(
    st.lists(st.text("ab ", min_size=1, max_size=6).map(lambda s: s.strip()).filter(bool), min_size=1, unique=True),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
)
def test_hard_negative_differs_in_one_word(texts: list[str], position_draw: int, word_draw: int) -> None:
    texts = list(dict.fromkeys(" ".join(text.split()) for text in texts))
    sampler, indices = HardNegativeSampler(texts), np.arange(len(texts))
    drawn = sampler.sample(indices, np.full(len(texts), position_draw), np.full(len(texts), word_draw))
    for number, negative in enumerate(drawn.tolist()):
        options = [other for other in range(len(texts)) if _count_differing_words(texts[number], texts[other]) == 1]
        assert negative in options if options else negative == number


def test_all_hard_negatives_can_be_drawn() -> None:
    texts = ["a red star", "a blue star", "a green star", "a red moon", "nothing near"]
    sampler, rng = HardNegativeSampler(texts), np.random.default_rng(0)
    drawn = sampler.sample(np.zeros(200, np.int64), *rng.integers(0, 2**32, (2, 200)))
    assert set(drawn.tolist()) == {1, 2, 3}


def _count_differing_words(first_text: str, second_text: str) -> int:
    first, second = first_text.split(), second_text.split()
    return -1 if len(first) != len(second) else sum(a != b for a, b in zip(first, second, strict=True))


# The CLIP tokenizer


@given(st.lists(st.text(max_size=30), min_size=1, max_size=4))
def test_tokens_match_the_clip_tokenizer_of_transformers(caption_tokenizer: CaptionTokenizer, texts: list[str]) -> None:
    reference = _load_reference(caption_tokenizer.folder)
    batch = caption_tokenizer.encode(texts)
    expected = reference(texts, padding="max_length", max_length=12, truncation=True)
    np.testing.assert_array_equal(batch["input_ids"], expected.input_ids)
    np.testing.assert_array_equal(batch["attention_mask"], expected.attention_mask)


def _load_reference(folder: Path, cache: dict[Path, object] = {}):  # type: ignore[no-untyped-def]  # noqa: B006
    transformers = pytest.importorskip("transformers")
    if folder not in cache:
        cache[folder] = transformers.CLIPTokenizer.from_pretrained(folder)
    return cache[folder]


def test_end_of_text_has_the_largest_id_and_ends_every_text(caption_tokenizer: CaptionTokenizer) -> None:
    ids = caption_tokenizer.encode(["a red star", "", "x" * 100, "\N{PARTY POPPER} <|endoftext|>"])["input_ids"]
    end = caption_tokenizer.tokenizer.eos_token_id
    assert end == caption_tokenizer.tokenizer.vocab_size - 1
    assert (ids == end).any(axis=1).all(), "a truncated text does not end with end of text"
    first = (ids == end).argmax(axis=1)
    assert first.tolist()[:3] == [4, 1, 11], "a frequent word is split into several tokens"
    assert (ids[:, 0] == end - 1).all()


def test_vocabulary_smaller_than_the_byte_alphabet_is_refused() -> None:
    with pytest.raises(UsageError, match="expected at least 514"):
        train_clip_bpe(CAPTIONS, vocab_size=513)
    assert train_clip_bpe(CAPTIONS, vocab_size=520).vocab_size <= 520
