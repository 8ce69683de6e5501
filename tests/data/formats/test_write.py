"""Written records are read by webdataset, TensorBoard with protobuf, pyarrow and json, and by our own readers."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tensorboard.compat.tensorflow_stub import errors
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

from bottega.config.data import Source
from bottega.core.errors import DataError, UsageError
from bottega.data.formats import tar, tfrecord
from bottega.data.formats.reader import Piece
from bottega.data.formats.write import MANIFEST, OutputFormat, UniqueNames, write_records
from bottega.data.records.archive_members import is_supported_field
from bottega.data.records.record import BadRecord, Record

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
WAV = b"RIFF\x24\0\0\0WAVEfmt " + bytes(range(100))

ROW: dict[str, Any] = {
    "image": PNG,
    "seg.png": PNG[:50],
    "text": "gr\u00fc\u00df dich,\n\u4e16\u754c",
    "caption": "a cat",
    "label": 3,
    "count": -(2**40),
    "score": 0.5,
    "good": True,
    "tags": ["a", "b\u00e9"],
    "boxes": np.arange(8, dtype=np.float32).reshape(2, 4),
    "ids": np.array([1, -2, 2**62]),
    "extra": {"a": [1, {"b": None}]},
}


def build_records(*fields: dict[str, Any]) -> list[Record]:
    return [Record(f"a.jsonl:{i}", f"/data/a.jsonl, line {i}", row) for i, row in enumerate(fields, start=1)]


def values_equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return type(a) is type(b) and a == b


def read_back(files: list[Path], format: Any) -> list[Record]:
    records = [record for file in files for record in format.read(Piece(file, file.name), Source())]
    assert not [record for record in records if isinstance(record, BadRecord)]
    return records


def decode_sample(sample: dict[str, Any]) -> dict[str, Any]:
    """Decode a raw sample of webdataset by the documented rules, none of which unpickles."""
    out: dict[str, Any] = {}
    for field, data in sample.items():
        last = field.rpartition(".")[2]
        if field.startswith("__"):
            continue
        out[field] = (
            data.decode() if last in ("txt", "caption") else json.loads(data) if last in ("json", "cls") else data
        )
    return out


def test_webdataset_reads_written_shards(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    (file,) = write_records(build_records(ROW, {**ROW, "label": 9}), tmp_path / "out", to="webdataset", split="train")
    assert file.name == "train-000000.tar"
    with file.open("rb") as stream:
        members = webdataset.tariterators.tar_file_expander([{"url": str(file), "stream": stream}])
        samples = list(webdataset.tariterators.group_by_keys(members))
    assert [sample["__key__"] for sample in samples] == ["a_jsonl_1", "a_jsonl_2"]
    fields = decode_sample(samples[1])
    array = fields.pop("boxes.npy")
    assert fields.pop("ids.npy").startswith(b"\x93NUMPY")
    np.testing.assert_array_equal(np.frombuffer(array[-32:], "<f4").reshape(2, 4), ROW["boxes"])
    plain = {name: ROW[name] for name in ("count", "score", "good", "tags", "extra")}
    assert fields == {
        "png": PNG, "seg.png": PNG[:50], "txt": ROW["text"], "caption": "a cat", "cls": 9, "json": plain
    }  # fmt: skip


def test_tar_shards_are_reproducible(tmp_path: Path) -> None:
    first = write_records(build_records(ROW), tmp_path / "a", to="webdataset")[0]
    again = write_records(build_records(ROW), tmp_path / "b", to="webdataset")[0]
    assert first.read_bytes() == again.read_bytes()
    with tarfile.open(first) as archive:
        assert {(info.mtime, info.uid, info.gid, info.uname) for info in archive} == {(0, 0, 0, "")}


def build_example_class() -> Any:
    """Build the class of tf.train.Example, with its map as repeated entries, as in the wire format."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="written_for_tests.proto", package="w", syntax="proto3")

    def message(name: str, *fields: tuple[str, int, int, str | None, bool]) -> Any:
        descriptor = file.message_type.add(name=name)
        for title, number, kind, type_name, repeated in fields:
            label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            descriptor.field.add(name=title, number=number, type=kind, type_name=type_name, label=label)  # type: ignore[arg-type]
        return descriptor

    message("BytesList", ("value", 1, field.TYPE_BYTES, None, True))
    message("FloatList", ("value", 1, field.TYPE_FLOAT, None, True))
    message("Int64List", ("value", 1, field.TYPE_INT64, None, True))
    kinds = (("bytes_list", ".w.BytesList"), ("float_list", ".w.FloatList"), ("int64_list", ".w.Int64List"))
    feature = message("Feature", *((n, i, field.TYPE_MESSAGE, t, False) for i, (n, t) in enumerate(kinds, start=1)))
    feature.oneof_decl.add(name="kind")
    for part in feature.field:
        part.oneof_index = 0
    message("Entry", ("key", 1, field.TYPE_STRING, None, False), ("value", 2, field.TYPE_MESSAGE, ".w.Feature", False))
    message("Features", ("feature", 1, field.TYPE_MESSAGE, ".w.Entry", True))
    message("Example", ("features", 1, field.TYPE_MESSAGE, ".w.Features", False))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("w.Example"))


