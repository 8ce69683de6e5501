"""The captions that a picture is told apart from, and the tokens that others read them by."""

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
def tokens(tmp_path_factory: pytest.TempPathFactory) -> CaptionTokenizer:
    folder = tmp_path_factory.mktemp("tokens")
    train_clip_bpe(CAPTIONS, vocab_size=600).save(folder)
    return CaptionTokenizer(folder, 12)


def table_of(folder: Path, captions: tuple[str, ...]) -> Table:
    with ShardWriter(folder, {"key": TEXT, "caption": TEXT, "label": TEXT}) as out:
        for number, caption in enumerate(captions):
            out.add({"key": f"{number}.png", "caption": caption, "label": ""})
    return Table(folder)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    return table_of(tmp_path_factory.mktemp("table") / "train", CAPTIONS)


def source_of(
    table: Table, tokens: CaptionTokenizer, *, count: int = 5, seed: int = 0, hard: float = 0.0
) -> ContrastiveRows:
    rows = ArraySource({"image": np.arange(len(table))})
    return ContrastiveRows(rows, table, tokens, count=count, seed=seed, hard_fraction=hard)


@given(
    index=st.lists(st.integers(0, len(CAPTIONS) - 1), min_size=1, max_size=6),
    epochs=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    hard=st.sampled_from([0.0, 0.4, 1.0]),
)
def test_negatives_belong_to_a_row_and_its_epoch_and_not_to_the_batch(
    table: Table, tokens: CaptionTokenizer, index: list[int], epochs: list[int], hard: float
) -> None:
    source, epoch = source_of(table, tokens, hard=hard), np.array(epochs[: len(index)])
    together = source.rows(np.array(index), epoch)
    for place, number in enumerate(index):
        alone = source.rows(np.array([number]), epoch[place : place + 1])
        for name in ("texts", "caption", "counts"):
            np.testing.assert_array_equal(alone[name][0], together[name][place])


@pytest.mark.parametrize("hard", [0.0, 0.5, 1.0])
def test_the_first_is_ones_own_and_equal_ones_do_not_count(table: Table, tokens: CaptionTokenizer, hard: float) -> None:
    source, index = source_of(table, tokens, count=20, hard=hard), np.arange(len(CAPTIONS))
    rows = source.rows(index, np.zeros_like(index))
    own = tokens.encode(CAPTIONS)["input_ids"]
    np.testing.assert_array_equal(rows["texts"][:, 0], own)
    assert rows["counts"][:, 0].all()
    same = (rows["texts"] == own[:, None]).all(-1)[:, 1:]
    # "A red star" has the tokens of "a red star" and is another text.
    apart = np.flatnonzero([text.lower() == text for text in CAPTIONS])
    equal = rows["caption"][:, 1:] == rows["caption"][:, :1]
    np.testing.assert_array_equal(~rows["counts"][:, 1:], equal)
    assert (same | ~equal)[apart].all()
    assert rows["counts"].any(axis=1).all()


def test_every_other_row_is_drawn_as_often_and_none_is_its_own(table: Table, tokens: CaptionTokenizer) -> None:
    alone = table.folder.parent / "distinct"
    distinct = table_of(alone, tuple(f"number {n}" for n in range(8)))
    source = source_of(distinct, tokens, count=4000)
    found = source.sample_negatives(np.array([3]), np.array([0]))[0]
    share = np.bincount(found, minlength=8) / len(found)
    assert share[3] == 0
    # 4000 draws of 1/7: a deviation of 0.0055.
    np.testing.assert_allclose(np.delete(share, 3), 1 / 7, atol=0.025)


def test_other_epochs_and_seeds_draw_others(table: Table, tokens: CaptionTokenizer) -> None:
    index = np.arange(len(CAPTIONS))
    drawn = [
        source_of(table, tokens, count=8, seed=seed).sample_negatives(index, np.full_like(index, epoch))
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert not np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])
    assert source_of(table, tokens, seed=0).fingerprint != source_of(table, tokens, seed=1).fingerprint


