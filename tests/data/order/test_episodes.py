"""Episodes: sampling of tasks, support and query sets, independent of world size and batch size."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import small_media
import small_texts
from bottega.core.errors import DataError, UsageError
from bottega.data.loading.loader import Loader, iter_eval_batches
from bottega.data.order import episodes
from bottega.data.order.episodes import NO_TASK, Episodes
from bottega.data.sources.combine import Concat
from bottega.data.sources.source import ArraySource
from bottega.data.sources.take import Take

SAMPLES = 60


def make_source(samples: int = SAMPLES) -> ArraySource:
    """Return samples with their number and class."""
    number = np.arange(samples)
    return ArraySource({"number": number, "label": (number % 6).astype(np.int32), "x": np.zeros((samples, 3))})


def make_episodes(**changes: object) -> Episodes:
    options = {"shots": 2, "queries": 3, "length": 100, "seed": 0, **changes}
    return Episodes(make_source(), np.arange(SAMPLES) % 6, **options)  # type: ignore[arg-type]


@given(index=st.integers(0, 99), epoch=st.integers(0, 9), ways=st.sampled_from([None, 1, 3, 6]), seed=st.integers(0, 5))
def test_support_and_query_are_disjoint_samples_of_the_same_tasks(
    index: int, epoch: int, ways: int | None, seed: int
) -> None:
    dataset = make_episodes(ways=ways, seed=seed)
    rows = dataset.rows(np.array([index]), np.array([epoch]))
    support, query = rows["support"]["number"][0], rows["query"]["number"][0]
    assert len(support) == 2 * (ways or 1)
    assert len(query) == 3 * (ways or 1)
    assert len({*support.tolist(), *query.tolist()}) == len(support) + len(query)
    tasks = [np.unique(part % 6, return_counts=True) for part in (support, query)]
    np.testing.assert_array_equal(tasks[0][0], tasks[1][0])
    assert len(tasks[0][0]) == (ways or 1)
    assert set(tasks[0][1]) == {2}
    assert set(tasks[1][1]) == {3}


@given(index=st.integers(0, 99), epoch=st.integers(0, 3))
def test_classes_are_relabelled_one_to_one(index: int, epoch: int) -> None:
    rows = make_episodes(ways=4, relabelled_field="label").rows(np.array([index]), np.array([epoch]))
    pairs = {
        (int(number) % 6, int(label))
        for part in rows.values()
        for number, label in zip(part["number"][0], part["label"][0], strict=True)
    }
    assert len(pairs) == 4, "a class has several labels"
    assert {label for _, label in pairs} == set(range(4))
    assert rows["support"]["label"].dtype == np.int32


def test_new_labels_are_uniform() -> None:
    """Six classes at three positions, 100 times each on average: the 99.9th percentile of chi-square(10) is 29.6."""
    dataset, counts = make_episodes(ways=3, length=600), np.zeros((6, 3))
    for index in range(600):
        counts[dataset.draw(index, 0).tasks, np.arange(3)] += 1
    assert ((counts - 100) ** 2 / 100).sum() < 29.6


def test_episode_does_not_depend_on_its_batch() -> None:
    dataset = make_episodes(ways=2, relabelled_field="label")
    batch = dataset.rows(np.array([5, 90, 5]), np.array([1, 0, 2]))
    for position, (index, epoch) in enumerate([(5, 1), (90, 0), (5, 2)]):
        alone = pickle.loads(pickle.dumps(dataset)).rows(np.array([index]), np.array([epoch]))
        for part in ("support", "query"):
            for name, value in alone[part].items():
                np.testing.assert_array_equal(batch[part][name][position], value[0])
    assert (batch["support"]["number"][0] != batch["support"]["number"][2]).any(), "two epochs have the same draw"


def test_every_task_is_drawn_equally_often() -> None:
    dataset = make_episodes(length=60)
    tasks = [int(dataset.draw(index, epoch).tasks[0]) for epoch in range(2) for index in range(60)]
    assert np.bincount(tasks).tolist() == [20] * 6
    assert tasks[:60] != tasks[60:]
    assert sorted(tasks[:6]) == list(range(6)), "a short evaluation does not have every task"


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_the_episodes_of_a_batch(world: int) -> None:
    loader = Loader(make_episodes(ways=3, relabelled_field="label"), 8, seed=3)
    for step in (0, 7, 40):
        expected = loader.batch(step)
        ranks = [replace(loader, data_rank=rank, data_size=world).batch(step) for rank in range(world)]
        for part in ("support", "query"):
            for name, value in expected[part].items():
                np.testing.assert_array_equal(np.concatenate([rank[part][name] for rank in ranks]), value)


def test_evaluation_episodes_do_not_depend_on_the_batch_size() -> None:
    def queries(size: int) -> np.ndarray:
        return np.concatenate([batch["query"]["number"] for batch in iter_eval_batches(make_episodes(length=7), size)])

    np.testing.assert_array_equal(queries(7), queries(2))


def test_tasks_with_too_few_samples_are_omitted_or_refused() -> None:
    tasks = np.repeat([0, 1, 2, NO_TASK], [20, 4, 20, 16])
    dataset = Episodes(make_source(), tasks, shots=2, queries=3, length=30, seed=0)
    assert (len(dataset.task_samples), dataset.num_tasks) == (2, 3)
    assert {int(dataset.draw(i, 0).tasks[0]) for i in range(30)} == {0, 2}
    with pytest.raises(
        DataError, match=r"^data.train: 2 of 3 tasks have 5 samples or more, but an episode needs 3"
    ) as e:
        Episodes(make_source(), tasks, shots=2, queries=3, length=30, seed=0, ways=3)
    assert "\n" not in str(e.value)


def test_repeated_samples_belong_to_no_task() -> None:
    twice = Concat([make_source(10), make_source(5)], repeats=[2, 1])
    labels, sources = episodes.group_by_label(twice), episodes.group_by_source(twice)
    assert labels is not None
    assert sources is not None
    assert labels.tolist() == [n % 6 for n in range(10)] + [NO_TASK] * 10 + [n % 6 for n in range(5)]
    assert sources.tolist() == [0] * 10 + [NO_TASK] * 10 + [1] * 5
    assert episodes.group_by_label(Take(twice, 4)).tolist() == [0, 1, 2, 3]  # type: ignore[union-attr]


def test_regions_have_equal_sizes_of_at_least_the_minimum() -> None:
    regions = episodes.group_by_region(make_source(), size=7, max_regions=64)
    assert (np.diff(regions) >= 0).all()
    assert np.bincount(regions).min() >= 7
    assert np.bincount(regions).tolist() == [8, 7, 8, 7, 8, 7, 8, 7]
    assert episodes.group_by_region(make_source(3), size=7).tolist() == [0, 0, 0]


def test_tables_are_grouped_by_labels_and_fields(tmp_path: Path) -> None:
    from bottega.tasks import registry
    from bottega.tasks.recipes import load_recipe

    def open_source(name: str, values: dict[str, object]) -> object:
        recipe = load_recipe([name, values]).recipe
        return registry.open_workload(recipe, progress=lambda stage, done, total: None).data.training()

    for name, values in (("image", small_media.image(tmp_path)), ("audio", small_media.audio(tmp_path))):
        rows = open_source(name, values)
        labels, field = episodes.group_by_label(rows), episodes.group_by_field(rows, "label")  # type: ignore[arg-type]
        index = np.arange(len(rows))  # type: ignore[arg-type]
        np.testing.assert_array_equal(labels, rows.rows(index, 0 * index)["label"])  # type: ignore[attr-defined]
        np.testing.assert_array_equal(np.unique(labels, return_inverse=True)[1].shape, field.shape)  # type: ignore[arg-type]
    texts = open_source("classify", small_texts.settings(tmp_path))
    dataset = Episodes(texts, episodes.group_by_label(texts), shots=2, queries=2, length=9, seed=0, ways=3)  # type: ignore[arg-type]
    rows = dataset.rows(np.arange(4), np.zeros(4, np.int64))
    assert rows["support"]["input_ids"].shape[:2] == (4, 6)
    assert rows["support"]["input_ids"].shape[2] == rows["query"]["input_ids"].shape[2]
    assert "relabelled" not in dataset.describe(0, 0)
    assert dataset.describe(0, 0).startswith("episode 0, epoch 0: tasks ")
    with pytest.raises(UsageError, match=r"no field 'speaker'; choose from .*label.*source"):
        episodes.group_by_field(texts, "speaker")  # type: ignore[arg-type]
