"""Sample orders: random access, no loss or repetition, exact weights, the same for all ranks and workers."""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.config.data import Curriculum
from bottega.core.errors import DataError, UsageError
from bottega.core.noise import derive_seed
from bottega.data.loading.loader import POSITIONS_AT_ONCE, Cursor, Loader
from bottega.data.loading.prefetch import prefetch
from bottega.data.order import curriculum
from bottega.data.order.orders import (
    MAX_EXACT_SLOTS,
    BatchSizeSchedule,
    CurriculumOrder,
    CurriculumStage,
    Mixture,
    Order,
    Shuffled,
    compute_quotas,
)
from bottega.data.sources.combine import Concat
from bottega.data.sources.source import ArraySource, Source
from bottega.data.sources.take import Take
from operations import count_operations

SIZES = (70, 33, 17)
RANKING = np.random.default_rng(0).permutation(120)
STAGES = (
    CurriculumStage(0, 24, 30),
    CurriculumStage(7, 48, 80, replay_fraction=0.25),
    CurriculumStage(20, 24, 120, replay_fraction=0.5),
    CurriculumStage(31, 48, 120),
)
ORDERS: dict[str, Order] = {
    "shuffled": Shuffled(120, 5),
    "mixture": Mixture(SIZES, (0.7, 0.2, 0.1), seed=5),
    "odd mixture": Mixture(SIZES, (1.0, 0.123456789, 3.14159), seed=5),
    "coarse mixture": Mixture(SIZES, (0.7, 0.2, 0.1), seed=5, slot_size=24),
    "staged": CurriculumOrder(RANKING, STAGES, seed=5),
}
SOURCE = ArraySource({"x": np.arange(120)})

orders = pytest.mark.parametrize("name", ORDERS)
sources = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=5)
odd_weights = st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=6)
seeds = st.integers(0, 2**64)


def make_loader(name: str, **options: Any) -> Loader:
    return Loader(SOURCE, 24, seed=5, order=ORDERS[name], **options)


def find_owners(mixture: Mixture, index: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.cumsum(mixture.sizes), index, side="right")


def test_shuffled_order_matches_the_first_release() -> None:
    plain = Loader(ArraySource({"x": np.arange(1000)}), 8, seed=7)
    indices = np.concatenate([np.concatenate(plain.indices(step)) for step in range(500)])
    assert hashlib.sha256(indices.astype("<i8").tobytes()).hexdigest() == GOLDEN
    same = Loader(ArraySource({"x": np.arange(1000)}), 8, seed=0, order=Shuffled(1000, 7))
    assert np.array_equal(plain.indices(10**6), same.indices(10**6))


GOLDEN = "e4c1b07df4060e1245db9ea9206762104eb9a778e81369d9757ec9eaace7e0d3"


@orders
@settings(max_examples=10)
@given(st.data())
def test_positions_of_any_shape_are_random_access(name: str, data: st.DataObject) -> None:
    order = ORDERS[name]
    index, epoch = order.indices(np.arange(3000))
    drawn = np.array(data.draw(st.lists(st.integers(0, 2999), min_size=1, max_size=60)))
    for positions in (drawn, drawn.reshape(-1, 1), drawn.reshape(1, -1)):
        result = order.indices(positions)
        assert result[0].dtype == result[1].dtype == np.int64
        assert np.array_equal(result[0], index[positions])
        assert np.array_equal(result[1], epoch[positions])
    assert [part.shape for part in order.indices(np.empty(0, np.int64))] == [(0,), (0,)]


@orders
def test_no_sample_is_twice_in_one_epoch_and_none_is_left_out(name: str) -> None:
    order = ORDERS[name]
    index, epoch = order.indices(np.arange(5000))
    assert max(Counter(zip(index.tolist(), epoch.tolist(), strict=True)).values()) == 1
    assert set(index.tolist()) == set(range(order.size)) == set(range(120))
    for positions in (1, 24, 500, 1233, 5000):
        started = int(epoch[:positions].max()) + 1
        window = 256 // 17  # a mixture counts its smallest source to the end of a window
        assert started <= order.num_epochs(positions) <= started + window


@orders
@pytest.mark.parametrize("step", [10**6, 10**9])
def test_late_step_costs_no_more_than_an_early_one(name: str, step: int) -> None:
    stream = make_loader(name)
    stream.indices(0)
    # Cycle walking back into the range takes a few rounds more for some positions than for others.
    early = max(count_operations(lambda early_step=early_step: stream.indices(early_step)) for early_step in range(20))
    assert count_operations(lambda: stream.indices(step)) <= 2 * early


