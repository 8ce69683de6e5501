"""Patches: blocks of pixels in row-major order and their exact inverse, in one, two and three dimensions."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from bottega.models.dit.torch import patchify, unpatchify

# (patches, side of a patch) along each axis.
sizes = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3)


def number_values(batch: int, grid: tuple[int, ...], channels: int) -> torch.Tensor:
    """Return samples (batch, *grid, channels) whose values are their own indices, so that any misplaced value shows."""
    return torch.arange(batch * math.prod(grid) * channels, dtype=torch.float32).view(batch, *grid, channels)


def test_patches_are_squares_in_row_order() -> None:
    tokens = patchify(number_values(1, (4, 4), 1), (2, 2))
    assert tokens[0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]


def test_channels_stay_together_with_unequal_sides() -> None:
    tokens = patchify(number_values(1, (2, 4), 2), (1, 2))
    assert tokens[0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert patchify(number_values(1, (2, 2, 2), 1), (2, 1, 2))[0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert patchify(number_values(1, (6,), 1), (3,))[0].tolist() == [[0, 1, 2], [3, 4, 5]]


@given(sizes=sizes, channels=st.integers(1, 3), batch=st.integers(1, 2))
def test_unpatchify_inverts_patchify(sizes: list[tuple[int, int]], channels: int, batch: int) -> None:
    patch = tuple(side for _, side in sizes)
    grid = tuple(count * side for count, side in sizes)
    x = number_values(batch, grid, channels)
    tokens = patchify(x, patch)
    assert tokens.shape == (batch, math.prod(count for count, _ in sizes), math.prod(patch) * channels)
    assert torch.equal(unpatchify(tokens, patch, grid), x)


@given(sizes=sizes, channels=st.integers(1, 3))
def test_patch_is_the_block_at_its_position(sizes: list[tuple[int, int]], channels: int) -> None:
    patch = tuple(side for _, side in sizes)
    x = number_values(1, tuple(count * side for count, side in sizes), channels)
    tokens = patchify(x, patch)[0]
    positions = torch.cartesian_prod(*(torch.arange(count) for count, _ in sizes)).view(len(tokens), -1)
    for token, position in zip(tokens, positions.tolist(), strict=True):
        block = x[0][
            tuple(slice(index * side, (index + 1) * side) for index, side in zip(position, patch, strict=True))
        ]
        assert torch.equal(token, block.flatten())
