"""Texts about stickers: answers are correct, held-out pairs are never named, and each text fits one sequence."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bottega.core.errors import UsageError
from bottega.data.embedded.sticker_texts import CACHE_NAMES, build_texts, materialise_texts
from bottega.data.embedded.stickers import COLOURS, HELD_OUT_PAIRS, PAIRS, PATTERNS, SHAPES, TRAINING_PAIRS
from bottega.data.text.tokenizer import Tokenizer
from bottega.data.text.vocabulary import TokenizerSpec
from bottega.tasks.language.prepare import prepare_language
from bottega.tasks.personalize.config import Keywords
from bottega.tasks.recipes import check_recipe

HISTORY = re.compile(r"(?:wish: an? (?P<wish>\w+)\n)?liked:\n(?P<liked>(?:an? .*\n)+)likes: (?P<answer>.*)\n")
WISHES = re.compile(r"wish: (?P<wish>an? .*)\nshows: (?P<answer>.*)\n")


def quiet(stage: str, done: int, total: int) -> None:
    """Show no progress bar."""


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return build_texts()


@pytest.fixture(scope="module")
def histories(texts: list[str]) -> list[re.Match[str]]:
    return [match for text in texts if (match := HISTORY.fullmatch(text))]


def find_words(text: str, vocabulary: tuple[str, ...]) -> list[str]:
    return [word for word in re.findall(r"\w+", text) if word in vocabulary]


def test_no_text_names_a_held_out_pair(texts: list[str]) -> None:
    pairs: Counter[tuple[str, str]] = Counter()
    for text in texts:
        for line in text.splitlines():
            line_pairs = [
                (colour, pattern) for colour in find_words(line, COLOURS) for pattern in find_words(line, PATTERNS)
            ]
            assert len(line_pairs) <= 1, line
            pairs.update(line_pairs)
    assert set(pairs) == set(TRAINING_PAIRS)
    assert min(pairs.values()) > 100
    assert not HELD_OUT_PAIRS & set(pairs)


def test_answer_is_the_majority_of_the_liked_items(histories: list[re.Match[str]]) -> None:
    assert len(histories) > 10_000
    for match in histories:
        lines = match["liked"].splitlines()
        assert 3 <= len(lines) <= 7
        colour, pattern, *shapes = match["answer"].split(", ")
        word_counts = [Counter(find_words(match["liked"], vocabulary)) for vocabulary in (COLOURS, PATTERNS)]
        for word, counts in zip((colour, pattern), word_counts, strict=True):
            assert counts.total() == len(lines)
            (most, count), *others = counts.most_common()
            assert most == word
            assert count > sum(counts.values()) / 2
            assert not others or others[0][1] < count
        for shape in shapes:
            assert match["liked"].count(f" {shape} ") >= len(lines) - 1


def test_many_histories_have_the_form_of_personal_records(histories: list[re.Match[str]]) -> None:
    similar = [
        match
        for match in histories
        if len(lines := match["liked"].splitlines()) == 6
        and all(sum(word in line for line in lines) == 5 for word in match["answer"].split(", ")[:2])
    ]
    assert len(similar) > 0.3 * len(histories)
    assert 0.2 < sum(match["wish"] is not None for match in histories) / len(histories) < 0.3


def test_wish_answer_lists_the_attributes_of_the_wish(texts: list[str]) -> None:
    answers: Counter[str] = Counter()
    for text in texts:
        if "liked" in text or not text.startswith("wish"):
            continue
        assert WISHES.sub("", text) == ""
        for match in WISHES.finditer(text):
            wish = match["wish"].partition(" on ")[0]
            expected = [*find_words(wish, COLOURS), *find_words(wish, PATTERNS), *find_words(wish, SHAPES)]
            assert match["answer"].split(", ") == expected
            answers[match["answer"]] += 1
    assert min(answers[shape] for shape in SHAPES) > 200, "the shape alone, as in the wishes of personal records"


def test_texts_follow_the_prompts_of_the_recipe(histories: list[re.Match[str]], texts: list[str]) -> None:
    options: Keywords = check_recipe(["personalize"]).recipe.model.keywords  # type: ignore[union-attr]
    history = next(match for match in histories if match["wish"] is None)
    items = "".join(options.item.replace("{caption}", line) for line in history["liked"].splitlines())
    # The prompt drops the last line break of the history.
    prompt = options.preference_prompt.replace("{history}", items.rstrip("\n"))
    assert history.string == f"{prompt} {history['answer']}\n"
    assert any(text.startswith(options.target_prompt.replace("{wish}", "a star") + " star\n") for text in texts)
    assert set(options.allowed or ()) == {*COLOURS, *PATTERNS, *SHAPES}


def test_all_pairs_variant_contains_every_pair() -> None:
    lines = [line for text in build_texts(PAIRS) for line in text.splitlines() if line.startswith("likes")]
    assert {tuple(line.removeprefix("likes: ").split(", ")[:2]) for line in lines} == set(PAIRS)


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_cache_name_contains_the_content_hash(name: str) -> None:
    file = materialise_texts(name)
    digest = hashlib.sha256(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    assert CACHE_NAMES[name].rpartition("-")[2] == digest.hexdigest()[:16]
    assert CACHE_NAMES[name].startswith(name.replace("stickers", "sticker-texts"))


def test_every_text_fits_one_sequence_of_the_recipe(tmp_path: Path, texts: list[str]) -> None:
    recipe: Any = check_recipe(["language/stickers"]).recipe
    spec = TokenizerSpec(kind=recipe.data.tokenizer.kind, vocab_size=recipe.data.tokenizer.vocab_size)
    prepared = prepare_language(recipe.data, spec, progress=quiet, cache=tmp_path)
    tokenizer = Tokenizer.load(prepared.folder / "tokenizer")
    for word in (*SHAPES, *COLOURS, *PATTERNS):
        assert len(tokenizer.encode(f" {word}")) == 1, "each keyword is one token"
    lengths = [len(tokenizer.encode(text)) for text in texts[::20]]
    assert max(lengths) + 1 <= recipe.data.sequence_length
    assert sum(len(prepared.table(name)) for name in prepared.tables) == len(texts)
    assert recipe.data.padding


def test_unknown_dataset_name_is_refused(tmp_path: Path) -> None:
    settings = [("data.train.path", "posters", ""), ("data.train.kind", "embedded", "")]
    recipe: Any = check_recipe(["language/stickers"], settings).recipe
    if recipe.data.train.path is None:
        recipe = recipe.model_copy(
            update={
                "data": recipe.data.model_copy(
                    update={"train": recipe.data.train.model_copy(update={"path": "posters"})}
                )
            }
        )
    with pytest.raises(UsageError, match=r"'posters'.*choose from stickers, stickers-all"):
        prepare_language(recipe.data, TokenizerSpec(kind="bpe", vocab_size=300), progress=quiet, cache=tmp_path)


def test_texts_are_deterministic_and_mostly_unique(texts: list[str]) -> None:
    assert build_texts()[:50] == texts[:50]
    assert len(np.unique(texts)) > 0.8 * len(texts)
