"""Captions: tokenizers trained on them or loaded from a folder, and their source formats."""

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


def write_table(folder: Path, rows: Sequence[tuple[str, str]]) -> Table:
    with ShardWriter(folder, {"key": TEXT, "caption": TEXT, "label": TEXT}) as out:
        for number, (caption, label) in enumerate(rows):
            out.add({"key": f"{number}.png", "caption": caption, "label": label})
    return Table(folder)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    return write_table(tmp_path_factory.mktemp("captions") / "train", ROWS)


@pytest.fixture(scope="module")
def trained(table: Table, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_caption_tokenizer([table], content="x", vocab_size=300, cache=tmp_path_factory.mktemp("cache"))


def make_rows(table: Table, caption_tokenizer: CaptionTokenizer) -> CaptionRows:
    return CaptionRows(ArraySource({"image": np.arange(len(table))}), table, caption_tokenizer)


# Trained tokenizers


def test_trained_tokenizer_depends_on_captions_and_settings_only(table: Table, trained: Path, tmp_path: Path) -> None:
    retrained = train_caption_tokenizer([table], content="x", vocab_size=300, cache=tmp_path)
    assert retrained.name == trained.name
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (retrained / file).read_bytes() == (trained / file).read_bytes()
    assert train_caption_tokenizer([table], content="x", vocab_size=260, cache=tmp_path) != retrained
    assert train_caption_tokenizer([table], content="other", vocab_size=300, cache=tmp_path) != retrained


def test_caption_ends_with_end_of_text_even_when_truncated(trained: Path) -> None:
    caption_tokenizer = CaptionTokenizer(trained, 4)
    end = caption_tokenizer.tokenizer.eos_token_id
    batch = caption_tokenizer.encode(["", "a dark square", "x" * 100])
    assert batch["input_ids"].dtype == batch["attention_mask"].dtype == np.int32
    assert batch["attention_mask"].sum(1).tolist() == [1, 4, 4]
    assert batch["input_ids"][0].tolist() == [end] * 4
    assert batch["input_ids"][1, 3] == batch["input_ids"][2, 3] == end
    assert caption_tokenizer.tokenizer.decode(batch["input_ids"][1, :3]) == "a dark square", (
        "a word of the captions is split into several tokens"
    )
    with pytest.raises(UsageError, match="no room"):
        CaptionTokenizer(trained, 1)


@given(st.text(max_size=40))
def test_transformers_gives_the_same_tokens(trained: Path, text: str) -> None:
    folder = trained.parent / "saved"
    if not folder.is_dir():
        CaptionTokenizer(trained, 8).save(folder)
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    expected = reference(text, padding="max_length", max_length=8, truncation=True)
    tokens = CaptionTokenizer(folder, 8).encode([text])
    assert tokens["input_ids"][0].tolist() == expected.input_ids
    assert tokens["attention_mask"][0].tolist() == expected.attention_mask


# Pretrained tokenizers


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("clip")
    tiny_clip.tokenizer().save_pretrained(folder)
    return folder


@given(
    st.text(max_size=60) | st.sampled_from(["", " ", "A Red  SQUARE, it's dark!", "square " * 40]), st.integers(3, 20)
)
def test_clip_folder_gives_the_ids_of_clip(clip: Path, text: str, length: int) -> None:
    expected = tiny_clip.tokenizer()(text, padding="max_length", max_length=length, truncation=True)
    tokens = CaptionTokenizer(clip, length).encode([text])
    assert tokens["input_ids"][0].tolist() == expected.input_ids
    assert tokens["attention_mask"][0].tolist() == expected.attention_mask


def test_padding_token_is_read_from_special_tokens_map(clip: Path, tmp_path: Path) -> None:
    for file in clip.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": {"content": "!"}}))
    tokenizer = CaptionTokenizer(tmp_path, 8)
    padding = tokenizer.tokenizer.backend.token_to_id("!")
    assert tokenizer.encode(["red"])["input_ids"][0, 3:].tolist() == [padding] * 5
    tokenizer.save(tmp_path / "saved")
    assert CaptionTokenizer(tmp_path / "saved", 8).encode(["red"])["input_ids"][0, -1] == padding


# Samples


def test_label_replaces_a_missing_caption(table: Table, trained: Path) -> None:
    assert [read_caption(table, n) for n in range(4)] == ["a bright square", "dark", "a dark square", "a bright square"]
    assert find_distinct_captions([table], 2) == ("a bright square", "dark")
    assert find_distinct_captions([table], 9) == ("a bright square", "dark", "a dark square")
    caption_tokenizer = CaptionTokenizer(trained, 8)
    rows = make_rows(table, caption_tokenizer).rows(np.array([3, 1]), np.zeros(2, int))
    np.testing.assert_array_equal(rows["image"], [3, 1])
    np.testing.assert_array_equal(rows["input_ids"], caption_tokenizer.encode(["a bright square", "dark"])["input_ids"])


def test_record_without_caption_and_label_is_named(tmp_path: Path, trained: Path) -> None:
    uncaptioned = write_table(tmp_path / "train", [*ROWS, ("", "")])
    with pytest.raises(DataError, match=r"^4\.png: has neither caption nor label \(1 of 5 .*model\.condition=none"):
        make_rows(uncaptioned, CaptionTokenizer(trained, 8))


def test_caption_rows_pickle_small_and_round_trip(table: Table, trained: Path) -> None:
    rows = make_rows(table, CaptionTokenizer(trained, 8))
    index, epoch = np.arange(4), np.zeros(4, int)
    before = rows.rows(index, epoch)
    pickled = pickle.dumps(rows)
    assert len(pickled) < 2000
    after = pickle.loads(pickled).rows(index, epoch)
    for name, value in before.items():
        np.testing.assert_array_equal(value, after[name])
    assert "4 tokens, at most 8" in rows.describe(0, 0)


def test_fingerprint_depends_on_tokenizer_and_length(table: Table, trained: Path, clip: Path) -> None:
    fingerprints = {
        make_rows(table, CaptionTokenizer(folder, n)).fingerprint
        for folder, n in ((trained, 8), (trained, 9), (clip, 8))
    }
    assert len(fingerprints) == 3
    assert make_rows(table, CaptionTokenizer(trained, 8)).fingerprint in fingerprints


# Source formats


def encode_png(value: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((4, 4), value, np.uint8)).save(out, format="PNG")
    return out.getvalue()


def write_folder(root: Path, name: str, text: str) -> Path:
    for number in range(2):
        (root / f"{number}.png").write_bytes(encode_png(number))
    (root / name).write_text(text)
    return root


def write_archive(root: Path) -> Path:
    with tarfile.open(root / "shard.tar", "w") as out:
        for number, text in enumerate(("first", "second")):
            for suffix, data in (("png", encode_png(number)), ("txt", f"{text}\n".encode())):
                member = tarfile.TarInfo(f"{number}.{suffix}")
                member.size = len(data)
                out.addfile(member, io.BytesIO(data))
    return root / "shard.tar"


def write_parquet(root: Path) -> Path:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    images = [{"bytes": encode_png(number), "path": None} for number in range(2)]
    pq.write_table(pa.table({"image": images, "text": ["first", "second"]}), root / "rows.parquet")
    return root / "rows.parquet"


SOURCES = {
    "metadata.jsonl": lambda root: write_folder(
        root, "metadata.jsonl", '{"file_name": "0.png", "text": "first"}\n{"file_name": "1.png", "text": "second"}\n'
    ),
    "metadata.csv": lambda root: write_folder(root, "metadata.csv", "file_name,text\n0.png,first\n1.png,second\n"),
    "a column with a custom name": lambda root: write_folder(
        root, "metadata.csv", "file_name,prompt\n0.png,first\n1.png,second\n"
    ),
    "webdataset": write_archive,
    "parquet": write_parquet,
}


@pytest.mark.parametrize("source", SOURCES)
def test_captions_are_read_from_every_source_format(source: str, tmp_path: Path) -> None:
    path = SOURCES[source](tmp_path)
    overrides = {"data.train.label": "prompt"} if source.startswith("a column") else {}
    changes = {"model.condition": "text", "data.train.path": str(path), "training.max_steps": 1, **overrides}
    recipe = load_recipe([{"task": "image"}, changes]).recipe
    assert isinstance(recipe, ImageRecipe)
    prepared = prepare_media(recipe, progress=lambda stage, done, total: None)
    table = prepared.table("train")
    assert sorted(read_caption(table, number) for number in range(len(table))) == ["first", "second"]
