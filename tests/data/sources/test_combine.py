"""Combined sources: rows equal those of each source, and mixtures follow the recipe's weights."""

from __future__ import annotations

import pickle
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.config.data import Data
from bottega.config.data import Source as Options
from bottega.core.errors import DataError, UsageError
from bottega.data.loading.loader import Loader
from bottega.data.order.orders import Mixture
from bottega.data.sources.combine import Concat, combine_sources, compute_mixture_weights
from bottega.data.sources.source import ArraySource, Source
from bottega.data.sources.take import Take

RATE = np.int64(16_000)


class RecordingSource(Source):
    """Returns the index and epoch of each requested sample."""

    def __init__(self, name: int, size: int, **more: Any) -> None:
        self.name, self.size, self.more = name, size, more
        self.fingerprint = f"recording {name} {size}"  # type: ignore[misc]

    fingerprint = ""

    def __len__(self) -> int:
        return self.size

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        assert len(index) == 0 or (index.min() >= 0 and index.max() < self.size)
        source = np.full(len(index), self.name, np.int32)
        return {"source": source, "sample": np.stack([index, epoch], axis=1), "sample_rate": RATE, **self.more}

    def describe(self, index: int, epoch: int) -> str:
        return f"{index} in {epoch}"


parts = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 3), st.none() | st.integers(1, 12)), min_size=1, max_size=4
)


@given(parts, st.data())
def test_concat_returns_rows_in_the_requested_order(
    shape: list[tuple[int, int, int | None]], data: st.DataObject
) -> None:
    sizes, repeats, limits = zip(*shape, strict=True)
    concat = Concat([RecordingSource(i, size) for i, size in enumerate(sizes)], repeats=repeats, limits=limits)
    table = [
        (i, local, copy)
        for i, (size, repeat, limit) in enumerate(shape)
        for copy in range(repeat)
        for local in range(min(size, limit or size))
    ]
    assert len(concat) == len(table) == sum(concat.sizes)
    index = np.array(data.draw(st.lists(st.integers(0, len(concat) - 1), max_size=30)), np.int64)
    epoch = np.array(data.draw(st.lists(st.integers(0, 5), min_size=len(index), max_size=len(index))), np.int64)
    rows = concat.rows(index, epoch)
    assert list(rows) == ["source", "sample", "sample_rate"]
    assert rows["source"].dtype == np.int32
    assert rows["sample_rate"] == RATE
    expected = [
        (table[i][0], table[i][1], e * repeats[table[i][0]] + table[i][2]) for i, e in zip(index, epoch, strict=True)
    ]
    assert [
        (int(source), *pair) for source, pair in zip(rows["source"], rows["sample"].tolist(), strict=True)
    ] == expected


def test_repeats_of_a_source_have_distinct_epochs() -> None:
    concat = Concat([RecordingSource(0, 3), RecordingSource(1, 4)], repeats=[3, 1])
    batches = [concat.rows(np.arange(len(concat)), np.full(len(concat), epoch)) for epoch in range(4)]
    pairs = [tuple(pair) for rows in batches for pair in rows["sample"][rows["source"] == 0].tolist()]
    assert sorted(pairs) == [(sample, epoch) for sample in range(3) for epoch in range(12)]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (RecordingSource(1, 4, label=np.zeros(1)), r"b has the field 'label', but a does not"),
        (RecordingSource(1, 4, sample_rate=np.int64(8000)), r"'sample_rate' is 16000 in a and 8000 in b"),
        (RecordingSource(1, 4, source=np.zeros(1)), r"'source' is int32 \[\] in a and float64 \[\] in b"),
        (
            RecordingSource(1, 4, sample=np.zeros((1, 3), np.int64)),
            r"'sample' is int64 \[2\] in a and int64 \[3\] in b",
        ),
        (RecordingSource(1, 4, source=np.int32(1)), r"'source' is int32 \[\] in a and 1 in b"),
    ],
)
def test_sources_with_incompatible_rows_are_named(other: RecordingSource, message: str) -> None:
    concat = Concat([RecordingSource(0, 4), other], names=["a", "b"])
    with pytest.raises(DataError, match=message):
        concat.check()
    with pytest.raises(DataError, match=message):
        concat.rows(np.array([1, 5]), np.zeros(2, np.int64))


