"""A stream: what is new when, what comes again, and that neither ranks nor workers nor a restart have a say in it."""

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
from bottega.data.order.online import FIRST_EPOCH, OnlineStream, build_online_stream
from bottega.data.sources.source import ArraySource
from bottega.data.sources.zip_sources import Unshuffled, Zip
from bottega.tasks.recipes import load_recipe, parse_overrides

SHARES = st.sampled_from([0.0, 0.1, 0.2, 0.25, 1 / 3, 0.5, 0.9])
LENGTHS, GRAINS = st.integers(1, 90), st.integers(1, 12)


def whole(order: OnlineStream) -> np.ndarray:
    """All positions of the run, to the end of its last batch."""
    return np.arange(-(-order.epoch_length // order.batch_size) * order.batch_size)


@given(LENGTHS, GRAINS, SHARES)
def test_each_sample_is_new_once_and_in_order(length: int, grain: int, share: float) -> None:
    order = OnlineStream(length, 3, replay_fraction=share, batch_size=grain)
    index, epoch = order.indices(whole(order))
    np.testing.assert_array_equal(index[epoch == FIRST_EPOCH], np.arange(length))
    last = int(np.flatnonzero(epoch == FIRST_EPOCH)[-1])
    assert order.epoch_length == last + 1  # and not one step more is taken than that needs
    assert (index >= 0).all()
    assert (index < length).all()


@given(LENGTHS, GRAINS, SHARES, st.sampled_from([None, 12, 30]))
def test_what_comes_again_was_new_in_an_earlier_batch_and_is_remembered(
    length: int, grain: int, share: float, memory: int | None
) -> None:
    order = OnlineStream(length, 3, replay_fraction=share, memory_size=memory, batch_size=grain)
    positions = whole(order)
    index, epoch = order.indices(positions)
    for first in range(0, len(positions), grain):
        mine, is_new = index[first : first + grain], epoch[first : first + grain] == FIRST_EPOCH
        before = int((epoch[:first] == FIRST_EPOCH).sum())
        again = mine[~is_new]
        if first == 0:
            assert is_new[: min(grain, length)].all()
            continue
        assert (again < before).all()
        assert memory is None or (again >= before - memory).all()
        if len(again) <= min(before, memory or before):
            assert len(set(again.tolist())) == len(again)
        if before + grain <= length:  # not at the end, where the batch is filled up
            assert abs(len(again) - share * grain) < 1
            assert share * grain % 1 > 1e-9 or len(again) == round(share * grain)


@given(LENGTHS, GRAINS, SHARES)
def test_no_sample_is_twice_in_one_epoch(length: int, grain: int, share: float) -> None:
    order = OnlineStream(length, 3, replay_fraction=share, batch_size=grain)
    index, epoch = order.indices(whole(order))
    pairs = Counter(zip(index.tolist(), epoch.tolist(), strict=True))
    first = [pair for pair, count in pairs.items() if count > 1]
    assert not [pair for pair in first if length >= grain], first  # a loader has a batch of samples at least


@given(LENGTHS, GRAINS, SHARES, st.integers(0, 10**12))
def test_a_place_is_a_function_of_its_position(length: int, grain: int, share: float, far: int) -> None:
    order = OnlineStream(length, 3, replay_fraction=share, batch_size=grain)
    positions = np.r_[np.arange(2 * order.epoch_length), far + np.arange(5)]
    index, epoch = order.indices(positions)
    some = np.random.default_rng(0).permutation(len(positions))[:7]
    again = pickle.loads(pickle.dumps(order)).indices(positions[some])
    np.testing.assert_array_equal(again, (index[some], epoch[some]))
    shaped = order.indices(positions[: 2 * (len(positions) // 2)].reshape(2, -1))
    np.testing.assert_array_equal(shaped[0].ravel(), index[: shaped[0].size])
    assert epoch.max() < order.num_epochs(int(positions.max()) + 1)


@given(LENGTHS, GRAINS, SHARES)
def test_new_is_what_no_position_before_had(length: int, grain: int, share: float) -> None:
    order = OnlineStream(length, 3, replay_fraction=share, batch_size=grain)
    positions = np.arange(2 * order.epoch_length + grain)
    index, epoch = order.indices(positions)
    np.testing.assert_array_equal(order.is_new(positions), epoch == FIRST_EPOCH)
    first = np.r_[[i not in index[:at] for at, i in enumerate(index)]]
    np.testing.assert_array_equal(order.is_new(positions), first)


def test_what_has_no_end_is_always_new() -> None:
    positions = np.arange(25).reshape(5, 5)
    np.testing.assert_array_equal(Unshuffled(10).is_new(positions), positions < 10)
    assert Unshuffled(10, is_endless=True).is_new(positions).all()


@pytest.mark.parametrize(("length", "memory"), [(1, None), (5, None), (5, 6), (11, None)])
def test_a_stream_shorter_than_a_batch_fills_it_with_all_it_has(length: int, memory: int | None) -> None:
    """Each about equally often, as in every batch after its end."""
    order = OnlineStream(length, 3, memory_size=memory, batch_size=12)
    for first in (0, 12, 24):
        index, epoch = order.indices(np.arange(first, first + 12))
        times = np.bincount(index[epoch != FIRST_EPOCH], minlength=length)
        assert times.max() - times.min() <= 1
        assert times.sum() == (12 - length if first == 0 else 12)


def test_what_comes_again_is_drawn_evenly() -> None:
    """Of a memory of 40 at each step; the oldest as often as the newest, within four standard errors."""
    order = OnlineStream(60_000, 1, replay_fraction=0.25, memory_size=40, batch_size=8)
    positions = np.arange(8, order.epoch_length)
    index, epoch = order.indices(positions)
    again = epoch != FIRST_EPOCH
    age = order.num_new_before(positions // 8 * 8)[again] - 1 - index[again]
    settled = positions[again] > 8 * 40
    counts = np.bincount(age[settled], minlength=40)
    assert len(counts) == 40
    expected = settled.sum() / 40
    assert np.abs(counts - expected).max() < 4 * np.sqrt(expected)
    other = OnlineStream(60_000, 2, replay_fraction=0.25, memory_size=40, batch_size=8).indices(positions)[0]
    assert (other != index)[again].mean() > 0.9
    np.testing.assert_array_equal(other[~again], index[~again])


def test_ranks_and_workers_and_a_restart_change_nothing() -> None:
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
                shares = [next(one)["x"] for one in streams]
                np.testing.assert_array_equal(np.concatenate(shares), plain[step])
            for one in streams:
                one.close()


def test_parts_side_by_side_have_a_stream_each() -> None:
    sources = {"long": ArraySource({"x": np.arange(50)}), "short": ArraySource({"x": np.arange(20)})}
    orders = {
        name: OnlineStream(len(source), 1, replay_fraction=0.25, batch_size=8) for name, source in sources.items()
    }
    both = Zip(sources, orders=orders, length=max(order.epoch_length for order in orders.values()))
    loader = Loader(both, 8, seed=0, order=Unshuffled(len(both)))
    steps = int(np.ceil(loader.steps_per_epoch))
    for name, order in orders.items():
        seen = np.concatenate([loader.batch(step)[name]["x"] for step in range(steps)])
        index, epoch = order.indices(np.arange(steps * 8))
        np.testing.assert_array_equal(seen, index)
        np.testing.assert_array_equal(index[epoch == FIRST_EPOCH], np.arange(len(sources[name])))


# What a recipe says


def recipe(*words: str) -> Recipe:
    sources, overrides = parse_overrides(words)
    return load_recipe(sources, overrides).recipe


def test_the_length_is_the_streams_own() -> None:
    for words in (["--online"], ["online=true"], ["data.online.replay=0.0"], ["data.online={replay: 0.25}"]):
        one = recipe("routing", *words)
        assert one.data.online is not None
        assert (one.training.max_steps, one.training.num_epochs) == (None, None)
    assert recipe("--online", "routing").data.online == recipe("routing", "data.online=true").data.online
    assert recipe("routing", "--online", "--max_steps", "5").training.max_steps == 5
    assert recipe("routing", "--online", "false").data.online is None
    assert recipe("routing", "--online=false").training.num_epochs == recipe("routing").training.num_epochs
    kept = recipe("routing", "data.online={replay: 0.25, memory: 9}", "--online")
    assert kept.data.online is not None
    assert (kept.data.online.replay, kept.data.online.memory) == (0.25, 9)


def test_a_batch_is_that_of_the_recipe_whatever_the_ranks() -> None:
    one = recipe("routing", "data.online={replay: 0.25, memory: 99}", "training.batch_size=16")
    assert build_online_stream(one, 200) == OnlineStream(
        200, one.seed, replay_fraction=0.25, memory_size=99, batch_size=16
    )
    more = recipe("routing", "--online", "training.batch_size=16", "training.gradient_accumulation_steps=3")
    assert build_online_stream(more, 200).batch_size == 48


@pytest.mark.parametrize(
    ("words", "said"),
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
def test_what_makes_no_stream_is_said_in_a_line(words: list[str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        recipe("routing", "model.plasticity=false", "model.spike_threshold=null", "--online", *words)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_memory_too_small_for_its_share_is_refused() -> None:
    with pytest.raises(UsageError, match=r"data\.online\.memory=3 is too small: .* a batch of 32 replays 8 samples"):
        OnlineStream(100, 0, replay_fraction=0.25, memory_size=3, batch_size=32)


def test_runs_without_a_stream_have_the_names_they_had() -> None:
    plain: dict[str, Any] = recipe("routing").results_key()
    assert not any(key.startswith("data.online") for key in plain)
    assert recipe("routing", "--online").run_name() != recipe("routing").run_name()
