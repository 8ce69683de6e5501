"""Several sources stand in one batch as if each had been asked alone, and a recipe's shares are what is seen."""

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
from bottega.data.sources.combine import Concat, combine_sources, mixture_weights
from bottega.data.sources.source import ArraySource, Source
from bottega.data.sources.take import Take

RATE = np.int64(16_000)


class Seen(Source):
    """Says which sample it was asked for and in which epoch."""

    def __init__(self, name: int, size: int, **more: Any) -> None:
        self.name, self.size, self.more = name, size, more
        self.fingerprint = f"seen {name} {size}"  # type: ignore[misc]

    fingerprint = ""

    def __len__(self) -> int:
        return self.size

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        assert len(index) == 0 or (index.min() >= 0 and index.max() < self.size)
        who = np.full(len(index), self.name, np.int32)
        return {"who": who, "seen": np.stack([index, epoch], axis=1), "sample_rate": RATE, **self.more}

    def describe(self, index: int, epoch: int) -> str:
        return f"{index} in {epoch}"


parts = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 3), st.none() | st.integers(1, 12)), min_size=1, max_size=4
)


@given(parts, st.data())
def test_rows_are_those_of_each_source_in_the_order_asked_for(
    shape: list[tuple[int, int, int | None]], data: st.DataObject
) -> None:
    sizes, repeats, limits = zip(*shape, strict=True)
    whole = Concat([Seen(i, size) for i, size in enumerate(sizes)], repeats=repeats, limits=limits)
    table = [
        (i, local, copy)
        for i, (size, repeat, limit) in enumerate(shape)
        for copy in range(repeat)
        for local in range(min(size, limit or size))
    ]
    assert len(whole) == len(table) == sum(whole.sizes)
    index = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=30)), np.int64)
    epoch = np.array(data.draw(st.lists(st.integers(0, 5), min_size=len(index), max_size=len(index))), np.int64)
    rows = whole.rows(index, epoch)
    assert list(rows) == ["who", "seen", "sample_rate"]
    assert rows["who"].dtype == np.int32
    assert rows["sample_rate"] == RATE
    expected = [
        (table[i][0], table[i][1], e * repeats[table[i][0]] + table[i][2]) for i, e in zip(index, epoch, strict=True)
    ]
    assert [(int(who), *pair) for who, pair in zip(rows["who"], rows["seen"].tolist(), strict=True)] == expected


def test_a_repeated_source_never_looks_the_same_twice() -> None:
    whole = Concat([Seen(0, 3), Seen(1, 4)], repeats=[3, 1])
    batches = [whole.rows(np.arange(len(whole)), np.full(len(whole), epoch)) for epoch in range(4)]
    pairs = [tuple(pair) for rows in batches for pair in rows["seen"][rows["who"] == 0].tolist()]
    assert sorted(pairs) == [(sample, epoch) for sample in range(3) for epoch in range(12)]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Seen(1, 4, label=np.zeros(1)), r"b has the field 'label', but a does not"),
        (Seen(1, 4, sample_rate=np.int64(8000)), r"'sample_rate' is 16000 in a and 8000 in b"),
        (Seen(1, 4, who=np.zeros(1)), r"'who' is int32 \[\] in a and float64 \[\] in b"),
        (Seen(1, 4, seen=np.zeros((1, 3), np.int64)), r"'seen' is int64 \[2\] in a and int64 \[3\] in b"),
        (Seen(1, 4, who=np.int32(1)), r"'who' is int32 \[\] in a and 1 in b"),
    ],
)
def test_sources_that_cannot_stand_in_one_batch_are_named(other: Seen, message: str) -> None:
    whole = Concat([Seen(0, 4), other], names=["a", "b"])
    with pytest.raises(DataError, match=message):
        whole.check()
    if len(other.more.get("label", [0])) == 1:
        with pytest.raises(DataError, match=message):
            whole.rows(np.array([1, 5]), np.zeros(2, np.int64))


def test_one_source_alone_may_have_another_form() -> None:
    whole = Concat([ArraySource({"x": np.zeros((4, 8))}), ArraySource({"x": np.zeros((4, 6))})])
    assert whole.rows(np.array([1, 2]), np.zeros(2, np.int64))["x"].shape == (2, 8)
    assert whole.rows(np.array([5]), np.zeros(1, np.int64))["x"].shape == (1, 6)
    order = Mixture((4, 4), (1, 1), seed=0, slot_size=2)
    shapes = {batch["x"].shape for batch in islice(Loader(whole, 2, seed=0, order=order)(0), 20)}
    assert shapes == {(2, 8), (2, 6)}


def test_a_combination_tells_its_content_and_travels() -> None:
    whole = Concat([Seen(0, 3), Seen(1, 4)], repeats=[2, 1])
    assert whole.describe(4, 3) == "data.sources[0]: 1 in 7"
    assert whole.describe(7, 3) == "data.sources[1]: 1 in 3"
    others = (
        Concat([Seen(1, 4), Seen(0, 3)]),
        Concat([Seen(0, 3), Seen(1, 4)]),
        Concat([Seen(0, 3), Seen(1, 4)], repeats=[2, 1], limits=[2, None]),
    )
    assert len({whole.fingerprint, *(other.fingerprint for other in others)}) == 4
    twin = pickle.loads(pickle.dumps(whole))
    assert twin.fingerprint == whole.fingerprint
    with pytest.raises(DataError, match=r"data\.sources\[1\] has no samples"):
        Concat([Seen(0, 3), Seen(1, 0)])


