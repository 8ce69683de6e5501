"""Synthetic users who like stickers: their histories, requests and targets, with known favourite colours and patterns.

Each user has a favourite colour and a favourite pattern: five of six liked stickers have the colour, and five have the
pattern. The request names a shape that none of the six has. The favourites of training users are training pairs, those of
all other users are held-out pairs.
"""

from __future__ import annotations

import json
import zlib
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bottega.core.noise import numpy_generator
from bottega.data.embedded.stickers import (
    BACKGROUNDS,
    PAIRS,
    SHAPES,
    TEST_PAIRS,
    TRAINING_PAIRS,
    VALIDATION_PAIRS,
    Pair,
    draw_sticker,
    format_caption,
)
from bottega.data.tables.cache import get_or_build
from bottega.storage.cache_folder import default_cache

# The name ends with a hash of the content, which a test checks.
CACHE_NAME = "people-20476f5a93bb2f07"
TABLES = ("train", "validation", "test")
HISTORY_LENGTH = 6
NUM_TRAINING_USERS, NUM_HELD_OUT_USERS = 300, 48
# Records of each training user, each with a different history and request.
RECORDS_PER_USER = 4
FIRST_USER_ID = {"train": 1000, "validation": 0, "test": 100}
# Images per shape, pair and background in the catalogue of histories and targets.
NUM_COPIES = 2

Sticker = tuple[str, str, str, str]
"""Shape, colour, pattern, background."""


def materialise_people() -> Path:
    """Write the users to the cache and return the folder with train.jsonl, validation.jsonl, test.jsonl and pictures/."""

    def build(folder: Path) -> None:
        pictures = folder / "people" / "pictures"
        pictures.mkdir(parents=True, exist_ok=True)
        for number, (sticker, copy) in enumerate(product(CATALOGUE, range(NUM_COPIES))):
            pixels = draw_sticker(*sticker, rng=numpy_generator("catalogue", *sticker, copy))
            (pictures / f"{number:04d}.png").write_bytes(encode_png(pixels))
        for table in TABLES:
            lines = (json.dumps(record) for record in build_records(table))
            (folder / "people" / f"{table}.jsonl").write_text("".join(f"{line}\n" for line in lines))

    return get_or_build(default_cache() / "embedded", CACHE_NAME, build) / "people"


CATALOGUE: tuple[Sticker, ...] = tuple(
    (shape, colour, pattern, background) for (colour, pattern), shape, background in product(PAIRS, SHAPES, BACKGROUNDS)
)
CATALOGUE_INDEX = {sticker: number for number, sticker in enumerate(CATALOGUE)}


def build_records(table: str) -> list[dict[str, Any]]:
    """Return the records of all users of a table."""
    pairs = {"train": TRAINING_PAIRS, "validation": VALIDATION_PAIRS, "test": TEST_PAIRS}[table]
    num_users, records_per_user = (
        (NUM_TRAINING_USERS, RECORDS_PER_USER) if table == "train" else (NUM_HELD_OUT_USERS, 1)
    )
    return [
        _build_record(
            f"{FIRST_USER_ID[table] + number}",
            pairs[number % len(pairs)],
            rng=numpy_generator("people", table, number, record),
        )
        for number in range(num_users)
        for record in range(records_per_user)
    ]


def _build_record(user: str, pair: Pair, *, rng: np.random.Generator) -> dict[str, Any]:
    requested_shape = _choose(SHAPES, rng)
    # No sticker is liked twice.
    candidates = list(product([shape for shape in SHAPES if shape != requested_shape], BACKGROUNDS))
    shapes_and_backgrounds = [candidates[number] for number in rng.permutation(len(candidates))[:HISTORY_LENGTH]]
    pairs = sample_liked_pairs(pair, rng=rng)
    liked = [
        (shape, *liked_pair, background)
        for (shape, background), liked_pair in zip(shapes_and_backgrounds, pairs, strict=True)
    ]
    colour, pattern = pair
    return {
        "user": user,
        "history": [_build_item(sticker, rng) for sticker in liked],
        "target": _build_item((requested_shape, colour, pattern, _choose(BACKGROUNDS, rng)), rng),
        "wish": format_caption(requested_shape),
        "truth": {"shape": requested_shape, "colour": colour, "pattern": pattern},
    }


def sample_liked_pairs(
    favourite: Pair, *, count: int = HISTORY_LENGTH, num_exceptions: int = 1, rng: np.random.Generator
) -> list[Pair]:
    """Return (colour, pattern) of liked stickers: the favourite, except for `num_exceptions` random colours and patterns.

    All other pairs are training pairs, so only the favourite can be a held-out pair.
    """
    colours, patterns = ([favourite[attribute]] * count for attribute in (0, 1))
    for number in rng.permutation(count)[:num_exceptions]:
        colours[number] = ""
    for number in rng.permutation(count)[:num_exceptions]:
        patterns[number] = ""
    pairs = []
    for colour, pattern in zip(colours, patterns, strict=True):
        matching_pairs = [
            pair
            for pair in TRAINING_PAIRS
            if (pair[0] == colour or (not colour and pair[0] != favourite[0]))
            and (pair[1] == pattern or (not pattern and pair[1] != favourite[1]))
        ]
        pairs.append(favourite if colour and pattern else _choose(matching_pairs, rng))
    return pairs


def _build_item(sticker: Sticker, rng: np.random.Generator) -> dict[str, str]:
    shape, colour, pattern, background = sticker
    item_id = f"{CATALOGUE_INDEX[sticker] * NUM_COPIES + int(rng.integers(NUM_COPIES)):04d}"
    caption = format_caption(shape, colour, pattern, background)
    return {"id": item_id, "caption": caption, "image": f"pictures/{item_id}.png"}


def _choose(options: Any, rng: np.random.Generator) -> Any:
    return options[int(rng.integers(len(options)))]


def encode_png(pixels: np.ndarray) -> bytes:
    """Return an uncompressed PNG: compressed bytes differ between releases of zlib, and so would the fingerprint."""
    height, width, _ = pixels.shape
    rows = np.concatenate((np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)), axis=1).tobytes()
    assert len(rows) < 1 << 16, "a stored deflate block holds less than 64 KiB"
    size = len(rows).to_bytes(2, "little")
    deflate_block = b"\x01" + size + bytes(255 - byte for byte in size) + rows
    zlib_stream = b"\x78\x01" + deflate_block + zlib.adler32(rows).to_bytes(4, "big")
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes((8, 2, 0, 0, 0))
    chunks = ((b"IHDR", header), (b"IDAT", zlib_stream), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        len(content).to_bytes(4, "big") + name + content + zlib.crc32(name + content).to_bytes(4, "big")
        for name, content in chunks
    )
