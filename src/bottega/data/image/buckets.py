"""Aspect-ratio buckets: a few shapes with about the same number of pixels, so that images need not become squares."""

from __future__ import annotations

import math

MULTIPLE = 8
MIN_ASPECT = 0.5
MAX_ASPECT = 2.0


def compute_bucket_shapes(count: int, image_size: int, *, multiple: int = MULTIPLE) -> tuple[tuple[int, int], ...]:
    """Return up to `count` shapes (height, width) of about image_size^2 pixels, from 1:2 to 2:1 in geometric steps.

    Sides are rounded to multiples of `multiple`, so that patches and latents fit; duplicates are removed.
    """
    shapes: dict[tuple[int, int], None] = {}
    for number in range(count):
        fraction = number / (count - 1) if count > 1 else 0.5
        aspect = MIN_ASPECT * (MAX_ASPECT / MIN_ASPECT) ** fraction
        height, width = image_size / math.sqrt(aspect), image_size * math.sqrt(aspect)
        shapes[_round_to_multiple(height, multiple), _round_to_multiple(width, multiple)] = None
    return tuple(shapes)


def assign_bucket(height: int, width: int, shapes: tuple[tuple[int, int], ...]) -> int:
    """Return the index of the shape with the nearest aspect ratio; the first one if several are equally near."""
    aspect = math.log(width / height)
    return min(range(len(shapes)), key=lambda number: abs(math.log(shapes[number][1] / shapes[number][0]) - aspect))


def _round_to_multiple(side: float, multiple: int) -> int:
    return max(1, round(side / multiple)) * multiple
