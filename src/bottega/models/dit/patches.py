"""Splits samples into patches and joins them again.

B batch   g... sides of the grid   p... sides of a patch   n... patches in each direction   C channels
"""

from __future__ import annotations

import math

from torch import Tensor


def patchify(x: Tensor, patch: tuple[int, ...]) -> Tensor:
    """Reshape (B, g..., C) to (B, N, P C), with N the product of n... and P the product of p..., both in row order.

    A transpose is needed: a reshape alone would cut rows of pixels, not squares.
    """
    axes = len(patch)
    grid = x.shape[1:-1]
    sides = [size for side, part in zip(grid, patch, strict=True) for size in (side // part, part)]
    cut = x.reshape(x.shape[0], *sides, x.shape[-1])
    outer, inner = range(1, 2 * axes, 2), range(2, 2 * axes + 1, 2)
    ordered = cut.permute(0, *outer, *inner, 2 * axes + 1)
    return ordered.reshape(x.shape[0], math.prod(ordered.shape[1 : axes + 1]), -1)


def unpatchify(tokens: Tensor, patch: tuple[int, ...], grid: tuple[int, ...]) -> Tensor:
    """Reshape (B, N, P C) to (B, g..., C), the inverse of `patchify`."""
    axes = len(patch)
    counts = [side // part for side, part in zip(grid, patch, strict=True)]
    cut = tokens.reshape(tokens.shape[0], *counts, *patch, -1)
    pairs = [axis for i in range(axes) for axis in (1 + i, 1 + axes + i)]
    return cut.permute(0, *pairs, 2 * axes + 1).reshape(tokens.shape[0], *grid, -1)
