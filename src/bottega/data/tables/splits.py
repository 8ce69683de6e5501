"""Assign rows to train, validation and test: a pure function of row names and recipe.

Validation takes the lowest hashes and test the highest, so that with data.split.by=hash changing the fraction of one does
not move rows of the other. With the other values of data.split.by validation is filled first, so raising its fraction can
take rows from test.
"""

from __future__ import annotations

import hashlib
import heapq
from dataclasses import dataclass

import numpy as np

from bottega.config.data import Splitting
from bottega.core.errors import DataError, UsageError
from bottega.core.noise import derive_key

TRAIN, VALIDATION, TEST = 0, 1, 2
SPLIT_NAMES = ("train", "validation", "test")


@dataclass(frozen=True)
class SplitTable:
    """The columns a split depends on, each (n,). Keys, files and groups are 64-bit hashes of their names."""

    keys: np.ndarray
    """Hash of the row's key, or of its field data.split.field."""
    sizes: np.ndarray | None = None
    """Size of each row that fractions are measured in, such as its characters; None counts rows."""
    files: np.ndarray | None = None
    labels: np.ndarray | None = None
    """Any number that identifies the class."""
    groups: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.keys)


def hash_key(text: str) -> int:
    """Return 64 bits of the SHA-256 of a name, the same on every machine and in every version."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def assign_splits(rows: SplitTable, options: Splitting, validation: float | None, test: float | None) -> np.ndarray:
    """Return 0 (train), 1 (validation) or 2 (test) for each row. `options.folds` replaces the fraction of validation."""
    if options.folds is not None:
        validation = None
    _check_fractions(validation, test)
    keys = _mix_seed(rows.keys, options.seed)
    if options.by == "hash":
        splits = _split_by_hash(keys, validation, test)
    elif options.by == "stratified":
        splits = _split_by_class(keys, _require_column(rows.labels, options), validation, test)
    else:
        unit, hashes, sizes = _find_units(rows, keys, options)
        splits = _split_by_size(hashes, sizes, validation, test)[unit]
    if options.folds is not None:
        fold_rows = np.flatnonzero(splits == TRAIN)
        splits[fold_rows[_assign_folds(rows, keys, options, fold_rows, test) == options.fold]] = VALIDATION
    requested = (True, validation is not None or options.folds is not None, test is not None)
    _check_not_empty(splits, requested, options)
    return splits


def _check_fractions(validation: float | None, test: float | None) -> None:
    fractions = {"data.validation.split": validation, "data.test.split": test}
    for key, fraction in fractions.items():
        if fraction is not None and not 0 < fraction < 1:
            raise UsageError(f"{key} is {fraction:g}; it must be between 0 and 1")
    if (validation or 0) + (test or 0) >= 1:
        raise UsageError(
            f"data.validation.split={validation:g} and data.test.split={test:g} leave nothing to train on; their sum "
            "must be below 1"
        )


def _check_not_empty(splits: np.ndarray, requested: tuple[bool, bool, bool], options: Splitting) -> None:
    counts = np.bincount(splits, minlength=3).tolist()
    for split, name in enumerate(SPLIT_NAMES):
        if requested[split] and not counts[split]:
            listed = ", ".join(f"{SPLIT_NAMES[i]} {counts[i]}" for i in range(3) if requested[i])
            remedy = "add rows" if options.by == "fraction" else "set data.split.by=fraction, or add rows"
            if options.folds is not None:
                remedy = f"lower data.split.folds={options.folds}, or add rows"
            raise DataError(
                f"splitting {len(splits)} rows by {options.by} leaves no row for {name} ({listed}); {remedy}"
            )


def _mix_seed(keys: np.ndarray, seed: int) -> np.ndarray:
    """Return hashes that depend on the seed; seed 0 leaves them unchanged, so that the hash of a name alone gives its split."""
    keys = np.asarray(keys, dtype=np.uint64)
    if seed == 0:
        return keys
    low, high = derive_key("split", seed)
    # Each step is invertible, so distinct names stay distinct; the multiplications carry every bit to the top ones.
    mixed = keys ^ np.uint64(high << 32 | low)
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def _require_column(column: np.ndarray | None, options: Splitting) -> np.ndarray:
    if column is None:
        needs = {
            "file": "data whose rows come from several files",
            "group": "data.split.field in each row",
            "stratified": "a class for each row",
        }
        raise UsageError(f"data.split.by={options.by} needs {needs[options.by]}; use fraction or hash")
    return column


def _find_units(rows: SplitTable, keys: np.ndarray, options: Splitting) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the index of each row's unit (a row, file or group, which stays whole), and the hash and size of each unit."""
    sizes = np.ones(len(rows), np.int64) if rows.sizes is None else np.asarray(rows.sizes)
    if options.by == "fraction":
        return np.arange(len(rows)), keys, sizes
    column = _require_column(rows.files if options.by == "file" else rows.groups, options)
    hashes, unit = np.unique(column, return_inverse=True)
    # Summed as integers: the weights of bincount are floats, which round above 2^53.
    totals = np.zeros(len(hashes), sizes.dtype)
    np.add.at(totals, unit, sizes)
    return unit, _mix_seed(hashes.astype(np.uint64), options.seed), totals