def test_shares_by_weight_and_by_temperature() -> None:
    assert mixture_weights([5, 5], None, [None, None]) is None
    assert mixture_weights([5, 5], "concatenate", [None, None]) is None
    assert mixture_weights([1, 1000], "weighted", [3, None]) == [0.75, 0.25]
    assert mixture_weights([1, 3], "temperature", [None, None]) == [0.25, 0.75]
    # The share of mT5 (Xue et al., 2021) with alpha = 0.3: a language with a hundredth of the text is seen four times less.
    low, high = mixture_weights([1, 100], "temperature", [None, None], 1 / 0.3) or []
    assert high / low == pytest.approx(100**0.3)
    assert mixture_weights([1, 10**12], "temperature", [None, None], 1e9) == pytest.approx([0.5, 0.5])
    tiny, _ = mixture_weights([1, 10**12], "temperature", [None, None], 0.01) or []
    assert 0 < tiny < 1e-8


def options(count: int, **each: Any) -> list[Options]:
    return [Options(**{key: values[i] for key, values in each.items()}) for i in range(count)]


def recipe(**fields: Any) -> Data:
    return Data.model_validate(fields)


def counts(source: Source, order: Any, samples: int) -> list[int]:
    loader = Loader(source, 10, seed=3, order=order)
    seen = np.concatenate([batch["who"] for batch in islice(loader(0), samples // 10)])
    return np.bincount(seen).tolist()


SEVERAL = [Seen(0, 30), Seen(1, 20), Seen(2, 50)]
PLAIN = options(3)


def test_one_source_stays_as_it_is() -> None:
    only = SEVERAL[0]
    assert combine_sources([(only, Options())], recipe(), seed=0) == (only, None)
    assert combine_sources([(only, Options())], recipe(mixture="weighted"), seed=0) == (only, None)
    first, order = combine_sources([(only, Options())], recipe(limit=7), seed=0)
    assert isinstance(first, Take)
    assert (len(first), order) == (7, None)
    assert first.fingerprint == Take(only, 7).fingerprint


def test_concatenated_sources_are_seen_once_an_epoch() -> None:
    given_options = options(3, repeat=[2, None, None], limit=[None, 5, None])
    source, order = combine_sources(list(zip(SEVERAL, given_options, strict=True)), recipe(), seed=0)
    assert order is None
    assert len(source) == 60 + 5 + 50
    assert counts(source, order, 1150) == [600, 50, 500]


def test_weights_are_the_shares_that_are_seen() -> None:
    weighted = options(3, weight=[7, 2, None])
    source, order = combine_sources(list(zip(SEVERAL, weighted, strict=True)), recipe(mixture="weighted"), seed=0)
    assert counts(source, order, 1000) == [700, 200, 100]
    assert len(source) == 100
    assert Loader(source, 10, seed=3, order=order).steps_per_epoch == 10
    with pytest.raises(UsageError, match=r"data\.sources\[0\]\.weight=7 .* data\.mixture=weighted"):
        combine_sources(list(zip(SEVERAL, weighted, strict=True)), recipe(mixture="concatenate"), seed=0)
    _, order = combine_sources(list(zip(SEVERAL, weighted, strict=True)), recipe(), seed=0)
    assert counts(source, order, 1000) == [700, 200, 100], "who gives weights means them"


def test_a_temperature_flattens_the_sizes() -> None:
    data = recipe(sources=[{}] * 3, mixture="temperature", temperature=2)
    source, order = combine_sources(list(zip(SEVERAL, PLAIN, strict=True)), data, seed=0)
    root = np.sqrt([30, 20, 50])
    assert counts(source, order, 5120) == pytest.approx(5120 * root / root.sum(), abs=2)


@pytest.mark.parametrize("mixture", [None, "weighted"])
@pytest.mark.parametrize("limit", [None, 40])
def test_replay_has_its_share_whatever_the_rest_is(mixture: str | None, limit: int | None) -> None:
    data = recipe(mixture=mixture, limit=limit, replay={"path": "old", "share": 0.1})
    old = Seen(3, 8)
    source, order = combine_sources(list(zip(SEVERAL, PLAIN, strict=True)), data, seed=0, replay=old)
    seen = counts(source, order, 3000)
    assert seen[3] == 300
    if mixture == "weighted":
        assert seen[:3] == [900, 900, 900]
        assert len(source) == (8 + 3 * 13 if limit else 108)
    else:
        ratios = [30, 10, 0] if limit else [30, 20, 50]
        assert seen[:3] == pytest.approx([2700 * r / sum(ratios) for r in ratios], abs=30)
        assert len(source) == (limit or 100) + 8
    assert order is not None
    assert order.size == len(source)


def test_a_combination_of_other_forms_is_refused_before_the_first_step() -> None:
    wrong = [Seen(0, 4), Seen(1, 4, sample_rate=np.int64(8000))]
    with pytest.raises(DataError, match=r"'sample_rate' is 16000 in data\.sources\[0\] and 8000 in data\.sources\[1\]"):
        combine_sources(list(zip(wrong, options(2), strict=True)), recipe(), seed=0)
    data = recipe(replay={"path": "old"})
    with pytest.raises(DataError, match=r"in data\.train and 8000 in data\.replay"):
        combine_sources([(wrong[0], Options())], data, seed=0, replay=wrong[1])