def read_with_tensorboard(file: Path) -> Iterator[dict[str, list[Any]]]:
    """Read records with TensorBoard's reader, which verifies both checksums, and parse Examples with protobuf."""
    example, reader = build_example_class(), PyRecordReader_New(str(file))
    while True:
        try:
            reader.GetNext()
        except errors.OutOfRangeError:
            return
        entries = example.FromString(reader.record()).features.feature
        yield {entry.key: list(getattr(entry.value, entry.value.WhichOneof("kind")).value) for entry in entries}


def test_tensorboard_and_protobuf_read_written_records(tmp_path: Path) -> None:
    many = build_records(ROW, *({"n": i, "pad": b"\0" * (i * 37 % 2000)} for i in range(500)))
    (file,) = write_records(many, tmp_path / "out", to="tfrecord", split="test")
    assert file.name == "test-000000.tfrecord"
    first, *rest = read_with_tensorboard(file)
    assert first == {
        "image": [PNG], "seg.png": [PNG[:50]], "text": [ROW["text"].encode()], "caption": [b"a cat"], "label": [3],
        "count": [-(2**40)], "score": [0.5], "good": [1], "tags": [b"a", "b\u00e9".encode()],
        "boxes": [0, 1, 2, 3, 4, 5, 6, 7], "boxes/shape": [2, 4], "ids": [1, -2, 2**62],
        "extra": [b'{"a": [1, {"b": null}]}'],
    }  # fmt: skip
    assert [row["n"] for row in rest] == [[i] for i in range(500)]


def test_pyarrow_reads_written_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    row = {**ROW, "extra": {"a": [1, None]}}  # a list of mixed types has no column type
    (file,) = write_records(build_records(row, {**row, "caption": None}), tmp_path / "out", to="parquet", split="train")
    table_rows = pyarrow.parquet.read_table(file).to_pylist()
    assert table_rows[0] == {**row, "boxes": ROW["boxes"].tolist(), "ids": ROW["ids"].tolist()}
    assert table_rows[1]["caption"] is None
    kinds = pyarrow.parquet.read_schema(file)
    assert str(kinds.field("boxes").type) == "list<element: list<element: float>>"
    assert pyarrow.parquet.ParquetFile(file).metadata.row_group(0).column(0).compression == "ZSTD"


