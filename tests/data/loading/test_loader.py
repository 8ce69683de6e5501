"""The batch stream covers every epoch exactly and does not depend on ranks, workers or its first step."""

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
from bottega.data.loading.loader import POSITIONS_AT_ONCE, Loader, iter_eval_batches
from bottega.data.order.orders import CurriculumOrder, CurriculumStage, Mixture
from bottega.data.sources.source import ArraySource
from fake_engine import FakeEngine
from operations import count_operations


def build_source(size: int) -> ArraySource:
    return ArraySource({"x": np.arange(size), "y": np.arange(size * 2).reshape(size, 2)})


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 60), batch=st.integers(1, 60))
def test_every_epoch_is_a_permutation_across_batch_borders(size: int, batch: int) -> None:
    batch = min(size, batch)
    loader = Loader(build_source(size), batch, seed=4)
    steps = -(-3 * size // batch)
    index, epoch = (np.concatenate(parts) for parts in zip(*map(loader.indices, range(steps)), strict=True))
    assert np.array_equal(epoch, np.arange(steps * batch) // size)
    for number in range(3):
        assert np.array_equal(np.sort(index[epoch == number]), np.arange(size))
    assert loader.steps_per_epoch == size / batch


@pytest.mark.parametrize(("workers", "prefetch"), [(0, 0), (0, 3), (2, 0), (2, 2)])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_order_does_not_depend_on_ranks_or_workers(world: int, workers: int, prefetch: int) -> None:
    start, steps = 5, 4
    source = build_source(30)
    rank_batches = []
    for rank in range(world):
        stream = Loader(source, 8, seed=1, data_rank=rank, data_size=world, workers=workers, prefetch=prefetch)(start)
        rank_batches.append(list(islice(stream, steps)))
        stream.close()
    loader = Loader(source, 8, seed=1)
    for step in range(steps):
        samples = np.concatenate([batches[step]["x"] for batches in rank_batches])
        assert np.array_equal(samples, loader.indices(start + step)[0])
        assert np.array_equal(samples, loader.batch(start + step)["x"])


def test_stream_from_a_later_step_continues_the_same_order() -> None:
    loader = Loader(build_source(10_000), 7, seed=2)
    early = list(islice(loader(0), 2000))  # longer than one block of cached positions
    late = list(islice(loader(1500), 500))
    assert all(np.array_equal(a["y"], b["y"]) for a, b in zip(early[1500:], late, strict=True))


def test_fewer_samples_than_a_batch_are_refused_with_both_numbers() -> None:
    message = "has 3 samples, fewer than one batch of 12; lower training.batch_size or add data"
    with pytest.raises(DataError, match=message):
        Loader(build_source(3), 12, seed=0)


def test_indivisible_batch_size_is_refused_with_the_process_counts_that_fit() -> None:
    with pytest.raises(
        UsageError,
        match=r"training.batch_size=8 .* 3 processes; use a multiple of 3, or a number of processes that divides it \(1, 2, 4, 8\)",
    ):
        Loader(build_source(30), 8, seed=0, data_size=3)


STAGES = (CurriculumStage(0, 4, 10), CurriculumStage(3, 8, 20), CurriculumStage(5, 6, 30))


def build_staged_loader(**options: Any) -> Loader:
    return Loader(build_source(30), 8, seed=0, order=CurriculumOrder(np.arange(30)[::-1], STAGES, seed=1), **options)


def test_curriculum_stages_have_their_own_batch_sizes() -> None:
    sizes = [4, 4, 4, 8, 8, 6, 6, 6]
    loader = build_staged_loader()
    assert [loader.batch_size_at(step) for step in range(8)] == sizes
    assert [len(batch["x"]) for batch in islice(loader(0), 8)] == sizes
    assert [len(batch["x"]) for batch in islice(build_staged_loader(data_rank=1, data_size=2)(2), 6)] == [
        size // 2 for size in sizes[2:]
    ]
    assert [loader.samples_before(step) for step in range(9)] == [0, *np.cumsum(sizes)]
    assert [loader.step_at(samples) for samples in (0, 3, 4, 12, 27, 28, 33, 34)] == [0, 0, 1, 3, 4, 5, 5, 6]
    assert loader.steps_per_epoch == 30 / 8
    drawn = np.concatenate([batch["x"] for batch in islice(loader(0), 10)])
    assert np.array_equal(drawn, loader.order.indices(np.arange(len(drawn)))[0])  # type: ignore[union-attr]


def test_indivisible_stage_batch_size_is_refused_by_name() -> None:
    with pytest.raises(
        UsageError,
        match=r"curriculum\.stages\[2\]\.batch_size=6 .* 4 processes; use a multiple of 4, or a number of processes that divides it \(1, 2, 3, 6\)",
    ):
        build_staged_loader(data_size=4)


def test_epoch_of_a_mixture_counts_all_samples() -> None:
    order = Mixture((20, 10), (0.9, 0.1), seed=0)
    assert Loader(build_source(30), 6, seed=0, order=order).steps_per_epoch == 5


class CountingEngine(FakeEngine):
    """Count the samples of all training steps."""

    samples = 0

    def train_step(self, step: int, batch: Batch, **options: Any) -> dict[str, Any]:
        self.samples += len(batch["x"])
        return {"loss": 0.0}

    def fetch(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        return {name: float(value) for name, value in metrics.items()}

    def eval_step(self, batch: Batch) -> EvaluationOutput:
        raise NotImplementedError

    def snapshot(self) -> Snapshot:
        raise NotImplementedError

    def load(self, folder: Path) -> None:
        raise NotImplementedError


class RecordingCallback(Callback):
    name = "recording"

    def __init__(self) -> None:
        self.samples: list[int] = []
        self.samples_per_log: list[int] = []

    def after_step(self, progress: Progress, metrics: dict[str, float]) -> None:
        self.samples.append(progress.samples)
        self.samples_per_log.append(round(metrics["samples_per_second"] * metrics["step_seconds"] * 3))


def test_trainer_counts_the_samples_of_every_stage() -> None:
    engine, callback = CountingEngine(), RecordingCallback()
    trainer = Trainer(
        engine=engine,
        batches=build_staged_loader(),
        progress=Progress(total=9),
        cadences=Cadences(log=3),
        callbacks=[callback],
    )
    assert trainer.run().samples == engine.samples == 12 + 16 + 24
    assert callback.samples == [12, 34, 52]
    assert callback.samples_per_log == [12, 22, 18]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("limit", [None, 1, 5, 22, 100])
def test_evaluation_yields_every_sample_exactly_once_in_order(world: int, limit: int | None) -> None:
    source = build_source(22)
    expected = np.arange(22 if limit is None else min(limit, 22))
    ranks = [list(iter_eval_batches(source, 8, data_rank=rank, data_size=world, limit=limit)) for rank in range(world)]
    samples, total = [], 0.0
    for parts in zip(*ranks, strict=True):
        assert len({len(part["x"]) for part in parts}) == 1
        assert len({"weight" in part for part in parts}) == 1
        x = np.concatenate([part["x"] for part in parts])
        weight = np.concatenate([part.get("weight", np.ones(len(part["x"]), np.float32)) for part in parts])
        assert weight.dtype == np.float32
        if "weight" in parts[0]:
            assert 0 in weight  # the key is present only in padded batches
        samples.append(x[weight > 0])
        total += weight.sum()
    assert np.array_equal(np.concatenate(samples), expected)
    assert total == len(expected)


@pytest.mark.parametrize("world", [1, 3])
def test_evaluation_batches_hold_the_sample_index(world: int) -> None:
    """Noise is seeded by the index, so that a sample has the same noise for every batch size and rank."""
    source = build_source(10)
    for rank in range(world):
        for batch in iter_eval_batches(source, 4, data_rank=rank, data_size=world):
            assert batch["index"].dtype == np.int64
            assert np.array_equal(batch["index"], batch["x"])


def test_padding_keeps_the_weights_a_source_has() -> None:
    source = ArraySource({"weight": np.array([0.5, 2.0, 3.0], np.float32)})
    parts = [next(iter(iter_eval_batches(source, 4, data_rank=rank, data_size=2))) for rank in range(2)]
    assert np.concatenate([part["weight"] for part in parts]).tolist() == [0.5, 2.0, 3.0, 0.0]


@pytest.mark.parametrize("samples", [1000, 1_000_000])
def test_step_overhead_is_bounded(samples: int) -> None:
    stream = Loader(ArraySource({"x": np.arange(samples)}), 8, seed=0)(0)
    next(stream)
    steps = 2 * POSITIONS_AT_ONCE // 8  # the order is cached for a block of positions
    assert count_operations(lambda: list(islice(stream, steps))) < 20 * steps


def test_array_source_fingerprint_and_description() -> None:
    source = build_source(4)
    assert source.fingerprint == build_source(4).fingerprint
    assert source.fingerprint != build_source(5).fingerprint
    assert ArraySource({"x": np.zeros(4)}).fingerprint != ArraySource({"z": np.zeros(4)}).fingerprint
    assert ArraySource({"x": np.zeros(4)}).fingerprint != ArraySource({"x": np.zeros((4, 1))}).fingerprint
    assert "sample 2 of 4" in source.describe(2, 0)
    assert "y: [4 5]" in source.describe(2, 0)
    with pytest.raises(DataError, match="all of the same length"):
        ArraySource({"x": np.zeros(4), "y": np.zeros(3)})
    with pytest.raises(DataError, match="at least one"):
        ArraySource({})
