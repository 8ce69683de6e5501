"""Prepared shards: damaged or hostile folders are refused, and no option is ignored."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bottega.config.data import Cleaning, HeldOut, Source, TextData
from bottega.core.errors import DataError, UsageError
from bottega.data.formats import SourceFiles
from bottega.data.prepare import tokenizer_training
from bottega.data.prepare.prepared import PreparedData
from bottega.data.tables.cache import write_manifest
from bottega.data.tables.shards import COLUMNS_FILE, TEXT, Column, ShardWriter, Table
from bottega.data.text.vocabulary import TokenizerSpec
from bottega.tasks.language.prepare import prepare_language

BYTES = TokenizerSpec(kind="bytes")


def prepare(cache: Path, spec: TokenizerSpec = BYTES, **options: Any) -> PreparedData:
    return prepare_language(TextData(**options), spec, progress=lambda stage, done, total: None, cache=cache)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    with ShardWriter(tmp_path / "t", {"x": Column("<f4", (2,)), "text": TEXT}) as writer:
        for number in range(5):
            writer.add({"x": [number, -number], "text": "é" * number})
    return tmp_path / "t"


def test_table_round_trip(table: Path) -> None:
    rows = list(Table(table).iter_rows())
    assert [row["text"] for row in rows] == ["", "é", "éé", "ééé", "éééé"]
    assert np.array_equal(Table(table).gather("x", np.array([4, 1])), [[4, -4], [1, -1]])
    assert Table(table).lengths("text").tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("columns", "x", "dtype"), "O"),
        (("columns", "x", "dtype"), "|O8"),
        (("columns", "x", "shape"), [-1]),
        (("columns", "x", "shape"), [1 << 40]),
        (("columns", "x", "holds"), "code"),
        (("columns", "x", "varying"), True),
        (("rows",), 6),
        (("rows",), "many"),
        (("columns", "../x"), {"dtype": "<f4", "shape": [], "varying": False, "holds": "numbers"}),
    ],
)
def test_table_with_invalid_columns_is_refused(table: Path, keys: tuple[str, ...], value: Any) -> None:
    meta = json.loads((table / COLUMNS_FILE).read_text())
    block = meta
    for key in keys[:-1]:
        block = block[key]
    block[keys[-1]] = value
    (table / COLUMNS_FILE).write_text(json.dumps(meta))
    with pytest.raises(DataError, match="not a table of prepared data, or a damaged one"):
        Table(table)


@pytest.mark.parametrize("ends", [[0, 2, 6, 4, 20], [0, 2, 6, 12, 1 << 50], [-8, 2, 6, 12, 20], [0, 2, 6, 12]])
def test_invalid_row_ends_are_refused(table: Path, ends: list[int]) -> None:
    np.array(ends, "<i8").tofile(table / "text.ends.bin")
    with pytest.raises(DataError, match=r"text(\.ends)?\.bin"):
        Table(table)


def test_file_changed_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("as it was " * 100)
    read = SourceFiles.read

    def read_and_change(self: SourceFiles, piece: Any) -> Any:
        yield from read(self, piece)
        path.write_text("as it is now " * 100)

    monkeypatch.setattr(SourceFiles, "read", read_and_change)
    with pytest.raises(DataError, match="changed while it was read"):
        prepare(tmp_path / "cache", train=Source(path=str(path)))
    assert not [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()], "an entry was left in the cache"


def test_tokenizer_is_trained_on_train_alone_even_from_a_small_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_training, "MAX_TRAINING_BYTES", 1000)
    for name, word in (("train", "apple"), ("held", "qqqqq")):
        rows = "".join(json.dumps({"text": f"{word} " * 20}) + "\n" for _ in range(50))
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    prepared = prepare(
        tmp_path / "cache",
        TokenizerSpec(vocab_size=270),
        train=Source(path=str(tmp_path / "train.jsonl.gz")),
        validation=HeldOut(path=str(tmp_path / "held.jsonl.gz")),
    )
    vocabulary = prepared.tokenizer.backend.get_vocab()
    assert any("apple" in token for token in vocabulary)
    assert not any("qq" in token for token in vocabulary)


def test_compressed_texts_with_the_same_content_are_separate_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("a.txt.gz", "b.txt.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b"the same text\n" * 50))
        prepared = prepare(tmp_path / "cache", train=Source(path=str(tmp_path / name)), validation=HeldOut(split=0.1))
        assert sum(counts["bytes"] for counts in prepared.tables.values()) == 700
        assert prepared.table("train").row("key", 0).startswith(name[0])


def test_options_that_shards_cannot_honour_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text to prepare\n" * 50)
    prepared = prepare(tmp_path / "cache", train=Source(path=str(tmp_path / "a.txt")))
    shards = Source(path=str(prepared.folder))
    assert prepare(tmp_path / "other", train=shards).fingerprint == prepared.fingerprint
    with pytest.raises(UsageError, match=r"data\.clean cannot be applied to .* prepared shards"):
        prepare(tmp_path / "other", train=shards, clean=Cleaning())
    with pytest.raises(UsageError, match=r"data\.validation\.path: .* with splits of their own"):
        prepare(tmp_path / "other", train=shards, validation=HeldOut(path=str(tmp_path / "a.txt")))
    other = prepare(tmp_path / "cache", TokenizerSpec(vocab_size=300), train=Source(path=str(tmp_path / "a.txt")))
    spec = TokenizerSpec(kind="pretrained", path=str(other.folder / "tokenizer"))
    with pytest.raises(DataError, match="prepared with another tokenizer"):
        prepare(tmp_path / "other", spec, train=shards)


def test_damaged_shards_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text to prepare\n" * 50)
    folder = prepare(tmp_path / "cache", train=Source(path=str(tmp_path / "a.txt"))).folder
    tokens = folder / "train" / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-4])
    with pytest.raises(DataError, match="is damaged"):
        prepare(tmp_path / "other", train=Source(path=str(folder)))
    write_manifest(folder)
    with pytest.raises(DataError, match="damaged one"):
        Table(folder / "train")


def test_table_outside_the_prepared_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text to prepare\n" * 50)
    folder = prepare(tmp_path / "cache", train=Source(path=str(tmp_path / "a.txt"))).folder
    meta = json.loads((folder / "meta.json").read_text())
    meta["tables"]["train/../../elsewhere"] = meta["tables"]["train"]
    (folder / "meta.json").write_text(json.dumps(meta))
    write_manifest(folder)
    with pytest.raises(DataError, match=r"'train/\.\./\.\./elsewhere' is not a table"):
        prepare(tmp_path / "other", train=Source(path=str(folder)))


def test_text_folder_may_contain_meta_json(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text('{"title": "mine"}')
    (tmp_path / "a.txt").write_text("some text\n" * 20)
    (tmp_path / "b.txt").write_text("more text\n" * 20)
    data: dict[str, Any] = {"train": Source(path=str(tmp_path), kind="text")}
    assert prepare(tmp_path / "cache", **data).tables["train"]["rows"] >= 2
