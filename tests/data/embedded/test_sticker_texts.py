"""Texts about stickers: the answers are true, nothing that is held out is named, and a recipe reads each as a whole."""

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

HISTORY = re.compile(r"(?:wish: an? (?P<wish>\w+)\n)?liked:\n(?P<liked>(?:an? .*\n)+)likes: (?P<said>.*)\n")
WISHES = re.compile(r"wish: (?P<wish>an? .*)\nshows: (?P<said>.*)\n")


def quiet(stage: str, done: int, total: int) -> None:
    """No bar."""


@pytest.fixture(scope="module")
def written() -> list[str]:
    return build_texts()


@pytest.fixture(scope="module")
def histories(written: list[str]) -> list[re.Match[str]]:
    return [found for text in written if (found := HISTORY.fullmatch(text))]


def words_in(said: str, known: tuple[str, ...]) -> list[str]:
    return [word for word in re.findall(r"\w+", said) if word in known]


def test_no_text_names_a_held_out_pair(written: list[str]) -> None:
    pairs: Counter[tuple[str, str]] = Counter()
    for text in written:
        for line in text.splitlines():
            found = [(colour, pattern) for colour in words_in(line, COLOURS) for pattern in words_in(line, PATTERNS)]
            assert len(found) <= 1, line
            pairs.update(found)
    assert set(pairs) == set(TRAINING_PAIRS)
    assert min(pairs.values()) > 100
    assert not HELD_OUT_PAIRS & set(pairs)


def test_the_answer_is_what_most_of_the_liked_have(histories: list[re.Match[str]]) -> None:
    assert len(histories) > 10_000
    for found in histories:
        lines = found["liked"].splitlines()
        assert 3 <= len(lines) <= 7
        colour, pattern, *shapes = found["said"].split(", ")
        counted = [Counter(words_in(found["liked"], known)) for known in (COLOURS, PATTERNS)]
        for word, counts in zip((colour, pattern), counted, strict=True):
            assert counts.total() == len(lines)
            (most, count), *others = counts.most_common()
            assert most == word
            assert count > sum(counts.values()) / 2
            assert not others or others[0][1] < count
        for shape in shapes:
            assert found["liked"].count(f" {shape} ") >= len(lines) - 1


def test_most_histories_are_like_those_of_people(histories: list[re.Match[str]]) -> None:
    alike = [
        found
        for found in histories
        if len(lines := found["liked"].splitlines()) == 6
        and all(sum(word in line for line in lines) == 5 for word in found["said"].split(", ")[:2])
    ]
    assert len(alike) > 0.3 * len(histories)
    assert 0.2 < sum(found["wish"] is not None for found in histories) / len(histories) < 0.3


def test_a_wish_shows_what_it_says(written: list[str]) -> None:
    told: Counter[str] = Counter()
    for text in written:
        if "liked" in text or not text.startswith("wish"):
            continue
        assert WISHES.sub("", text) == ""
        for found in WISHES.finditer(text):
            wish = found["wish"].partition(" on ")[0]
            expected = [*words_in(wish, COLOURS), *words_in(wish, PATTERNS), *words_in(wish, SHAPES)]
            assert found["said"].split(", ") == expected
            told[found["said"]] += 1
    assert min(told[shape] for shape in SHAPES) > 200, "the shape alone, as people wish"


def test_the_forms_are_those_that_the_recipe_asks_in(histories: list[re.Match[str]], written: list[str]) -> None:
    options: Keywords = check_recipe(["personalize"]).recipe.model.keywords  # type: ignore[union-attr]
    found = next(one for one in histories if one["wish"] is None)
    items = "".join(options.item.replace("{caption}", line) for line in found["liked"].splitlines())
    # Who asks takes the last line break of a history away.
    asked = options.preference_prompt.replace("{history}", items.rstrip("\n"))
    assert found.string == f"{asked} {found['said']}\n"
    assert any(text.startswith(options.target_prompt.replace("{wish}", "a star") + " star\n") for text in written)
    assert set(options.allowed or ()) == {*COLOURS, *PATTERNS, *SHAPES}


def test_the_variant_with_all_pairs_has_them_all() -> None:
    lines = [line for text in build_texts(PAIRS) for line in text.splitlines() if line.startswith("likes")]
    assert {tuple(line.removeprefix("likes: ").split(", ")[:2]) for line in lines} == set(PAIRS)


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_the_name_holds_the_hash(name: str) -> None:
    file = materialise_texts(name)
    digest = hashlib.sha256(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    assert CACHE_NAMES[name].rpartition("-")[2] == digest.hexdigest()[:16]
    assert CACHE_NAMES[name].startswith(name.replace("stickers", "sticker-texts"))


def test_the_recipe_reads_each_text_as_a_whole(tmp_path: Path, written: list[str]) -> None:
    recipe: Any = check_recipe(["language/stickers"]).recipe
    spec = TokenizerSpec(kind=recipe.data.tokenizer.kind, vocab_size=recipe.data.tokenizer.vocab_size)
    ready = prepare_language(recipe.data, spec, progress=quiet, cache=tmp_path)
    tokenizer = Tokenizer.load(ready.folder / "tokenizer")
    for word in (*SHAPES, *COLOURS, *PATTERNS):
        assert len(tokenizer.encode(f" {word}")) == 1, "what is asked for is one token each"
    lengths = [len(tokenizer.encode(text)) for text in written[::20]]
    assert max(lengths) + 1 <= recipe.data.sequence_length
    assert sum(len(ready.table(name)) for name in ready.tables) == len(written)
    assert recipe.data.padding


def test_a_name_that_is_not_there_is_refused(tmp_path: Path) -> None:
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


def test_texts_are_the_same_each_time(written: list[str]) -> None:
    assert build_texts()[:50] == written[:50]
    assert len(np.unique(written)) > 0.8 * len(written)
