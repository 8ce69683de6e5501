"""A split is a function of names: nothing is in two parts, rows stay where the rule says so, and shares are met."""

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


def hashes(*names: object) -> np.ndarray:
    return np.array([hash_key(str(name)) for name in names], np.uint64)


def named(count: int, **columns: Any) -> SplitTable:
    return SplitTable(hashes(*range(count)), **columns)


def by(rule: str, **more: Any) -> Splitting:
    return Splitting.model_validate({"by": rule, "field": "user", **more})


def count(sides: np.ndarray) -> list[int]:
    return np.bincount(sides, minlength=3).tolist()


def test_a_hash_is_the_same_for_ever() -> None:
    assert hash_key("a.txt") == int.from_bytes(hashlib.sha256(b"a.txt").digest()[:8], "big")
    assert hash_key("") == 0xE3B0C44298FC1C14
    assert hash_key("\ud800") != hash_key("\ud801")  # an unpaired surrogate in a file name is no accident


def fitting_one_by_one(keys: list[int], sizes: list[int], share: float) -> set[int]:
    """The rule of the first release, word for word."""
    order = sorted(range(len(keys)), key=lambda i: keys[i])
    room = share * sum(sizes)
    kept_back = set()
    for i in order:
        if sizes[i] <= room:
            kept_back.add(i)
            room -= sizes[i]
    return kept_back or {min(order, key=lambda i: sizes[i])}


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=200), st.floats(0.001, 0.9))
def test_fractions_are_those_of_the_first_release(sizes: list[int], share: float) -> None:
    names = [f"{i}.txt" for i in range(len(sizes))]
    keys = [int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") for name in names]
    expected = fitting_one_by_one(keys, sizes, share)
    assume(len(expected) < len(sizes))
    sides = assign_splits(SplitTable(np.array(keys, np.uint64), sizes=np.array(sizes)), by("fraction"), share, None)
    assert sides.dtype == np.int8
    assert set(np.flatnonzero(sides == VALIDATION).tolist()) == expected
    assert set(sides.tolist()) == {TRAIN, VALIDATION}


@given(st.integers(3, 500), st.floats(0.01, 0.45), st.floats(0.01, 0.45), seeds)
def test_fractions_of_rows_are_exact(size: int, validation: float, test: float, seed: int) -> None:
    sides = assign_splits(named(size), by("fraction", seed=seed), validation, test)
    assert count(sides)[1:] == [max(1, int(validation * size)), max(1, int(test * size))]


@given(st.integers(20, 300), st.integers(1, 300), seeds)
def test_a_hash_never_moves_as_data_grows(size: int, more: int, seed: int) -> None:
    options = by("hash", seed=seed)
    before, after = (_sides_or_skip(named(n), options) for n in (size, size + more))
    assert np.array_equal(before, after[:size])
    # Another share of validation moves nothing into or out of test.
    wider = assign_splits(named(size + more), options, 0.5, 0.2)
    assert np.array_equal(wider == TEST, after == TEST)
    assert (wider[after == VALIDATION] == VALIDATION).all()


def _sides_or_skip(rows: SplitTable, options: Splitting) -> np.ndarray:
    try:
        return assign_splits(rows, options, 0.3, 0.2)
    except DataError:
        assume(False)
        raise


def test_hash_shares_are_met_by_many_rows() -> None:
    sides = assign_splits(named(50_000), by("hash"), 0.1, 0.05)
    assert np.array(count(sides)) / 50_000 == pytest.approx([0.85, 0.1, 0.05], abs=0.005)
    keys = named(50_000).keys
    assert np.array_equal(sides == VALIDATION, keys < 0.1 * 2.0**64)


@pytest.mark.parametrize("seed", [1, 2, 12345])
def test_another_seed_mixes_hashes_well(seed: int) -> None:
    # Also those that are close to each other: the share of the low half stays that of chance.
    close = SplitTable(np.arange(20_000, dtype=np.uint64))
    sides = assign_splits(close, by("hash", seed=seed), 0.3, None)
    assert sides.mean() == pytest.approx(0.3, abs=0.015)
    assert abs(np.corrcoef(sides[:-1], sides[1:])[0, 1]) < 0.03


@pytest.mark.parametrize("rule", ["fraction", "hash", "file", "stratified", "group"])
@pytest.mark.parametrize("folds", [None, 4])
def test_the_seed_changes_the_choice_and_nothing_else_does(rule: str, folds: int | None) -> None:
    rows = named(
        200,
        files=hashes(*(i // 5 for i in range(200))),
        labels=np.arange(200) % 3,
        groups=hashes(*(i // 4 for i in range(200))),
    )
    first, again, other = (assign_splits(rows, by(rule, seed=seed, folds=folds), 0.2, 0.1) for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    shuffled = np.random.default_rng(0).permutation(200)
    moved = SplitTable(
        *(column[shuffled] for column in (rows.keys, np.ones(200), rows.files, rows.labels, rows.groups))
    )
    assert np.array_equal(assign_splits(moved, by(rule, folds=folds), 0.2, 0.1), first[shuffled])


whole_units = st.lists(st.integers(1, 12), min_size=4, max_size=60)


@pytest.mark.parametrize("rule", ["file", "group"])
@given(sizes=whole_units, seed=seeds, folds=st.none() | st.integers(2, 4))
def test_files_and_groups_stay_whole(rule: str, sizes: list[int], seed: int, folds: int | None) -> None:
    unit = np.repeat(np.arange(len(sizes)), sizes)
    names = hashes(*range(len(sizes)))[unit]
    rows = named(len(unit), files=names if rule == "file" else None, groups=names if rule == "group" else None)
    try:
        sides = assign_splits(rows, by(rule, seed=seed, folds=folds), 0.25, 0.1)
    except DataError:
        assume(False)
        raise
    for number in range(len(sizes)):
        assert len(set(sides[unit == number].tolist())) == 1
    if folds is None:
        kept = count(sides)[VALIDATION]
        # As near as whole units allow: what is left of the room is less than any unit that is still in train.
        smallest = min((size for i, size in enumerate(sizes) if sides[unit == i][0] == TRAIN), default=0)
        assert kept <= max(0.25 * len(unit), min(sizes))
        assert kept + smallest > 0.25 * len(unit) or count(sides)[TEST] > 0


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12), st.floats(0.05, 0.4), st.none() | st.floats(0.05, 0.4), seeds
)
def test_each_class_has_its_share(sizes: list[int], validation: float, test: float | None, seed: int) -> None:
    assume(max(sizes) >= (2 if test is None else 3))
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    sides = assign_splits(named(len(labels), labels=labels), by("stratified", seed=seed), validation, test)
    for label, size in enumerate(sizes):
        train, kept, tested = count(sides[labels == label])
        assert train >= 1
        assert (kept >= 1) == (size >= 2)
        if test is None:
            assert tested == 0
        else:
            assert (tested >= 1) == (size >= 3)
            assert tested <= max(1, int(test * size) + 1)
        assert kept <= max(1, int(validation * size) + 1)
    if min(sizes) * validation >= 1 and test is None:
        assert count(sides)[VALIDATION] == round(validation * len(labels))


@pytest.mark.parametrize("rule", ["fraction", "hash", "file", "stratified", "group"])
@given(size=st.integers(40, 150), folds=st.integers(2, 5), seed=seeds, test=st.none() | st.just(0.2))
def test_folds_are_disjoint_and_together_everything(
    rule: str, size: int, folds: int, seed: int, test: float | None
) -> None:
    unit = np.arange(size) // 2
    labels = np.arange(size) % 3
    rows = named(size, files=hashes(*unit), groups=hashes(*unit), labels=labels)
    parts = []
    for fold in range(folds):
        try:
            parts.append(assign_splits(rows, by(rule, seed=seed, folds=folds, fold=fold), None, test))
        except DataError:
            assume(False)
    sides = np.stack(parts)
    tested = sides[0] == TEST
    assert ((sides == TEST) == tested).all()
    assert tested.any() == (test is not None)
    assert np.array_equal((sides == VALIDATION).sum(axis=0), ~tested)
    weights = (sides == VALIDATION).sum(axis=1)
    if rule != "hash":
        assert weights.max() - weights.min() <= (2 if rule in ("file", "group") else 1)
    if rule == "stratified":
        by_class = np.stack([(sides[:, labels == label] == VALIDATION).sum(axis=1) for label in range(3)])
        assert (np.ptp(by_class, axis=1) <= 1).all()


def test_folds_of_texts_are_equal_in_characters() -> None:
    sizes = np.random.default_rng(0).integers(1, 1000, 500)
    kept = [
        assign_splits(named(500, sizes=sizes), by("fraction", folds=5, fold=fold), None, None) == VALIDATION
        for fold in range(5)
    ]
    weights = [sizes[fold].sum() for fold in kept]
    assert max(weights) - min(weights) <= 1000


def test_folds_stand_in_place_of_a_share() -> None:
    alone, both = (assign_splits(named(100), by("fraction", folds=5), share, None) for share in (None, 0.01))
    assert count(both) == [80, 20, 0]
    assert np.array_equal(alone, both)


@pytest.mark.parametrize(
    ("rows", "rule", "shares", "message"),
    [
        (
            named(1),
            {"by": "fraction"},
            (0.1, None),
            r"1 rows by fraction leaves no row for train .*validation 1\); add rows",
        ),
        (named(2), {"by": "fraction"}, (0.1, 0.1), r"no row for train \(train 0, validation 1, test 1\)"),
        (named(0), {"by": "fraction"}, (0.1, None), r"0 rows .* no row for train"),
        (
            named(5),
            {"by": "hash"},
            (1e-9, None),
            r"no row for validation \(train 5, validation 0\); set data\.split\.by=frac",
        ),
        (named(9, files=np.zeros(9)), {"by": "file"}, (0.1, None), r"9 rows by file leaves no row for train"),
        (named(3, labels=np.arange(3)), {"by": "stratified"}, (0.1, None), r"no row for validation"),
        (named(3), {"by": "fraction", "folds": 5, "fold": 4}, (None, None), r"lower data\.split\.folds=5"),
    ],
)
def test_an_empty_part_is_refused_with_its_counts(
    rows: SplitTable, rule: dict[str, Any], shares: tuple[float | None, float | None], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        assign_splits(rows, Splitting.model_validate(rule), *shares)


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(UsageError, match=r"validation\.split=0\.6 and data\.test\.split=0\.4 leave nothing"):
        assign_splits(named(10), by("fraction"), 0.6, 0.4)
    with pytest.raises(UsageError, match=r"data\.test\.split is 1\.5; it must be between 0 and 1"):
        assign_splits(named(10), by("fraction"), None, 1.5)
    for rule, what in {"file": "files", "stratified": "a class for each row", "group": r"data\.split\.field"}.items():
        with pytest.raises(UsageError, match=f"data.split.by={rule} needs {what}"):
            assign_splits(named(10), by(rule), 0.1, None)


@pytest.mark.parametrize("rule", ["fraction", "hash", "file", "stratified", "group"])
def test_no_row_is_visited_by_python_itself(rule: str) -> None:
    """A million rows are a second's work where each step is one operation on arrays, and minutes where it is not."""

    def table(n: int) -> SplitTable:
        rng = np.random.default_rng(0)
        keys = rng.integers(0, 2**64, n, dtype=np.uint64)
        return SplitTable(keys, rng.integers(1, 10_000, n), keys // 2**44, rng.integers(0, 1000, n), keys // 2**48)

    few, many = table(10_000), table(200_000)
    assign_splits(few, by(rule), 0.05, 0.05)
    counts = [count_operations(lambda rows=rows: assign_splits(rows, by(rule), 0.05, 0.05)) for rows in (few, many)]
    assert max(counts) < 2000
    assert np.array(count(assign_splits(many, by(rule), 0.05, 0.05)))[1:] / 200_000 == pytest.approx(
        [0.05, 0.05], abs=0.002
    )
