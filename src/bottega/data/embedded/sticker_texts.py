"""Synthetic texts that teach a small model to summarise liked stickers and to name the object of a request.

The texts have the format of the prompts in the recipe `personalize`; their histories differ from those of its users.
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
from bottega.data.tables.cache import get_or_build
from bottega.storage.cache_folder import default_cache

# Names of the cache folders; each ends with a hash of the content, which a test checks.
CACHE_NAMES = {
    "stickers": "sticker-texts-b18402122bb9b53a",
    "stickers-all": "sticker-texts-all-5fe535e0929354e7",
}
# Number of texts of each kind.
NUM_HISTORIES, NUM_WISHES, NUM_CAPTIONS = 13_000, 7_000, 1_000
# Fraction of histories with a favourite shape: without them, only requests would teach the model to predict a shape.
FAVOURITE_SHAPE_FRACTION = 0.5


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
    texts = [_build_history(pairs, rng) for _ in range(NUM_HISTORIES)]
    texts += [_build_wishes(pairs, rng) for _ in range(NUM_WISHES)]
    texts += [f"{_choose_caption(pairs, rng)}\n" for _ in range(NUM_CAPTIONS)]
    return [texts[number] for number in rng.permutation(len(texts))]


def format_preference_text(liked: list[str], answer: str) -> str:
    """Return the text of a history: captions, and what they have in common."""
    items = "".join(f"{caption}\n" for caption in liked)
    return f"liked:\n{items}likes: {answer}\n"


def format_target_text(wish: str, answer: str) -> str:
    """Return the text of a request and the keywords of its object."""
    return f"wish: {wish}\nshows: {answer}\n"


def _build_history(pairs: tuple[Pair, ...], rng: np.random.Generator) -> str:
    """Return a random history: half have the length of a user's, and half have one exception, as users have."""
    favourite = _choose(pairs, rng)
    count = HISTORY_LENGTH if rng.random() < 0.5 else int(rng.integers(3, 8))
    num_exceptions = 1 if rng.random() < 0.5 else int(rng.integers(0, (count + 2) // 3))
    liked_pairs = sample_liked_pairs(favourite, count=count, num_exceptions=num_exceptions, rng=rng)
    favourite_shape = _choose(SHAPES, rng) if rng.random() < FAVOURITE_SHAPE_FRACTION else None
    shapes = [favourite_shape or _choose(SHAPES, rng) for _ in liked_pairs]
    if favourite_shape and num_exceptions:
        shapes[int(rng.integers(count))] = _choose(SHAPES, rng)
    liked = [
        format_caption(shape, *pair, _choose(BACKGROUNDS, rng)) for shape, pair in zip(shapes, liked_pairs, strict=True)
    ]
    # The image prompt of `personalize` is a wish followed by a history.
    wish = f"wish: {format_caption(_choose(SHAPES, rng))}\n" if rng.random() < 0.25 else ""
    return wish + format_preference_text(liked, format_keywords(*favourite, favourite_shape))


def _build_wishes(pairs: tuple[Pair, ...], rng: np.random.Generator) -> str:
    count = int(rng.integers(1, 5))
    return "".join(_build_wish(_choose(SHAPES, rng), _choose(pairs, rng), rng) for _ in range(count))


def _build_wish(shape: str, pair: Pair, rng: np.random.Generator) -> str:
    colour, pattern = pair
    attributes = [(None, None), (None, None), (colour, None), (None, pattern), (colour, pattern)][int(rng.integers(5))]
    background = _choose((None, None, *BACKGROUNDS), rng)
    return format_target_text(format_caption(shape, *attributes, background), format_keywords(*attributes, shape))


def _choose_caption(pairs: tuple[Pair, ...], rng: np.random.Generator) -> str:
    shape, (colour, pattern), background = _choose(SHAPES, rng), _choose(pairs, rng), _choose(BACKGROUNDS, rng)
    return str(_choose(list_caption_forms(shape, colour, pattern, background), rng))


def _choose(options: Any, rng: np.random.Generator) -> Any:
    return options[int(rng.integers(len(options)))]