def test_parquet_has_row_groups_and_a_fixed_schema(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    big = build_records(*({"n": i, "data": os.urandom(1 << 20)} for i in range(20)))
    (file,) = write_records(big, tmp_path / "a", to="parquet")
    meta = pyarrow.parquet.ParquetFile(file).metadata
    assert [meta.row_group(i).num_rows for i in range(meta.num_row_groups)] == [8, 8, 4]
    with pytest.raises(DataError, match=r"line 20: field 'new' is not in the first rows"):
        write_records([*big[:-1], big[-1]._replace(fields={"new": 1})], tmp_path / "b", to="parquet")
    with pytest.raises(DataError, match=r"field 'n' has values of several types"):
        write_records(build_records({"n": 1}, {"n": "x"}), tmp_path / "b", to="parquet")
    assert os.listdir(tmp_path / "b") == []


def test_json_lines_without_media_are_shards(tmp_path: Path) -> None:
    plain = {name: value for name, value in ROW.items() if not isinstance(value, bytes)}
    files = write_records(build_records(*[plain] * 5), tmp_path / "out", to="jsonl", split="train", shard_bytes=600)
    assert [file.name for file in files] == ["train-000000.jsonl", "train-000001.jsonl"]
    assert files[0].stat().st_size >= 600
    parsed = [json.loads(line) for file in files for line in file.read_bytes().splitlines()]
    assert parsed == [{**plain, "boxes": ROW["boxes"].tolist(), "ids": ROW["ids"].tolist()}] * 5
    with pytest.raises(DataError, match=r"field 'x'.*JSON"):
        write_records(build_records({"x": float("nan")}), tmp_path / "nan", to="jsonl")
    with pytest.raises(DataError, match=r"line 2: has media \(png\), but the rows before it have none"):
        write_records(build_records({"x": 1}, {"png": PNG}), tmp_path / "nan", to="jsonl")


def test_json_lines_with_media_are_a_folder_of_images(tmp_path: Path) -> None:
    song = tmp_path / "song.FLAC"
    song.write_bytes(b"fLaC" + bytes(50))
    records = [
        Record("cats/1.jpg", "x", {"jpg": b"\xff\xd8\xff1", "label": 1}),
        Record("cats_1", "x", {"image": PNG, "label": 2, "file_name": "old.png"}),
        Record("../../etc/passwd", "x", {"audio": song, "seg.png": PNG, "text": "both"}),
    ]
    (file,) = write_records(records, tmp_path / "out", to="jsonl", split="train")
    assert file == tmp_path / "out" / "train" / "metadata.jsonl"
    assert [json.loads(line) for line in file.read_bytes().splitlines()] == [
        {"file_name": "cats_1.jpg", "label": 1},
        {"file_name": "cats_1-2.png", "label": 2},
        {"file_name": "etc_passwd.flac", "seg.png_file_name": "etc_passwd.1.png", "text": "both"},
    ]
    contents = {path.name: path.read_bytes() for path in file.parent.iterdir() if path != file}
    assert contents == {
        "cats_1.jpg": b"\xff\xd8\xff1", "cats_1-2.png": PNG, "etc_passwd.flac": song.read_bytes(), "etc_passwd.1.png": PNG
    }  # fmt: skip


@pytest.mark.parametrize("value", [1 << 63, np.array([1 << 63], np.uint64), "a\ud800"])
def test_value_that_tfrecord_cannot_store_is_refused_with_the_reason(value: Any, tmp_path: Path) -> None:
    message = (
        r"field 'x' cannot be stored in a TFRecord \(.+\); integers must fit in 64 bits and text must be valid Unicode$"
    )
    with pytest.raises(DataError, match=message):
        write_records(build_records({"x": value}), tmp_path / "out", to="tfrecord")


names = st.text(st.characters(codec="utf-8", categories=("L", "N")), min_size=1, max_size=8).map(str.lower)
texts = st.text(st.characters(codec="utf-8", exclude_categories=("C",)), max_size=30)
numbers = st.integers(-(2**63), 2**63 - 1)
some_arrays = hnp.arrays(st.sampled_from((np.int64, np.float32)), hnp.array_shapes(min_dims=1, max_dims=3, max_side=4))


@given(
    st.lists(
        st.dictionaries(names, texts | numbers | st.floats(width=32, allow_nan=False) | some_arrays, max_size=5),
        min_size=1,
        max_size=5,
    )
)
def test_tfrecord_round_trips(tmp_path_factory: pytest.TempPathFactory, values: list[dict[str, Any]]) -> None:
    files = write_records(build_records(*values), tmp_path_factory.mktemp("out") / "x", to="tfrecord", shard_bytes=300)
    records = read_back(files, tfrecord.FORMAT)
    assert [record.fields.keys() for record in records] == [row.keys() for row in values]
    for record, row in zip(records, values, strict=True):
        for name, value in row.items():
            read_value = record.fields[name]
            if isinstance(value, np.ndarray):
                assert read_value.dtype == value.dtype
                np.testing.assert_array_equal(read_value, value)
            else:
                assert values_equal(read_value, value)


def is_written_under_another_name(name: str) -> bool:
    """Return whether a field is written under another name; see test_text_with_nul_and_colliding_names."""
    return is_supported_field(name) or name in ("label", "class", "image", "audio", "video")


plain_values = st.recursive(
    st.none() | st.booleans() | numbers | texts | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@given(
    st.lists(
        st.dictionaries(
            names.filter(lambda name: not is_written_under_another_name(name)),
            plain_values | some_arrays | st.just(PNG) | st.just(WAV),
            max_size=5,
        ),
        min_size=1,
        max_size=5,
    )
)
def test_webdataset_round_trips(tmp_path_factory: pytest.TempPathFactory, values: list[dict[str, Any]]) -> None:
    files = write_records(
        build_records(*values), tmp_path_factory.mktemp("out") / "x", to="webdataset", shard_bytes=4000
    )
    records = read_back(files, tar.FORMAT)
    assert len(records) == len(values)
    for record, row in zip(records, values, strict=True):
        json_fields = record.fields.get("json", {})
        for name, value in row.items():
            suffixes = {bytes: ".png" if value is PNG else ".wav"}
            field = name + suffixes.get(type(value), "")
            read_value = record.fields[field] if field in record.fields else json_fields[name]
            if isinstance(value, np.ndarray):
                np.testing.assert_array_equal(read_value, value)
            else:
                assert values_equal(read_value, value)


def test_text_with_nul_and_colliding_names(tmp_path: Path) -> None:
    row = {"note": "a\0b", "text": "one", "txt": "two", "image": PNG, "png": PNG[:9], "label": 2**62, "id": 7}
    (record,) = read_back(write_records(build_records(row), tmp_path / "out", to="webdataset"), tar.FORMAT)
    assert record.fields == {
        "json": {"note": "a\0b", "label": 2**62}, "note": "a\0b", "label": 2**62, "txt": "one", "txt.txt": "two",
        "png": PNG, "png.png": PNG[:9], "id": 7
    }  # fmt: skip


@pytest.mark.parametrize(("label", "member"), [("7", "cls"), ("cat", "label.txt"), ("07", "label.txt"), (7, "cls")])
def test_class_label_is_an_integer_or_text_member(tmp_path: Path, label: object, member: str) -> None:
    files = write_records(build_records({"png": PNG, "label": label}), tmp_path / "out", to="webdataset")
    with tarfile.open(files[0]) as archive:
        assert {name.partition(".")[2] for name in archive.getnames()} == {"png", member}
    (record,) = read_back(files, tar.FORMAT)
    assert record.fields["cls" if member == "cls" else "label"] == (7 if member == "cls" else label)


def test_shards_have_the_configured_size(tmp_path: Path) -> None:
    many = build_records(*({"png": PNG + bytes(4000)} for _ in range(100)))
    files = write_records(many, tmp_path / "out", to="webdataset", split="train", shard_bytes=100_000)
    assert [file.name for file in files] == [f"train-{i:06d}.tar" for i in range(5)]
    assert all(100_000 <= file.stat().st_size < 107_000 for file in files[:-1])
    assert len(read_back(files, tar.FORMAT)) == 100


def test_foreign_files_are_never_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    many = build_records(*({"n": i} for i in range(20)))
    assert len(write_records(many, out, to="tfrecord", split="train", shard_bytes=50)) > 2
    write_records(many, out, to="tfrecord", split="test")
    again = write_records(many, out, to="tfrecord", split="train")
    assert {file.name for file in out.iterdir()} == {MANIFEST, "train-000000.tfrecord", "test-000000.tfrecord"}
    with pytest.raises(UsageError, match="already contains tfrecord"):
        write_records(many, out, to="parquet")
    (out / "mine.txt").write_text("keep")
    before = {file: file.read_bytes() for file in out.iterdir()}
    with pytest.raises(UsageError, match=r"contains mine\.txt, which Bottega did not write"):
        write_records(many, out, to="tfrecord")
    assert {file: file.read_bytes() for file in out.iterdir()} == before
    # A shard of the same name that another program wrote is not replaced.
    foreign = tmp_path / "theirs" / "train-000000.tfrecord"
    foreign.parent.mkdir()
    foreign.write_bytes(again[0].read_bytes())
    with pytest.raises(UsageError, match="did not write"):
        write_records(many, foreign.parent, to="tfrecord")
    # A manifest cannot name a file outside the folder.
    (tmp_path / "note").mkdir()
    note = {"to": "tfrecord", "splits": {"train": ["../out/mine.txt"]}}
    (tmp_path / "note" / MANIFEST).write_text(json.dumps(note))
    with pytest.raises(UsageError, match="cannot read"):
        write_records(many, tmp_path / "note", to="tfrecord")
    assert (out / "mine.txt").read_text() == "keep"


@pytest.mark.parametrize("to", ["webdataset", "tfrecord", "parquet", "jsonl"])
def test_failed_write_leaves_existing_files(tmp_path: Path, to: OutputFormat) -> None:
    out = tmp_path / "out"
    files = write_records(build_records({"png": PNG}), out, to=to)
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}

    def failing_records() -> Iterator[Record]:
        yield from build_records({"png": PNG + b"new"}, {"png": PNG})
        raise DataError("the reader stops here")

    with pytest.raises(DataError, match="the reader stops here"):
        write_records(failing_records(), out, to=to, shard_bytes=10)
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before
    assert files[0] in before
    with pytest.raises(DataError, match="has no records to write"):
        write_records([], out, to=to)
    write_records(build_records({"png": PNG + b"new"}), out, to=to)
    assert any(b"new" in file.read_bytes() for file in out.rglob("*") if file.is_file()) or to == "parquet"


@pytest.mark.parametrize(
    ("to", "fields", "message"),
    [
        ("webdataset", {"x": b"\1\2\3"}, "bytes of an unknown media type"),
        ("webdataset", {"a/b": "x"}, "file name"),
        ("webdataset", {"A": "x", "a": "y"}, "a second member"),
        ("webdataset", {"x": np.array([object()])}, "pickles"),
        ("webdataset", {"x": {"a": object()}}, "JSON"),
        ("webdataset", {"x": "\ud800"}, "surrogate"),
        ("tfrecord", {"x": 2**63}, "'x'"),
        ("tfrecord", {"x": np.array([2**63], np.uint64)}, "int64"),
        ("tfrecord", {"x": np.array([1j])}, "complex"),
        ("parquet", {"x": object()}, "'x'"),
        ("jsonl", {"x": b"\1\2\3"}, "bytes of an unknown media type"),
    ],
)
def test_unsupported_values_are_refused(tmp_path: Path, to: OutputFormat, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"line 1.*{message}") as caught:
        write_records(build_records(fields), tmp_path / "out", to=to)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "out").iterdir()) == []


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="choose from webdataset, tfrecord, parquet, jsonl"):
        write_records([], tmp_path, to="pickle")  # type: ignore[arg-type]
    for split in ("", "../x", ".x", "a/b"):
        with pytest.raises(UsageError, match="split"):
            write_records([], tmp_path, to="jsonl", split=split)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        write_records(build_records({"a": 1}), tmp_path / "file", to="jsonl")


@given(st.lists(st.text(max_size=200), max_size=20))
def test_keys_become_unique_file_names(keys: list[str]) -> None:
    names = UniqueNames()
    unique = [names.make_unique(key) for key in keys]
    assert len({name.casefold() for name in unique}) == len(keys)
    for name in unique:
        assert 0 < len(name.encode()) < 130
        assert not set(name) & set("./\\: \0\n")
        assert not name.startswith("_")
