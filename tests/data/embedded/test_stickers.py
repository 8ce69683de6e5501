"""Stickers: what is held out is nowhere to be seen, pictures show what is said of them, and the ruler reads them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bottega.config.data import HeldOut, Source
from bottega.core.errors import UsageError
from bottega.core.noise import numpy_generator
from bottega.data.embedded import CACHE_NAMES, materialise_embedded, sticker_people
from bottega.data.embedded.sticker_people import FIRST_USER_ID, TABLES, encode_png, materialise_people
from bottega.data.embedded.sticker_recognition import NO_STICKER, match_drawings, recognise_stickers
from bottega.data.embedded.stickers import (
    BACKGROUNDS,
    COLOURS,
    HELD_OUT_PAIRS,
    PAIRS,
    PATTERNS,
    SHAPES,
    SIDE,
    TEST_PAIRS,
    TRAINING_PAIRS,
    VALIDATION_PAIRS,
    draw_sticker,
    format_caption,
    list_caption_forms,
)
from bottega.data.image.decode import decode_image
from bottega.data.prepare.media import prepare_media
from bottega.data.sources.samples import open_media_source
from bottega.data.text.captions import read_captions
from bottega.tasks.align import config as align
from bottega.tasks.autoencode import config as autoencode
from bottega.tasks.generation import config as media
from bottega.tasks.recipes import check_recipe

STICKERS = Source(kind="embedded", path="stickers")
ATTRIBUTES = ("shape", "colour", "pattern")


def content(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = file.relative_to(folder).as_posix().encode()
        digest.update(name + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def quiet(stage: str, done: int, total: int) -> None:
    """No bar."""


@pytest.fixture(scope="module")
def seen() -> dict[str, np.ndarray]:
    return {file.stem: np.load(file) for file in materialise_embedded("image", "stickers").iterdir()}


@pytest.fixture(scope="module")
def people() -> dict[str, list[dict[str, Any]]]:
    folder = materialise_people()
    lines = {table: (folder / f"{table}.jsonl").read_text().splitlines() for table in TABLES}
    return {table: [json.loads(line) for line in said] for table, said in lines.items()}


# The pairs that are held out


def test_every_colour_and_pattern_is_also_seen() -> None:
    assert len(PAIRS) == 40
    assert len(HELD_OUT_PAIRS) == 10
    assert not set(VALIDATION_PAIRS) & set(TEST_PAIRS)
    for pairs in (VALIDATION_PAIRS, TEST_PAIRS):
        assert len({colour for colour, _ in pairs}) == 5, (
            "who answers one colour to all is right for one in five at most"
        )
        assert {pattern for _, pattern in pairs} == set(PATTERNS)
    by_colour, by_pattern = (Counter(pair[part] for pair in TRAINING_PAIRS) for part in (0, 1))
    assert min(by_colour[colour] for colour in COLOURS) >= 3
    assert min(by_pattern[pattern] for pattern in PATTERNS) >= 6


def test_what_is_embedded_shows_and_names_seen_pairs_only(seen: dict[str, np.ndarray]) -> None:
    shown = set(zip(seen["colour"].tolist(), seen["pattern"].tolist(), strict=True))
    assert shown == set(TRAINING_PAIRS)
    assert set(seen["shape"].tolist()) == set(SHAPES)
    for said in seen["caption"].tolist():
        words = set(said.replace(",", "").split())
        assert not [pair for pair in HELD_OUT_PAIRS if set(pair) <= words], said


def test_a_caption_says_nothing_that_the_picture_does_not_show(seen: dict[str, np.ndarray]) -> None:
    rows = zip(*(seen[name].tolist() for name in ("caption", *ATTRIBUTES, "background")), strict=True)
    forms = Counter()
    for said, shape, colour, pattern, background in rows:
        known = list_caption_forms(shape, colour, pattern, background)
        assert said in known
        forms[known.index(said)] += 1
    assert len(forms) == len(set(list_caption_forms("star", "red", "plain", "sky")))
    assert min(forms.values()) > 0.08 * len(seen["caption"])


def test_the_variant_with_all_pairs_has_them_all(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bottega.data.embedded.stickers.COPIES", 1)
    monkeypatch.setitem(CACHE_NAMES, "stickers-all", "stickers-all-test")
    folder = materialise_embedded("image", "stickers-all")
    colours, patterns = (np.load(folder / f"{name}.npy").tolist() for name in ("colour", "pattern"))
    assert set(zip(colours, patterns, strict=True)) == set(PAIRS)


def test_captions_read_well() -> None:
    assert format_caption("star", "red", "striped", "white") == "a red striped star on a white background"
    assert format_caption("star", "orange") == "an orange star"
    assert format_caption("moon") == "a moon"
    assert "red, striped, star" in list_caption_forms("star", "red", "striped", "sky")


# The same everywhere


def test_the_name_of_the_pictures_holds_their_hash() -> None:
    assert CACHE_NAMES["stickers"] == f"stickers-{content(materialise_embedded('image', 'stickers'))}"


def test_the_name_of_the_people_holds_their_hash() -> None:
    assert f"people-{content(materialise_people())}" == sticker_people.CACHE_NAME


@pytest.mark.slow
def test_the_name_of_all_pictures_holds_their_hash() -> None:
    assert CACHE_NAMES["stickers-all"] == f"stickers-all-{content(materialise_embedded('image', 'stickers-all'))}"


# Recipes


def recipe(kind: str) -> media.MediaRecipe:
    data = {"train": STICKERS, "validation": HeldOut(split=0.05)}
    if kind == "image":
        return media.ImageRecipe.model_validate({"model": {"condition": "text"}, "data": data})
    recipe = autoencode.ImageVaeRecipe if kind == "image_vae" else align.AlignRecipe
    return recipe.model_validate({"data": data})


@pytest.fixture(scope="module")
def prepared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stickers")


@pytest.mark.parametrize("kind", ["image", "image_vae", "align"])
def test_a_recipe_reads_them_with_captions(kind: str, prepared_cache: Path, seen: dict[str, np.ndarray]) -> None:
    ready = prepare_media(recipe(kind), progress=quiet, cache=prepared_cache)
    assert (ready.metadata["bad"], ready.metadata["dropped"]) == (0, {})
    train, validation = (
        open_media_source(recipe(kind), ready, name, is_training=False) for name in ("train", "validation")
    )
    total = len(seen["caption"])
    assert (len(train), len(validation)) == (total - round(0.05 * total), round(0.05 * total))
    assert train.rows(np.arange(4), np.zeros(4, np.int64))["image"].shape == (4, SIDE, SIDE, 3)
    said = [one for name in ("train", "validation") for one in read_captions(ready.table(name))]
    assert sorted(said) == sorted(seen["caption"].tolist())


def test_a_name_that_is_not_there_is_refused(prepared_cache: Path) -> None:
    def asked(recipe: media.MediaRecipe) -> None:
        other = recipe.data.model_copy(update={"train": Source(kind="embedded", path="posters")})
        prepare_media(recipe.model_copy(update={"data": other}), progress=quiet, cache=prepared_cache)

    with pytest.raises(UsageError, match=r"data\.train\.path.*'posters'.*choose from stickers, stickers-all"):
        asked(recipe("image"))
    with pytest.raises(UsageError, match=r"'posters'.*remove path"):
        asked(media.AudioRecipe(data=media.AudioData(train=STICKERS)))


def test_other_data_take_the_place_of_a_named_set() -> None:
    over = check_recipe(["language/stickers"], [("data.train.path", "my.txt", "--data")]).recipe.data.train
    assert (over.kind, over.path) == ("auto", "my.txt")
    plain = check_recipe(["language/stickers"], [("data.train.kind", "embedded", "")]).recipe.data.train
    assert (plain.kind, plain.path) == ("embedded", None)


# People


def test_people_are_of_one_table_and_like_what_is_theirs(people: dict[str, list[dict[str, Any]]]) -> None:
    users = {table: {record["user"] for record in records} for table, records in people.items()}
    assert {table: len(names) for table, names in users.items()} == {"train": 300, "validation": 48, "test": 48}
    assert len(set.union(*users.values())) == 396
    assert "17" in users["validation"]
    assert {table: min(map(int, names)) for table, names in users.items()} == FIRST_USER_ID
    liked = {"train": set(TRAINING_PAIRS), "validation": set(VALIDATION_PAIRS), "test": set(TEST_PAIRS)}
    for table, records in people.items():
        pairs = {(record["truth"]["colour"], record["truth"]["pattern"]) for record in records}
        assert pairs == liked[table]
        each = {(record["user"], record["truth"]["colour"], record["truth"]["pattern"]) for record in records}
        assert len(each) == len(users[table]), "nobody changes taste"


def test_five_of_six_have_the_favourite_and_none_the_wished_shape(people: dict[str, list[dict[str, Any]]]) -> None:
    together = Counter()
    for records in people.values():
        for record in records:
            truth, said = record["truth"], [item["caption"].split() for item in record["history"]]
            assert len(said) == len({item["id"] for item in record["history"]}) == 6
            colours, patterns = (
                [truth["colour"] in words for words in said],
                [truth["pattern"] in words for words in said],
            )
            assert (sum(colours), sum(patterns)) == (5, 5)
            assert not any(truth["shape"] in words for words in said)
            assert record["wish"] == format_caption(truth["shape"])
            assert record["target"]["caption"].startswith(
                format_caption(truth["shape"], truth["colour"], truth["pattern"])
            )
            together[colours.index(False) == patterns.index(False)] += 1
    assert 0.1 < together[True] / together.total() < 0.25, "one in six is odd in both"


def test_training_people_are_shown_no_held_out_pair(people: dict[str, list[dict[str, Any]]]) -> None:
    for record in people["train"]:
        for item in (*record["history"], record["target"]):
            assert not [pair for pair in HELD_OUT_PAIRS if set(pair) <= set(item["caption"].split())]


def test_pictures_of_people_show_what_their_captions_say(people: dict[str, list[dict[str, Any]]]) -> None:
    folder = materialise_people()
    some = [record for records in people.values() for record in records[:12]]
    targets = np.stack([decode_image(folder / record["target"]["image"], channels=3) for record in some])
    found = recognise_stickers(targets)
    assert [
        dict(zip(ATTRIBUTES, names, strict=True)) for names in zip(*(found[a] for a in ATTRIBUTES), strict=True)
    ] == [record["truth"] for record in some]
    for item in some[0]["history"]:
        picture = decode_image(folder / item["image"], channels=3)[None]
        (shape,), (colour,), (pattern,) = (recognise_stickers(picture)[name] for name in ATTRIBUTES)
        assert item["caption"].startswith(format_caption(shape, colour, pattern))


def test_a_picture_is_written_as_it_is(tmp_path: Path) -> None:
    pixels = numpy_generator("png").integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    (tmp_path / "a.png").write_bytes(encode_png(pixels))
    np.testing.assert_array_equal(decode_image(tmp_path / "a.png", channels=3), pixels)


# The ruler


def blurred(pictures: np.ndarray, sigma: float) -> np.ndarray:
    reach = np.arange(-3, 4)
    weights = np.exp(-(reach**2) / (2 * sigma**2))
    padded = np.pad(pictures.astype(np.float64), ((0, 0), (3, 3), (3, 3), (0, 0)), mode="edge")
    for axis in (1, 2):
        padded = sum(
            weight * padded.take(range(i, i + SIDE), axis=axis) for i, weight in enumerate(weights / weights.sum())
        )
    return padded


def pixels(values: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def fresh() -> tuple[list[tuple[str, str, str, str]], np.ndarray]:
    """All pairs, each twice in every shape, on a background that takes turns."""
    names = [
        (shape, *pair, BACKGROUNDS[(number + turn) % 4])
        for turn in (0, 1)
        for number, (shape, pair) in enumerate(product(SHAPES, PAIRS))
    ]
    rng = numpy_generator("fresh stickers")
    return names, np.stack([draw_sticker(*one, rng=rng) for one in names])


def noisy(pictures: np.ndarray, *, sigma: float, rng: np.random.Generator) -> np.ndarray:
    return pictures + rng.normal(0, 255 * sigma, pictures.shape)


@pytest.mark.parametrize(
    ("change", "least"),
    [
        (lambda pictures, rng: pictures, 0.99),
        (lambda pictures, rng: blurred(pictures, 0.7), 0.95),
        (partial(noisy, sigma=0.1), 0.95),
        (lambda pictures, rng: noisy(blurred(pictures, 0.7), sigma=0.1, rng=rng), 0.95),
        (lambda pictures, rng: 0.85 * pictures + 0.15 * pictures[::-1], 0.95),
    ],
    ids=["clean", "blurred", "noisy", "both", "two at once"],
)
def test_the_ruler_reads_what_was_drawn(change: Any, least: float, fresh: tuple[list[Any], np.ndarray]) -> None:
    names, pictures = fresh
    found = recognise_stickers(pixels(change(pictures, rng=numpy_generator("change"))))
    for part, attribute in enumerate(ATTRIBUTES):
        right = np.mean([said == one[part] for said, one in zip(found[attribute], names, strict=True)])
        assert right >= least, attribute


def test_what_shows_no_sticker_is_read_as_none(fresh: tuple[list[Any], np.ndarray]) -> None:
    rng = numpy_generator("no stickers")
    _, pictures = fresh
    shuffled = rng.permuted(pictures[:24].reshape(24, -1, 3), axis=1).reshape(24, SIDE, SIDE, 3)
    for nothing in (
        rng.integers(0, 256, (24, SIDE, SIDE, 3)),
        128 + 60 * rng.normal(size=(24, SIDE, SIDE, 3)),
        128 + 200 * blurred(rng.normal(size=(24, SIDE, SIDE, 3)), 1.5),
        shuffled,
        np.full((2, SIDE, SIDE, 3), 200),
        pictures.mean(axis=0, keepdims=True),
    ):
        found = match_drawings(pixels(nothing))
        assert set(found.shape + found.colour + found.pattern) == {NO_STICKER}
        assert found.explained_variance.max() < 0.2


def test_a_larger_picture_is_read_at_its_own_size(fresh: tuple[list[Any], np.ndarray]) -> None:
    names, pictures = fresh
    large = pictures[:16].repeat(2, axis=1).repeat(2, axis=2)
    found = recognise_stickers(large)
    assert [found["pattern"][i] for i in range(16)] == [one[2] for one in names[:16]]
    assert recognise_stickers(pictures[:0]) == {"shape": [], "colour": [], "pattern": []}
