"""Labelled texts as batches: special tokens, truncation, padding, and class numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.config.data import Data, HeldOut, Source
from bottega.core.errors import DataError
from bottega.data.prepare.prepared import PreparedData
from bottega.data.sources import combine
from bottega.data.tables.classes import Classes
from bottega.data.text.labelled import (
    LabelledTexts,
    TextCollator,
    compute_balanced_weights,
    encode_labels,
    find_training_classes,
    open_labelled_texts,
)
from bottega.data.text.vocabulary import TokenizerSpec
from bottega.tasks.classify.config import ClassifyData
from bottega.tasks.classify.prepare import prepare_classify

BYTES = TokenizerSpec(kind="bytes")


def ignore_progress(stage: str, done: int, total: int) -> None:
    """Show no progress bar."""


def prepare(folder: Path, rows: list[dict[str, Any]], spec: TokenizerSpec = BYTES, **options: Any) -> PreparedData:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ClassifyData(train=Source(path=str(path)), **{"validation": None, **options})
    return prepare_classify(data, spec, seed=0, progress=ignore_progress, cache=folder / "cache")


def load_batch(source: LabelledTexts, index: list[int]) -> dict[str, Any]:
    return source.rows(np.array(index), np.zeros(len(index), int))


ids = st.integers(0, 30).flatmap(lambda count: st.lists(st.integers(10, 99), min_size=count, max_size=count))
special_tokens = st.lists(st.integers(1, 9), max_size=3).map(tuple)


@given(st.lists(ids, min_size=1, max_size=5), special_tokens, special_tokens, st.none() | st.integers(7, 30))
def test_row_is_the_text_between_special_tokens_truncated_and_padded(
    texts: list[list[int]], before: tuple[int, ...], after: tuple[int, ...], max_length: int | None
) -> None:
    batch = TextCollator(0, before, after, max_length).collate([np.array(text, np.uint16) for text in texts])
    T = batch["input_ids"].shape[1]
    lengths = batch["attention_mask"].sum(axis=1)
    for row, text, length in zip(batch["input_ids"].tolist(), texts, lengths.tolist(), strict=True):
        room = len(text) if max_length is None else max_length - len(before) - len(after)
        expected = [*before, *text[:room], *after] or [0]
        assert row == expected + [0] * (T - len(expected))
        assert length == len(expected)
    assert batch["input_ids"].dtype == batch["attention_mask"].dtype == np.int32
    # Real tokens come first, and the longest text has at most three padding tokens.
    assert (np.diff(batch["attention_mask"], axis=1) <= 0).all()
    assert T - lengths.max() < 4
    assert T % 4 == 0 or max_length == T


def test_a_batch_is_as_long_as_its_longest_text(tmp_path: Path) -> None:
    rows = [{"text": "x" * n, "label": n % 2} for n in (1, 3, 9, 17, 30)]
    prepared = prepare(tmp_path, rows)
    source = open_labelled_texts(prepared, "train")
    assert source.lengths().tolist() == [1, 3, 9, 17, 30]
    assert [load_batch(source, [n])["input_ids"].shape[1] for n in range(5)] == [4, 4, 12, 20, 30]
    assert load_batch(source, [0, 2, 1])["attention_mask"].sum(axis=1).tolist() == [1, 9, 3]
    untruncated = load_batch(source, [0, 4])
    assert untruncated["input_ids"][0].tolist() == [ord("x"), *[256] * 29]
    assert (untruncated["label"].dtype, untruncated["label"].tolist()) == (np.int32, [1, 0])
    cut = open_labelled_texts(prepared, "train", sequence_length=12)
    assert [load_batch(cut, [n])["input_ids"].shape[1] for n in range(5)] == [4, 4, 12, 12, 12]
    assert cut.fingerprint != source.fingerprint
    assert open_labelled_texts(prepared, "train", sequence_length=64).fingerprint == source.fingerprint


def test_text_without_tokens_is_a_row_of_padding(tmp_path: Path) -> None:
    rows = [{"text": " " if n == 3 else "some words here", "label": n % 2} for n in range(6)]
    source = open_labelled_texts(prepare(tmp_path, rows, TokenizerSpec(kind="words")), "train")
    batch = load_batch(source, [3, 0])
    assert batch["attention_mask"].sum(axis=1).tolist() == [1, 3]
    assert batch["input_ids"][0].tolist() == [1] * batch["input_ids"].shape[1]
    assert TextCollator(7).collate([np.zeros(0, np.uint16)])["input_ids"].tolist() == [[7] * 4]


def test_texts_of_several_sources_are_padded_to_one_length(tmp_path: Path) -> None:
    """Each source pads to its own longest text of the batch."""
    sources: list[tuple[Any, Source]] = []
    for name, length in (("a", 3), ("b", 20)):
        (tmp_path / name).mkdir()
        prepared = prepare(tmp_path / name, [{"text": "x" * length, "label": n % 2} for n in range(4)])
        sources.append((open_labelled_texts(prepared, "train"), Source(path=name, limit=3)))
    source, _ = combine.combine_sources(sources, Data(sources=tuple(options for _, options in sources)), seed=0)
    batch = source.rows(np.arange(6), np.zeros(6, int))
    assert batch["attention_mask"].sum(axis=1).tolist() == [3, 3, 3, 20, 20, 20]
    assert batch["input_ids"].shape == (6, 20)
    assert batch["input_ids"][0].tolist() == [ord("x")] * 3 + [256] * 17
    assert source.rows(np.arange(3), np.zeros(3, int))["input_ids"].shape == (3, 3)


def test_multi_label_targets_are_multi_hot(tmp_path: Path) -> None:
    labels = [["b", "a"], [], ["c"], ["a"]]
    prepared = prepare(tmp_path, [{"text": "x", "label": label} for label in labels], multi_label=True)
    assert prepared.classes.names == ("a", "b", "c")
    targets = load_batch(open_labelled_texts(prepared, "train"), [0, 1, 2, 3])
    assert targets["labels"].dtype == np.float32
    assert targets["labels"].tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]]
    assert "label" not in targets


def test_unknown_label_suggests_the_nearest_class(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, [{"text": "x", "label": "good"}, {"text": "y", "label": "baad"}])
    classes = Classes(("bad", "good", "so-so"))
    with pytest.raises(
        DataError, match=r"^rows.jsonl:2: label 'baad' is not one of the 3 classes .*; did you mean 'bad'\?$"
    ):
        open_labelled_texts(prepared, "train", classes=classes)
    with pytest.raises(DataError, match=r"label 'good' is not one of the 2 classes .*; choose from 0, 1$"):
        encode_labels(prepared.table("train"), Classes(("0", "1")))
    several = prepare(tmp_path, [{"text": "x", "label": ["good", "bda"]}] * 2, multi_label=True)
    with pytest.raises(DataError, match=r"label 'bda' is .* did you mean 'bad'"):
        open_labelled_texts(several, "train", classes=classes)


def test_new_data_uses_the_class_numbers_of_training(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, [{"text": "x", "label": "good"}, {"text": "y", "label": "good"}])
    assert open_labelled_texts(prepared, "train", classes=Classes(("bad", "good"))).labels.tolist() == [1, 1]


def test_training_data_of_one_class_is_refused(tmp_path: Path) -> None:
    rows = [{"text": "x", "label": "good"}] * 4
    with pytest.raises(
        DataError, match=r"all samples \(the first is rows.jsonl:1\) are of the class 'good', .* data.label_field"
    ):
        find_training_classes(prepare(tmp_path, rows))
    # Classes of held-out data alone cannot be trained.
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "y", "label": "bad"}\n')
    with pytest.raises(DataError, match="are of the class 'good'"):
        find_training_classes(prepare(tmp_path, rows, validation=HeldOut(path=str(other))))
    with pytest.raises(DataError, match="have no class"):
        find_training_classes(prepare(tmp_path, [{"text": "x", "label": []}] * 4, multi_label=True))
    single = prepare(tmp_path, [{"text": "x", "label": ["a"]}, {"text": "y", "label": []}], multi_label=True)
    assert find_training_classes(single).names == ("a",)


def test_balanced_weights_match_scikit_learn() -> None:
    sklearn = pytest.importorskip("sklearn.utils.class_weight")
    labels = np.array([0, 0, 0, 1, 2, 2])
    expected = sklearn.compute_class_weight("balanced", classes=np.arange(3), y=labels)
    np.testing.assert_allclose(compute_balanced_weights(labels, 3), expected)
    assert compute_balanced_weights(labels, 4)[3] == 1.0
    assert compute_balanced_weights(np.array([[1, 0], [1, 1], [1, 0.0]]), 2) == pytest.approx((4 / 6, 2.0))
