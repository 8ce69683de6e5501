"""Splits named by files and folders of a dataset are not mixed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.data.formats import SourceFiles, find_files
from bottega.data.formats.split_names import group_by_split


def write_folder(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"text": "a text"}\n')
    return root


def list_names(source_files: SourceFiles) -> list[str]:
    return [file.relative_to(source_files.root).as_posix() for file in source_files.paths]


@pytest.mark.parametrize(
    ("names", "train", "held_out"),
    [
        (("train.jsonl", "dev.jsonl", "test.jsonl"), ["train.jsonl"], ["dev.jsonl"]),
        (("data/train-00000.jsonl", "data/train-00001.jsonl", "data/validation-00000.jsonl"),
         ["data/train-00000.jsonl", "data/train-00001.jsonl"], ["data/validation-00000.jsonl"]),
        (("Split-train/a.jsonl", "Split-eval/a.jsonl"), ["a.jsonl"], ["a.jsonl"]),
        (("train/cat/1.jsonl", "train/dog/2.jsonl", "val/cat/3.jsonl"), ["cat/1.jsonl", "dog/2.jsonl"], ["cat/3.jsonl"]),
    ],
)  # fmt: skip
def test_train_is_the_default_and_other_splits_are_read_by_name(
    tmp_path: Path, names: tuple[str, ...], train: list[str], held_out: list[str]
) -> None:
    root = str(write_folder(tmp_path / "set", *names))
    assert list_names(find_files(Source(path=root))) == train
    assert sorted(list_names(find_files(Source(path=root, split="validation")))) == held_out
    assert sorted(list_names(find_files(Source(path=root, split="val")))) == held_out
    with pytest.raises(DataError, match="has no split 'extra'; set split to one of"):
        find_files(Source(path=root, split="extra"))


@pytest.mark.parametrize(
    "names",
    [
        ("a.jsonl", "b.jsonl"),
        ("train.jsonl",),
        ("train.jsonl", "trainer.jsonl"),
        ("cars/1.jsonl", "train/2.jsonl", "planes/3.jsonl"),
        ("train-0.jsonl", "train-1.jsonl"),
        ("dev.jsonl", "test.jsonl"),
    ],
)
def test_other_names_are_not_splits(tmp_path: Path, names: tuple[str, ...]) -> None:
    root = write_folder(tmp_path / "set", *names)
    assert group_by_split(sorted(root.rglob("*.jsonl"))) == {}
    assert len(list_names(find_files(Source(path=str(root))))) == len(names)
