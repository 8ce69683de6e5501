"""Sources one after the other: what stands where, what comes back, and whose a held-out sample is."""

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


def quiet(stage: str, done: int, total: int) -> None: ...


def planned(sizes: tuple[int, ...], batch: int, epochs: int, **more: Any) -> Sequential:
    return Sequential(sizes, seed=3, **more).plan_turns(10**6, batch, epochs=epochs)


def owner_of(order: Sequential, index: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.cumsum(order.sizes), index, side="right")


@given(SIZES, st.integers(1, 9), st.integers(1, 3))
def test_each_source_is_passed_over_as_often_as_asked_before_the_next(sizes: Any, batch: int, epochs: int) -> None:
    order = planned(sizes, batch, epochs)
    total = order.schedule.num_steps(batch) * batch
    index, epoch = order.indices(np.arange(total))
    for turn, (start, stop) in enumerate(
        zip(order.schedule.start_positions, [*order.schedule.start_positions[1:], total], strict=True)
    ):
        assert start % batch == 0
        assert set(owner_of(order, index[start:stop])) == {turn}
        seen = Counter(zip(index[start:stop].tolist(), epoch[start:stop].tolist(), strict=True))
        assert max(seen.values()) == 1
        offset = sum(sizes[:turn])
        whole = {(offset + i, e) for i in range(sizes[turn]) for e in range(epochs)}
        assert whole <= set(seen)
        assert len(set(seen) - whole) < batch


@given(SIZES, st.integers(1, 9), st.integers(0, 10**12), st.sampled_from([0.0, 0.2, 1 / 3]))
def test_a_place_is_a_function_of_its_position(sizes: Any, batch: int, far: int, share: float) -> None:
    order = planned(sizes, batch, 2, replay_fraction=share)
    positions = np.r_[np.arange(3 * sum(sizes)), far + np.arange(5)]
    index, epoch = order.indices(positions)
    some = np.random.default_rng(0).permutation(len(positions))[:7]
    again = Sequential(sizes, seed=3, replay_fraction=share, turn_lengths=order.turn_lengths).indices(positions[some])
    np.testing.assert_array_equal(again, (index[some], epoch[some]))
    assert epoch.max() < order.num_epochs(int(positions.max()) + 1)


@given(SIZES, st.integers(1, 9), st.sampled_from([0.2, 0.25, 0.5]), st.sampled_from([None, 1, 5]))
def test_replay_has_its_share_of_each_later_turn_and_only_what_was_seen(
    sizes: Any, batch: int, share: float, memory: int | None
) -> None:
    order = planned(sizes, batch, 1, replay_fraction=share, memory_size=memory)
    total = order.schedule.num_steps(batch) * batch
    index, epoch = order.indices(np.arange(total))
    pairs = Counter(zip(index.tolist(), epoch.tolist(), strict=True))
    assert max(pairs.values()) == 1  # what comes back is never seen in the same epoch again
    block = round(1 / share)
    for turn, (start, stop) in enumerate(
        zip(order.schedule.start_positions, [*order.schedule.start_positions[1:], total], strict=True)
    ):
        owner = owner_of(order, index[start:stop])
        assert owner.max() == turn
        if turn == 0:
            continue
        whole = (stop - start) // block * block
        assert ((owner[:whole].reshape(-1, block) < turn).sum(axis=1) == 1).all()
        assert set(index[start:stop][owner == turn]) == set(range(sum(sizes[:turn]), sum(sizes[: turn + 1])))
        assert set(index[start:stop][owner < turn]) <= set(index[:start])
        for earlier in range(turn):
            came_back = set(index[start:stop][owner == earlier])
            assert memory is None or len(came_back) <= memory


def test_of_a_turn_too_short_for_a_pass_only_what_was_seen_comes_back() -> None:
    order = Sequential((1000, 1000), seed=0, replay_fraction=0.5).plan_turns(20, 10, epochs=None)
    index, _ = order.indices(np.arange(200))
    start = order.schedule.start_positions[1]
    back = index[start:][index[start:] < 1000]
    assert len(back) == (200 - start) // 2
    assert set(back) <= set(index[:start])
    assert set(order.first_samples(0, 50)) <= set(index[:start])
    assert len(set(order.first_samples(0, 50))) == 50


def test_examples_are_of_their_own_turn_and_seen() -> None:
    order = planned((20, 30, 10), 4, 1, replay_fraction=0.2)
    index, _ = order.indices(np.arange(order.schedule.num_steps(4) * 4))
    for turn, stop in enumerate(order.schedule.start_positions[1:]):
        chosen = order.first_samples(turn, 1000)
        assert set(owner_of(order, chosen)) == {turn}
        assert set(chosen) <= set(index[:stop])
        assert len(set(chosen)) == len(chosen) == order.sizes[turn]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_share_each_batch(world: int) -> None:
    source = ArraySource({"x": np.arange(60)})
    order = planned((25, 35), 8, 2)
    whole = Loader(source, 8, seed=0, order=order)
    ranks = [Loader(source, 8, seed=0, order=order, data_rank=r, data_size=world) for r in range(world)]
    for step in range(order.schedule.num_steps(8)):
        parts = np.concatenate([rank.batch(step)["x"] for rank in ranks])
        np.testing.assert_array_equal(parts, whole.batch(step)["x"])
        assert len({value >= 25 for value in parts.tolist()}) == 1  # no batch is of two sources


