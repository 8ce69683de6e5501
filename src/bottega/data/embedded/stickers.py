"""Stickers drawn by code: a shape in one colour and pattern on a background, 32 x 32 pixels, with captions.

Users like a colour and a pattern. Ten of the forty pairs are held out: the dataset "stickers" never shows or names them,
so a model that draws a held-out pair has generalised.

Only + - * / and square roots are used, which are exact to the last bit on every processor. u, v: right and down from the
centre of a shape, in units of its radius. depth: distance inside the shape, in the same unit; negative is outside.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np

from bottega.core.noise import numpy_generator

SIDE = 32
# A pixel is the mean of this many sample points per side.
POINTS_PER_SIDE = 4
# An autoencoder with one latent per 4 x 4 pixels loses details below three pixels; stripes, dots and frames are larger.
RADIUS_RANGE = (10.5, 13.0)
MAX_SHIFT = 2.0
"""Largest distance of a shape from the centre of the image, in pixels along each axis."""

SHAPES = ("circle", "square", "triangle", "star", "heart", "cross", "diamond", "moon")
COLOURS = ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink")
PATTERNS = ("plain", "striped", "dotted", "checked", "framed")
BACKGROUNDS = ("white", "grey", "beige", "sky")
RGB = {
    "red": (220, 35, 35),
    "orange": (250, 135, 20),
    "yellow": (245, 220, 30),
    "green": (35, 155, 50),
    "cyan": (30, 200, 205),
    "blue": (35, 70, 215),
    "purple": (130, 40, 175),
    "pink": (250, 120, 190),
    "white": (255, 255, 255),
    "grey": (175, 175, 180),
    "beige": (240, 220, 185),
    "sky": (190, 220, 250),
}
# One ink for all colours, so that the look of a pattern does not depend on the colour.
INK = (40, 40, 48)

Pair = tuple[str, str]
"""Colour, pattern."""
PAIRS: tuple[Pair, ...] = tuple(product(COLOURS, PATTERNS))
VALIDATION_PAIRS: tuple[Pair, ...] = (
    ("red", "striped"),
    ("yellow", "dotted"),
    ("cyan", "checked"),
    ("purple", "framed"),
    ("pink", "plain"),
)
TEST_PAIRS: tuple[Pair, ...] = (
    ("orange", "dotted"),
    ("green", "striped"),
    ("blue", "checked"),
    ("red", "framed"),
    ("cyan", "plain"),
)
HELD_OUT_PAIRS: frozenset[Pair] = frozenset(VALIDATION_PAIRS + TEST_PAIRS)
TRAINING_PAIRS: tuple[Pair, ...] = tuple(pair for pair in PAIRS if pair not in HELD_OUT_PAIRS)

# Images per shape, pair and background.
NUM_COPIES = 10


def build_fields(pairs: tuple[Pair, ...] = TRAINING_PAIRS) -> dict[str, np.ndarray]:
    """Return the fields image, uint8 `(images, 32, 32, 3)`, caption and attributes, in random order."""
    stickers = [(*attributes, copy) for copy in range(NUM_COPIES) for attributes in product(SHAPES, pairs, BACKGROUNDS)]
    order = numpy_generator("stickers", len(stickers)).permutation(len(stickers))
    stickers = [stickers[number] for number in order]
    images = np.empty((len(stickers), SIDE, SIDE, 3), np.uint8)
    captions = []
    for number, (shape, (colour, pattern), background, copy) in enumerate(stickers):
        rng = numpy_generator("sticker", shape, colour, pattern, background, copy)
        images[number] = draw_sticker(shape, colour, pattern, background, rng=rng)
        forms = list_caption_forms(shape, colour, pattern, background)
        captions.append(forms[int(rng.integers(len(forms)))])
    text_fields = {
        "caption": captions,
        "shape": [shape for shape, _, _, _ in stickers],
        "colour": [pair[0] for _, pair, _, _ in stickers],
        "pattern": [pair[1] for _, pair, _, _ in stickers],
        "background": [background for _, _, background, _ in stickers],
    }
    return {"image": images, **{name: np.array(values) for name, values in text_fields.items()}}


def format_caption(
    shape: str, colour: str | None = None, pattern: str | None = None, background: str | None = None
) -> str:
    """Return a caption such as "a red striped star on a white background", without attributes that are None."""
    words = " ".join(word for word in (colour, pattern, shape) if word)
    article = "an" if words[0] in "aeiou" else "a"
    return f"{article} {words} on a {background} background" if background else f"{article} {words}"


def format_keywords(*words: str | None) -> str:
    """Return keywords such as "red, striped"."""
    return ", ".join(word for word in words if word)


def list_caption_forms(shape: str, colour: str, pattern: str, background: str) -> tuple[str, ...]:
    """Return all captions of an image, also partial ones and keywords, which a generator must understand too."""
    return (
        format_caption(shape, colour, pattern, background),
        format_caption(shape, colour, pattern, background),
        format_caption(shape, colour, pattern),
        format_caption(shape, colour),
        format_caption(shape, None, pattern),
        format_caption(shape),
        format_keywords(colour, pattern, shape),
        format_keywords(colour, pattern, shape),
        format_keywords(colour, pattern),
        format_keywords(shape),
    )


def draw_sticker(shape: str, colour: str, pattern: str, background: str, *, rng: np.random.Generator) -> np.ndarray:
    """Return a sticker, uint8 (32, 32, 3), at a position and size drawn from `rng`."""
    radius = RADIUS_RANGE[0] + (RADIUS_RANGE[1] - RADIUS_RANGE[0]) * rng.random()
    center_x, center_y = SIDE / 2 + MAX_SHIFT * (2 * rng.random(2) - 1)
    return render_sticker(shape, colour, pattern, background, center_x=center_x, center_y=center_y, radius=radius)


def render_sticker(
    shape: str, colour: str, pattern: str, background: str, *, center_x: float, center_y: float, radius: float
) -> np.ndarray:
    """Return a sticker, uint8 (32, 32, 3), at a given centre and radius in pixels."""
    painted, inked = compute_coverage(shape, pattern, center_x=center_x, center_y=center_y, radius=radius)
    counts = np.stack((painted, inked, POINTS_PER_SIDE**2 - painted - inked), axis=2)
    total = counts @ np.array((RGB[colour], INK, RGB[background]))
    return ((total + POINTS_PER_SIDE**2 // 2) // POINTS_PER_SIDE**2).astype(np.uint8)


def compute_coverage(
    shape: str, pattern: str, *, center_x: float, center_y: float, radius: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return how many of the 16 points of each pixel show the colour, and how many the ink, both (32, 32)."""
    points = (np.arange(SIDE * POINTS_PER_SIDE) + 0.5) / POINTS_PER_SIDE
    u, v = ((points - center_x) / radius)[None, :], ((points - center_y) / radius)[:, None]
    depth = DEPTH_FUNCTIONS[shape](u, v)
    inked = INK_FUNCTIONS[pattern](u, v, depth)
    return _count_points((depth > 0) & ~inked), _count_points((depth > 0) & inked)


