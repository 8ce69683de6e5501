"""Patches: squares of pixels in row order, and exactly back, in one, two and three directions."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from bottega.models.dit.torch import patchify, unpatchify

# (patches, side of a patch) in each direction.
sizes = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3)


def counted(batch: int, grid: tuple[int, ...], channels: int) -> torch.Tensor:
    """Every value is its own place, so that one that moved is seen."""
    return torch.arange(batch * math.prod(grid) * channels, dtype=torch.float32).view(batch, *grid, channels)


def test_the_first_patch_of_a_square_is_a_square() -> None:
    tokens = patchify(counted(1, (4, 4), 1), (2, 2))
    assert tokens[0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]


def test_channels_stay_together_and_sides_may_differ() -> None:
    tokens = patchify(counted(1, (2, 4), 2), (1, 2))
    assert tokens[0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert patchify(counted(1, (2, 2, 2), 1), (2, 1, 2))[0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert patchify(counted(1, (6,), 1), (3,))[0].tolist() == [[0, 1, 2], [3, 4, 5]]


@given(sizes=sizes, channels=st.integers(1, 3), batch=st.integers(1, 2))
def test_the_way_back_is_exact(sizes: list[tuple[int, int]], channels: int, batch: int) -> None:
    patch = tuple(part for _, part in sizes)
    grid = tuple(count * part for count, part in sizes)
    x = counted(batch, grid, channels)
    tokens = patchify(x, patch)
    assert tokens.shape == (batch, math.prod(count for count, _ in sizes), math.prod(patch) * channels)
    assert torch.equal(unpatchify(tokens, patch, grid), x)


@given(sizes=sizes, channels=st.integers(1, 3))
def test_a_patch_is_the_block_at_its_place(sizes: list[tuple[int, int]], channels: int) -> None:
    patch = tuple(part for _, part in sizes)
    x = counted(1, tuple(count * part for count, part in sizes), channels)
    tokens = patchify(x, patch)[0]
    places = torch.cartesian_prod(*(torch.arange(count) for count, _ in sizes)).view(len(tokens), -1)
    for token, place in zip(tokens, places.tolist(), strict=True):
        block = x[0][tuple(slice(at * part, (at + 1) * part) for at, part in zip(place, patch, strict=True))]
        assert torch.equal(token, block.flatten())
