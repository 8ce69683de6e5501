"""Which row is for training, validation or test: a function of the names of the rows and the recipe, never of chance.

Validation is taken from the lowest hashes and test from the highest, so that another share of one moves nothing in the
other where the rule allows it.
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
NAMES = ("train", "validation", "test")


@dataclass(frozen=True)
class SplitTable:
    """What a split needs to know of each row. Names are 64-bit hashes [n]."""

    keys: np.ndarray
    """The row's name, or what data.split.field names."""
    sizes: np.ndarray | None = None
    """What shares are counted in: characters, seconds; None counts rows."""
    files: np.ndarray | None = None
    labels: np.ndarray | None = None
    """Any number that stands for the class."""
    groups: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.keys)


def hash_key(text: str) -> int:
    """64 bits of a name, the same on every machine and for ever."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def assign_splits(rows: SplitTable, options: Splitting, validation: float | None, test: float | None) -> np.ndarray:
    """For each row 0 (train), 1 (validation) or 2 (test). `options.folds` stands in place of the share of validation."""
    if options.folds is not None:
        validation = None
    _check_shares(validation, test)
    keys = _mixed(rows.keys, options.seed)
    if options.by == "hash":
        sides = _by_hash(keys, validation, test)
    elif options.by == "stratified":
        sides = _by_class(keys, _needed(rows.labels, options), validation, test)
    else:
        unit, names, sizes = _units(rows, keys, options)
        sides = _by_size(names, sizes, validation, test)[unit]
    if options.folds is not None:
        rest = np.flatnonzero(sides == TRAIN)
        sides[rest[_folds(rows, keys, options, rest) == options.fold]] = VALIDATION
    wanted = (True, validation is not None or options.folds is not None, test is not None)
    _check_sides(sides, wanted, options)
    return sides


def _check_shares(validation: float | None, test: float | None) -> None:
    shares = {"data.validation.split": validation, "data.test.split": test}
    for key, share in shares.items():
        if share is not None and not 0 < share < 1:
            raise UsageError(f"{key} is {share:g}; it must lie between 0 and 1")
    if (validation or 0) + (test or 0) >= 1:
        raise UsageError(
            f"data.validation.split={validation:g} and data.test.split={test:g} leave nothing to train on; lower them"
        )


def _check_sides(sides: np.ndarray, wanted: tuple[bool, bool, bool], options: Splitting) -> None:
    counts = np.bincount(sides, minlength=3).tolist()
    for side, name in enumerate(NAMES):
        if wanted[side] and not counts[side]:
            told = ", ".join(f"{NAMES[i]} {counts[i]}" for i in range(3) if wanted[i])
            remedy = "add rows" if options.by == "fraction" else "set data.split.by=fraction, or add rows"
            if options.folds is not None:
                remedy = f"lower data.split.folds={options.folds}, or add rows"
            raise DataError(f"splitting {len(sides)} rows by {options.by} leaves no row for {name} ({told}); {remedy}")


def _mixed(keys: np.ndarray, seed: int) -> np.ndarray:
    """Other hashes for another seed. Seed 0 leaves them, so the hash of a name alone tells its side."""
    keys = np.asarray(keys, dtype=np.uint64)
    if seed == 0:
        return keys
    low, high = derive_key("split", seed)
    # Each step can be undone, so names that differ still do; the multiplications carry every bit to the top ones.
    mixed = keys ^ np.uint64(high << 32 | low)
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def _needed(column: np.ndarray | None, options: Splitting) -> np.ndarray:
    if column is None:
        what = {"stratified": "a class for each row", "group": "data.split.field in each row"}
        raise UsageError(f"data.split.by={options.by} needs {what.get(options.by, 'files')}; use fraction or hash")
    return column


def _units(rows: SplitTable, keys: np.ndarray, options: Splitting) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What stays whole (a row, file or group): the number of each row's unit, and the hash and size of each unit."""
    sizes = np.ones(len(rows), np.int64) if rows.sizes is None else np.asarray(rows.sizes)
    if options.by == "fraction":
        return np.arange(len(rows)), keys, sizes
    column = _needed(rows.files if options.by == "file" else rows.groups, options)
    names, unit = np.unique(column, return_inverse=True)
    # Summed as integers, because weights of bincount are floats that round above 2^53.
    totals = np.zeros(len(names), sizes.dtype)
    np.add.at(totals, unit, sizes)
    return unit, _mixed(names.astype(np.uint64), options.seed), totals


