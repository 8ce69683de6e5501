"""Rows of numbers: read from records, of equal width, and augmented as a function of (seed, epoch, index)."""

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


def encode_row(fields: dict[str, Any], **options: Any) -> dict[str, Any]:
    (row,) = VectorEncoder(**options).rows(Record("a:1", "/data/a, line 1", fields))
    return row


def write_table(folder: Path, records: list[dict[str, Any]]) -> Table:
    encoder = VectorEncoder()
    with ShardWriter(folder, encoder.columns) as writer:
        for i, fields in enumerate(records):
            for row in encoder.rows(Record(f"a:{i}", f"a:{i}", fields)):
                writer.add(row)
    return Table(folder)


def test_vector_is_read_from_every_common_field_layout() -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"x": [1, 2, 3]}, {}),
        ({"features": np.array([[1.0], [2.0], [3.0]])}, {}),
        ({"mine": (1, 2, 3), "x": [9]}, {"field": "mine"}),
        ({"b": 2, "a": 1.0, "c": np.int64(3)}, {}),
        ({"c": np.array([3]), "a": "1", "b": "2e0", "name": "tit", "label": "4"}, {}),
        ({"a": 1, "b": 2, "c": 3, "kind": 9}, {"label_field": "kind"}),
    ]
    for fields, options in cases:
        row = encode_row(fields, **options)
        np.testing.assert_array_equal(row["x"], [1, 2, 3], err_msg=str(fields))
        assert row["x"].dtype == np.float32
    assert encode_row({"x": [1], "label": 3.0})["label"] == "3"
    assert encode_row({"x": [1], "y": b"cat"})["label"] == "cat"
    assert encode_row({"x": [1]})["label"] == ""


def test_column_order_does_not_matter() -> None:
    np.testing.assert_array_equal(encode_row({"b": 2, "a": 1})["x"], encode_row({"a": 1, "b": 2})["x"])


def test_record_without_valid_numbers_is_refused_with_the_reason() -> None:
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
            encode_row(fields, **options)


@pytest.mark.parametrize("name", ["rule", "Rule", "EXPERT", " Expert "])
def test_rule_column_is_case_insensitive_and_never_an_input(name: str) -> None:
    row = encode_row({"a": 1, "b": 2, name: 3, "label": 0})
    np.testing.assert_array_equal(row["x"], [1, 2])
    assert row["rule"] == 3


def infer_from(*rows: dict[str, Any]) -> Layout | None:
    return infer_layout(Record(f"a:{i}", f"a, line {i}", fields) for i, fields in enumerate(rows))


def test_input_columns_are_inferred_from_the_first_rows() -> None:
    good = {"b": "2", "a": "1", "city": "Rome", "label": "x", "Rule": "0"}
    assert infer_from(good, good) == Layout(("a", "b"), ("city",))
    with_typo = {**good, "b": "abc"}
    assert infer_from(with_typo, good, good) == Layout(("a", "b"), ("city",)), (
        "a single value that is not a number does not change the layout"
    )
    assert infer_from({"x": [1, 2], "label": 0}) is None
    assert infer_from() is None


def test_row_with_other_numeric_columns_is_refused() -> None:
    layout = Layout(("a", "b"), ("city",))
    np.testing.assert_array_equal(encode_row({"city": "", "b": "2", "a": "1", "label": 0}, layout=layout)["x"], [1, 2])
    np.testing.assert_array_equal(encode_row({"b": 2, "a": 1, "remark": "new"}, layout=layout)["x"], [1, 2])
    for fields, message in (
        ({"a": 1, "b": "abc"}, "column 'b' is 'abc', which is not a number"),
        ({"a": 1, "b": ""}, "column 'b' has no value"),
        ({"a": 1}, "has no column 'b'; the inputs are 'a', 'b': add what is missing"),
        ({"a": 1, "b": 2, "c": 3}, "has an unknown column 'c'; .*: remove it"),
        ({"a": 1, "c": 3}, "has no column 'b' and has an unknown column 'c'; .*: rename the columns"),
    ):
        with pytest.raises(Unreadable, match=message):
            encode_row(fields, layout=layout)


