"""Comparison of splits: duplicates and held-out rows that are also trained on, and their removal for media."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bottega
import small_media
import small_routing
from bottega.core.errors import UsageError
from bottega.data.prepare.labels import COPY, WORD
from bottega.data.prepare.split_comparison import compare_tables
from bottega.data.tables import content
from bottega.data.tables.shards import TEXT, Column, ShardWriter, Table
from bottega.tasks.recipes import load_recipe
from bottega.tasks.registry import open_workload


def write_texts(folder: Path, texts: Sequence[str], *, forms: Sequence[int] | None = None) -> Table:
    with ShardWriter(folder, {"text": TEXT, "form": Column(), "key": TEXT}) as writer:
        for row, text in enumerate(texts):
            writer.add({"text": text, "form": forms[row] if forms else WORD, "key": f"{folder.name}:{row}"})
    return Table(folder)


def test_counts_duplicates_and_rows_of_both_splits(tmp_path: Path) -> None:
    train = write_texts(tmp_path / "train", ["one", "two", "Two ", "three", "two"])
    validation = write_texts(tmp_path / "validation", ["four", " three", "five", "six"])
    assert compare_tables([train], {"validation": validation}) == {
        "train": {"compared": 5, "duplicates": 2, "share": 0.4},
        "validation": {"compared": 4, "in_train": 1, "share": 0.25, "example": ["validation:1", "train:3"]},
    }


def test_augmented_copies_and_rows_beyond_a_limit_do_not_count(tmp_path: Path) -> None:
    train = write_texts(tmp_path / "train", ["one", "one", "two", "two"], forms=[WORD, COPY, WORD, WORD])
    validation = write_texts(tmp_path / "validation", ["new", "one"])
    limits = {"train": 3, "validation": 1}
    comparison = compare_tables([train], {"validation": validation}, limits=limits)
    assert comparison["train"] == {"compared": 2, "duplicates": 0, "share": 0.0}
    assert comparison["validation"] == {"compared": 1, "in_train": 0, "share": 0.0}


def test_several_training_tables_are_compared_as_one(tmp_path: Path) -> None:
    tables = [write_texts(tmp_path / f"train.{i}", texts) for i, texts in enumerate((["one", "two"], ["two", "three"]))]
    comparison = compare_tables(tables, {"test": write_texts(tmp_path / "test", ["three"])})
    assert comparison["train"]["duplicates"] == 1
    assert comparison["test"]["example"] == ["test:0", "train.1:1"]


def test_the_texts_of_a_language_model_count_by_their_tokens(tmp_path: Path) -> None:
    tables = {}
    for name, lengths in (("train", [1, 99]), ("validation", [1, 19])):
        with ShardWriter(tmp_path / name, {"tokens": Column("<u2", varying=True), "key": TEXT}) as writer:
            for length in lengths:
                writer.add({"tokens": np.arange(length), "key": str(length)})
        tables[name] = Table(tmp_path / name)
    comparison = compare_tables([tables["train"]], {"validation": tables["validation"]})
    assert comparison["validation"] == {"compared": 2, "in_train": 1, "share": 0.05, "example": ["1", "1"]}


def test_only_some_rows_of_large_tables_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = write_texts(tmp_path / "train", [f"text {number:02d}" for number in range(30)])
    monkeypatch.setattr(content, "MAX_COMPARED_ROWS", 7)
    assert content.select_rows(table).tolist() == [0, 4, 9, 14, 19, 24, 29]
    monkeypatch.setattr(content, "MAX_COMPARED_BYTES", 3 * len("text 00"))
    assert content.select_rows(table).tolist() == [0, 14, 29]
    assert content.select_rows(table, 2).tolist() == [0, 1]


def test_tables_without_content_are_not_compared(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "train", {"key": TEXT}) as writer:
        writer.add({"key": "a"})
    assert compare_tables([Table(tmp_path / "train")], {}) == {}


def write_twice(path: Path) -> Path:
    """Write all samples of an .npz a second time, behind the first."""
    arrays = dict(np.load(path))
    doubled = path.with_name(f"doubled-{path.name}")
    np.savez(doubled, **{name: np.concatenate([array, array]) for name, array in arrays.items()})
    return doubled


@pytest.mark.parametrize(
    ("recipe", "write"),
    [
        ("classify/image", small_media.write_images),
        ("classify/audio", small_media.write_audio),
        ("classify/video", small_media.write_videos),
        ("routing", small_routing.write_rows),
    ],
)
def test_duplicate_samples_of_a_medium_are_dropped(recipe: str, write: Callable[[Path], Path], tmp_path: Path) -> None:
    path = write_twice(write(tmp_path))
    settings: dict[str, Any] = {"data.train": {"kind": "auto", "path": str(path)}, "data.validation": {"split": 0.25}}
    settings |= {"model.num_experts": 3} if recipe == "routing" else {}
    comparisons = {}
    for deduplicate in (None, {"method": "exact"}):
        loaded = load_recipe([recipe, settings, {"data.deduplicate": deduplicate}]).recipe
        data = open_workload(loaded, progress=lambda stage, done, total: None).data
        comparisons[deduplicate is not None] = data.compare_splits()
    num_rows = len(np.load(path)["label"]) // 2
    assert f"{num_rows} records dropped: duplicate" in data.notes
    assert comparisons[False]["train"]["duplicates"] + comparisons[False]["validation"]["in_train"] > num_rows / 2
    after = comparisons[True]
    assert after["train"]["compared"] + after["validation"]["compared"] == num_rows
    assert after["train"]["duplicates"] == after["validation"]["in_train"] == 0


def test_near_duplicates_of_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"data.deduplicate.method"):
        bottega.train("classify/image", {"data.deduplicate.method": "near", "output_dir": str(tmp_path)}, quiet=True)


def test_share_of_compared_rows_is_recorded_only_if_some_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = write_texts(tmp_path / "train", [f"text {number}" for number in range(10)])
    assert "sampled" not in compare_tables([train], {})["train"]
    monkeypatch.setattr(content, "MAX_COMPARED_ROWS", 4)
    assert compare_tables([train], {})["train"]["sampled"] == 0.4
