"""Rules for fields shared by encoders, splits and curricula; pieces of one long text are not separate texts."""

from __future__ import annotations

import gzip
import json
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.config.data import Cleaning, Curriculum, Deduplication, Filter, HeldOut, Source, Splitting, TextData
from bottega.core.errors import DataError
from bottega.data.audio.decode import encode_wav
from bottega.data.audio.encoder import AudioEncoder
from bottega.data.formats import text as text_files
from bottega.data.image.encoder import ImageEncoder
from bottega.data.numbers.vectors import VectorEncoder
from bottega.data.prepare import scan as scanning
from bottega.data.prepare.inputs import collect_inputs, list_items
from bottega.data.prepare.media import prepare_media, prepare_vectors
from bottega.data.prepare.prepared import PreparedData
from bottega.data.prepare.rules import DroppedRecord, Rules, read_records
from bottega.data.records import fields
from bottega.data.records.record import BadRecord, Record, Unreadable
from bottega.data.tables.classes import read_text_column
from bottega.data.text.duplicates import NUM_PERMUTATIONS
from bottega.data.text.vocabulary import TokenizerSpec
from bottega.tasks.classify.config import ClassifyData
from bottega.tasks.classify.prepare import prepare_classify
from bottega.tasks.generation import config as media
from bottega.tasks.language.prepare import prepare_language
from bottega.tasks.routing.config import RoutingData

BYTES = TokenizerSpec(kind="bytes")
WAV = encode_wav(np.sin(np.arange(400) / 9).astype(np.float32), 8000)
MEDIA = {
    "image": (ImageEncoder((8, 8), 3), np.zeros((8, 8, 3), np.uint8)),
    "audio": (AudioEncoder(8000), WAV),
    "x": (VectorEncoder(), [1.0, 2.0]),
}


def ignore_progress(stage: str, done: int, total: int) -> None:
    """Show no progress bar."""


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare_texts(path: Path, cache: Path, **options: Any) -> PreparedData:
    train = Source(path=str(path), **options.pop("train", {}))
    data = TextData(train=train, **{"validation": HeldOut(split=0.2), **options})
    return prepare_language(data, BYTES, progress=ignore_progress, cache=cache)


def read_texts(prepared: PreparedData, table: str) -> list[str]:
    rows = prepared.table(table)
    return [prepared.tokenizer.decode(rows.row("tokens", n)[:-1]) for n in range(len(rows))]


@pytest.mark.parametrize("medium", MEDIA)
@pytest.mark.parametrize("name", fields.LABEL_FIELDS)
def test_encoders_and_split_read_the_same_label(medium: str, name: str) -> None:
    encoder, content = MEDIA[medium]
    for value in ("rock", 3, 3.0, b"3\n", np.int64(3), np.array([3]), None):
        record = Record("a", "/data/a", {medium: content, name: value})
        (row,) = encoder.rows(record)
        assert row["label"] == fields.read_label(record, None)
        assert row["label"] in ("rock", "3", "")


def test_empty_label_is_not_replaced_by_a_different_column() -> None:
    assert fields.read_label(Record("a", "", {"label": None, "genre": "rock"}), None) == ""


def test_named_label_field_is_used_or_refused() -> None:
    record = Record("a", "", {"class": "usual", "mood": "sad", "none": None, "tags": ["b", "a"]})
    assert fields.read_label(record, "mood") == "sad"
    assert fields.read_label(record, "label") == "usual"
    for field, message in (("key", "no field 'key'"), ("none", "no value"), ("tags", "text or a number, not list")):
        with pytest.raises(Unreadable, match=message):
            fields.read_label(record, field)


def test_a_caption_is_not_the_label() -> None:
    record = Record("a", "", {"text": "cat", "transcript": "it is a cat"})
    assert fields.read_annotations(record, label_field="text") == {"key": "a", "label": "cat", "caption": "it is a cat"}
    with pytest.raises(Unreadable, match="no field 'title'"):
        fields.read_caption(record, "title")


def test_stratified_split_of_audio_has_rare_classes_in_validation(tmp_path: Path) -> None:
    folder = tmp_path / "audio"
    folder.mkdir()
    rare = set(range(0, 200, 20))
    table = ["file_name,genre"]
    for number in range(200):
        (folder / f"{number:03}.wav").write_bytes(WAV)
        table.append(f"{number:03}.wav,{'rare' if number in rare else 'usual'}")
    (folder / "metadata.csv").write_text("\n".join(table) + "\n")
    data = media.AudioData(
        train=Source(path=str(folder)), validation=HeldOut(split=0.1), split=Splitting(by="stratified")
    )
    prepared = prepare_media(
        media.AudioRecipe(task="audio", data=data), progress=ignore_progress, cache=tmp_path / "cache"
    )
    assert sorted(read_text_column(prepared.table("validation"), "label")) == ["rare", *["usual"] * 19]


