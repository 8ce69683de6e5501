"""Stickers: training data contains no held-out pair, images match their captions, and the recogniser reads them."""

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


def hash_folder(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = file.relative_to(folder).as_posix().encode()
        digest.update(name + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def quiet(stage: str, done: int, total: int) -> None:
    """Show no progress bar."""


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    return {file.stem: np.load(file) for file in materialise_embedded("image", "stickers").iterdir()}


@pytest.fixture(scope="module")
def people() -> dict[str, list[dict[str, Any]]]:
    folder = materialise_people()
    lines = {table: (folder / f"{table}.jsonl").read_text().splitlines() for table in TABLES}
    return {table: [json.loads(line) for line in table_lines] for table, table_lines in lines.items()}


# Held-out pairs


def test_training_pairs_cover_every_colour_and_pattern() -> None:
    assert len(PAIRS) == 40
    assert len(HELD_OUT_PAIRS) == 10
    assert not set(VALIDATION_PAIRS) & set(TEST_PAIRS)
    for pairs in (VALIDATION_PAIRS, TEST_PAIRS):
        assert len({colour for colour, _ in pairs}) == 5, "a constant colour guess is right at most once in five"
        assert {pattern for _, pattern in pairs} == set(PATTERNS)
    by_colour, by_pattern = (Counter(pair[position] for pair in TRAINING_PAIRS) for position in (0, 1))
    assert min(by_colour[colour] for colour in COLOURS) >= 3
    assert min(by_pattern[pattern] for pattern in PATTERNS) >= 6


def test_embedded_stickers_contain_training_pairs_only(arrays: dict[str, np.ndarray]) -> None:
    shown = set(zip(arrays["colour"].tolist(), arrays["pattern"].tolist(), strict=True))
    assert shown == set(TRAINING_PAIRS)
    assert set(arrays["shape"].tolist()) == set(SHAPES)
    for caption in arrays["caption"].tolist():
        words = set(caption.replace(",", "").split())
        assert not [pair for pair in HELD_OUT_PAIRS if set(pair) <= words], caption


def test_captions_match_the_drawn_attributes(arrays: dict[str, np.ndarray]) -> None:
    rows = zip(*(arrays[name].tolist() for name in ("caption", *ATTRIBUTES, "background")), strict=True)
    forms = Counter()
    for caption, shape, colour, pattern, background in rows:
        caption_forms = list_caption_forms(shape, colour, pattern, background)
        assert caption in caption_forms
        forms[caption_forms.index(caption)] += 1
    assert len(forms) == len(set(list_caption_forms("star", "red", "plain", "sky")))
    assert min(forms.values()) > 0.08 * len(arrays["caption"])


def test_all_pairs_variant_contains_every_pair(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bottega.data.embedded.stickers.NUM_COPIES", 1)
    monkeypatch.setitem(CACHE_NAMES, "stickers-all", "stickers-all-test")
    folder = materialise_embedded("image", "stickers-all")
    colours, patterns = (np.load(folder / f"{name}.npy").tolist() for name in ("colour", "pattern"))
    assert set(zip(colours, patterns, strict=True)) == set(PAIRS)


def test_caption_grammar() -> None:
    assert format_caption("star", "red", "striped", "white") == "a red striped star on a white background"
    assert format_caption("star", "orange") == "an orange star"
    assert format_caption("moon") == "a moon"
    assert "red, striped, star" in list_caption_forms("star", "red", "striped", "sky")


# Content hashes


def test_cache_name_of_stickers_contains_the_content_hash() -> None:
    assert CACHE_NAMES["stickers"] == f"stickers-{hash_folder(materialise_embedded('image', 'stickers'))}"


def test_cache_name_of_people_contains_the_content_hash() -> None:
    assert f"people-{hash_folder(materialise_people())}" == sticker_people.CACHE_NAME


@pytest.mark.slow
def test_cache_name_of_all_stickers_contains_the_content_hash() -> None:
    assert CACHE_NAMES["stickers-all"] == f"stickers-all-{hash_folder(materialise_embedded('image', 'stickers-all'))}"


# Recipes


def build_recipe(kind: str) -> media.MediaRecipe:
    data = {"train": STICKERS, "validation": HeldOut(split=0.05)}
    if kind == "image":
        return media.ImageRecipe.model_validate({"model": {"condition": "text"}, "data": data})
    recipe = autoencode.ImageVaeRecipe if kind == "image_vae" else align.AlignRecipe
    return recipe.model_validate({"data": data})


@pytest.fixture(scope="module")
def prepared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stickers")


@pytest.mark.parametrize("kind", ["image", "image_vae", "align"])
def test_recipe_reads_stickers_with_captions(kind: str, prepared_cache: Path, arrays: dict[str, np.ndarray]) -> None:
    prepared = prepare_media(build_recipe(kind), progress=quiet, cache=prepared_cache)
    assert (prepared.metadata["bad"], prepared.metadata["dropped"]) == (0, {})
    train, validation = (
        open_media_source(build_recipe(kind), prepared, name, is_training=False) for name in ("train", "validation")
    )
    total = len(arrays["caption"])
    assert (len(train), len(validation)) == (total - round(0.05 * total), round(0.05 * total))
    assert train.rows(np.arange(4), np.zeros(4, np.int64))["image"].shape == (4, SIDE, SIDE, 3)
    captions = [caption for name in ("train", "validation") for caption in read_captions(prepared.table(name))]
    assert sorted(captions) == sorted(arrays["caption"].tolist())


def test_unknown_dataset_name_is_refused(prepared_cache: Path) -> None:
    def prepare_unknown_path(recipe: media.MediaRecipe) -> None:
        other = recipe.data.model_copy(update={"train": Source(kind="embedded", path="posters")})
        prepare_media(recipe.model_copy(update={"data": other}), progress=quiet, cache=prepared_cache)

    with pytest.raises(UsageError, match=r"data\.train\.path.*'posters'.*choose from stickers, stickers-all"):
        prepare_unknown_path(build_recipe("image"))
    with pytest.raises(UsageError, match=r"'posters'.*remove path"):
        prepare_unknown_path(media.AudioRecipe(data=media.AudioData(train=STICKERS)))


def test_data_setting_replaces_the_embedded_dataset() -> None:
    over = check_recipe(["language/stickers"], [("data.train.path", "my.txt", "--data")]).recipe.data.train
    assert (over.kind, over.path) == ("auto", "my.txt")
    plain = check_recipe(["language/stickers"], [("data.train.kind", "embedded", "")]).recipe.data.train
    assert (plain.kind, plain.path) == ("embedded", None)


# People


def test_every_user_is_in_one_table_and_likes_one_pair(people: dict[str, list[dict[str, Any]]]) -> None:
    users = {table: {record["user"] for record in records} for table, records in people.items()}
    assert {table: len(names) for table, names in users.items()} == {"train": 300, "validation": 48, "test": 48}
    assert len(set.union(*users.values())) == 396
    assert "17" in users["validation"]
    assert {table: min(map(int, names)) for table, names in users.items()} == FIRST_USER_ID
    liked = {"train": set(TRAINING_PAIRS), "validation": set(VALIDATION_PAIRS), "test": set(TEST_PAIRS)}
    for table, records in people.items():
        pairs = {(record["truth"]["colour"], record["truth"]["pattern"]) for record in records}
        assert pairs == liked[table]
        users_and_pairs = {
            (record["user"], record["truth"]["colour"], record["truth"]["pattern"]) for record in records
        }
        assert len(users_and_pairs) == len(users[table]), "a user always likes the same pair"


def test_five_of_six_history_items_have_the_favourite_and_none_the_requested_shape(
    people: dict[str, list[dict[str, Any]]],
) -> None:
    is_same_exception = Counter()
    for records in people.values():
        for record in records:
            truth, caption_words = record["truth"], [item["caption"].split() for item in record["history"]]
            assert len(caption_words) == len({item["id"] for item in record["history"]}) == 6
            colours, patterns = (
                [truth["colour"] in words for words in caption_words],
                [truth["pattern"] in words for words in caption_words],
            )
            assert (sum(colours), sum(patterns)) == (5, 5)
            assert not any(truth["shape"] in words for words in caption_words)
            assert record["wish"] == format_caption(truth["shape"])
            assert record["target"]["caption"].startswith(
                format_caption(truth["shape"], truth["colour"], truth["pattern"])
            )
            is_same_exception[colours.index(False) == patterns.index(False)] += 1
    assert 0.1 < is_same_exception[True] / is_same_exception.total() < 0.25, (
        "in one record of six, the same item is the exception in colour and in pattern"
    )


def test_training_users_have_no_held_out_pair(people: dict[str, list[dict[str, Any]]]) -> None:
    for record in people["train"]:
        for item in (*record["history"], record["target"]):
            assert not [pair for pair in HELD_OUT_PAIRS if set(pair) <= set(item["caption"].split())]


def test_images_of_people_match_their_captions(people: dict[str, list[dict[str, Any]]]) -> None:
    folder = materialise_people()
    sampled = [record for records in people.values() for record in records[:12]]
    targets = np.stack([decode_image(folder / record["target"]["image"], channels=3) for record in sampled])
    recognised = recognise_stickers(targets)
    assert [
        dict(zip(ATTRIBUTES, names, strict=True)) for names in zip(*(recognised[a] for a in ATTRIBUTES), strict=True)
    ] == [record["truth"] for record in sampled]
    for item in sampled[0]["history"]:
        image = decode_image(folder / item["image"], channels=3)[None]
        (shape,), (colour,), (pattern,) = (recognise_stickers(image)[name] for name in ATTRIBUTES)
        assert item["caption"].startswith(format_caption(shape, colour, pattern))


def test_png_encoding_is_lossless(tmp_path: Path) -> None:
    pixels = numpy_generator("png").integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    (tmp_path / "a.png").write_bytes(encode_png(pixels))
    np.testing.assert_array_equal(decode_image(tmp_path / "a.png", channels=3), pixels)


# Recognition


def blur_images(images: np.ndarray, sigma: float) -> np.ndarray:
    reach = np.arange(-3, 4)
    weights = np.exp(-(reach**2) / (2 * sigma**2))
    padded = np.pad(images.astype(np.float64), ((0, 0), (3, 3), (3, 3), (0, 0)), mode="edge")
    for axis in (1, 2):
        padded = sum(
            weight * padded.take(range(i, i + SIDE), axis=axis) for i, weight in enumerate(weights / weights.sum())
        )
    return padded


def to_pixels(values: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def drawn_stickers() -> tuple[list[tuple[str, str, str, str]], np.ndarray]:
    """All pairs, each twice in every shape, on alternating backgrounds."""
    names = [
        (shape, *pair, BACKGROUNDS[(number + turn) % 4])
        for turn in (0, 1)
        for number, (shape, pair) in enumerate(product(SHAPES, PAIRS))
    ]
    rng = numpy_generator("fresh stickers")
    return names, np.stack([draw_sticker(*attributes, rng=rng) for attributes in names])


def add_noise(images: np.ndarray, *, sigma: float, rng: np.random.Generator) -> np.ndarray:
    return images + rng.normal(0, 255 * sigma, images.shape)


@pytest.mark.parametrize(
    ("change", "min_accuracy"),
    [
        (lambda images, rng: images, 0.99),
        (lambda images, rng: blur_images(images, 0.7), 0.95),
        (partial(add_noise, sigma=0.1), 0.95),
        (lambda images, rng: add_noise(blur_images(images, 0.7), sigma=0.1, rng=rng), 0.95),
        (lambda images, rng: 0.85 * images + 0.15 * images[::-1], 0.95),
    ],
    ids=["clean", "blurred", "noisy", "blurred and noisy", "two at once"],
)
def test_recogniser_reads_the_drawn_attributes(
    change: Any, min_accuracy: float, drawn_stickers: tuple[list[Any], np.ndarray]
) -> None:
    names, images = drawn_stickers
    recognised = recognise_stickers(to_pixels(change(images, rng=numpy_generator("change"))))
    for position, attribute in enumerate(ATTRIBUTES):
        accuracy = np.mean(
            [predicted == expected[position] for predicted, expected in zip(recognised[attribute], names, strict=True)]
        )
        assert accuracy >= min_accuracy, attribute


def test_image_without_a_sticker_is_recognised_as_none(drawn_stickers: tuple[list[Any], np.ndarray]) -> None:
    rng = numpy_generator("no stickers")
    _, images = drawn_stickers
    shuffled = rng.permuted(images[:24].reshape(24, -1, 3), axis=1).reshape(24, SIDE, SIDE, 3)
    for batch in (
        rng.integers(0, 256, (24, SIDE, SIDE, 3)),
        128 + 60 * rng.normal(size=(24, SIDE, SIDE, 3)),
        128 + 200 * blur_images(rng.normal(size=(24, SIDE, SIDE, 3)), 1.5),
        shuffled,
        np.full((2, SIDE, SIDE, 3), 200),
        images.mean(axis=0, keepdims=True),
    ):
        matches = match_drawings(to_pixels(batch))
        assert set(matches.shape + matches.colour + matches.pattern) == {NO_STICKER}
        assert matches.explained_variance.max() < 0.2


def test_recogniser_accepts_larger_images(drawn_stickers: tuple[list[Any], np.ndarray]) -> None:
    names, images = drawn_stickers
    large = images[:16].repeat(2, axis=1).repeat(2, axis=2)
    recognised = recognise_stickers(large)
    assert [recognised["pattern"][i] for i in range(16)] == [attributes[2] for attributes in names[:16]]
    assert recognise_stickers(images[:0]) == {"shape": [], "colour": [], "pattern": []}