def _split_by_hash(keys: np.ndarray, validation: float | None, test: float | None) -> np.ndarray:
    """Split each row by its own hash, so that it stays where it is when data are added."""
    splits = np.zeros(len(keys), np.int8)
    if validation is not None:
        splits[keys < np.uint64(int(validation * 2**64))] = VALIDATION
    if test is not None:
        splits[keys >= np.uint64(_find_test_start(test))] = TEST
    return splits


def _find_test_start(test: float | None) -> int:
    """Return the lowest hash that belongs to test; 2^64, which is above all hashes, without a test set."""
    return 2**64 if test is None else 2**64 - max(1, int(test * 2**64))


def _split_by_size(hashes: np.ndarray, sizes: np.ndarray, validation: float | None, test: float | None) -> np.ndarray:
    """Split whole units in the order of their hashes as far as they fit, so that a new unit moves few others."""
    splits = np.zeros(len(hashes), np.int8)
    order = np.argsort(hashes, kind="stable")
    total = int(sizes.sum())
    for split, fraction, queue in ((VALIDATION, validation, order), (TEST, test, order[::-1])):
        remaining = queue[splits[queue] == TRAIN]
        if fraction is not None and len(remaining):
            splits[_choose_fitting_units(remaining, sizes, fraction * total)] = split
    return splits


def _choose_fitting_units(queue: np.ndarray, sizes: np.ndarray, room: float) -> np.ndarray:
    """Return the units, taken in the order of the queue, that fit into the total size `room`; the smallest if none fits."""
    chosen = []
    remaining = queue[sizes[queue] <= room]
    while len(remaining):
        cumulative_sizes = np.cumsum(sizes[remaining])
        num_fitting = int(np.searchsorted(cumulative_sizes, room, side="right"))
        chosen.append(remaining[:num_fitting])
        room -= float(cumulative_sizes[num_fitting - 1])
        # A unit that does not fit now never will, so each iteration drops all of them at once.
        remaining = remaining[num_fitting:]
        remaining = remaining[sizes[remaining] <= room]
    return np.concatenate(chosen) if chosen else queue[[np.argmin(sizes[queue])]]


def _split_by_class(keys: np.ndarray, labels: np.ndarray, validation: float | None, test: float | None) -> np.ndarray:
    """Split each class by the fractions: its lowest hashes for validation and its highest for test."""
    _, class_ids, counts = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.lexsort((keys, class_ids))
    starts = np.cumsum(counts) - counts
    rank = np.arange(len(keys)) - starts[class_ids[order]]
    # A class with too few rows for all three gets one in train first, then in validation, then in test.
    num_validation = _apportion(counts, validation, counts - 1)
    num_test = _apportion(counts, test, counts - 1 - num_validation)
    splits = np.zeros(len(keys), np.int8)
    splits[order[rank < num_validation[class_ids[order]]]] = VALIDATION
    splits[order[rank >= (counts - num_test)[class_ids[order]]]] = TEST
    return splits


def _apportion(counts: np.ndarray, fraction: float | None, max_counts: np.ndarray) -> np.ndarray:
    """Return the number of rows to take from each class: at least one, unless `max_counts` allows none.

    Fractions are rounded down; the rows that are then missing are taken from the classes with the largest remainders.
    """
    if fraction is None or not len(counts):
        return np.zeros_like(counts)
    ideal = fraction * counts
    quotas = np.floor(ideal).astype(np.int64)
    by_remainder = np.lexsort((np.arange(len(counts)), quotas - ideal))
    quotas[by_remainder[: max(0, round(fraction * int(counts.sum())) - int(quotas.sum()))]] += 1
    return np.minimum(np.maximum(quotas, 1), np.maximum(max_counts, 0))


def _assign_folds(
    rows: SplitTable, keys: np.ndarray, options: Splitting, fold_rows: np.ndarray, test: float | None
) -> np.ndarray:
    """Return the fold (m,) of each of the rows `fold_rows` (m,), which are all rows but those of test."""
    num_folds = options.folds or 1
    if options.by == "hash":
        # The folds divide the hashes below those of test. The top 32 bits are enough, and the product fits 64 bits.
        num_hashes = -(-_find_test_start(test) >> 32)
        return (keys[fold_rows] >> np.uint64(32)) * np.uint64(num_folds) // np.uint64(num_hashes)
    if options.by == "stratified":
        # Dealt class by class without restarting, so that classes and folds are both balanced to within one row.
        order = np.lexsort((keys[fold_rows], _require_column(rows.labels, options)[fold_rows]))
        fold = np.empty(len(fold_rows), np.int64)
        fold[order] = np.arange(len(fold_rows)) % num_folds
        return fold
    unit, hashes, sizes = _find_units(rows, keys, options)
    present, local = np.unique(unit[fold_rows], return_inverse=True)
    return _balance_folds(hashes[present], sizes[present], num_folds)[local]


def _balance_folds(hashes: np.ndarray, sizes: np.ndarray, num_folds: int) -> np.ndarray:
    """Assign units in the order of their hashes to the fold that is smallest so far."""
    order = np.argsort(hashes, kind="stable")
    fold = np.empty(len(hashes), np.int64)
    if len(sizes) and (sizes == sizes[0]).all():
        fold[order] = np.arange(len(hashes)) % num_folds
        return fold
    heap = [(0, 0, number) for number in range(num_folds)]
    for i in order.tolist():
        load, count, number = heap[0]
        fold[i] = number
        heapq.heapreplace(heap, (load + int(sizes[i]), count + 1, number))
    return fold