def test_renamed_field_can_be_split_and_ordered_by(tmp_path: Path) -> None:
    rows = [{"body": f"text {n % 10}", "stars": n % 3} for n in range(60)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    prepared = prepare_texts(path, tmp_path / "a", train={"field": "body"}, split=Splitting(by="hash", field="body"))
    # Split by the text, so that equal texts are in the same split.
    assert not set(read_texts(prepared, "train")) & set(read_texts(prepared, "validation"))
    data = ClassifyData(
        train=Source(path=str(path), field="body", label="stars"),
        validation=None,
        curriculum=Curriculum.model_validate({"by": "stars", "stages": [{"steps": 3}]}),
    )
    table = prepare_classify(data, BYTES, seed=0, progress=ignore_progress, cache=tmp_path / "b").table("train")
    assert table.values("score").tolist() == [float(label) for label in read_text_column(table, "label")]


def test_field_names_can_be_swapped() -> None:
    rules = Rules("text", "label")
    record = rules.apply(Record("a", "", {"text": "the label", "body": "the text"}), Source(field="body", label="text"))
    assert isinstance(record, Record)
    assert (record.fields["text"], record.fields["label"], record.fields["body"]) == (
        "the text",
        "the label",
        "the text",
    )


def test_renamed_field_is_read_once(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"a": 1, "b": 2, "kind": n % 2} for n in range(4)])
    data = RoutingData(train=Source(path=str(path), label="kind"), validation=None)
    prepared = prepare_vectors(data, progress=ignore_progress, cache=tmp_path / "cache")
    assert prepared.table("train").row("x", 3).tolist() == [1, 2]
    # An image field with a usual name of labels or captions is neither.
    encoder, content = MEDIA["image"]
    record = Rules("image").apply(
        Record("a", "", {"target": content, "txt": "cat"}), Source(field="target", label="txt")
    )
    assert isinstance(record, Record)
    (row,) = encoder.rows(record)
    assert (row["label"], row["caption"]) == ("cat", "")


def test_table_column_is_not_parsed_as_an_archive_member() -> None:
    row = {"json": {"text": "just metadata"}, "content": "what is learned", "a.npy": 1}
    record = Rules("text").apply(Record("a", "", row), Source())
    assert isinstance(record, Record)
    assert record.fields == {**row, "text": "what is learned"}


@pytest.mark.parametrize("by", ["hash", "group"])
def test_row_without_the_split_field_is_a_bad_row(tmp_path: Path, by: Any) -> None:
    rows = [{"text": f"text {n}", **({"user": n % 9} if n != 7 else {})} for n in range(60)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    split = Splitting(by=by, field="user")
    prepared = prepare_texts(path, tmp_path / "a", split=split, bad_records="skip", max_bad=0.1)
    all_texts = [*read_texts(prepared, "train"), *read_texts(prepared, "validation")]
    assert sorted(all_texts) == sorted(f"text {n}" for n in range(60) if n != 7)
    assert prepared.metadata["dropped"] == {"no field to split by": 1}
    for options in ({}, {"bad_records": "skip", "max_bad": 0.01}):
        with pytest.raises(DataError, match=r"rows\.jsonl, line 8: has no field 'user' to split by"):
            prepare_texts(path, tmp_path / "b", split=split, **options)


def test_split_field_is_needed_only_where_rows_are_split_by_it(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"text": f"text {n}"} for n in range(20)])
    prepare_texts(path, tmp_path / "a", split=Splitting(by="fraction", field="user"))
    users = write_rows(tmp_path / "users.jsonl", [{"text": f"train {n}", "user": n % 5} for n in range(20)])
    split = Splitting(by="group", field="user")
    prepared = prepare_texts(users, tmp_path / "b", split=split, test=HeldOut(path=str(path)))
    assert len(read_texts(prepared, "test")) == 20


def read_pieces(path: Path, rules: Rules) -> list[Record | BadRecord | DroppedRecord]:
    inputs, fractions = collect_inputs(TextData(train=Source(path=str(path)), validation=None))
    return [
        record
        for item in list_items(inputs, fractions, cut_single_text=True)
        for record in read_records(inputs, item, rules)
    ]


@pytest.mark.parametrize("suffix", ["txt", "txt.gz"])
@pytest.mark.parametrize("cleaning", [Cleaning(), Cleaning(html=True), Cleaning(boilerplate=True)])
def test_pieces_of_a_long_text_are_cleaned_and_filtered_as_one_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, cleaning: Cleaning
) -> None:
    monkeypatch.setattr(text_files, "MAX_PIECE_BYTES", 64)
    words = "\n" + "\n\n".join(f"And this is the word{n}, of them." for n in range(200)) + "\nend\n"
    path = tmp_path / f"long.{suffix}"
    path.write_bytes(gzip.compress(words.encode()) if suffix.endswith("gz") else words.encode())
    rules = Rules("text", clean=cleaning, filter=Filter(min_characters=30, min_words=6, languages=("en",)))
    pieces = read_pieces(path, rules)
    assert len(pieces) > 50
    assert all(isinstance(piece, Record) for piece in pieces)
    joined = "".join(piece.fields["text"] for piece in pieces if isinstance(piece, Record))
    assert joined.split() == words.split()
    assert joined == joined.strip()
    if cleaning == Cleaning():
        assert joined == words.strip()


