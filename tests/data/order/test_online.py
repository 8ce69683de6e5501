"""Online streams: new and replayed samples, independent of ranks, workers and restarts."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.config.recipe import Recipe
from bottega.core.errors import UsageError
from bottega.data.loading.loader import Loader
from bottega.data.order.online import NEW_SAMPLE_EPOCH, OnlineStream, build_online_stream
from bottega.data.sources.source import ArraySource
from bottega.data.sources.zip_sources import Unshuffled, Zip
from bottega.tasks.recipes import load_recipe, parse_overrides

FRACTIONS = st.sampled_from([0.0, 0.1, 0.2, 0.25, 1 / 3, 0.5, 0.9])
LENGTHS, BATCH_SIZES = st.integers(1, 90), st.integers(1, 12)


def all_positions(order: OnlineStream) -> np.ndarray:
    """Return all positions of the run, to the end of its last batch."""
    return np.arange(-(-order.epoch_length // order.batch_size) * order.batch_size)


@given(LENGTHS, BATCH_SIZES, FRACTIONS)
def test_each_sample_is_new_once_and_in_order(length: int, batch_size: int, fraction: float) -> None:
    order = OnlineStream(length, 3, replay_fraction=fraction, batch_size=batch_size)
    index, epoch = order.indices(all_positions(order))
    np.testing.assert_array_equal(index[epoch == NEW_SAMPLE_EPOCH], np.arange(length))
    last = int(np.flatnonzero(epoch == NEW_SAMPLE_EPOCH)[-1])
    assert order.epoch_length == last + 1  # the stream ends with its last new sample
    assert (index >= 0).all()
    assert (index < length).all()


@given(LENGTHS, BATCH_SIZES, FRACTIONS, st.sampled_from([None, 12, 30]))
def test_replayed_samples_are_in_memory_from_an_earlier_batch(
    length: int, batch_size: int, fraction: float, memory: int | None
) -> None:
    order = OnlineStream(length, 3, replay_fraction=fraction, memory_size=memory, batch_size=batch_size)
    positions = all_positions(order)
    index, epoch = order.indices(positions)
    for first in range(0, len(positions), batch_size):
        batch, is_new = index[first : first + batch_size], epoch[first : first + batch_size] == NEW_SAMPLE_EPOCH
        before = int((epoch[:first] == NEW_SAMPLE_EPOCH).sum())
        replayed = batch[~is_new]
        if first == 0:
            assert is_new[: min(batch_size, length)].all()
            continue
        assert (replayed < before).all()
        assert memory is None or (replayed >= before - memory).all()
        if len(replayed) <= min(before, memory or before):
            assert len(set(replayed.tolist())) == len(replayed)
        if before + batch_size <= length:  # except at the end, where the batch is filled up
            assert abs(len(replayed) - fraction * batch_size) < 1
            assert fraction * batch_size % 1 > 1e-9 or len(replayed) == round(fraction * batch_size)


@given(LENGTHS, BATCH_SIZES, FRACTIONS)
def test_no_sample_is_twice_in_one_epoch(length: int, batch_size: int, fraction: float) -> None:
    order = OnlineStream(length, 3, replay_fraction=fraction, batch_size=batch_size)
    index, epoch = order.indices(all_positions(order))
    pairs = Counter(zip(index.tolist(), epoch.tolist(), strict=True))
    repeated = [pair for pair, count in pairs.items() if count > 1]
    assert not repeated or length < batch_size, repeated  # a loader refuses fewer samples than a batch


@given(LENGTHS, BATCH_SIZES, FRACTIONS, st.integers(0, 10**12))
def test_sample_is_a_function_of_its_position(length: int, batch_size: int, fraction: float, far_position: int) -> None:
    order = OnlineStream(length, 3, replay_fraction=fraction, batch_size=batch_size)
    positions = np.r_[np.arange(2 * order.epoch_length), far_position + np.arange(5)]
    index, epoch = order.indices(positions)
    chosen = np.random.default_rng(0).permutation(len(positions))[:7]
    pickled = pickle.loads(pickle.dumps(order)).indices(positions[chosen])
    np.testing.assert_array_equal(pickled, (index[chosen], epoch[chosen]))
    shaped = order.indices(positions[: 2 * (len(positions) // 2)].reshape(2, -1))
    np.testing.assert_array_equal(shaped[0].ravel(), index[: shaped[0].size])
    assert epoch.max() < order.num_epochs(int(positions.max()) + 1)


@given(LENGTHS, BATCH_SIZES, FRACTIONS)
def test_sample_is_new_at_its_first_position_only(length: int, batch_size: int, fraction: float) -> None:
    order = OnlineStream(length, 3, replay_fraction=fraction, batch_size=batch_size)
    positions = np.arange(2 * order.epoch_length + batch_size)
    index, epoch = order.indices(positions)
    np.testing.assert_array_equal(order.is_new(positions), epoch == NEW_SAMPLE_EPOCH)
    is_first = np.r_[[sample not in index[:position] for position, sample in enumerate(index)]]
    np.testing.assert_array_equal(order.is_new(positions), is_first)


def test_endless_stream_is_always_new() -> None:
    positions = np.arange(25).reshape(5, 5)
    np.testing.assert_array_equal(Unshuffled(10).is_new(positions), positions < 10)
    assert Unshuffled(10, is_endless=True).is_new(positions).all()


@pytest.mark.parametrize(("length", "memory"), [(1, None), (5, None), (5, 6), (11, None)])
def test_stream_shorter_than_a_batch_repeats_its_samples_evenly(length: int, memory: int | None) -> None:
    """Counts differ by at most one, as in every batch after the end of the stream."""
    order = OnlineStream(length, 3, memory_size=memory, batch_size=12)
    for first in (0, 12, 24):
        index, epoch = order.indices(np.arange(first, first + 12))
        times = np.bincount(index[epoch != NEW_SAMPLE_EPOCH], minlength=length)
        assert times.max() - times.min() <= 1
        assert times.sum() == (12 - length if first == 0 else 12)


def test_replay_draws_uniformly_from_memory() -> None:
    """With a memory of 40, every age is equally frequent within four standard errors."""
    order = OnlineStream(60_000, 1, replay_fraction=0.25, memory_size=40, batch_size=8)
    positions = np.arange(8, order.epoch_length)
    index, epoch = order.indices(positions)
    replayed = epoch != NEW_SAMPLE_EPOCH
    age = order.num_new_before(positions // 8 * 8)[replayed] - 1 - index[replayed]
    with_full_memory = positions[replayed] > 8 * 40
    counts = np.bincount(age[with_full_memory], minlength=40)
    assert len(counts) == 40
    expected = with_full_memory.sum() / 40
    assert np.abs(counts - expected).max() < 4 * np.sqrt(expected)
    other = OnlineStream(60_000, 2, replay_fraction=0.25, memory_size=40, batch_size=8).indices(positions)[0]
    assert (other != index)[replayed].mean() > 0.9
    np.testing.assert_array_equal(other[~replayed], index[~replayed])


def test_order_does_not_depend_on_ranks_workers_or_restarts() -> None:
    source = ArraySource({"x": np.arange(100)})
    order = OnlineStream(100, 5, replay_fraction=0.25, memory_size=30, batch_size=8)
    plain = [Loader(source, 8, seed=0, order=order).batch(step)["x"] for step in range(15)]
    for world, workers in ((1, 0), (2, 0), (4, 0), (1, 1)):
        loaders = [
            Loader(source, 8, seed=0, data_rank=r, data_size=world, order=order, workers=workers) for r in range(world)
        ]
        for start in (0, 7) if not workers else (7,):
            streams = [loader(start) for loader in loaders]
            for step in range(start, 12):
                rank_batches = [next(stream)["x"] for stream in streams]
                np.testing.assert_array_equal(np.concatenate(rank_batches), plain[step])
            for stream in streams:
                stream.close()


def test_zipped_sources_have_separate_streams() -> None:
    sources = {"long": ArraySource({"x": np.arange(50)}), "short": ArraySource({"x": np.arange(20)})}
    orders = {
        name: OnlineStream(len(source), 1, replay_fraction=0.25, batch_size=8) for name, source in sources.items()
    }
    both = Zip(sources, orders=orders, length=max(order.epoch_length for order in orders.values()))
    loader = Loader(both, 8, seed=0, order=Unshuffled(len(both)))
    steps = int(np.ceil(loader.steps_per_epoch))
    for name, order in orders.items():
        loaded = np.concatenate([loader.batch(step)[name]["x"] for step in range(steps)])
        index, epoch = order.indices(np.arange(steps * 8))
        np.testing.assert_array_equal(loaded, index)
        np.testing.assert_array_equal(index[epoch == NEW_SAMPLE_EPOCH], np.arange(len(sources[name])))


# Recipes


def load(*arguments: str) -> Recipe:
    sources, overrides = parse_overrides(arguments)
    return load_recipe(sources, overrides).recipe


def test_online_recipe_has_no_length_unless_set() -> None:
    for arguments in (["--online"], ["online=true"], ["data.online.replay=0.0"], ["data.online={replay: 0.25}"]):
        recipe = load("routing", *arguments)
        assert recipe.data.online is not None
        assert (recipe.training.max_steps, recipe.training.num_epochs) == (None, None)
    assert load("--online", "routing").data.online == load("routing", "data.online=true").data.online
    assert load("routing", "--online", "--max_steps", "5").training.max_steps == 5
    assert load("routing", "--online", "false").data.online is None
    assert load("routing", "--online=false").training.num_epochs == load("routing").training.num_epochs
    merged = load("routing", "data.online={replay: 0.25, memory: 9}", "--online")
    assert merged.data.online is not None
    assert (merged.data.online.replay, merged.data.online.memory) == (0.25, 9)


def test_batch_size_is_the_global_one_of_the_recipe() -> None:
    recipe = load("routing", "data.online={replay: 0.25, memory: 99}", "training.batch_size=16")
    assert build_online_stream(recipe, 200) == OnlineStream(
        200, recipe.seed, replay_fraction=0.25, memory_size=99, batch_size=16
    )
    accumulating = load("routing", "--online", "training.batch_size=16", "training.gradient_accumulation_steps=3")
    assert build_online_stream(accumulating, 200).batch_size == 48


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["training.num_epochs=2"], "training.num_epochs: a stream (data.online) is one pass over the data, got 2"),
        (
            ["data.online={replay: 0, memory: 5}"],
            "data.online: memory 5 has no effect without replay; set replay, such as 0.2",
        ),
        (["data.online.replay=1.0"], "data.online.replay: expected a number below 1"),
        (
            ["data.sources=[{rule: 1}, {rule: 2}]", "data.mixture=sequence"],
            "mixture: a stream (online) trains on its sources",
        ),
        (["data.sources=[{rule: 1, weight: 2}, {rule: 2}]"], "mixture: a stream (online) trains on its sources"),
        (["data.replay.path=old.csv"], "set online.replay instead"),
        (["data.curriculum.competence={}"], "curriculum: a stream (online) trains on its sources"),
        (["techniques=[ewc]"], "data.online: ewc anchors the weights at the end of each source"),
        (["techniques=[replay]"], "in a stream set data.online.replay, such as 0.2"),
        (["techniques=[maml]"], "data.online: maml draws episodes, and a stream"),
    ],
)
def test_settings_incompatible_with_a_stream_are_refused_in_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load("routing", "model.plasticity=false", "model.spike_threshold=null", "--online", *arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_memory_smaller_than_a_batchs_replay_is_refused() -> None:
    with pytest.raises(UsageError, match=r"data\.online\.memory=3 is too small: .* a batch of 32 replays 8 samples"):
        OnlineStream(100, 0, replay_fraction=0.25, memory_size=3, batch_size=32)


def test_online_changes_the_results_key_only_where_set() -> None:
    plain: dict[str, Any] = load("routing").results_key()
    assert not any(key.startswith("data.online") for key in plain)
    assert load("routing", "--online").run_name() != load("routing").run_name()