def _by_hash(keys: np.ndarray, validation: float | None, test: float | None) -> np.ndarray:
    """Each row for itself, so it stays where it is whatever comes to the data."""
    sides = np.zeros(len(keys), np.int8)
    if validation is not None:
        sides[keys < np.uint64(int(validation * 2**64))] = VALIDATION
    if test is not None:
        sides[keys >= np.uint64(2**64 - max(1, int(test * 2**64)))] = TEST
    return sides


def _by_size(names: np.ndarray, sizes: np.ndarray, validation: float | None, test: float | None) -> np.ndarray:
    """Whole units in the order of their hashes, as long as they fit; so a new one moves few."""
    sides = np.zeros(len(names), np.int8)
    order = np.argsort(names, kind="stable")
    whole = int(sizes.sum())
    for side, share, queue in ((VALIDATION, validation, order), (TEST, test, order[::-1])):
        left = queue[sides[queue] == TRAIN]
        if share is not None and len(left):
            sides[_fitting(left, sizes, share * whole)] = side
    return sides


def _fitting(queue: np.ndarray, sizes: np.ndarray, room: float) -> np.ndarray:
    """Those of the queue that fit the room one after the other, or the smallest where none does."""
    taken = []
    left = queue[sizes[queue] <= room]
    while len(left):
        used = np.cumsum(sizes[left])
        fit = int(np.searchsorted(used, room, side="right"))
        taken.append(left[:fit])
        room -= float(used[fit - 1])
        # What does not fit now never will, so each turn passes over all of that at once.
        left = left[fit:]
        left = left[sizes[left] <= room]
    return np.concatenate(taken) if taken else queue[[np.argmin(sizes[queue])]]


def _by_class(keys: np.ndarray, labels: np.ndarray, validation: float | None, test: float | None) -> np.ndarray:
    """Each class by its share, its lowest hashes for validation and its highest for test."""
    _, label, counts = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.lexsort((keys, label))
    starts = np.cumsum(counts) - counts
    at = np.arange(len(keys)) - starts[label[order]]
    # Train keeps one of each class, then validation has one, then test.
    first = _apportioned(counts, validation, counts - 1)
    last = _apportioned(counts, test, counts - 1 - first)
    sides = np.zeros(len(keys), np.int8)
    sides[order[at < first[label[order]]]] = VALIDATION
    sides[order[at >= (counts - last)[label[order]]]] = TEST
    return sides


def _apportioned(counts: np.ndarray, share: float | None, most: np.ndarray) -> np.ndarray:
    """How many of each class: its share rounded down, the rest to the largest remainders; at least one where it can."""
    if share is None or not len(counts):
        return np.zeros_like(counts)
    ideal = share * counts
    whole = np.floor(ideal).astype(np.int64)
    by_remainder = np.lexsort((np.arange(len(counts)), whole - ideal))
    whole[by_remainder[: max(0, round(share * int(counts.sum())) - int(whole.sum()))]] += 1
    return np.minimum(np.maximum(whole, 1), np.maximum(most, 0))


def _folds(rows: SplitTable, keys: np.ndarray, options: Splitting, rest: np.ndarray) -> np.ndarray:
    """For each row of `rest` which of `folds` equal parts it is in."""
    folds = options.folds or 1
    if options.by == "hash":
        # The top 32 bits are enough to tell folds apart, and their product fits 64.
        return (keys[rest] >> np.uint64(32)) * np.uint64(folds) >> np.uint64(32)
    if options.by == "stratified":
        # Dealt class by class without starting anew, so classes and folds are both equal to within one row.
        order = np.lexsort((keys[rest], _needed(rows.labels, options)[rest]))
        fold = np.empty(len(rest), np.int64)
        fold[order] = np.arange(len(rest)) % folds
        return fold
    unit, names, sizes = _units(rows, keys, options)
    present, local = np.unique(unit[rest], return_inverse=True)
    return _balanced(names[present], sizes[present], folds)[local]


def _balanced(names: np.ndarray, sizes: np.ndarray, folds: int) -> np.ndarray:
    """Units in the order of their hashes, each to the part that is lightest so far."""
    order = np.argsort(names, kind="stable")
    fold = np.empty(len(names), np.int64)
    if len(sizes) and (sizes == sizes[0]).all():
        fold[order] = np.arange(len(names)) % folds
        return fold
    parts = [(0, 0, number) for number in range(folds)]
    for i in order.tolist():
        load, count, number = parts[0]
        fold[i] = number
        heapq.heapreplace(parts, (load + int(sizes[i]), count + 1, number))
    return fold
