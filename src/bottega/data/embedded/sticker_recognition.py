"""Recognise the attributes of a sticker image by matching it with drawings; nothing here is trained.

An image is matched with the drawing of least squared error over all shapes, patterns, colours, backgrounds, positions and
sizes. N images   P pixels   G drawings without colour   C pairs of colour and background
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np

from bottega.data.embedded.stickers import (
    BACKGROUNDS,
    COLOURS,
    INK,
    PATTERNS,
    POINTS_PER_SIDE,
    RGB,
    SHAPES,
    SIDE,
    compute_coverage,
)
from bottega.data.image.resize import resize_image

NO_STICKER = "none"
"""Attribute of an image without a sticker."""
# A drawing that explains a smaller fraction of the image's variance does not match it.
MIN_EXPLAINED_VARIANCE = 0.3
OFFSETS = (-2, -1, 0, 1, 2)
RADII = (10.9, 11.75, 12.6)
IMAGES_AT_ONCE = 16


@dataclass(frozen=True)
class DrawingMatch:
    """The best drawings of N images, and the fraction of each image's variance that its drawing explains."""

    shape: list[str]
    colour: list[str]
    pattern: list[str]
    background: list[str]
    explained_variance: np.ndarray


def recognise_stickers(images: np.ndarray) -> dict[str, list[str]]:
    """Return shape, colour and pattern of images, uint8 (N, h, w, 3); "none" for images without a sticker."""
    match = match_drawings(images)
    return {"shape": match.shape, "colour": match.colour, "pattern": match.pattern}


def match_drawings(images: np.ndarray) -> DrawingMatch:
    """Return the best drawings of images, uint8 (N, h, w, 3)."""
    assert images.dtype == np.uint8, f"expected uint8 images, got {images.dtype}"
    assert images.ndim == 4, f"expected (N, h, w, 3), got {images.shape}"
    assert images.shape[3] == 3, f"expected (N, h, w, 3), got {images.shape}"
    if images.shape[1:3] != (SIDE, SIDE):
        images = np.stack([resize_image(image, (SIDE, SIDE), mode="stretch") for image in images])
    best_names: list[tuple[str, str, str, str]] = []
    explained_variance = np.empty(len(images))
    for start in range(0, len(images), IMAGES_AT_ONCE):
        chunk = images[start : start + IMAGES_AT_ONCE].reshape(-1, SIDE * SIDE, 3).astype(np.float32) / 255
        names, error = _find_nearest_drawings(chunk)
        variance = np.square(chunk - chunk.mean(axis=1, keepdims=True)).sum(axis=(1, 2))
        explained_variance[start : start + IMAGES_AT_ONCE] = 1 - error / np.maximum(variance, 1e-6)
        best_names += names
    matched_names = [
        names if fraction >= MIN_EXPLAINED_VARIANCE else (NO_STICKER,) * 4
        for names, fraction in zip(best_names, explained_variance, strict=True)
    ]
    shape, colour, pattern, background = ([names[attribute] for names in matched_names] for attribute in range(4))
    return DrawingMatch(shape, colour, pattern, background, explained_variance)


def _find_nearest_drawings(images: np.ndarray) -> tuple[list[tuple[str, str, str, str]], np.ndarray]:
    """Return the attributes of the drawing nearest to each image, float32 (N, P, 3), and its squared error (N,)."""
    drawings = _build_drawings()
    # One matrix product for all images: a product for each image takes six times as long.
    channels = np.ascontiguousarray(images.transpose(0, 2, 1)).reshape(-1, SIDE * SIDE)
    error = (-2 * drawings.colour_differences) @ (channels @ drawings.masks).reshape(len(images), 6, -1)
    error += drawings.constant_error
    # The error of the background alone, which all drawings on it have in common.
    error += np.square(images[:, None] - drawings.backgrounds[:, None]).sum(axis=(2, 3))[:, :, None]
    flat_error = error.reshape(len(images), -1)
    nearest = flat_error.argmin(axis=1)
    names = []
    for number in nearest.tolist():
        pair, geometry = divmod(number, error.shape[2])
        (shape, pattern), (colour, background) = drawings.geometries[geometry], PALETTE[pair]
        names.append((shape, colour, pattern, background))
    return names, flat_error[np.arange(len(images)), nearest]


PALETTE = tuple(product(COLOURS, BACKGROUNDS))
"""Pairs of colour and background, C."""


@dataclass(frozen=True)
class Drawings:
    """All drawings, each background + painted x (colour - background) + inked x (ink - background)."""

    geometries: list[tuple[str, str]]
    """Shape and pattern of each drawing without colour, G."""
    masks: np.ndarray
    """Painted and inked fractions of the pixels, (P, 2G)."""
    colour_differences: np.ndarray
    """Differences of colour and ink from the background, by channel, (C, 6)."""
    backgrounds: np.ndarray
    """(C, 3)"""
    constant_error: np.ndarray
    """Part of the squared error that does not depend on the image, (C, G)."""


@cache
def _build_drawings() -> Drawings:
    geometries, painted, inked = [], [], []
    for shape, pattern, radius, right, down in product(SHAPES, PATTERNS, RADII, OFFSETS, OFFSETS):
        coverage = compute_coverage(shape, pattern, center_x=SIDE / 2 + right, center_y=SIDE / 2 + down, radius=radius)
        geometries.append((shape, pattern))
        painted.append(coverage[0])
        inked.append(coverage[1])
    coverages = np.array((painted, inked), np.float32).reshape(2, len(geometries), SIDE * SIDE) / POINTS_PER_SIDE**2
    rgb = {name: np.array(value, np.float32) / 255 for name, value in {**RGB, "ink": INK}.items()}
    backgrounds = np.stack([rgb[background] for _, background in PALETTE])
    # [C, channel, painted or inked]
    painted_colours = np.stack([np.stack((rgb[colour], rgb["ink"]), axis=1) for colour, _ in PALETTE])
    differences = painted_colours - backgrounds[:, :, None]
    products = np.einsum("xgp,ygp->xyg", coverages, coverages)
    constant_error = np.einsum("ckx,cky,xyg->cg", differences, differences, products)
    constant_error += 2 * np.einsum("ck,ckx,xg->cg", backgrounds, differences, coverages.sum(axis=2))
    masks = np.ascontiguousarray(coverages.reshape(-1, SIDE * SIDE).T)
    return Drawings(
        geometries, masks, differences.reshape(len(PALETTE), 6), backgrounds, constant_error.astype(np.float32)
    )