def test_the_turns_of_a_run_of_steps_are_by_size() -> None:
    order = Sequential((100, 300), seed=0).plan_turns(40, 8, epochs=None)
    assert order.schedule.first_steps(8) == (0, 10)
    assert order.schedule.num_steps(8) == 40
    with pytest.raises(UsageError, match=r"data.sources\[0\] has 1 of 301 samples"):
        Sequential((1, 300), seed=0).plan_turns(40, 8, epochs=None)


@given(st.lists(st.integers(1, 30), min_size=2, max_size=4), st.integers(1, 120))
def test_every_beginning_of_what_is_held_out_has_each_source(rows: list[int], first: int) -> None:
    samples = Interleaved(ArraySource({"x": np.arange(sum(rows))}), rows, name="validation")
    index = np.arange(len(samples))
    found = samples.rows(index, np.zeros_like(index))
    assert sorted(found["x"]) == list(range(sum(rows)))
    np.testing.assert_array_equal(found["source"], np.searchsorted(np.cumsum(rows), found["x"], side="right"))
    assert [samples.inner_index(i) for i in index] == found["x"].tolist()
    first = min(first, sum(rows))
    counts = np.bincount(found["source"][:first], minlength=len(rows))
    assert (np.abs(counts - first * np.array(rows) / sum(rows)) <= len(rows)).all()


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts(folder: Path, count: int = 40) -> str:
    rows = [{"text": f"word{i % 7} and number {i}", "label": i % 4} for i in range(count)]
    return jsonl(folder / "rows.jsonl", rows)


def classified(folder: Path, **data: Any) -> Any:
    spec = TokenizerSpec(kind="words", min_frequency=1)
    return prepare_classify(ClassifyData(**data), spec, seed=0, progress=quiet, cache=folder / "cache")


def of(path: str, *labels: Any) -> dict[str, Any]:
    return {"path": path, "labels": list(labels)}


def test_sources_of_one_file_by_their_classes(tmp_path: Path) -> None:
    path = texts(tmp_path)
    sources = [of(path, 0, 1), of(path, "2", 3)]
    prepared = classified(tmp_path, sources=sources, mixture="sequence", validation={"split": 0.25})
    assert prepared.classes.names == ("0", "1", "2", "3")
    assert [set(prepared.class_ids(f"train.{i}")) for i in range(2)] == [{0, 1}, {2, 3}]
    assert prepared.notes() == []
    counts = prepared.metadata["by_source"]["validation"]
    assert sum(counts) == prepared.tables["validation"]["rows"] == 10
    labels = prepared.class_ids("validation")
    assert set(labels[: counts[0]]) <= {0, 1}
    assert set(labels[counts[0] :]) <= {2, 3}


def test_held_out_data_of_its_own_is_told_apart_by_the_classes(tmp_path: Path) -> None:
    path = texts(tmp_path)
    other = jsonl(tmp_path / "held.jsonl", [{"text": f"word{i}", "label": i % 4} for i in range(8)])
    sources = [of(path, 0, 1), of(path, 2, 3)]
    prepared = classified(tmp_path, sources=sources, mixture="sequence", validation={"path": other})
    assert prepared.metadata["by_source"] == {"validation": [4, 4]}
    # Without a sequence, what measures all sources has the classes of all.
    mixed = classified(tmp_path, sources=[of(path, 0), of(path, 1)], validation={"path": other})
    assert set(mixed.class_ids("validation")) == {0, 1}
    assert "by_source" not in mixed.metadata


def test_a_class_that_no_record_has_is_named(tmp_path: Path) -> None:
    path = texts(tmp_path)
    with pytest.raises(DataError, match=r"no record has the class '9' of data\.train\.labels"):
        classified(tmp_path, sources=[of(path, 0, 9), of(path, 1)])
    with pytest.raises(
        DataError, match=r"none of the 40 records .* is left: 40 of another class; labels keeps only 8, 9"
    ):
        classified(tmp_path, sources=[of(path, 0), of(path, 8, 9)])


def test_windows_that_reach_over_are_nobodys(tmp_path: Path) -> None:
    paths = [jsonl(tmp_path / f"{name}.jsonl", [{"text": name * 60}] * 6) for name in "ab"]
    data = TextData(sources=[{"path": path} for path in paths], mixture="sequence", validation={"split": 0.5})
    prepared = prepare_language(data, TokenizerSpec(kind="characters"), progress=quiet, cache=tmp_path / "cache")
    rows = prepared.metadata["by_source"]["validation"]
    windows = TokenWindows(prepared.folder, "validation", sequence_length=16)
    letters = [set(windows.rows(np.array([i]), np.array([0]))["input_ids"][0].tolist()) for i in range(len(windows))]
    end = prepared.metadata["end_of_text"]
    own = [{prepared.tokenizer.encode(name)[0], end} for name in "ab"]
    for found, who in zip(letters, find_source_ids(windows, rows).tolist(), strict=True):
        assert found <= own[who] if who != NO_SOURCE else len(found - {end}) == 2
    assert {0, 1} <= set(find_source_ids(windows, rows).tolist())
    documents = TokenDocuments(prepared.folder, "validation", sequence_length=16)
    assert set(find_source_ids(documents, rows).tolist()) == {0, 1}
