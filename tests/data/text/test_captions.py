"""Captions become the tokens that their tokenizer means, whichever way they come with the data."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import tiny_clip
from bottega.core.errors import DataError, UsageError
from bottega.data.prepare.media import prepare_media
from bottega.data.sources.source import ArraySource
from bottega.data.tables.shards import TEXT, ShardWriter, Table
from bottega.data.text.captions import (
    CaptionRows,
    CaptionTokenizer,
    find_distinct_captions,
    read_caption,
    train_caption_tokenizer,
)
from bottega.tasks.generation.config import ImageRecipe
from bottega.tasks.recipes import load_recipe

ROWS = (("a bright square", "light"), ("", "dark"), ("a dark square", ""), ("a bright square", "light"))


def table_of(folder: Path, rows: Sequence[tuple[str, str]]) -> Table:
    with ShardWriter(folder, {"key": TEXT, "caption": TEXT, "label": TEXT}) as out:
        for number, (caption, label) in enumerate(rows):
            out.add({"key": f"{number}.png", "caption": caption, "label": label})
    return Table(folder)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    return table_of(tmp_path_factory.mktemp("captions") / "train", ROWS)


@pytest.fixture(scope="module")
def learnt(table: Table, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_caption_tokenizer([table], content="x", vocab_size=300, cache=tmp_path_factory.mktemp("cache"))


def rows_of(table: Table, tokens: CaptionTokenizer) -> CaptionRows:
    return CaptionRows(ArraySource({"image": np.arange(len(table))}), table, tokens)


# Our own tokenizer


def test_it_is_a_function_of_the_captions(table: Table, learnt: Path, tmp_path: Path) -> None:
    again = train_caption_tokenizer([table], content="x", vocab_size=300, cache=tmp_path)
    assert again.name == learnt.name
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (again / file).read_bytes() == (learnt / file).read_bytes()
    assert train_caption_tokenizer([table], content="x", vocab_size=260, cache=tmp_path) != again
    assert train_caption_tokenizer([table], content="other", vocab_size=300, cache=tmp_path) != again


def test_a_caption_ends_with_a_mark_also_where_it_is_cut(learnt: Path) -> None:
    tokens = CaptionTokenizer(learnt, 4)
    end = tokens.tokenizer.eos_token_id
    found = tokens.encode(["", "a dark square", "x" * 100])
    assert found["input_ids"].dtype == found["attention_mask"].dtype == np.int32
    assert found["attention_mask"].sum(1).tolist() == [1, 4, 4]
    assert found["input_ids"][0].tolist() == [end] * 4
    assert found["input_ids"][1, 3] == found["input_ids"][2, 3] == end
    assert tokens.tokenizer.decode(found["input_ids"][1, :3]) == "a dark square", "words of the captions are tokens"
    with pytest.raises(UsageError, match="no room"):
        CaptionTokenizer(learnt, 1)


@given(st.text(max_size=40))
def test_transformers_gives_the_same_tokens(learnt: Path, text: str) -> None:
    folder = learnt.parent / "saved"
    if not folder.is_dir():
        CaptionTokenizer(learnt, 8).save(folder)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    told = theirs(text, padding="max_length", max_length=8, truncation=True)
    ours = CaptionTokenizer(folder, 8).encode([text])
    assert ours["input_ids"][0].tolist() == told.input_ids
    assert ours["attention_mask"][0].tolist() == told.attention_mask


# That of a folder


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("clip")
    tiny_clip.tokenizer().save_pretrained(folder)
    return folder


@given(
    st.text(max_size=60) | st.sampled_from(["", " ", "A Red  SQUARE, it's dark!", "square " * 40]), st.integers(3, 20)
)
def test_ids_are_those_of_clip(clip: Path, text: str, length: int) -> None:
    theirs = tiny_clip.tokenizer()(text, padding="max_length", max_length=length, truncation=True)
    ours = CaptionTokenizer(clip, length).encode([text])
    assert ours["input_ids"][0].tolist() == theirs.input_ids
    assert ours["attention_mask"][0].tolist() == theirs.attention_mask


def test_the_filling_token_is_found_where_older_files_name_it(clip: Path, tmp_path: Path) -> None:
    for file in clip.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": {"content": "!"}}))
    found = CaptionTokenizer(tmp_path, 8)
    filler = found.tokenizer.backend.token_to_id("!")
    assert found.encode(["red"])["input_ids"][0, 3:].tolist() == [filler] * 5
    found.save(tmp_path / "kept")
    assert CaptionTokenizer(tmp_path / "kept", 8).encode(["red"])["input_ids"][0, -1] == filler


# Samples


def test_a_class_stands_in_for_a_caption(table: Table, learnt: Path) -> None:
    assert [read_caption(table, n) for n in range(4)] == ["a bright square", "dark", "a dark square", "a bright square"]
    assert find_distinct_captions([table], 2) == ("a bright square", "dark")
    assert find_distinct_captions([table], 9) == ("a bright square", "dark", "a dark square")
    tokens = CaptionTokenizer(learnt, 8)
    rows = rows_of(table, tokens).rows(np.array([3, 1]), np.zeros(2, int))
    np.testing.assert_array_equal(rows["image"], [3, 1])
    np.testing.assert_array_equal(rows["input_ids"], tokens.encode(["a bright square", "dark"])["input_ids"])


def test_a_record_that_says_nothing_is_named(tmp_path: Path, learnt: Path) -> None:
    silent = table_of(tmp_path / "train", [*ROWS, ("", "")])
    with pytest.raises(DataError, match=r"^4\.png: has neither caption nor label, like 1 of 5 .*model\.condition=none"):
        rows_of(silent, CaptionTokenizer(learnt, 8))


def test_a_worker_is_sent_little_and_sees_the_same(table: Table, learnt: Path) -> None:
    rows = rows_of(table, CaptionTokenizer(learnt, 8))
    index, epoch = np.arange(4), np.zeros(4, int)
    before = rows.rows(index, epoch)
    sent = pickle.dumps(rows)
    assert len(sent) < 2000
    after = pickle.loads(sent).rows(index, epoch)
    for name, value in before.items():
        np.testing.assert_array_equal(value, after[name])
    assert "4 tokens, at most 8" in rows.describe(0, 0)


def test_other_tokens_are_other_samples(table: Table, learnt: Path, clip: Path) -> None:
    prints = {
        rows_of(table, CaptionTokenizer(folder, n)).fingerprint for folder, n in ((learnt, 8), (learnt, 9), (clip, 8))
    }
    assert len(prints) == 3
    assert rows_of(table, CaptionTokenizer(learnt, 8)).fingerprint in prints


# Where captions come from


def picture(value: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((4, 4), value, np.uint8)).save(out, format="PNG")
    return out.getvalue()


def as_table(root: Path, name: str, text: str) -> Path:
    for number in range(2):
        (root / f"{number}.png").write_bytes(picture(number))
    (root / name).write_text(text)
    return root


def as_archive(root: Path) -> Path:
    with tarfile.open(root / "shard.tar", "w") as out:
        for number, text in enumerate(("first", "second")):
            for suffix, data in (("png", picture(number)), ("txt", f"{text}\n".encode())):
                member = tarfile.TarInfo(f"{number}.{suffix}")
                member.size = len(data)
                out.addfile(member, io.BytesIO(data))
    return root / "shard.tar"


def as_parquet(root: Path) -> Path:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pictures = [{"bytes": picture(number), "path": None} for number in range(2)]
    pq.write_table(pa.table({"image": pictures, "text": ["first", "second"]}), root / "rows.parquet")
    return root / "rows.parquet"


SOURCES = {
    "metadata.jsonl": lambda root: as_table(
        root, "metadata.jsonl", '{"file_name": "0.png", "text": "first"}\n{"file_name": "1.png", "text": "second"}\n'
    ),
    "metadata.csv": lambda root: as_table(root, "metadata.csv", "file_name,text\n0.png,first\n1.png,second\n"),
    "a column of another name": lambda root: as_table(
        root, "metadata.csv", "file_name,prompt\n0.png,first\n1.png,second\n"
    ),
    "webdataset": as_archive,
    "parquet": as_parquet,
}


@pytest.mark.parametrize("source", SOURCES)
def test_captions_are_kept_however_they_come(source: str, tmp_path: Path) -> None:
    path = SOURCES[source](tmp_path)
    named = {"data.train.label": "prompt"} if source.startswith("a column") else {}
    changes = {"model.condition": "text", "data.train.path": str(path), "training.max_steps": 1, **named}
    recipe = load_recipe([{"task": "image"}, changes]).recipe
    assert isinstance(recipe, ImageRecipe)
    prepared = prepare_media(recipe, progress=lambda stage, done, total: None)
    table = prepared.table("train")
    assert sorted(read_caption(table, number) for number in range(len(table))) == ["first", "second"]