def test_a_worker_gets_the_same_from_a_small_copy(table: Table, tokens: CaptionTokenizer) -> None:
    source, index = source_of(table, tokens, hard=0.5), np.arange(5)
    before = source.rows(index, np.zeros_like(index))
    copied = pickle.dumps(source)
    assert len(copied) < 20_000
    after = pickle.loads(copied).rows(index, np.zeros_like(index))
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])


def test_a_single_row_has_nothing_to_be_told_apart_from(tokens: CaptionTokenizer, tmp_path: Path) -> None:
    source = source_of(table_of(tmp_path / "one", ("a red star",)), tokens, hard=0.5)
    assert source.rows(np.array([0]), np.array([0]))["counts"].tolist() == [[True] + [False] * 5]


def test_a_picture_nothing_is_said_about_is_named(tokens: CaptionTokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^1\.png: has neither caption nor label, like 1 of 2"):
        source_of(table_of(tmp_path / "some", ("a red star", " ")), tokens)


@given(
    st.lists(st.text("ab ", min_size=1, max_size=6).map(lambda s: s.strip()).filter(bool), min_size=1, unique=True),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
)
def test_a_near_caption_differs_in_one_word_and_none_is_missed(texts: list[str], word: int, other: int) -> None:
    texts = list(dict.fromkeys(" ".join(text.split()) for text in texts))
    near, every = HardNegativeSampler(texts), np.arange(len(texts))
    drawn = near.sample(every, np.full(len(texts), word), np.full(len(texts), other))
    for number, found in enumerate(drawn.tolist()):
        options = [other for other in range(len(texts)) if _differing(texts[number], texts[other]) == 1]
        assert found in options if options else found == number


def test_all_near_captions_can_be_drawn() -> None:
    texts = ["a red star", "a blue star", "a green star", "a red moon", "nothing near"]
    near, draw = HardNegativeSampler(texts), np.random.default_rng(0)
    drawn = near.sample(np.zeros(200, np.int64), *draw.integers(0, 2**32, (2, 200)))
    assert set(drawn.tolist()) == {1, 2, 3}


def _differing(one: str, other: str) -> int:
    first, second = one.split(), other.split()
    return -1 if len(first) != len(second) else sum(a != b for a, b in zip(first, second, strict=True))


# The tokenizer


@given(st.lists(st.text(max_size=30), min_size=1, max_size=4))
def test_clips_own_tokenizer_gives_the_same_tokens(tokens: CaptionTokenizer, texts: list[str]) -> None:
    theirs = _theirs(tokens.folder)
    found = tokens.encode(texts)
    told = theirs(texts, padding="max_length", max_length=12, truncation=True)
    np.testing.assert_array_equal(found["input_ids"], told.input_ids)
    np.testing.assert_array_equal(found["attention_mask"], told.attention_mask)


def _theirs(folder: Path, known: dict[Path, object] = {}):  # type: ignore[no-untyped-def]  # noqa: B006
    transformers = pytest.importorskip("transformers")
    if folder not in known:
        known[folder] = transformers.CLIPTokenizer.from_pretrained(folder)
    return known[folder]


def test_any_text_has_tokens_and_ends_where_clip_looks_for_it(tokens: CaptionTokenizer) -> None:
    found = tokens.encode(["a red star", "", "x" * 100, "\N{PARTY POPPER} <|endoftext|>"])["input_ids"]
    end = tokens.tokenizer.eos_token_id
    assert end == tokens.tokenizer.vocab_size - 1
    assert (found == end).any(axis=1).all(), "also where a text is cut"
    first = (found == end).argmax(axis=1)
    assert first.tolist()[:3] == [4, 1, 11], "a word that occurs often is one token"
    assert (found[:, 0] == end - 1).all()


def test_a_vocabulary_too_small_for_bytes_is_refused() -> None:
    with pytest.raises(UsageError, match="less than 514"):
        train_clip_bpe(CAPTIONS, vocab_size=513)
    assert train_clip_bpe(CAPTIONS, vocab_size=520).vocab_size <= 520
