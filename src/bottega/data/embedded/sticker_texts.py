"""Synthetic texts that teach a small model to summarise liked stickers and to name the object of a request.

The forms are those that the recipe `personalize` asks in; the histories are other ones than those of its people.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from bottega.core.noise import numpy_generator
from bottega.data.embedded import check_embedded_name
from bottega.data.embedded.sticker_people import HISTORY_LENGTH, sample_liked_pairs
from bottega.data.embedded.stickers import (
    BACKGROUNDS,
    PAIRS,
    SHAPES,
    TRAINING_PAIRS,
    Pair,
    format_caption,
    format_keywords,
    list_caption_forms,
)
from bottega.data.tables.cache import default_cache, get_or_build

# By the hash of what is written (a test compares), as for the others.
CACHE_NAMES = {
    "stickers": "sticker-texts-b18402122bb9b53a",
    "stickers-all": "sticker-texts-all-5fe535e0929354e7",
}
# Of each, in all.
HISTORIES, WISHES, CAPTIONS = 13_000, 7_000, 1_000
# Some like a shape, too: else no shape could be foreseen in any history, and wishes alone would have to teach to repeat one.
SHAPE_LOVERS = 0.5


def materialise_texts(name: str) -> Path:
    """Write the texts to the cache and return a JSON lines file with the field `text`."""
    check_embedded_name(name, *CACHE_NAMES)

    def build(folder: Path) -> None:
        lines = (json.dumps({"text": text}) for text in build_texts(TRAINING_PAIRS if name == "stickers" else PAIRS))
        (folder / "texts.jsonl").write_text("".join(f"{line}\n" for line in lines))

    return get_or_build(default_cache() / "embedded", CACHE_NAMES[name], build) / "texts.jsonl"


def build_texts(pairs: tuple[Pair, ...] = TRAINING_PAIRS) -> list[str]:
    """Return all texts in random order."""
    rng = numpy_generator("sticker texts", len(pairs))
    found = [_history(pairs, rng) for _ in range(HISTORIES)]
    found += [_wishes(pairs, rng) for _ in range(WISHES)]
    found += [f"{_caption(pairs, rng)}\n" for _ in range(CAPTIONS)]
    return [found[number] for number in rng.permutation(len(found))]


def format_preference_text(liked: list[str], answer: str) -> str:
    """Return the text of a history: captions, and what they have in common."""
    items = "".join(f"{said}\n" for said in liked)
    return f"liked:\n{items}likes: {answer}\n"


def format_target_text(wish: str, answer: str) -> str:
    return f"wish: {wish}\nshows: {answer}\n"


def _history(pairs: tuple[Pair, ...], rng: np.random.Generator) -> str:
    """As people's are, or shorter or longer, or more or less of one mind."""
    favourite = _one(pairs, rng)
    count = HISTORY_LENGTH if rng.random() < 0.5 else int(rng.integers(3, 8))
    odd = 1 if rng.random() < 0.5 else int(rng.integers(0, (count + 2) // 3))
    shown = sample_liked_pairs(favourite, count=count, num_odd=odd, rng=rng)
    loved = _one(SHAPES, rng) if rng.random() < SHAPE_LOVERS else None
    shapes = [loved or _one(SHAPES, rng) for _ in shown]
    if loved and odd:
        shapes[int(rng.integers(count))] = _one(SHAPES, rng)
    liked = [format_caption(shape, *pair, _one(BACKGROUNDS, rng)) for shape, pair in zip(shapes, shown, strict=True)]
    # Image tokens follow a wish and a history, in this order.
    wish = f"wish: {format_caption(_one(SHAPES, rng))}\n" if rng.random() < 0.25 else ""
    return wish + format_preference_text(liked, format_keywords(*favourite, loved))


def _wishes(pairs: tuple[Pair, ...], rng: np.random.Generator) -> str:
    count = int(rng.integers(1, 5))
    return "".join(_wish(_one(SHAPES, rng), _one(pairs, rng), rng) for _ in range(count))


def _wish(shape: str, pair: Pair, rng: np.random.Generator) -> str:
    colour, pattern = pair
    said = [(None, None), (None, None), (colour, None), (None, pattern), (colour, pattern)][int(rng.integers(5))]
    background = _one((None, None, *BACKGROUNDS), rng)
    return format_target_text(format_caption(shape, *said, background), format_keywords(*said, shape))


def _caption(pairs: tuple[Pair, ...], rng: np.random.Generator) -> str:
    shape, (colour, pattern), background = _one(SHAPES, rng), _one(pairs, rng), _one(BACKGROUNDS, rng)
    return str(_one(list_caption_forms(shape, colour, pattern, background), rng))


def _one(things: Any, rng: np.random.Generator) -> Any:
    return things[int(rng.integers(len(things)))]
