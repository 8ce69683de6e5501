"""One answer to which field is what, for the encoder, the split and the curriculum; and pieces of a text are no texts."""

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
from bottega.data.text.duplicates import PERMUTATIONS
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


def quiet(stage: str, done: int, total: int) -> None:
    """No bar."""


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def language(path: Path, cache: Path, **options: Any) -> PreparedData:
    train = Source(path=str(path), **options.pop("train", {}))
    data = TextData(train=train, **{"validation": HeldOut(split=0.2), **options})
    return prepare_language(data, BYTES, progress=quiet, cache=cache)


def texts(ready: PreparedData, table: str) -> list[str]:
    rows = ready.table(table)
    return [ready.tokenizer.decode(rows.row("tokens", n)[:-1]) for n in range(len(rows))]


@pytest.mark.parametrize("medium", MEDIA)
@pytest.mark.parametrize("name", fields.LABEL_FIELDS)
def test_every_medium_finds_the_class_where_the_split_does(medium: str, name: str) -> None:
    encoder, content = MEDIA[medium]
    for value in ("rock", 3, 3.0, b"3\n", np.int64(3), np.array([3]), None):
        record = Record("a", "/data/a", {medium: content, name: value})
        (row,) = encoder.rows(record)
        assert row["label"] == fields.read_label(record, None)
        assert row["label"] in ("rock", "3", "")


def test_a_row_without_a_class_takes_none_from_another_column() -> None:
    assert fields.read_label(Record("a", "", {"label": None, "genre": "rock"}), None) == ""


def test_a_class_that_is_asked_for_by_name_is_that_one_or_none() -> None:
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


def test_a_rare_genre_of_sounds_has_its_share_of_validation(tmp_path: Path) -> None:
    folder = tmp_path / "sounds"
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
    ready = prepare_media(media.AudioRecipe(task="audio", data=data), progress=quiet, cache=tmp_path / "cache")
    assert sorted(read_text_column(ready.table("validation"), "label")) == ["rare", *["usual"] * 19]


def test_a_field_that_is_read_under_another_name_can_still_be_split_and_ordered_by(tmp_path: Path) -> None:
    rows = [{"body": f"text {n % 10}", "stars": n % 3} for n in range(60)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    ready = language(path, tmp_path / "a", train={"field": "body"}, split=Splitting(by="hash", field="body"))
    # By the text, so equal ones are together.
    assert not set(texts(ready, "train")) & set(texts(ready, "validation"))
    data = ClassifyData(
        train=Source(path=str(path), field="body", label="stars"),
        validation=None,
        curriculum=Curriculum.model_validate({"by": "stars", "stages": [{"steps": 3}]}),
    )
    table = prepare_classify(data, BYTES, seed=0, progress=quiet, cache=tmp_path / "b").table("train")
    assert table.values("score").tolist() == [float(label) for label in read_text_column(table, "label")]


def test_names_can_be_exchanged() -> None:
    rules = Rules("text", "label")
    ruled = rules.apply(Record("a", "", {"text": "the label", "body": "the text"}), Source(field="body", label="text"))
    assert isinstance(ruled, Record)
    assert (ruled.fields["text"], ruled.fields["label"], ruled.fields["body"]) == ("the text", "the label", "the text")


def test_what_stands_under_two_names_is_taken_once(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"a": 1, "b": 2, "kind": n % 2} for n in range(4)])
    data = RoutingData(train=Source(path=str(path), label="kind"), validation=None)
    ready = prepare_vectors(data, progress=quiet, cache=tmp_path / "cache")
    assert ready.table("train").row("x", 3).tolist() == [1, 2]
    # A picture that a source calls by a usual name of labels or captions is neither.
    encoder, content = MEDIA["image"]
    record = Rules("image").apply(
        Record("a", "", {"target": content, "txt": "cat"}), Source(field="target", label="txt")
    )
    assert isinstance(record, Record)
    (row,) = encoder.rows(record)
    assert (row["label"], row["caption"]) == ("cat", "")


def test_a_column_of_a_table_is_no_member_of_an_archive() -> None:
    row = {"json": {"text": "just metadata"}, "content": "what is learned", "a.npy": 1}
    ruled = Rules("text").apply(Record("a", "", row), Source())
    assert isinstance(ruled, Record)
    assert ruled.fields == {**row, "text": "what is learned"}


@pytest.mark.parametrize("by", ["hash", "group"])
def test_a_row_without_the_field_to_split_by_is_a_bad_row(tmp_path: Path, by: Any) -> None:
    rows = [{"text": f"text {n}", **({"user": n % 9} if n != 7 else {})} for n in range(60)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    split = Splitting(by=by, field="user")
    skipping = language(path, tmp_path / "a", split=split, bad_records="skip", max_bad=0.1)
    seen = [*texts(skipping, "train"), *texts(skipping, "validation")]
    assert sorted(seen) == sorted(f"text {n}" for n in range(60) if n != 7)
    assert skipping.metadata["dropped"] == {"no field to split by": 1}
    for options in ({}, {"bad_records": "skip", "max_bad": 0.01}):
        with pytest.raises(DataError, match=r"rows\.jsonl, line 8: has no field 'user' to split by"):
            language(path, tmp_path / "b", split=split, **options)


def test_only_a_split_by_a_field_needs_it_and_only_where_rows_are_split(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"text": f"text {n}"} for n in range(20)])
    language(path, tmp_path / "a", split=Splitting(by="fraction", field="user"))
    users = write_rows(tmp_path / "users.jsonl", [{"text": f"train {n}", "user": n % 5} for n in range(20)])
    split = Splitting(by="group", field="user")
    ready = language(users, tmp_path / "b", split=split, test=HeldOut(path=str(path)))
    assert len(texts(ready, "test")) == 20