class PaddedSource(RecordingSource):
    """A source with the field `ids`, which is padded to the longest sample of a batch."""

    padding_values = {"ids": 0}  # noqa: RUF012

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        return {**super().rows(index, epoch), "ids": np.ones((len(index), 5), np.int64)}


def test_source_without_a_padded_field_is_named() -> None:
    scalar = RecordingSource(1, 4, ids=np.zeros(1, np.int64))
    for other, message in (
        (RecordingSource(1, 4), r"a has the field 'ids', but b does not; give all sources the same fields"),
        (scalar, r"'ids' is int64 \[5\] in a and int64 \[\] in b"),
    ):
        concat = Concat([PaddedSource(0, 4), other], names=["a", "b"])
        with pytest.raises(DataError, match=message):
            concat.check()
        with pytest.raises(DataError, match=message):
            concat.rows(np.array([1, 5]), np.zeros(2, np.int64))


def test_batches_from_single_sources_may_differ_in_shape() -> None:
    concat = Concat([ArraySource({"x": np.zeros((4, 8))}), ArraySource({"x": np.zeros((4, 6))})])
    assert concat.rows(np.array([1, 2]), np.zeros(2, np.int64))["x"].shape == (2, 8)
    assert concat.rows(np.array([5]), np.zeros(1, np.int64))["x"].shape == (1, 6)
    order = Mixture((4, 4), (1, 1), seed=0, slot_size=2)
    shapes = {batch["x"].shape for batch in islice(Loader(concat, 2, seed=0, order=order)(0), 20)}
    assert shapes == {(2, 8), (2, 6)}


def test_concat_has_descriptions_and_fingerprint_and_pickles() -> None:
    concat = Concat([RecordingSource(0, 3), RecordingSource(1, 4)], repeats=[2, 1])
    assert concat.describe(4, 3) == "data.sources[0]: 1 in 7"
    assert concat.describe(7, 3) == "data.sources[1]: 1 in 3"
    others = (
        Concat([RecordingSource(1, 4), RecordingSource(0, 3)]),
        Concat([RecordingSource(0, 3), RecordingSource(1, 4)]),
        Concat([RecordingSource(0, 3), RecordingSource(1, 4)], repeats=[2, 1], limits=[2, None]),
    )
    assert len({concat.fingerprint, *(other.fingerprint for other in others)}) == 4
    copy = pickle.loads(pickle.dumps(concat))
    assert copy.fingerprint == concat.fingerprint
    with pytest.raises(DataError, match=r"data\.sources\[1\] has no samples"):
        Concat([RecordingSource(0, 3), RecordingSource(1, 0)])


def test_mixture_weights_by_weight_and_by_temperature() -> None:
    assert compute_mixture_weights([5, 5], None, [None, None]) is None
    assert compute_mixture_weights([5, 5], "concatenate", [None, None]) is None
    assert compute_mixture_weights([1, 1000], "weighted", [3, None]) == [0.75, 0.25]
    assert compute_mixture_weights([1, 3], "temperature", [None, None]) == [0.25, 0.75]
    # The weights of mT5 (Xue et al., 2021) with alpha = 0.3: a language with a hundredth of the text is four times rarer.
    low, high = compute_mixture_weights([1, 100], "temperature", [None, None], 1 / 0.3) or []
    assert high / low == pytest.approx(100**0.3)
    assert compute_mixture_weights([1, 10**12], "temperature", [None, None], 1e9) == pytest.approx([0.5, 0.5])
    tiny, _ = compute_mixture_weights([1, 10**12], "temperature", [None, None], 0.01) or []
    assert 0 < tiny < 1e-8


def make_options(count: int, **each: Any) -> list[Options]:
    return [Options(**{key: values[i] for key, values in each.items()}) for i in range(count)]


def make_data(**fields: Any) -> Data:
    return Data.model_validate(fields)


