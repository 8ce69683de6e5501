"""Splits are functions of record names: disjoint, stable where the rule promises it, with the right fractions."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bottega.config.data import Splitting
from bottega.core.errors import DataError, UsageError
from bottega.data.tables.splits import SplitTable, assign_splits, hash_key
from operations import count_operations

TRAIN, VALIDATION, TEST = 0, 1, 2
seeds = st.integers(0, 100)


def hash_names(*names: object) -> np.ndarray:
    return np.array([hash_key(str(name)) for name in names], np.uint64)


def make_table(count: int, **columns: Any) -> SplitTable:
    return SplitTable(hash_names(*range(count)), **columns)


def make_splitting(rule: str, **more: Any) -> Splitting:
    return Splitting.model_validate({"by": rule, "field": "user", **more})


def count_splits(splits: np.ndarray) -> list[int]:
    return np.bincount(splits, minlength=3).tolist()


def test_hash_key_is_stable() -> None:
    assert hash_key("a.txt") == int.from_bytes(hashlib.sha256(b"a.txt").digest()[:8], "big")
    assert hash_key("") == 0xE3B0C44298FC1C14
    assert hash_key("\ud800") != hash_key("\ud801")  # file names may contain lone surrogates


def reference_fraction_split(keys: list[int], sizes: list[int], fraction: float) -> set[int]:
    """Return the held-out indices by the rule of the first release."""
    order = sorted(range(len(keys)), key=lambda i: keys[i])
    room = fraction * sum(sizes)
    held_out = set()
    for i in order:
        if sizes[i] <= room:
            held_out.add(i)
            room -= sizes[i]
    return held_out or {min(order, key=lambda i: sizes[i])}


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=200), st.floats(0.001, 0.9))
def test_fraction_split_matches_the_first_release(sizes: list[int], fraction: float) -> None:
    names = [f"{i}.txt" for i in range(len(sizes))]
    keys = [int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") for name in names]
    expected = reference_fraction_split(keys, sizes, fraction)
    assume(len(expected) < len(sizes))
    splits = assign_splits(
        SplitTable(np.array(keys, np.uint64), sizes=np.array(sizes)), make_splitting("fraction"), fraction, None
    )
    assert splits.dtype == np.int8
    assert set(np.flatnonzero(splits == VALIDATION).tolist()) == expected
    assert set(splits.tolist()) == {TRAIN, VALIDATION}


@given(st.integers(3, 500), st.floats(0.01, 0.45), st.floats(0.01, 0.45), seeds)
def test_fractions_of_rows_are_exact(size: int, validation: float, test: float, seed: int) -> None:
    splits = assign_splits(make_table(size), make_splitting("fraction", seed=seed), validation, test)
    assert count_splits(splits)[1:] == [max(1, int(validation * size)), max(1, int(test * size))]


@given(st.integers(20, 300), st.integers(1, 300), seeds)
def test_hash_split_is_stable_as_data_grows(size: int, more: int, seed: int) -> None:
    options = make_splitting("hash", seed=seed)
    before, after = (_assign_or_skip(make_table(n), options) for n in (size, size + more))
    assert np.array_equal(before, after[:size])
    # A different validation fraction moves nothing into or out of test.
    wider = assign_splits(make_table(size + more), options, 0.5, 0.2)
    assert np.array_equal(wider == TEST, after == TEST)
    assert (wider[after == VALIDATION] == VALIDATION).all()


def _assign_or_skip(rows: SplitTable, options: Splitting) -> np.ndarray:
    try:
        return assign_splits(rows, options, 0.3, 0.2)
    except DataError:
        assume(False)
        raise


def test_hash_split_of_many_rows_has_the_right_fractions() -> None:
    splits = assign_splits(make_table(50_000), make_splitting("hash"), 0.1, 0.05)
    assert np.array(count_splits(splits)) / 50_000 == pytest.approx([0.85, 0.1, 0.05], abs=0.005)
    keys = make_table(50_000).keys
    assert np.array_equal(splits == VALIDATION, keys < 0.1 * 2.0**64)


@pytest.mark.parametrize("seed", [1, 2, 12345])
def test_seeded_hash_split_is_uncorrelated_for_adjacent_keys(seed: int) -> None:
    # Adjacent keys must be assigned independently.
    adjacent = SplitTable(np.arange(20_000, dtype=np.uint64))
    splits = assign_splits(adjacent, make_splitting("hash", seed=seed), 0.3, None)
    assert splits.mean() == pytest.approx(0.3, abs=0.015)
    assert abs(np.corrcoef(splits[:-1], splits[1:])[0, 1]) < 0.03


@pytest.mark.parametrize("rule", ["fraction", "hash", "file", "stratified", "group"])
@pytest.mark.parametrize("folds", [None, 4])
def test_split_depends_on_the_seed_and_not_on_the_row_order(rule: str, folds: int | None) -> None:
    rows = make_table(
        200,
        files=hash_names(*(i // 5 for i in range(200))),
        labels=np.arange(200) % 3,
        groups=hash_names(*(i // 4 for i in range(200))),
    )
    first, again, other = (
        assign_splits(rows, make_splitting(rule, seed=seed, folds=folds), 0.2, 0.1) for seed in (0, 0, 1)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    permutation = np.random.default_rng(0).permutation(200)
    permuted = SplitTable(
        *(column[permutation] for column in (rows.keys, np.ones(200), rows.files, rows.labels, rows.groups))
    )
    assert np.array_equal(assign_splits(permuted, make_splitting(rule, folds=folds), 0.2, 0.1), first[permutation])


unit_sizes = st.lists(st.integers(1, 12), min_size=4, max_size=60)


@pytest.mark.parametrize("rule", ["file", "group"])
@given(sizes=unit_sizes, seed=seeds, folds=st.none() | st.integers(2, 4))
def test_files_and_groups_are_not_divided(rule: str, sizes: list[int], seed: int, folds: int | None) -> None:
    unit = np.repeat(np.arange(len(sizes)), sizes)
    names = hash_names(*range(len(sizes)))[unit]
    rows = make_table(len(unit), files=names if rule == "file" else None, groups=names if rule == "group" else None)
    try:
        splits = assign_splits(rows, make_splitting(rule, seed=seed, folds=folds), 0.25, 0.1)
    except DataError:
        assume(False)
        raise
    for number in range(len(sizes)):
        assert len(set(splits[unit == number].tolist())) == 1
    if folds is None:
        num_validation = count_splits(splits)[VALIDATION]
        # The remaining capacity is less than any unit that is still in train.
        smallest = min((size for i, size in enumerate(sizes) if splits[unit == i][0] == TRAIN), default=0)
        assert num_validation <= max(0.25 * len(unit), min(sizes))
        assert num_validation + smallest > 0.25 * len(unit) or count_splits(splits)[TEST] > 0


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12), st.floats(0.05, 0.4), st.none() | st.floats(0.05, 0.4), seeds
)
def test_stratified_split_has_each_class_in_proportion(
    sizes: list[int], validation: float, test: float | None, seed: int
) -> None:
    assume(max(sizes) >= (2 if test is None else 3))
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    splits = assign_splits(
        make_table(len(labels), labels=labels), make_splitting("stratified", seed=seed), validation, test
    )
    for label, size in enumerate(sizes):
        train, num_validation, num_test = count_splits(splits[labels == label])
        assert train >= 1
        assert (num_validation >= 1) == (size >= 2)
        if test is None:
            assert num_test == 0
        else:
            assert (num_test >= 1) == (size >= 3)
            assert num_test <= max(1, int(test * size) + 1)
        assert num_validation <= max(1, int(validation * size) + 1)
    if min(sizes) * validation >= 1 and test is None:
        assert count_splits(splits)[VALIDATION] == round(validation * len(labels))


@pytest.mark.parametrize("rule", ["fraction", "hash", "file", "stratified", "group"])
@given(size=st.integers(40, 150), folds=st.integers(2, 5), seed=seeds, test=st.none() | st.just(0.2))
def test_folds_are_disjoint_and_cover_everything(
    rule: str, size: int, folds: int, seed: int, test: float | None
) -> None:
    unit = np.arange(size) // 2
    labels = np.arange(size) % 3
    rows = make_table(size, files=hash_names(*unit), groups=hash_names(*unit), labels=labels)
    splits_by_fold = []
    for fold in range(folds):
        try:
            options = make_splitting(rule, seed=seed, folds=folds, fold=fold)
            splits_by_fold.append(assign_splits(rows, options, None, test))
        except DataError:
            assume(False)
    splits = np.stack(splits_by_fold)
    is_test = splits[0] == TEST
    assert ((splits == TEST) == is_test).all()
    assert is_test.any() == (test is not None)
    assert np.array_equal((splits == VALIDATION).sum(axis=0), ~is_test)
    weights = (splits == VALIDATION).sum(axis=1)
    if rule != "hash":
        assert weights.max() - weights.min() <= (2 if rule in ("file", "group") else 1)
    if rule == "stratified":
        by_class = np.stack([(splits[:, labels == label] == VALIDATION).sum(axis=1) for label in range(3)])
        assert (np.ptp(by_class, axis=1) <= 1).all()


@pytest.mark.parametrize("test", [0.1, 0.2, 0.5, 0.9])
def test_folds_by_hash_divide_the_rows_outside_test(test: float) -> None:
    """Test takes the highest hashes, so folds that divided the whole range of hashes would leave the last fold empty."""
    keys = np.arange(10_000, dtype=np.uint64) * np.uint64(2**64 // 10_000)
    counts = [
        count_splits(assign_splits(SplitTable(keys), make_splitting("hash", folds=5, fold=fold), None, test))
        for fold in range(5)
    ]
    assert [num_test for *_, num_test in counts] == pytest.approx([10_000 * test] * 5, abs=1)
    assert [num_validation for _, num_validation, _ in counts] == pytest.approx([2000 * (1 - test)] * 5, abs=2)


def test_folds_by_hash_without_test_are_ranges_of_the_hash() -> None:
    rows = make_table(500)
    for fold in range(3):
        splits = assign_splits(rows, make_splitting("hash", folds=3, fold=fold), None, None)
        assert np.array_equal(splits == VALIDATION, [(int(key) >> 32) * 3 >> 32 == fold for key in rows.keys])


def test_folds_of_texts_are_equal_in_characters() -> None:
    sizes = np.random.default_rng(0).integers(1, 1000, 500)
    folds = [
        assign_splits(make_table(500, sizes=sizes), make_splitting("fraction", folds=5, fold=fold), None, None)
        == VALIDATION
        for fold in range(5)
    ]
    weights = [sizes[fold].sum() for fold in folds]
    assert max(weights) - min(weights) <= 1000


def test_folds_override_the_validation_fraction() -> None:
    alone, both = (
        assign_splits(make_table(100), make_splitting("fraction", folds=5), fraction, None) for fraction in (None, 0.01)
    )
    assert count_splits(both) == [80, 20, 0]
    assert np.array_equal(alone, both)


@pytest.mark.parametrize(
    ("rows", "rule", "fractions", "message"),
    [
        (
            make_table(1),
            {"by": "fraction"},
            (0.1, None),
            r"1 rows by fraction leaves no row for train .*validation 1\); add rows",
        ),
        (make_table(2), {"by": "fraction"}, (0.1, 0.1), r"no row for train \(train 0, validation 1, test 1\)"),
        (make_table(0), {"by": "fraction"}, (0.1, None), r"0 rows .* no row for train"),
        (
            make_table(5),
            {"by": "hash"},
            (1e-9, None),
            r"no row for validation \(train 5, validation 0\); set data\.split\.by=frac",
        ),
        (make_table(9, files=np.zeros(9)), {"by": "file"}, (0.1, None), r"9 rows by file leaves no row for train"),
        (make_table(3, labels=np.arange(3)), {"by": "stratified"}, (0.1, None), r"no row for validation"),
        (make_table(3), {"by": "fraction", "folds": 5, "fold": 4}, (None, None), r"lower data\.split\.folds=5"),
    ],
)
def test_empty_split_is_refused_with_its_counts(
    rows: SplitTable, rule: dict[str, Any], fractions: tuple[float | None, float | None], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        assign_splits(rows, Splitting.model_validate(rule), *fractions)


def test_invalid_split_settings_are_refused() -> None:
    with pytest.raises(UsageError, match=r"validation\.split=0\.6 and data\.test\.split=0\.4 leave nothing"):
        assign_splits(make_table(10), make_splitting("fraction"), 0.6, 0.4)
    with pytest.raises(UsageError, match=r"data\.test\.split is 1\.5; it must be between 0 and 1"):
        assign_splits(make_table(10), make_splitting("fraction"), None, 1.5)
    for rule, requirement in {
        "file": "data whose rows come from several files",
        "stratified": "a class for each row",
        "group": r"data\.split\.field",
    }.items():
        with pytest.raises(UsageError, match=f"data.split.by={rule} needs {requirement}"):
            assign_splits(make_table(10), make_splitting(rule), 0.1, None)


@pytest.mark.parametrize("rule", ["fraction", "hash", "file", "stratified", "group"])
def test_splits_are_vectorised_over_rows(rule: str) -> None:
    """The number of operations does not grow with the number of rows."""

    def random_table(n: int) -> SplitTable:
        rng = np.random.default_rng(0)
        keys = rng.integers(0, 2**64, n, dtype=np.uint64)
        return SplitTable(keys, rng.integers(1, 10_000, n), keys // 2**44, rng.integers(0, 1000, n), keys // 2**48)

    few, many = random_table(10_000), random_table(200_000)
    assign_splits(few, make_splitting(rule), 0.05, 0.05)
    counts = [
        count_operations(lambda rows=rows: assign_splits(rows, make_splitting(rule), 0.05, 0.05))
        for rows in (few, many)
    ]
    assert max(counts) < 2000
    assert np.array(count_splits(assign_splits(many, make_splitting(rule), 0.05, 0.05)))[1:] / 200_000 == pytest.approx(
        [0.05, 0.05], abs=0.002
    )