@orders
@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8])
def test_ranks_share_one_order(name: str, world: int) -> None:
    start = 5
    streams = [make_loader(name, data_rank=rank, data_size=world)(start) for rank in range(world)]
    for step in range(start, 45):
        batch = np.concatenate([next(stream)["x"] for stream in streams])
        assert np.array_equal(batch, make_loader(name).indices(step)[0])


class AllOrders:
    """One step of every order at once, so that workers are started once for all of them."""

    def __init__(self, **options: Any) -> None:
        self.cursors = {name: Cursor(make_loader(name, **options), block=POSITIONS_AT_ONCE) for name in ORDERS}

    def __call__(self, step: int) -> dict[str, Any]:
        return {name: cursor(step)["x"] for name, cursor in self.cursors.items()}


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_workers_share_one_order(workers: int) -> None:
    start = 3
    stream = prefetch(AllOrders(data_rank=1, data_size=2), start, workers=workers, depth=workers % 2)
    for step, batch in enumerate(islice(stream, 40), start=start):
        for name, samples in batch.items():
            expected = make_loader(name).indices(step)[0]
            assert np.array_equal(samples, expected[len(expected) // 2 :])
    stream.close()


@orders
@settings(max_examples=8)
@given(stops=st.lists(st.integers(1, 60), max_size=6, unique=True))
def test_stream_restarted_at_any_step_is_unchanged(name: str, stops: list[int]) -> None:
    expected = [batch["x"] for batch in islice(make_loader(name)(0), 61)]
    batches, step = [], 0
    for stop in (*sorted(stops), 61):
        batches += [batch["x"] for batch in islice(make_loader(name)(step), stop - step)]
        step = stop
    assert len(batches) == 61
    assert all(np.array_equal(a, b) for a, b in zip(batches, expected, strict=True))


@given(sources, seeds, st.integers(1, 5))
def test_mixture_keeps_each_sources_order_and_exact_weight(
    parts: list[tuple[int, int]], seed: int, slot_size: int
) -> None:
    sizes, weights = zip(*parts, strict=True)
    mixture = Mixture(sizes, weights, seed=seed, slot_size=slot_size)
    blocks = 4
    index, epoch = mixture.indices(np.arange(blocks * mixture.slots_per_block * slot_size))
    owner = find_owners(mixture, index)
    by_block = owner.reshape(blocks, -1)
    offset = 0
    for i, (size, weight) in enumerate(parts):
        assert ((by_block == i).sum(axis=1) * sum(weights) == weight * mixture.slots_per_block * slot_size).all()
        is_own = owner == i
        expected = Shuffled(size, derive_seed("mixture", seed, i)).indices(np.arange(is_own.sum()))
        assert np.array_equal(index[is_own] - offset, expected[0])
        assert np.array_equal(epoch[is_own], expected[1])
        full_epochs = int(is_own.sum()) // size
        assert np.array_equal(
            np.sort((index[is_own] - offset)[: full_epochs * size].reshape(-1, size), axis=1),
            np.tile(np.arange(size), (full_epochs, 1)),
        )
        offset += size


@given(sources, st.integers(2, 9))
def test_slot_comes_from_one_source(parts: list[tuple[int, int]], slot_size: int) -> None:
    sizes, weights = zip(*parts, strict=True)
    mixture = Mixture(sizes, weights, seed=1, slot_size=slot_size)
    index, _ = mixture.indices(np.arange(slot_size * 100))
    owner = find_owners(mixture, index).reshape(100, slot_size)
    assert (owner == owner[:, :1]).all()


@given(odd_weights, seeds)
def test_irregular_weights_are_exact_to_two_samples(weights: list[float], seed: int) -> None:
    mixture = Mixture((50,) * len(weights), tuple(weights), seed=seed)
    length = 20 * mixture.slots_per_window
    owner = find_owners(mixture, mixture.indices(np.arange(length))[0])
    ends = np.arange(1, length // mixture.slots_per_window + 1) * mixture.slots_per_window
    for i, weight in enumerate(weights):
        counts = np.cumsum(owner == i)[ends - 1]
        assert np.abs(counts - ends * weight / sum(weights)).max() <= 2


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=50))
def test_quotas_are_proportional_and_at_least_one(weights: list[float]) -> None:
    quotas = np.array(compute_quotas(tuple(weights)))
    assert quotas.min() >= 1
    assert quotas.sum() <= MAX_EXACT_SLOTS or quotas.sum() == 2**30
    fractions = np.array(weights) / sum(weights)
    error = np.abs(quotas / quotas.sum() - fractions) / fractions
    assert (error[fractions > 1e-6] <= 1.5e-3).all()


def test_small_quotas_are_exact_and_tiny_weights_have_one() -> None:
    assert compute_quotas((0.7, 0.2, 0.1)) == (7, 2, 1)
    assert compute_quotas((1 / 3, 1 / 6, 1 / 2)) == (2, 1, 3)
    assert compute_quotas((60_000, 10_000)) == (6, 1)
    assert compute_quotas((1023, 1)) == (1023, 1)
    assert sum(compute_quotas((1024, 1))) > MAX_EXACT_SLOTS
    assert compute_quotas((1.0, 1e-30))[1] == 1


def test_slot_owners_differ_between_blocks_and_seeds() -> None:
    def slot_owners(seed: int) -> list[list[int]]:
        mixture = Mixture((1000, 1000), (0.5, 0.25), seed=seed)
        return find_owners(mixture, mixture.indices(np.arange(300))[0]).reshape(-1, 3).tolist()

    assert len({tuple(block) for block in slot_owners(0)}) == 3
    assert slot_owners(0) != slot_owners(1)


@given(
    size=st.integers(4, 60),
    shape=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6), st.floats(0.05, 1), st.booleans()), min_size=1),
    seed=seeds,
)
def test_stages_use_the_easiest_samples_and_their_replay_fraction(
    size: int, shape: list[tuple[int, int, float, bool]], seed: int
) -> None:
    ranking = np.random.default_rng(size).permutation(size)
    stages, first = [], 0
    for steps, batch, fraction, has_replay in shape[:5]:
        stages.append(
            CurriculumStage(first, batch, max(1, round(fraction * size)), replay_fraction=0.25 if has_replay else 0.0)
        )
        first += steps
    order = CurriculumOrder(ranking, tuple(stages), seed=seed)
    ranks = np.argsort(ranking)
    pairs: list[tuple[int, int]] = []
    position = 0
    for i, stage in enumerate(stages):
        steps = (stages[i + 1].first_step if i + 1 < len(stages) else first + 40) - stage.first_step
        index, epoch = order.indices(np.arange(position, position + steps * stage.batch_size))
        position += len(index)
        pairs += zip(index.tolist(), epoch.tolist(), strict=True)
        rank = ranks[index]
        assert (rank < stage.num_samples).all()
        num_old = stages[i - 1].num_samples if i and stage.replay_fraction else 0
        if 0 < num_old < stage.num_samples:
            repeated = (rank[: len(rank) // 4 * 4] < num_old).reshape(-1, 4).sum(axis=1)
            assert (repeated == 1).all()
        else:
            epochs = rank[: len(rank) // stage.num_samples * stage.num_samples].reshape(-1, stage.num_samples)
            assert (np.sort(epochs, axis=1) == np.arange(stage.num_samples)).all()
    assert len(set(pairs)) == len(pairs)


def test_order_of_a_stage_does_not_depend_on_the_stages_before_it() -> None:
    short = (CurriculumStage(0, 8, 30), CurriculumStage(10, 16, 90))
    long = (CurriculumStage(0, 8, 60), CurriculumStage(25, 16, 90))
    first, second = (CurriculumOrder(RANKING, stages, seed=1) for stages in (short, long))
    assert np.array_equal(first.indices(80 + np.arange(500))[0], second.indices(200 + np.arange(500))[0])
    same = CurriculumOrder(RANKING, (CurriculumStage(0, 16, 90), CurriculumStage(10, 16, 90)), seed=1).indices(
        np.arange(320)
    )[0]
    assert not np.array_equal(same[:160], same[160:])
    other = CurriculumOrder(RANKING, short, seed=2)
    assert not np.array_equal(first.indices(80 + np.arange(500))[0], other.indices(80 + np.arange(500))[0])


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5))
def test_batch_size_schedule_counts_samples(stages: list[tuple[int, int]]) -> None:
    firsts = np.cumsum([0, *(steps for steps, _ in stages)])[:-1]
    schedule = BatchSizeSchedule(tuple(firsts.tolist()), tuple(size for _, size in stages))
    expected = [size for steps, size in stages for _ in range(steps)] + [stages[-1][1]] * 20
    assert [schedule.batch_size_at(step) for step in range(len(expected))] == expected
    before = np.cumsum([0, *expected])
    assert [schedule.samples_before(step) for step in range(len(before))] == before.tolist()
    for samples in range(int(before[-2])):
        step = schedule.step_at(samples)
        assert before[step] <= samples < before[step + 1]


def test_ranking_is_ascending_and_stable() -> None:
    class WithLengths(Source):
        """A source with sample lengths."""

        fingerprint = "lengthy"

        def __len__(self) -> int:
            return 4

        def lengths(self) -> np.ndarray:
            return np.array([5, 2, 5, 1])

        def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
            return {"score": index % 2, "pair": np.zeros((len(index), 2))}

        def describe(self, index: int, epoch: int) -> str:
            return ""

    source = WithLengths()
    assert curriculum.rank_samples(source, "length").tolist() == [3, 1, 0, 2]
    assert curriculum.rank_samples(Take(source, 3), "length").tolist() == [1, 0, 2]
    twice = Concat([source, source], repeats=[1, 2], limits=[2, None])
    assert curriculum.rank_samples(twice, "length").tolist() == [5, 9, 1, 3, 7, 0, 2, 4, 6, 8]
    assert curriculum.rank_samples(source, "score").tolist() == [0, 2, 1, 3]
    assert curriculum.rank_samples(source, np.array([4, 3, 2, 1])).tolist() == [3, 2, 1, 0]
    assert curriculum.rank_samples(source, lambda s: -np.arange(len(s))).tolist() == [3, 2, 1, 0]
    with pytest.raises(UsageError, match=r"all samples have the same length; use rarity"):
        curriculum.rank_samples(SOURCE, "length")
    with pytest.raises(
        UsageError, match=r"by=age: the samples have no such field; choose from length, rarity, score, pair"
    ):
        curriculum.rank_samples(source, "age")
    with pytest.raises(
        DataError, match=r"by=pair gives float64 of shape \[4, 2\]; expected one number for each of the 4 samples"
    ):
        curriculum.rank_samples(source, "pair")
    with pytest.raises(DataError, match="nan for sample 2"):
        curriculum.rank_samples(source, np.array([1, 2, np.nan, np.inf]))
    with pytest.raises(UsageError, match="rarity needs tokens, but the samples have score, pair"):
        curriculum.rank_samples(source, "rarity")


def test_rarity_is_the_mean_surprise_of_the_tokens() -> None:
    tokens = np.array([[0, 0, 0, 0], [0, 0, 1, 1], [2, 0, 0, 0]] + [[0, 0, 0, 0]] * 300, np.int32)
    counts = np.bincount(tokens.ravel())
    surprise = -np.log(counts / counts.sum())
    expected = surprise[tokens].mean(axis=1)
    for name in ("tokens", "input_ids"):
        assert np.allclose(curriculum.compute_rarity(ArraySource({name: tokens})), expected, rtol=1e-12)
    order = curriculum.rank_samples(ArraySource({"tokens": tokens}), "rarity")
    assert order.tolist() == [0, *range(3, 303), 2, 1]
    mask = np.ones_like(tokens)
    mask[1, 3] = 0
    masked = curriculum.compute_rarity(ArraySource({"tokens": tokens, "attention_mask": mask}))
    total = 303 * 4 - 1
    assert masked[1] == pytest.approx((2 * np.log(total / (total - 2)) + np.log(total)) / 3, rel=1e-12)


def test_stages_are_planned_in_steps_and_samples() -> None:
    options = Curriculum.model_validate(
        {
            "stages": [
                {"share": 0.25, "steps": "1 epoch"},
                {"share": 0.5, "steps": "20%", "batch_size": 4, "replay": 0.1},
                {"steps": 1},
            ]
        }
    )
    planned = curriculum.plan_stages(
        options, size=200, total_steps=100, steps_per_epoch=25, batch_size=8, batch_multiplier=2
    )
    assert planned == (
        CurriculumStage(0, 8, 50),
        CurriculumStage(25, 8, 100, replay_fraction=0.1),
        CurriculumStage(45, 8, 200),
    )


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"steps": 100}, {"steps": 1}], r"stages\[1\] would begin at step 100, but the run has 100"),
        ([{"steps": 0}, {"steps": 5}], r"stages\[0\]\.steps is 0"),
        ([{"steps": 5}, {"steps": 5, "share": 0.01}], r"stages\[1\] has 2 samples .* fewer than one batch of 8"),
        ([{"steps": 5, "batch_size": 300}], r"stages\[0\] has 200 samples .* fewer than one batch of 300"),
        ([{"steps": 5, "replay": 0.5}], r"stages\[0\]\.replay=0\.5: this stage is the first"),
        ([{"steps": 5}, {"steps": 5, "replay": 0.5}], r"stages\[1\]\.replay=0\.5: this stage adds no samples"),
        ([{"steps": 0}, {"steps": 5, "share": 0.01}], r"stages\[0\].*; .*stages\[1\]"),
    ],
)
def test_invalid_stages_are_refused_by_name(stages: list[dict[str, Any]], message: str) -> None:
    options = Curriculum.model_validate({"stages": stages})
    with pytest.raises(UsageError, match=message):
        curriculum.plan_stages(options, size=200, total_steps=100, steps_per_epoch=25, batch_size=8)