def test_table_rows_are_memory_mapped_and_of_equal_width(tmp_path: Path) -> None:
    source = VectorRows(write_table(tmp_path / "a", [{"x": values, "label": 1} for values in X]), labels=np.arange(20))
    rows = source.rows(np.array([4, 0]), np.zeros(2, int))
    np.testing.assert_array_equal(rows["x"], X[[4, 0]])
    assert (rows["label"].tolist(), rows["label"].dtype, source.num_inputs) == ([4, 0], np.int32, 3)
    assert len(pickle.dumps(source)) < 2000
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(source)).rows(np.array([4]), np.zeros(1, int))["x"], X[[4]])
    assert source.describe(4, 0) == "row 4 of 20: a:4\nx: [12. 13. 14.]\nclass 4"
    with pytest.raises(DataError, match="a:1: has 3 numbers, but a:0 has 2"):
        VectorRows(write_table(tmp_path / "b", [{"x": [1, 2]}, {"x": [1, 2, 3]}]))


def test_invalid_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rows"):
        VectorRows(write_table(tmp_path, []))
    with pytest.raises(DataError, match=r"must have shape \(samples, d\), got \(3,\)"):
        VectorRows(np.zeros(3))
    with pytest.raises(DataError, match="has 20 rows, but there are 3 labels"):
        VectorRows(X, labels=np.zeros(3))


@given(st.floats(0.01, 5), st.floats(0, 1))
def test_noise_and_masking_have_the_configured_strength(level: float, probability: float) -> None:
    x = np.full((100, 200), 100, np.float32)
    index, epoch = np.arange(100), np.zeros(100, int)
    noise = augment_vectors(x, VectorAugmentation(noise_level=level), seed=0, epoch=epoch, index=index) - x
    assert noise.std() == pytest.approx(level, rel=0.03)
    assert abs(noise.mean()) < 0.05 * level
    masked = augment_vectors(x, VectorAugmentation(mask_probability=probability), seed=0, epoch=epoch, index=index) == 0
    assert masked.mean() == pytest.approx(probability, abs=0.015)
    # Uniform over rows and over inputs.
    assert np.abs(masked.mean(0) - probability).max() < 0.25
    assert np.abs(masked.mean(1) - probability).max() < 0.2


@given(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 3)), min_size=1, max_size=12))
def test_a_row_does_not_depend_on_its_batch(samples: list[tuple[int, int]]) -> None:
    source = VectorRows(X, augmentation=VectorAugmentation(noise_level=1.0, mask_probability=0.3), seed=7)
    index, epoch = (np.array(values) for values in zip(*samples, strict=True))
    rows = source.rows(index, epoch)["x"]
    for position in range(len(samples)):
        alone = source.rows(index[position : position + 1], epoch[position : position + 1])["x"][0]
        np.testing.assert_array_equal(rows[position], alone)


def test_augmentation_is_a_function_of_seed_epoch_and_index() -> None:
    options = VectorAugmentation(noise_level=1.0)
    x = np.zeros((1, 8), np.float32)

    def noise(seed: int, epoch: int, index: int) -> np.ndarray:
        return augment_vectors(x, options, seed=seed, epoch=np.array([epoch]), index=np.array([index]))

    noises = [noise(0, 0, 0), noise(1, 0, 0), noise(0, 1, 0), noise(0, 0, 1)]
    assert len({values.tobytes() for values in noises}) == 4
    np.testing.assert_array_equal(noises[0], noise(0, 0, 0))
    np.testing.assert_array_equal(x, 0)


def test_no_augmentation_changes_nothing() -> None:
    for options in (None, VectorAugmentation(), VectorAugmentation(enabled=False, noise_level=1.0)):
        source = VectorRows(X, augmentation=options)
        rows = source.rows(np.arange(20), np.zeros(20, int))
        assert set(rows) == {"x"}
        np.testing.assert_array_equal(rows["x"], X)
    assert Loader(VectorRows(X), batch_size=8, seed=0).batch(3)["x"].shape == (8, 3)


def test_fingerprint_changes_with_the_samples() -> None:
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