def test_column_named_continued_is_not_a_piece(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"text": " short ", "continued": True}])
    rules = Rules("text", clean=Cleaning(), filter=Filter(min_characters=30))
    assert read_pieces(path, rules) == [DroppedRecord("rows.jsonl:1", "too short")]


@given(st.lists(st.lists(st.booleans(), max_size=5), max_size=5), st.integers(0, 9))
def test_signatures_of_selected_rows_are_concatenated(selected: list[list[bool]], seed: int) -> None:
    class FakeScan:
        def __init__(self, folder: Path) -> None:
            self.folder = folder

        def job_folder(self, number: int) -> Path:
            return self.folder / str(number)

    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        scan: Any = FakeScan(Path(folder))
        signatures = [rng.integers(0, 9, (len(rows), NUM_PERMUTATIONS), np.uint32) for rows in selected]
        for number, part in enumerate(signatures):
            scan.job_folder(number).mkdir()
            np.save(scan.job_folder(number) / "signatures.npy", part)
        rows = np.array([row for part in selected for row in part], bool)
        result = scanning._load_signatures(scan, rows, [len(part) for part in selected])
        np.testing.assert_array_equal(result, np.concatenate([np.empty((0, NUM_PERMUTATIONS)), *signatures])[rows])


def test_signatures_are_held_in_memory_once(tmp_path: Path) -> None:
    class FakeScan:
        def job_folder(self, number: int) -> Path:
            return tmp_path / str(number)

    scan: Any = FakeScan()
    for number in range(8):
        scan.job_folder(number).mkdir()
        np.save(scan.job_folder(number) / "signatures.npy", np.zeros((2000, NUM_PERMUTATIONS), np.uint32))
    rows = np.ones(16000, bool)
    tracemalloc.start()
    signatures = scanning._load_signatures(scan, rows, [2000] * 8)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.2 * signatures.nbytes


def test_near_duplicates_are_dropped(tmp_path: Path) -> None:
    long = " ".join(f"word{n}" for n in range(60))
    rows = [{"text": f"{long} {n % 4}" if n % 2 else f"other text {n} of its own, number {n * n}"} for n in range(40)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    prepared = prepare_texts(path, tmp_path / "cache", validation=None, deduplicate=Deduplication(method="near"))
    assert sum(long in text for text in read_texts(prepared, "train")) == 1
    assert prepared.metadata["dropped"]["duplicate"] == 40 - len(read_texts(prepared, "train"))


@pytest.mark.parametrize("counts", [(6, 3), (3, 40), (40, 4, 7)])
@pytest.mark.parametrize("by", ["fraction", "file"])
def test_each_source_of_a_sequence_is_split_separately(tmp_path: Path, counts: tuple[int, ...], by: Any) -> None:
    for number, count in enumerate(counts):
        (tmp_path / str(number)).mkdir()
        for file in range(count):
            (tmp_path / str(number) / f"{file}.txt").write_text(f"{number} of {count}. " * 20)
    sources = tuple(Source(path=str(tmp_path / str(number))) for number in range(len(counts)))
    data = TextData(
        sources=sources,
        mixture="sequence",
        validation=HeldOut(split=0.25),
        test=HeldOut(split=0.25),
        split=Splitting(by=by),
    )
    prepared = prepare_language(data, TokenizerSpec(kind="bytes"), progress=ignore_progress, cache=tmp_path / "cache")
    for table in ("validation", "test"):
        num_held_out = prepared.metadata["by_source"][table]
        assert num_held_out == [max(1, count // 4) for count in counts]
        # The rows belong to that source.
        names = [text.partition(" ")[0] for text in read_texts(prepared, table)]
        assert [names.count(str(number)) for number in range(len(counts))] == num_held_out


def test_source_too_small_to_split_in_a_sequence_is_named(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [{"text": f"row {n}"} for n in range(20)])
    write_rows(tmp_path / "b.jsonl", [{"text": "alone"}])
    sources = tuple(Source(path=str(tmp_path / name)) for name in ("a.jsonl", "b.jsonl"))
    data = TextData(sources=sources, mixture="sequence", validation=HeldOut(split=0.1))
    with pytest.raises(DataError, match=r"b\.jsonl, which is split by itself in a sequence: splitting 1 rows"):
        prepare_language(data, TokenizerSpec(kind="bytes"), progress=ignore_progress, cache=tmp_path / "cache")
