"""Sequential sources: positions, replay, and the sources of held-out samples."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.config.data import TextData
from bottega.core.errors import DataError, UsageError
from bottega.data.loading.loader import Loader
from bottega.data.order.interleaved import NO_SOURCE, Interleaved, find_source_ids
from bottega.data.order.sequential import Sequential
from bottega.data.sources.source import ArraySource
from bottega.data.text.tokens import TokenDocuments, TokenWindows
from bottega.data.text.vocabulary import TokenizerSpec
from bottega.tasks.classify.config import ClassifyData
from bottega.tasks.classify.prepare import prepare_classify
from bottega.tasks.language.prepare import prepare_language

SIZES = st.lists(st.integers(1, 40), min_size=2, max_size=4).map(tuple)


def ignore_progress(stage: str, done: int, total: int) -> None:
    """Show no progress bar."""


def plan_order(sizes: tuple[int, ...], batch: int, epochs: int, **options: Any) -> Sequential:
    return Sequential(sizes, seed=3, **options).plan_turns(10**6, batch, epochs=epochs)


def find_owners(order: Sequential, index: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.cumsum(order.sizes), index, side="right")


@given(SIZES, st.integers(1, 9), st.integers(1, 3))
def test_each_source_has_its_epochs_before_the_next_starts(sizes: Any, batch: int, epochs: int) -> None:
    order = plan_order(sizes, batch, epochs)
    total = order.schedule.num_steps(batch) * batch
    index, epoch = order.indices(np.arange(total))
    for turn, (start, stop) in enumerate(
        zip(order.schedule.start_positions, [*order.schedule.start_positions[1:], total], strict=True)
    ):
        assert start % batch == 0
        assert set(find_owners(order, index[start:stop])) == {turn}
        counts = Counter(zip(index[start:stop].tolist(), epoch[start:stop].tolist(), strict=True))
        assert max(counts.values()) == 1
        offset = sum(sizes[:turn])
        expected = {(offset + i, e) for i in range(sizes[turn]) for e in range(epochs)}
        assert expected <= set(counts)
        assert len(set(counts) - expected) < batch


@given(SIZES, st.integers(1, 9), st.integers(0, 10**12), st.sampled_from([0.0, 0.2, 1 / 3]))
def test_sample_is_a_function_of_its_position(sizes: Any, batch: int, far_position: int, fraction: float) -> None:
    order = plan_order(sizes, batch, 2, replay_fraction=fraction)
    positions = np.r_[np.arange(3 * sum(sizes)), far_position + np.arange(5)]
    index, epoch = order.indices(positions)
    chosen = np.random.default_rng(0).permutation(len(positions))[:7]
    rebuilt = Sequential(sizes, seed=3, replay_fraction=fraction, turn_lengths=order.turn_lengths).indices(
        positions[chosen]
    )
    np.testing.assert_array_equal(rebuilt, (index[chosen], epoch[chosen]))
    assert epoch.max() < order.num_epochs(int(positions.max()) + 1)


@given(SIZES, st.integers(1, 9), st.sampled_from([0.2, 0.25, 0.5]), st.sampled_from([None, 1, 5]))
def test_replay_has_its_fraction_of_each_later_turn_from_earlier_samples(
    sizes: Any, batch: int, fraction: float, memory: int | None
) -> None:
    order = plan_order(sizes, batch, 1, replay_fraction=fraction, memory_size=memory)
    total = order.schedule.num_steps(batch) * batch
    index, epoch = order.indices(np.arange(total))
    pairs = Counter(zip(index.tolist(), epoch.tolist(), strict=True))
    assert max(pairs.values()) == 1  # no replayed sample is repeated within an epoch
    block = round(1 / fraction)
    for turn, (start, stop) in enumerate(
        zip(order.schedule.start_positions, [*order.schedule.start_positions[1:], total], strict=True)
    ):
        owner = find_owners(order, index[start:stop])
        assert owner.max() == turn
        if turn == 0:
            continue
        length = (stop - start) // block * block
        assert ((owner[:length].reshape(-1, block) < turn).sum(axis=1) == 1).all()
        assert set(index[start:stop][owner == turn]) == set(range(sum(sizes[:turn]), sum(sizes[: turn + 1])))
        assert set(index[start:stop][owner < turn]) <= set(index[:start])
        for earlier in range(turn):
            replayed = set(index[start:stop][owner == earlier])
            assert memory is None or len(replayed) <= memory


def test_replay_of_a_turn_shorter_than_an_epoch_has_only_its_trained_samples() -> None:
    order = Sequential((1000, 1000), seed=0, replay_fraction=0.5).plan_turns(20, 10, epochs=None)
    index, _ = order.indices(np.arange(200))
    start = order.schedule.start_positions[1]
    replayed = index[start:][index[start:] < 1000]
    assert len(replayed) == (200 - start) // 2
    assert set(replayed) <= set(index[:start])
    assert set(order.first_samples(0, 50)) <= set(index[:start])
    assert len(set(order.first_samples(0, 50))) == 50


def test_first_samples_are_trained_samples_of_their_turn() -> None:
    order = plan_order((20, 30, 10), 4, 1, replay_fraction=0.2)
    index, _ = order.indices(np.arange(order.schedule.num_steps(4) * 4))
    for turn, stop in enumerate(order.schedule.start_positions[1:]):
        chosen = order.first_samples(turn, 1000)
        assert set(find_owners(order, chosen)) == {turn}
        assert set(chosen) <= set(index[:stop])
        assert len(set(chosen)) == len(chosen) == order.sizes[turn]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_share_each_batch(world: int) -> None:
    source = ArraySource({"x": np.arange(60)})
    order = plan_order((25, 35), 8, 2)
    expected = Loader(source, 8, seed=0, order=order)
    ranks = [Loader(source, 8, seed=0, order=order, data_rank=r, data_size=world) for r in range(world)]
    for step in range(order.schedule.num_steps(8)):
        batch = np.concatenate([rank.batch(step)["x"] for rank in ranks])
        np.testing.assert_array_equal(batch, expected.batch(step)["x"])
        assert len({value >= 25 for value in batch.tolist()}) == 1  # no batch is of two sources


def test_turn_lengths_are_proportional_to_source_sizes() -> None:
    order = Sequential((100, 300), seed=0).plan_turns(40, 8, epochs=None)
    assert order.schedule.first_steps(8) == (0, 10)
    assert order.schedule.num_steps(8) == 40
    with pytest.raises(UsageError, match=r"data.sources\[0\] has 1 of 301 samples"):
        Sequential((1, 300), seed=0).plan_turns(40, 8, epochs=None)


@given(st.lists(st.integers(1, 30), min_size=2, max_size=4), st.integers(1, 120))
def test_every_prefix_of_held_out_data_is_balanced_over_sources(rows: list[int], prefix: int) -> None:
    samples = Interleaved(ArraySource({"x": np.arange(sum(rows))}), rows, name="validation")
    index = np.arange(len(samples))
    loaded = samples.rows(index, np.zeros_like(index))
    assert sorted(loaded["x"]) == list(range(sum(rows)))
    np.testing.assert_array_equal(loaded["source"], np.searchsorted(np.cumsum(rows), loaded["x"], side="right"))
    assert [samples.inner_index(i) for i in index] == loaded["x"].tolist()
    prefix = min(prefix, sum(rows))
    counts = np.bincount(loaded["source"][:prefix], minlength=len(rows))
    assert (np.abs(counts - prefix * np.array(rows) / sum(rows)) <= len(rows)).all()


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_texts(folder: Path, count: int = 40) -> str:
    rows = [{"text": f"word{i % 7} and number {i}", "label": i % 4} for i in range(count)]
    return write_jsonl(folder / "rows.jsonl", rows)


def prepare(folder: Path, **data: Any) -> Any:
    spec = TokenizerSpec(kind="words", min_frequency=1)
    return prepare_classify(ClassifyData(**data), spec, seed=0, progress=ignore_progress, cache=folder / "cache")


def select_labels(path: str, *labels: Any) -> dict[str, Any]:
    return {"path": path, "labels": list(labels)}


def test_sources_select_classes_of_one_file(tmp_path: Path) -> None:
    path = write_texts(tmp_path)
    sources = [select_labels(path, 0, 1), select_labels(path, "2", 3)]
    prepared = prepare(tmp_path, sources=sources, mixture="sequence", validation={"split": 0.25})
    assert prepared.classes.names == ("0", "1", "2", "3")
    assert [set(prepared.class_ids(f"train.{i}")) for i in range(2)] == [{0, 1}, {2, 3}]
    assert prepared.notes() == []
    counts = prepared.metadata["by_source"]["validation"]
    assert sum(counts) == prepared.tables["validation"]["rows"] == 10
    labels = prepared.class_ids("validation")
    assert set(labels[: counts[0]]) <= {0, 1}
    assert set(labels[counts[0] :]) <= {2, 3}


def test_separate_validation_data_is_assigned_to_sources_by_class(tmp_path: Path) -> None:
    path = write_texts(tmp_path)
    held_out = write_jsonl(tmp_path / "held.jsonl", [{"text": f"word{i}", "label": i % 4} for i in range(8)])
    sources = [select_labels(path, 0, 1), select_labels(path, 2, 3)]
    prepared = prepare(tmp_path, sources=sources, mixture="sequence", validation={"path": held_out})
    assert prepared.metadata["by_source"] == {"validation": [4, 4]}
    # Without a sequence, validation data has the classes of all sources.
    mixed = prepare(tmp_path, sources=[select_labels(path, 0), select_labels(path, 1)], validation={"path": held_out})
    assert set(mixed.class_ids("validation")) == {0, 1}
    assert "by_source" not in mixed.metadata


def test_label_without_records_is_named(tmp_path: Path) -> None:
    path = write_texts(tmp_path)
    with pytest.raises(DataError, match=r"no record has the class '9' of data\.train\.labels"):
        prepare(tmp_path, sources=[select_labels(path, 0, 9), select_labels(path, 1)])
    with pytest.raises(
        DataError, match=r"none of the 40 records .* is left: 40 of another class; labels keeps only 8, 9"
    ):
        prepare(tmp_path, sources=[select_labels(path, 0), select_labels(path, 8, 9)])


def test_windows_across_sources_belong_to_none(tmp_path: Path) -> None:
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", [{"text": name * 60}] * 6) for name in "ab"]
    data = TextData(sources=[{"path": path} for path in paths], mixture="sequence", validation={"split": 0.5})
    prepared = prepare_language(
        data, TokenizerSpec(kind="characters"), progress=ignore_progress, cache=tmp_path / "cache"
    )
    rows = prepared.metadata["by_source"]["validation"]
    windows = TokenWindows(prepared.folder, "validation", sequence_length=16)
    letters = [set(windows.rows(np.array([i]), np.array([0]))["input_ids"][0].tolist()) for i in range(len(windows))]
    end = prepared.metadata["end_of_text"]
    tokens_of_source = [{prepared.tokenizer.encode(name)[0], end} for name in "ab"]
    for tokens, source in zip(letters, find_source_ids(windows, rows).tolist(), strict=True):
        assert tokens <= tokens_of_source[source] if source != NO_SOURCE else len(tokens - {end}) == 2
    assert {0, 1} <= set(find_source_ids(windows, rows).tolist())
    documents = TokenDocuments(prepared.folder, "validation", sequence_length=16)
    assert set(find_source_ids(documents, rows).tolist()) == {0, 1}