def pieces(path: Path, rules: Rules) -> list[Record | BadRecord | DroppedRecord]:
    inputs, shares = collect_inputs(TextData(train=Source(path=str(path)), validation=None))
    return [
        ruled
        for item in list_items(inputs, shares, cut_single_text=True)
        for ruled in read_records(inputs, item, rules)
    ]


@pytest.mark.parametrize("suffix", ["txt", "txt.gz"])
@pytest.mark.parametrize("cleaning", [Cleaning(), Cleaning(html=True), Cleaning(boilerplate=True)])
def test_pieces_of_a_long_text_are_cleaned_and_filtered_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, cleaning: Cleaning
) -> None:
    monkeypatch.setattr(text_files, "MAX_PIECE_BYTES", 64)
    words = "\n" + "\n\n".join(f"And this is the word{n}, of them." for n in range(200)) + "\nend\n"
    path = tmp_path / f"long.{suffix}"
    path.write_bytes(gzip.compress(words.encode()) if suffix.endswith("gz") else words.encode())
    rules = Rules("text", clean=cleaning, filter=Filter(min_characters=30, min_words=6, languages=("en",)))
    found = pieces(path, rules)
    assert len(found) > 50
    assert all(isinstance(piece, Record) for piece in found)
    joined = "".join(piece.fields["text"] for piece in found if isinstance(piece, Record))
    assert joined.split() == words.split()
    assert joined == joined.strip()
    if cleaning == Cleaning():
        assert joined == words.strip()


def test_a_column_named_continued_makes_no_piece(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"text": " short ", "continued": True}])
    rules = Rules("text", clean=Cleaning(), filter=Filter(min_characters=30))
    assert pieces(path, rules) == [DroppedRecord("rows.jsonl:1", "too short")]


@given(st.lists(st.lists(st.booleans(), max_size=5), max_size=5), st.integers(0, 9))
def test_signatures_are_those_of_the_chosen_rows(chosen: list[list[bool]], seed: int) -> None:
    class Parts:
        def __init__(self, folder: Path) -> None:
            self.folder = folder

        def job_folder(self, number: int) -> Path:
            return self.folder / str(number)

    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        scan: Any = Parts(Path(folder))
        whole = [rng.integers(0, 9, (len(rows), PERMUTATIONS), np.uint32) for rows in chosen]
        for number, part in enumerate(whole):
            scan.job_folder(number).mkdir()
            np.save(scan.job_folder(number) / "signatures.npy", part)
        rows = np.array([row for part in chosen for row in part], bool)
        found = scanning._signatures(scan, rows, [len(part) for part in chosen])
        np.testing.assert_array_equal(found, np.concatenate([np.empty((0, PERMUTATIONS)), *whole])[rows])


def test_near_duplicates_are_in_memory_once(tmp_path: Path) -> None:
    class Parts:
        def job_folder(self, number: int) -> Path:
            return tmp_path / str(number)

    scan: Any = Parts()
    for number in range(8):
        scan.job_folder(number).mkdir()
        np.save(scan.job_folder(number) / "signatures.npy", np.zeros((2000, PERMUTATIONS), np.uint32))
    rows = np.ones(16000, bool)
    tracemalloc.start()
    found = scanning._signatures(scan, rows, [2000] * 8)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.2 * found.nbytes


def test_near_duplicates_go_whatever_the_jobs(tmp_path: Path) -> None:
    long = " ".join(f"word{n}" for n in range(60))
    rows = [{"text": f"{long} {n % 4}" if n % 2 else f"other text {n} of its own, number {n * n}"} for n in range(40)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    ready = language(path, tmp_path / "cache", validation=None, deduplicate=Deduplication(method="near"))
    assert sum(long in text for text in texts(ready, "train")) == 1
    assert ready.metadata["dropped"]["duplicate"] == 40 - len(texts(ready, "train"))


@pytest.mark.parametrize("counts", [(6, 3), (3, 40), (40, 4, 7)])
@pytest.mark.parametrize("by", ["fraction", "file"])
def test_each_source_of_a_sequence_has_its_own_share_held_back(
    tmp_path: Path, counts: tuple[int, ...], by: Any
) -> None:
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
    ready = prepare_language(data, TokenizerSpec(kind="bytes"), progress=quiet, cache=tmp_path / "cache")
    for table in ("validation", "test"):
        held = ready.metadata["by_source"][table]
        assert held == [max(1, count // 4) for count in counts]
        # And they are rows of that source.
        names = [text.partition(" ")[0] for text in texts(ready, table)]
        assert [names.count(str(number)) for number in range(len(counts))] == held


def test_a_source_of_a_sequence_that_is_too_small_is_named(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [{"text": f"row {n}"} for n in range(20)])
    write_rows(tmp_path / "b.jsonl", [{"text": "alone"}])
    sources = tuple(Source(path=str(tmp_path / name)) for name in ("a.jsonl", "b.jsonl"))
    data = TextData(sources=sources, mixture="sequence", validation=HeldOut(split=0.1))
    with pytest.raises(DataError, match=r"b\.jsonl, which is split by itself in a sequence: splitting 1 rows"):
        prepare_language(data, TokenizerSpec(kind="bytes"), progress=quiet, cache=tmp_path / "cache")
