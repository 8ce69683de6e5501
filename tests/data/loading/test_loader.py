"""The stream loses nothing at the border of epochs and does not depend on ranks, workers or where it is entered."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.core.callback import Callback, Progress
from bottega.core.engine import EvaluationOutput, Snapshot
from bottega.core.errors import DataError, UsageError
from bottega.core.trainer import Cadences, Trainer
from bottega.core.types import Batch
from bottega.data.loading.loader import BLOCK, Loader, iter_eval_batches
from bottega.data.order.orders import CurriculumOrder, CurriculumStage, Mixture
from bottega.data.sources.source import ArraySource
from fake_engine import FakeEngine
from operations import count_operations


def numbers(size: int) -> ArraySource:
    return ArraySource({"x": np.arange(size), "y": np.arange(size * 2).reshape(size, 2)})


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 60), batch=st.integers(1, 60))
def test_every_epoch_is_a_permutation_across_batch_borders(size: int, batch: int) -> None:
    batch = min(size, batch)
    loader = Loader(numbers(size), batch, seed=4)
    steps = -(-3 * size // batch)
    index, epoch = (np.concatenate(parts) for parts in zip(*map(loader.indices, range(steps)), strict=True))
    assert np.array_equal(epoch, np.arange(steps * batch) // size)
    for number in range(3):
        assert np.array_equal(np.sort(index[epoch == number]), np.arange(size))
    assert loader.steps_per_epoch == size / batch


@pytest.mark.parametrize(("workers", "prefetch"), [(0, 0), (0, 3), (2, 0), (2, 2)])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_and_workers_share_one_order(world: int, workers: int, prefetch: int) -> None:
    start, steps = 5, 4
    source = numbers(30)
    shares = []
    for rank in range(world):
        stream = Loader(source, 8, seed=1, data_rank=rank, data_size=world, workers=workers, prefetch=prefetch)(start)
        shares.append(list(islice(stream, steps)))
        stream.close()
    plain = Loader(source, 8, seed=1)
    for step in range(steps):
        got = np.concatenate([share[step]["x"] for share in shares])
        assert np.array_equal(got, plain.indices(start + step)[0])
        assert np.array_equal(got, plain.batch(start + step)["x"])


def test_a_stream_entered_late_continues_the_same_order() -> None:
    loader = Loader(numbers(10_000), 7, seed=2)
    early = list(islice(loader(0), 2000))  # longer than one block of remembered positions
    late = list(islice(loader(1500), 500))
    assert all(np.array_equal(a["y"], b["y"]) for a, b in zip(early[1500:], late, strict=True))


def test_too_little_data_is_refused_with_both_numbers() -> None:
    message = "has 3 samples, fewer than one batch of 12; lower training.batch_size or add data"
    with pytest.raises(DataError, match=message):
        Loader(numbers(3), 12, seed=0)


def test_a_batch_that_ranks_cannot_share_is_refused_with_the_sizes_that_fit() -> None:
    with pytest.raises(
        UsageError, match=r"training.batch_size=8 .* 3 processes; use a multiple of 3, or one of 1, 2, 4, 8 processes"
    ):
        Loader(numbers(30), 8, seed=0, data_size=3)


STAGES = (CurriculumStage(0, 4, 10), CurriculumStage(3, 8, 20), CurriculumStage(5, 6, 30))


def staged(**options: Any) -> Loader:
    return Loader(numbers(30), 8, seed=0, order=CurriculumOrder(np.arange(30)[::-1], STAGES, seed=1), **options)


def test_stages_have_batches_of_their_own_sizes() -> None:
    sizes = [4, 4, 4, 8, 8, 6, 6, 6]
    loader = staged()
    assert [loader.batch_size_at(step) for step in range(8)] == sizes
    assert [len(batch["x"]) for batch in islice(loader(0), 8)] == sizes
    assert [len(batch["x"]) for batch in islice(staged(data_rank=1, data_size=2)(2), 6)] == [
        size // 2 for size in sizes[2:]
    ]
    assert [loader.samples_before(step) for step in range(9)] == [0, *np.cumsum(sizes)]
    assert [loader.step_at(samples) for samples in (0, 3, 4, 12, 27, 28, 33, 34)] == [0, 0, 1, 3, 4, 5, 5, 6]
    assert loader.steps_per_epoch == 30 / 8
    seen = np.concatenate([batch["x"] for batch in islice(loader(0), 10)])
    assert np.array_equal(seen, loader.order.indices(np.arange(len(seen)))[0])  # type: ignore[union-attr]


def test_a_stage_that_ranks_cannot_share_is_named() -> None:
    with pytest.raises(
        UsageError,
        match=r"curriculum\.stages\[2\]\.batch_size=6 .* 4 processes; use a multiple of 4, or one of 1, 2, 3, 6 processes",
    ):
        staged(data_size=4)


def test_an_epoch_of_a_mixture_is_as_many_samples_as_there_are() -> None:
    order = Mixture((20, 10), (0.9, 0.1), seed=0)
    assert Loader(numbers(30), 6, seed=0, order=order).steps_per_epoch == 5


class Sizes(FakeEngine):
    """Counts the samples it is given."""

    seen = 0

    def train_step(self, step: int, batch: Batch) -> dict[str, Any]:
        self.seen += len(batch["x"])
        return {"loss": 0.0}

    def fetch(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        return {name: float(value) for name, value in metrics.items()}

    def eval_step(self, batch: Batch) -> EvaluationOutput:
        raise NotImplementedError

    def snapshot(self) -> Snapshot:
        raise NotImplementedError

    def load(self, folder: Path) -> None:
        raise NotImplementedError


class Told(Callback):
    name = "told"

    def __init__(self) -> None:
        self.samples: list[int] = []
        self.per_log: list[int] = []

    def after_step(self, progress: Progress, metrics: dict[str, float]) -> None:
        self.samples.append(progress.samples)
        self.per_log.append(round(metrics["samples_per_second"] * metrics["step_seconds"] * 3))


def test_the_loop_counts_the_samples_of_every_stage() -> None:
    engine, told = Sizes(), Told()
    fit = Trainer(
        engine=engine, batches=staged(), progress=Progress(total=9), cadences=Cadences(log=3), callbacks=[told]
    )
    assert fit.run().samples == engine.seen == 12 + 16 + 24
    assert told.samples == [12, 34, 52]
    assert told.per_log == [12, 22, 18]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("limit", [None, 1, 5, 22, 100])
def test_evaluation_sees_every_sample_exactly_once_in_order(world: int, limit: int | None) -> None:
    source = numbers(22)
    expected = np.arange(22 if limit is None else min(limit, 22))
    ranks = [list(iter_eval_batches(source, 8, data_rank=rank, data_size=world, limit=limit)) for rank in range(world)]
    seen, total = [], 0.0
    for parts in zip(*ranks, strict=True):
        assert len({len(part["x"]) for part in parts}) == 1
        assert len({"weight" in part for part in parts}) == 1
        x = np.concatenate([part["x"] for part in parts])
        weight = np.concatenate([part.get("weight", np.ones(len(part["x"]), np.float32)) for part in parts])
        assert weight.dtype == np.float32
        if "weight" in parts[0]:
            assert 0 in weight  # the key is there only where something was filled up
        seen.append(x[weight > 0])
        total += weight.sum()
    assert np.array_equal(np.concatenate(seen), expected)
    assert total == len(expected)


@pytest.mark.parametrize("world", [1, 3])
def test_evaluation_tells_the_number_of_each_sample(world: int) -> None:
    """Noise is drawn for it, so that a sample has the same in every batch size and on every rank."""
    source = numbers(10)
    for rank in range(world):
        for batch in iter_eval_batches(source, 4, data_rank=rank, data_size=world):
            assert batch["index"].dtype == np.int64
            assert np.array_equal(batch["index"], batch["x"])


def test_padding_keeps_the_weights_a_source_has() -> None:
    source = ArraySource({"weight": np.array([0.5, 2.0, 3.0], np.float32)})
    parts = [next(iter(iter_eval_batches(source, 4, data_rank=rank, data_size=2))) for rank in range(2)]
    assert np.concatenate([part["weight"] for part in parts]).tolist() == [0.5, 2.0, 3.0, 0.0]


@pytest.mark.parametrize("samples", [1000, 1_000_000])
def test_a_step_does_little_more_than_the_gather(samples: int) -> None:
    stream = Loader(ArraySource({"x": np.arange(samples)}), 8, seed=0)(0)
    next(stream)
    steps = 2 * BLOCK // 8  # the order is remembered for a block of positions
    assert count_operations(lambda: list(islice(stream, steps))) < 20 * steps


def test_array_source_tells_its_content() -> None:
    source = numbers(4)
    assert source.fingerprint == numbers(4).fingerprint
    assert source.fingerprint != numbers(5).fingerprint
    assert ArraySource({"x": np.zeros(4)}).fingerprint != ArraySource({"z": np.zeros(4)}).fingerprint
    assert ArraySource({"x": np.zeros(4)}).fingerprint != ArraySource({"x": np.zeros((4, 1))}).fingerprint
    assert "sample 2 of 4" in source.describe(2, 0)
    assert "y: [4 5]" in source.describe(2, 0)
    with pytest.raises(DataError, match="equally long"):
        ArraySource({"x": np.zeros(4), "y": np.zeros(3)})
    with pytest.raises(DataError, match="at least one"):
        ArraySource({})