def _count_points(points: np.ndarray) -> np.ndarray:
    """Return how many points of each pixel are set, (32, 32)."""
    return points.reshape(SIDE, POINTS_PER_SIDE, SIDE, POINTS_PER_SIDE).sum(axis=(1, 3))


def _compute_distance(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.sqrt(u * u + v * v)


def _circle(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return 0.95 - _compute_distance(u, v)


def _square(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return 0.84 - np.maximum(np.abs(u), np.abs(v))


def _triangle(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    # From the tip (0, -1) to (1.05, 0.85).
    return np.minimum(0.85 - v, (1.05 * (v + 1) - 1.85 * np.abs(u)) / 2.1272)


def _star(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Five tips at 1.15, and the corners between them at half of that: the nearest tip decides."""
    tips = ((0.0, -1.0), (0.951056516, -0.309016994), (0.587785252, 0.809016994))
    along = np.maximum.reduce([np.abs(u) * right + v * down for right, down in tips])
    across = np.sqrt(np.maximum(0, u * u + v * v - along * along))
    # Normal of the edge from (1.15, 0) to 0.575 (cos 36, sin 36).
    return -((along - 1.15) * 0.442385 + across * 0.896826)


def _heart(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """A square on its tip, and a circle on each of its upper sides."""
    shifted_v = v - 0.08
    tip = (0.8 - np.abs(u) - np.abs(shifted_v)) / 1.41421356
    return np.maximum(tip, 0.5656854 - _compute_distance(np.abs(u) - 0.4, shifted_v + 0.4))


def _cross(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    u, v = np.abs(u), np.abs(v)
    return np.maximum(np.minimum(0.4 - u, 0.98 - v), np.minimum(0.98 - u, 0.4 - v))


def _diamond(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return (1.1 - np.abs(u) - np.abs(v)) / 1.41421356


def _moon(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.minimum(1.0 - _compute_distance(u, v), _compute_distance(u - 0.55, v + 0.25) - 0.62)


DEPTH_FUNCTIONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "heart": _heart,
    "cross": _cross,
    "diamond": _diamond,
    "moon": _moon,
}


def _is_odd(position: np.ndarray, width: float) -> np.ndarray:
    return np.floor(position / width) % 2 == 1


def _plain(u: np.ndarray, v: np.ndarray, depth: np.ndarray) -> np.ndarray:
    return np.zeros(depth.shape, bool)


def _striped(u: np.ndarray, v: np.ndarray, depth: np.ndarray) -> np.ndarray:
    return np.broadcast_to(_is_odd(v + 0.16, 0.32), depth.shape)


def _dotted(u: np.ndarray, v: np.ndarray, depth: np.ndarray) -> np.ndarray:
    width = 0.62
    return _compute_distance(u - width * np.floor(u / width + 0.5), v - width * np.floor(v / width + 0.5)) < 0.2


def _checked(u: np.ndarray, v: np.ndarray, depth: np.ndarray) -> np.ndarray:
    return _is_odd(u, 0.4) ^ _is_odd(v, 0.4)


def _framed(u: np.ndarray, v: np.ndarray, depth: np.ndarray) -> np.ndarray:
    return depth < 0.24


INK_FUNCTIONS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "plain": _plain,
    "striped": _striped,
    "dotted": _dotted,
    "checked": _checked,
    "framed": _framed,
}
