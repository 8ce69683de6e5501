"""Rows of numbers: found in a record, equally wide, and changed as a function of (seed, epoch, index)."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.core.errors import DataError
from bottega.data.loading.loader import Loader
from bottega.data.numbers.numeric_fields import Layout, infer_layout
from bottega.data.numbers.vectors import VectorEncoder, VectorRows, augment_vectors
from bottega.data.records.record import Record, Unreadable
from bottega.data.tables.shards import ShardWriter, Table
from bottega.tasks.routing.config import VectorAugmentation

X = np.arange(60, dtype=np.float32).reshape(20, 3)


def row(fields: dict[str, Any], **options: Any) -> dict[str, Any]:
    (only,) = VectorEncoder(**options).rows(Record("a:1", "/data/a, line 1", fields))
    return only


def table(folder: Path, records: list[dict[str, Any]]) -> Table:
    encoder = VectorEncoder()
    with ShardWriter(folder, encoder.columns) as writer:
        for i, fields in enumerate(records):
            for made in encoder.rows(Record(f"a:{i}", f"a:{i}", fields)):
                writer.add(made)
    return Table(folder)


def test_a_vector_is_found_in_every_usual_form() -> None:
    forms: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"x": [1, 2, 3]}, {}),
        ({"features": np.array([[1.0], [2.0], [3.0]])}, {}),
        ({"mine": (1, 2, 3), "x": [9]}, {"field": "mine"}),
        ({"b": 2, "a": 1.0, "c": np.int64(3)}, {}),
        ({"c": np.array([3]), "a": "1", "b": "2e0", "name": "tit", "label": "4"}, {}),
        ({"a": 1, "b": 2, "c": 3, "kind": 9}, {"label_field": "kind"}),
    ]
    for fields, options in forms:
        made = row(fields, **options)
        np.testing.assert_array_equal(made["x"], [1, 2, 3], err_msg=str(fields))
        assert made["x"].dtype == np.float32
    assert row({"x": [1], "label": 3.0})["label"] == "3"
    assert row({"x": [1], "y": b"cat"})["label"] == "cat"
    assert row({"x": [1]})["label"] == ""


def test_columns_are_taken_by_name_so_that_their_order_in_a_row_does_not_matter() -> None:
    np.testing.assert_array_equal(row({"b": 2, "a": 1})["x"], row({"a": 1, "b": 2})["x"])


def test_what_holds_no_numbers_says_why() -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"name": "tit"}, {}, "no field contains numbers"),
        ({"a": 1, "b": None}, {}, "column 'b' has no value"),
        ({"a": 1, "b": ""}, {}, "column 'b' has no value"),
        ({"a": "nan"}, {}, "column 'a' is nan, which is not finite; replace it"),
        ({"x": [0, np.inf]}, {}, "'x': element 2 is inf, which is not finite"),
        (
            {"x": [0, 1e300]},
            {},
            r"'x': element 2 is 1e\+300, above the largest float32, 3.4e\+38; scale",
        ),
        (
            {"a": 1, "rule": 0, "expert": 0},
            {},
            "'rule' and 'expert' both contain the index of the correct expert; keep one",
        ),
        ({"a": 1, "Rule": 0, "rule": 0}, {}, "keep one"),
        ({"x": "tit"}, {}, "'x' contains no numbers but str"),
        ({"x": []}, {}, "contains no numbers"),
        ({"x": [1]}, {"field": "z"}, "has no field 'z'; it has x"),
        ({"x": [1]}, {"label_field": "z"}, "no field 'z'"),
    ]
    for fields, options, message in cases:
        with pytest.raises(Unreadable, match=message):
            row(fields, **options)


@pytest.mark.parametrize("name", ["rule", "Rule", "EXPERT", " Expert "])
def test_a_rule_is_found_however_it_is_written_and_is_never_an_input(name: str) -> None:
    made = row({"a": 1, "b": 2, name: 3, "label": 0})
    np.testing.assert_array_equal(made["x"], [1, 2])
    assert made["rule"] == 3


def told(*rows: dict[str, Any]) -> Layout | None:
    return infer_layout(Record(f"a:{i}", f"a, line {i}", fields) for i, fields in enumerate(rows))


def test_the_first_rows_tell_which_columns_are_inputs() -> None:
    good = {"b": "2", "a": "1", "city": "Rome", "label": "x", "Rule": "0"}
    assert told(good, good) == Layout(("a", "b"), ("city",))
    slip = {**good, "b": "abc"}
    assert told(slip, good, good) == Layout(("a", "b"), ("city",)), "one that is no number is a slip"
    assert told({"x": [1, 2], "label": 0}) is None
    assert told() is None


def test_a_row_has_the_columns_of_the_others() -> None:
    layout = Layout(("a", "b"), ("city",))
    np.testing.assert_array_equal(row({"city": "", "b": "2", "a": "1", "label": 0}, layout=layout)["x"], [1, 2])
    np.testing.assert_array_equal(row({"b": 2, "a": 1, "remark": "new"}, layout=layout)["x"], [1, 2])
    for fields, message in (
        ({"a": 1, "b": "abc"}, "column 'b' is 'abc', which is not a number"),
        ({"a": 1, "b": ""}, "column 'b' has no value"),
        ({"a": 1}, "has no column 'b'; the inputs are 'a', 'b': add what is missing"),
        ({"a": 1, "b": 2, "c": 3}, "has unknown columns 'c'; .*: remove them"),
        ({"a": 1, "c": 3}, "has no column 'b' and has unknown columns 'c'; .*: rename them"),
    ):
        with pytest.raises(Unreadable, match=message):
            row(fields, layout=layout)


def test_rows_of_a_table_are_mapped_and_equally_wide(tmp_path: Path) -> None:
    source = VectorRows(table(tmp_path / "a", [{"x": values, "label": 1} for values in X]), labels=np.arange(20))
    rows = source.rows(np.array([4, 0]), np.zeros(2, int))
    np.testing.assert_array_equal(rows["x"], X[[4, 0]])
    assert (rows["label"].tolist(), rows["label"].dtype, source.num_inputs) == ([4, 0], np.int32, 3)
    assert len(pickle.dumps(source)) < 2000
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(source)).rows(np.array([4]), np.zeros(1, int))["x"], X[[4]])
    assert source.describe(4, 0) == "row 4 of 20: a:4\nx: [12. 13. 14.]\nclass 4"
    with pytest.raises(DataError, match="a:1: has 3 numbers, but a:0 has 2"):
        VectorRows(table(tmp_path / "b", [{"x": [1, 2]}, {"x": [1, 2, 3]}]))


def test_wrong_data_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rows"):
        VectorRows(table(tmp_path, []))
    with pytest.raises(DataError, match=r"must have shape \(samples, d\), got \(3,\)"):
        VectorRows(np.zeros(3))
    with pytest.raises(DataError, match="20 rows and 3 labels"):
        VectorRows(X, labels=np.zeros(3))


@given(st.floats(0.01, 5), st.floats(0, 1))
def test_noise_and_holes_are_as_strong_as_asked(level: float, share: float) -> None:
    x = np.full((100, 200), 100, np.float32)
    index, epoch = np.arange(100), np.zeros(100, int)
    noise = augment_vectors(x, VectorAugmentation(noise_level=level), seed=0, epoch=epoch, index=index) - x
    assert noise.std() == pytest.approx(level, rel=0.03)
    assert abs(noise.mean()) < 0.05 * level
    holes = augment_vectors(x, VectorAugmentation(mask_probability=share), seed=0, epoch=epoch, index=index) == 0
    assert holes.mean() == pytest.approx(share, abs=0.015)
    # Everywhere alike, over rows and over inputs.
    assert np.abs(holes.mean(0) - share).max() < 0.25
    assert np.abs(holes.mean(1) - share).max() < 0.2


@given(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 3)), min_size=1, max_size=12))
def test_a_row_does_not_depend_on_its_batch(places: list[tuple[int, int]]) -> None:
    source = VectorRows(X, augmentation=VectorAugmentation(noise_level=1.0, mask_probability=0.3), seed=7)
    index, epoch = (np.array(part) for part in zip(*places, strict=True))
    rows = source.rows(index, epoch)["x"]
    for place in range(len(places)):
        alone = source.rows(index[place : place + 1], epoch[place : place + 1])["x"][0]
        np.testing.assert_array_equal(rows[place], alone)


def test_a_change_is_a_function_of_seed_epoch_and_index() -> None:
    options = VectorAugmentation(noise_level=1.0)
    x = np.zeros((1, 8), np.float32)

    def noise(seed: int, epoch: int, index: int) -> np.ndarray:
        return augment_vectors(x, options, seed=seed, epoch=np.array([epoch]), index=np.array([index]))

    drawn = [noise(0, 0, 0), noise(1, 0, 0), noise(0, 1, 0), noise(0, 0, 1)]
    assert len({values.tobytes() for values in drawn}) == 4
    np.testing.assert_array_equal(drawn[0], noise(0, 0, 0))
    np.testing.assert_array_equal(x, 0)


def test_nothing_asked_for_changes_nothing_and_the_loader_takes_it() -> None:
    for options in (None, VectorAugmentation(), VectorAugmentation(enabled=False, noise_level=1.0)):
        source = VectorRows(X, augmentation=options)
        rows = source.rows(np.arange(20), np.zeros(20, int))
        assert set(rows) == {"x"}
        np.testing.assert_array_equal(rows["x"], X)
    assert Loader(VectorRows(X), batch_size=8, seed=0).batch(3)["x"].shape == (8, 3)


def test_a_fingerprint_changes_with_what_is_seen() -> None:
    noisy = VectorAugmentation(noise_level=1.0)
    sources = [
        VectorRows(X),
        VectorRows(X[::-1]),
        VectorRows(X.reshape(10, 6)),
        VectorRows(X, labels=np.zeros(20)),
        VectorRows(X, augmentation=noisy),
        VectorRows(X, augmentation=noisy, seed=1),
        VectorRows(X, content="given"),
    ]
    assert len({source.fingerprint for source in sources}) == len(sources)
    assert VectorRows(X.copy(), seed=4).fingerprint == sources[0].fingerprint
