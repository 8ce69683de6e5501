"""Aspect buckets: a few shapes of about as many pixels, so that wide and tall images need not become squares."""

from __future__ import annotations

import math

MULTIPLE = 8
NARROWEST = 0.5
WIDEST = 2.0


def compute_bucket_shapes(count: int, image_size: int, *, multiple: int = MULTIPLE) -> tuple[tuple[int, int], ...]:
    """Up to `count` shapes (h, w) of about image_size^2 pixels, from 1:2 to 2:1 in equal ratios, wide ones last.

    Sides are multiples of `multiple`, so that patches and latents fit; shapes that become equal by it are one.
    """
    found: dict[tuple[int, int], None] = {}
    for number in range(count):
        share = number / (count - 1) if count > 1 else 0.5
        aspect = NARROWEST * (WIDEST / NARROWEST) ** share
        height, width = image_size / math.sqrt(aspect), image_size * math.sqrt(aspect)
        found[_whole(height, multiple), _whole(width, multiple)] = None
    return tuple(found)


def assign_bucket(height: int, width: int, shapes: tuple[tuple[int, int], ...]) -> int:
    """The number of the shape whose aspect is nearest, as a ratio; the first of several."""
    aspect = math.log(width / height)
    return min(range(len(shapes)), key=lambda number: abs(math.log(shapes[number][1] / shapes[number][0]) - aspect))


def _whole(side: float, multiple: int) -> int:
    return max(1, round(side / multiple)) * multiple