def count_by_source(source: Source, order: Any, samples: int) -> list[int]:
    loader = Loader(source, 10, seed=3, order=order)
    sources = np.concatenate([batch["source"] for batch in islice(loader(0), samples // 10)])
    return np.bincount(sources).tolist()


SOURCES = [RecordingSource(0, 30), RecordingSource(1, 20), RecordingSource(2, 50)]
DEFAULTS = make_options(3)


def test_single_source_is_returned_unchanged() -> None:
    only = SOURCES[0]
    assert combine_sources([(only, Options())], make_data(), seed=0) == (only, None)
    assert combine_sources([(only, Options())], make_data(mixture="weighted"), seed=0) == (only, None)
    first, order = combine_sources([(only, Options())], make_data(limit=7), seed=0)
    assert isinstance(first, Take)
    assert (len(first), order) == (7, None)
    assert first.fingerprint == Take(only, 7).fingerprint


def test_concatenation_follows_repeat_and_limit_of_each_source() -> None:
    options = make_options(3, repeat=[2, None, None], limit=[None, 5, None])
    source, order = combine_sources(list(zip(SOURCES, options, strict=True)), make_data(), seed=0)
    assert order is None
    assert len(source) == 60 + 5 + 50
    assert count_by_source(source, order, 1150) == [600, 50, 500]


def test_weights_are_the_fractions_of_samples() -> None:
    weighted = make_options(3, weight=[7, 2, None])
    source, order = combine_sources(list(zip(SOURCES, weighted, strict=True)), make_data(mixture="weighted"), seed=0)
    assert count_by_source(source, order, 1000) == [700, 200, 100]
    assert len(source) == 100
    assert Loader(source, 10, seed=3, order=order).steps_per_epoch == 10
    with pytest.raises(UsageError, match=r"data\.sources\[0\]\.weight=7 .* data\.mixture=weighted"):
        combine_sources(list(zip(SOURCES, weighted, strict=True)), make_data(mixture="concatenate"), seed=0)
    _, order = combine_sources(list(zip(SOURCES, weighted, strict=True)), make_data(), seed=0)
    assert count_by_source(source, order, 1000) == [700, 200, 100], "weights without a mixture setting were ignored"


def test_a_temperature_flattens_the_sizes() -> None:
    data = make_data(sources=[{}] * 3, mixture="temperature", temperature=2)
    source, order = combine_sources(list(zip(SOURCES, DEFAULTS, strict=True)), data, seed=0)
    root = np.sqrt([30, 20, 50])
    assert count_by_source(source, order, 5120) == pytest.approx(5120 * root / root.sum(), abs=2)


@pytest.mark.parametrize("mixture", [None, "weighted"])
@pytest.mark.parametrize("limit", [None, 40])
def test_replay_has_its_fraction_of_any_mixture(mixture: str | None, limit: int | None) -> None:
    data = make_data(mixture=mixture, limit=limit, replay={"path": "old", "share": 0.1})
    old = RecordingSource(3, 8)
    source, order = combine_sources(list(zip(SOURCES, DEFAULTS, strict=True)), data, seed=0, replay=old)
    num_samples = count_by_source(source, order, 3000)
    assert num_samples[3] == 300
    if mixture == "weighted":
        assert num_samples[:3] == [900, 900, 900]
        # The limit of 40 is divided by weight: 13 of each source; replay is not limited.
        assert len(source) == (8 + 3 * 13 if limit else 108)
    else:
        ratios = [30, 10, 0] if limit else [30, 20, 50]
        assert num_samples[:3] == pytest.approx([2700 * r / sum(ratios) for r in ratios], abs=30)
        assert len(source) == (limit or 100) + 8
    assert order is not None
    assert order.size == len(source)


def test_incompatible_sources_are_refused_when_combined() -> None:
    wrong = [RecordingSource(0, 4), RecordingSource(1, 4, sample_rate=np.int64(8000))]
    with pytest.raises(DataError, match=r"'sample_rate' is 16000 in data\.sources\[0\] and 8000 in data\.sources\[1\]"):
        combine_sources(list(zip(wrong, make_options(2), strict=True)), make_data(), seed=0)
    data = make_data(replay={"path": "old"})
    with pytest.raises(DataError, match=r"in data\.train and 8000 in data\.replay"):
        combine_sources([(wrong[0], Options())], data, seed=0, replay=wrong[1])
