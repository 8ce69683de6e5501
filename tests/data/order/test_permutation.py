"""Permutations: a bijection for every size, different between epochs and seeds, uniform, with random access."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.data.order import permutation
from bottega.data.order.permutation import permute


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 5000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
def test_every_sample_once(size: int, seed: int, epoch: int) -> None:
    order = permute(np.arange(size), size=size, seed=seed, epoch=epoch)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(size))


@pytest.mark.parametrize("size", [70_000, 2**17, 2**17 + 1])
def test_every_sample_once_over_several_blocks(size: int) -> None:
    order = permute(np.arange(size), size=size, seed=1, epoch=2)
    assert np.array_equal(np.sort(order), np.arange(size))


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_any_index_of_any_epoch_can_be_read_alone(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 300))
    orders = {epoch: permute(np.arange(size), size=size, seed=3, epoch=epoch) for epoch in range(4)}
    pairs = data.draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, 3)), min_size=1))
    index, epoch = np.array(pairs).T
    result = permute(index, size=size, seed=3, epoch=epoch)
    assert result.tolist() == [orders[e][i] for i, e in pairs]


def test_shape_is_preserved_and_huge_sizes_work() -> None:
    index = np.array([[0, 1, 2], [2**62 - 1, 5, 2**61]])
    order = permute(index, size=2**62, seed=0, epoch=np.array([[0, 0, 0], [1, 1, 1]]))
    assert order.shape == index.shape
    assert ((order >= 0) & (order < 2**62)).all()
    assert permute(np.array([], dtype=np.int64), size=3, seed=0, epoch=0).shape == (0,)


def test_orders_differ_between_seeds_and_epochs() -> None:
    index = np.arange(1000)
    orders = [permute(index, size=1000, seed=s, epoch=e) for s in range(3) for e in range(3)]
    for first, second in itertools.combinations(orders, 2):
        assert (first == second).sum() < 20  # two random orders agree in about one position


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_permutations_of_a_small_size_are_equally_likely(size: int) -> None:
    trials = 24_000
    epochs = np.repeat(np.arange(trials), size)
    orders = permute(np.tile(np.arange(size), trials), size=size, seed=0, epoch=epochs).reshape(trials, size)
    counts = Counter(map(tuple, orders.tolist()))
    permutations = list(itertools.permutations(range(size)))
    expected = trials / len(permutations)
    chi_square = sum((counts[order] - expected) ** 2 / expected for order in permutations)
    degrees_of_freedom = len(permutations) - 1
    assert chi_square < degrees_of_freedom + 5 * (2 * degrees_of_freedom) ** 0.5


@pytest.mark.parametrize("size", [7, 100, 1000])
def test_positions_and_neighbours_are_uniform_over_seeds(size: int) -> None:
    trials = 4000
    pairs = np.stack([permute(np.array([0, 1]), size=size, seed=seed, epoch=0) for seed in range(trials)])
    gap = (pairs[:, 1] - pairs[:, 0]) % size - 1
    for values, num_values in ((pairs[:, 0], size), (gap, size - 1)):
        expected = trials / num_values
        chi_square = ((np.bincount(values, minlength=num_values) - expected) ** 2 / expected).sum()
        assert chi_square < num_values + 5 * (2 * num_values) ** 0.5


def test_large_permutations_run_in_blocks_with_about_two_passes_per_index(monkeypatch: pytest.MonkeyPatch) -> None:
    block_sizes = []
    monkeypatch.setattr(
        permutation,
        "_apply_feistel",
        lambda values, *arguments, _original=permutation._apply_feistel, **options: (
            block_sizes.append(len(values)),
            _original(values, *arguments, **options),
        )[1],
    )
    positions = np.arange(1 << 18)
    permute(positions, size=len(positions) + 1, seed=0, epoch=0)
    # The worst size: half of the power-of-two domain is outside [0, size), so cycle walking takes two passes on average.
    assert sum(block_sizes) < 2.1 * len(positions)
    assert max(block_sizes) < 1 << 17, "a block does not fit in the processor's cache"
    assert len(block_sizes) < 4 * 40, "one of the four blocks takes 40 passes"


def test_indices_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="index"):
        permute(np.array([3]), size=3, seed=0, epoch=0)
    with pytest.raises(ValueError, match="size"):
        permute(np.array([0]), size=0, seed=0, epoch=0)
