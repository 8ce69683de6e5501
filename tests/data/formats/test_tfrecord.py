"""TFRecords are read according to TensorFlow's definitions, checked against protobuf and TensorBoard's reader."""

from __future__ import annotations

import gzip
import os
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c as reference
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.data.formats import crc32c, tfrecord
from bottega.data.formats.reader import Piece
from bottega.data.records.record import BadRecord, Record, Unreadable

DATA = os.environ.get("BOTTEGA_DATA")
needs_data = pytest.mark.skipif(DATA is None, reason="BOTTEGA_DATA is not set")


def build_message_classes() -> tuple[Any, Any]:
    """tf.train.Example and SequenceExample, from their published definition."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="example_for_tests.proto", package="t", syntax="proto3")

    def message(name: str, *fields: tuple[str, int, int, str, bool], parent: Any = file.message_type) -> Any:
        descriptor = parent.add(name=name)
        for title, number, kind, type_name, repeated in fields:
            label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            descriptor.field.add(name=title, number=number, type=kind, type_name=type_name or None, label=label)  # type: ignore[arg-type]
        return descriptor

    message("BytesList", ("value", 1, field.TYPE_BYTES, "", True))
    message("FloatList", ("value", 1, field.TYPE_FLOAT, "", True))
    message("Int64List", ("value", 1, field.TYPE_INT64, "", True))
    kinds = [("bytes_list", ".t.BytesList"), ("float_list", ".t.FloatList"), ("int64_list", ".t.Int64List")]
    feature = message("Feature", *((n, i, field.TYPE_MESSAGE, t, False) for i, (n, t) in enumerate(kinds, start=1)))
    feature.oneof_decl.add(name="kind")
    for part in feature.field:
        part.oneof_index = 0
    message("FeatureList", ("feature", 1, field.TYPE_MESSAGE, ".t.Feature", True))
    for name, inner, value in (("Features", "feature", "Feature"), ("FeatureLists", "feature_list", "FeatureList")):
        entry = "".join(word.title() for word in inner.split("_")) + "Entry"
        outer = message(name, (inner, 1, field.TYPE_MESSAGE, f".t.{name}.{entry}", True))
        pair = (("key", 1, field.TYPE_STRING, "", False), ("value", 2, field.TYPE_MESSAGE, f".t.{value}", False))
        message(entry, *pair, parent=outer.nested_type).options.map_entry = True
    message("Example", ("features", 1, field.TYPE_MESSAGE, ".t.Features", False))
    lists = ("feature_lists", 2, field.TYPE_MESSAGE, ".t.FeatureLists", False)
    message("SequenceExample", ("context", 1, field.TYPE_MESSAGE, ".t.Features", False), lists)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    message_types = (pool.FindMessageTypeByName(f"t.{name}") for name in ("Example", "SequenceExample"))
    return tuple(message_factory.GetMessageClass(kind) for kind in message_types)  # type: ignore[return-value]


EXAMPLE, SEQUENCE = build_message_classes()
INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT = st.floats(width=32, allow_nan=False)


def set_feature(feature: Any, value: Any) -> None:
    kind = {bytes: "bytes_list", float: "float_list", int: "int64_list"}[type(value[0])]
    getattr(feature, kind).value.extend(value)


def expected_value(value: list[Any]) -> Any:
    if isinstance(value[0], bytes):
        texts = [tfrecord._decode_if_text(part) for part in value]
        values = texts if all(isinstance(text, str) for text in texts) else value
        return values[0] if len(value) == 1 else values
    if len(value) == 1:
        return value[0]
    return np.array(value, np.int64 if isinstance(value[0], int) else np.float32)


def values_equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return type(a) is type(b) and a == b


def encode_records(*payloads: bytes) -> bytes:
    out = b""
    for data in payloads:
        length = struct.pack("<Q", len(data))
        out += length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))
    return out


def read_records(file: Path) -> list[Record | BadRecord]:
    return list(tfrecord.read(Piece(file, file.name), Source()))


def test_crc32c_matches_published_values() -> None:
    """RFC 3720, B.4, and the standard check value of CRC catalogues."""
    assert crc32c.crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c.crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c.crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c.crc32c(bytes(range(31, -1, -1))) == 0x113FDB5C
    assert crc32c.crc32c(b"123456789") == 0xE3069283
    assert crc32c.crc32c(b"") == 0
    assert crc32c.mask_crc(crc32c.crc32c(b"123456789")) == masked_crc32c(b"123456789")


@given(st.lists(st.integers(0, 3000), max_size=12), st.integers(0, 2**32 - 1))
def test_crc32c_of_spans_matches_the_reference(lengths: list[int], seed: int) -> None:
    data = np.random.Generator(np.random.Philox(seed)).bytes(sum(lengths) + 7)
    stops = np.cumsum(lengths, dtype=np.int64) + 3
    starts = stops - np.array(lengths, np.int64)
    checksums = crc32c.crc32c_of_spans(data, starts, stops)
    assert checksums.tolist() == [reference(data[a:b]) for a, b in zip(starts, stops, strict=True)]
    assert crc32c.mask_crcs(checksums).tolist() == [crc32c.mask_crc(int(crc)) for crc in checksums]
    assert crc32c.crc32c(data) == reference(data)


features = st.dictionaries(
    st.text(max_size=12),
    st.one_of(
        st.lists(st.binary(max_size=300), min_size=1, max_size=3),
        st.lists(st.text(max_size=20).map(str.encode), min_size=1, max_size=3),
        st.lists(INT64, min_size=1, max_size=40),
        st.lists(st.integers(-3, 200), min_size=1, max_size=4),
        st.lists(FLOAT, min_size=1, max_size=200),
    ),
    max_size=6,
)


@given(features)
def test_examples_of_protobuf_are_parsed(values: dict[str, list[Any]]) -> None:
    example = EXAMPLE()
    for name, value in values.items():
        set_feature(example.features.feature[name], value)
    data = example.SerializeToString()
    parsed = tfrecord.parse_example(data)
    expected = {name: expected_value(value) for name, value in values.items()}
    assert parsed.keys() == expected.keys()
    assert all(values_equal(parsed[name], expected[name]) for name in expected)
    # The fast parser agrees with the general one wherever it returns a result.
    for _, start, stop in tfrecord._iter_messages(data, 0, len(data)):
        quick, thorough = tfrecord._parse_common_layout(data, start, stop), tfrecord._parse_features(data, start, stop)
        assert (
            quick or not values or any(len(v) > 1 and isinstance(v[0], bytes) for v in values.values()) or "" in values
        )
        assert all(values_equal(quick[name], thorough[name]) for name in quick)


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=5), st.lists(st.lists(INT64, min_size=1, max_size=3), max_size=4), max_size=3
    )
)
def test_sequence_examples_are_parsed(values: dict[str, list[list[int]]]) -> None:
    example = SEQUENCE()
    set_feature(example.context.feature["id\0"], [7])
    for name, steps in values.items():
        example.feature_lists.feature_list[name].feature.extend([])
        for step in steps:
            set_feature(example.feature_lists.feature_list[name].feature.add(), step)
    parsed = tfrecord.parse_example(example.SerializeToString())
    assert parsed.pop("id\0") == 7
    for name, steps in values.items():
        widths = {len(step) for step in steps}
        if len(widths) == 1:
            assert parsed[name].tolist() == (steps if widths != {1} else [step[0] for step in steps])
        else:
            assert all(values_equal(a, expected_value(b)) for a, b in zip(parsed[name], steps, strict=True))


def test_rare_valid_encodings_are_parsed() -> None:
    def field(number: int, data: bytes) -> bytes:
        return bytes([number << 3 | 2, len(data)]) + data

    def entry(name: bytes, feature: bytes) -> bytes:
        return field(1, field(1, name) + field(2, feature))

    minus = b"\xff" * 9 + b"\x01"
    unpacked = field(3, b"\x08\x05\x08" + minus) + b"\x98\x06\x01"  # and an unknown field with number 99
    floats = field(2, b"\x0d" + struct.pack("<f", 0.5) + b"\x0d" + struct.pack("<f", 2.0))
    backwards = field(1, field(2, field(3, field(1, b"\x07"))) + field(1, b"b"))
    data = field(
        1, entry(b"i", unpacked) + entry(b"f", floats) + backwards + entry(b"none", b"") + entry(b"e", field(2, b""))
    )
    twice = field(1, entry(b"b", field(3, field(1, b"\x09"))))  # repeated messages are merged; the last value wins
    parsed = tfrecord.parse_example(data + b"\x19" + bytes(8) + twice)
    joined = field(3, field(1, b"\x01")) + field(3, field(1, b"\x02"))
    assert tfrecord.parse_example(field(1, entry(b"j", joined)))["j"].tolist() == [1, 2]
    assert tfrecord.parse_example(field(1, entry(b"j", joined + field(1, field(1, b"last")))))["j"] == "last"
    assert parsed["i"].tolist() == [5, -1]
    assert parsed["f"].tolist() == [0.5, 2.0]
    assert (parsed["b"], parsed["none"]) == (9, None)
    assert (parsed["e"].dtype, len(parsed["e"])) == (np.float32, 0)
    assert tfrecord.parse_example(b"") == {}


def test_text_and_bytes_are_distinguished() -> None:
    assert tfrecord._decode_if_text("gr\u00fc\u00df\n\tdich\u2028".encode()) == "gr\u00fc\u00df\n\tdich\u2028"
    for data in (b"\x89PNG\r\n", b"\xff\xd8\xff", b"RIFF\x10\0\0\0WAVE", b"\0"):
        assert tfrecord._decode_if_text(data) == data


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_parsed_or_refused(data: bytes) -> None:
    try:
        assert isinstance(tfrecord.parse_example(data), dict)
    except Unreadable:
        pass


@needs_data
@pytest.mark.parametrize(
    ("name", "count", "num_fields"),
    [
        ("penguin/Split-train/data_tfrecord-00000-of-00001.gz", 234, 5),
        ("penguin/Split-eval/data_tfrecord-00000-of-00001.gz", 100, 5),
        ("transformed_examples/Split-train/transformed_examples-00000-of-00001.gz", 9909, 17),
        ("mnist.tfrecord", 1000, 2),
        ("example.tfrecord", 4, None),
    ],
)
def test_real_files_match_protobuf(name: str, count: int, num_fields: int | None) -> None:
    file = Path(DATA or "", "readers-tfrecord", name)
    assert tfrecord.is_tfrecord(file.read_bytes()[:512])
    records = read_records(file)
    assert Counter(map(type, records)) == {Record: count}
    assert records[-1].key == f"{file.name}:{count}"
    assert num_fields is None or all(len(r.fields) == num_fields for r in records)  # type: ignore[union-attr]
    # Parse each record with protobuf as well.
    raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    offset = 0
    for record in records[:300]:
        (length,) = struct.unpack_from("<Q", raw, offset)
        features = EXAMPLE.FromString(raw[offset + 12 : offset + 12 + length]).features.feature
        offset += length + 16
        assert isinstance(record, Record)
        for field, value in record.fields.items():
            kind = features[field].WhichOneof("kind")
            expected = expected_value(list(getattr(features[field], kind).value)) if kind else None
            assert values_equal(value, expected), field


@needs_data
def test_real_file_in_pieces_gives_the_same_records() -> None:
    file = Path(DATA or "", "readers-tfrecord", "mnist.tfrecord")
    pieces = tfrecord.list_pieces(file, file.name, Source(), 100_000)
    assert len(pieces) > 25
    assert pieces[3].records_before == 3 * pieces[1].records_before
    records = [record for piece in pieces for record in tfrecord.read(piece, Source())]
    expected = read_records(file)
    assert [(r.key, r.where) for r in records] == [(r.key, r.where) for r in expected]
    assert all(
        values_equal(a.fields["image_floats"], b.fields["image_floats"]) for a, b in zip(records, expected, strict=True)
    )  # type: ignore[union-attr]


def build_examples(count: int) -> list[bytes]:
    out = []
    for i in range(count):
        example = EXAMPLE()
        set_feature(example.features.feature["n"], [i])
        set_feature(example.features.feature["pad"], [b"x" * (i % 50)])
        out.append(example.SerializeToString())
    return out


def test_damaged_record_is_reported_by_number(tmp_path: Path) -> None:
    file = tmp_path / "a.tfrecord"
    intact = encode_records(*build_examples(20))
    starts = [len(encode_records(*build_examples(i))) for i in range(20)]
    data = bytearray(intact)
    data[starts[4] + 14] ^= 1
    file.write_bytes(data)
    records = read_records(file)
    assert [type(r) for r in records] == [Record] * 4 + [BadRecord] + [Record] * 15
    assert records[4] == BadRecord(
        "a.tfrecord:5", f"{file}, record 5 at byte {starts[4]}", "is damaged: its checksum is wrong"
    )
    data[starts[9] + 1] ^= 1
    file.write_bytes(data)
    *good, bad = read_records(file)
    assert len(good) == 9
    assert isinstance(bad, BadRecord)
    assert bad.where == f"{file}, record 10 at byte {starts[9]}"
    assert "cannot be located" in bad.reason
    # Split into pieces, reading ends at the same record.
    pieces = tfrecord.list_pieces(file, "a.tfrecord", Source(), 60)
    assert len(pieces) > 3
    assert [r for piece in pieces for r in tfrecord.read(piece, Source())] == [*good, bad]
    file.write_bytes(intact[:-3])
    assert [type(r) for r in read_records(file)] == [Record] * 19 + [BadRecord]
    file.write_bytes(intact + b"abc")
    assert "truncated" in str(read_records(file)[-1])
    file.write_bytes(gzip.compress(intact)[:-40])
    with pytest.raises(DataError, match="truncated"):
        read_records(file)
    file.write_bytes(encode_records(b"\x0a\x05abc"))
    assert "not a tf.train.Example" in str(read_records(file)[0])
    file.write_bytes(b"")
    assert read_records(file) == []


def test_pieces_end_at_an_invalid_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tfrecord, "HEADERS_PER_BLOCK", 3)
    file = tmp_path / "a.tfrecord"
    # Records of one size, so that a scan that trusted a wrong length would find further records behind it.
    data = bytearray(encode_records(*[b""] * 40))
    file.write_bytes(data)
    assert len(tfrecord.list_pieces(file, "a", Source(), 16)) == 40
    data[16 * 10 : 16 * 10 + 1] = b"\x10"
    file.write_bytes(data)
    pieces = tfrecord.list_pieces(file, "a", Source(), 16)
    assert [piece.start for piece in pieces] == [16 * i for i in range(10)]
    records = [record for piece in pieces for record in tfrecord.read(piece, Source())]
    assert [type(record) for record in records] == [Record] * 10 + [BadRecord]


@given(st.integers(0, 600), st.binary(min_size=1, max_size=2), st.integers(1, 200))
def test_damage_at_any_offset_is_detected(
    tmp_path_factory: pytest.TempPathFactory, offset: int, noise: bytes, size: int
) -> None:
    file = tmp_path_factory.mktemp("damaged") / "a.tfrecord"
    data = bytearray(encode_records(*build_examples(12)))
    before = bytes(data)
    data[offset : offset + len(noise)] = noise
    file.write_bytes(data)
    records = read_records(file)
    assert (bytes(data) == before) == (not any(isinstance(r, BadRecord) for r in records))
    pieces = tfrecord.list_pieces(file, file.name, Source(), size)
    assert [r for piece in pieces for r in tfrecord.read(piece, Source())] == records


def test_records_larger_than_a_chunk_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tfrecord, "CHUNK_BYTES", 64)
    file = tmp_path / "a.tfrecord"
    example = EXAMPLE()
    set_feature(example.features.feature["big"], [b"y" * 5000])
    file.write_bytes(encode_records(*build_examples(9), example.SerializeToString(), *build_examples(3)))
    records = read_records(file)
    assert [r.fields.get("n") for r in records] == [*range(9), None, 0, 1, 2]  # type: ignore[union-attr]
    file.write_bytes(gzip.compress(file.read_bytes()))
    assert [r.fields.keys() for r in read_records(file)] == [r.fields.keys() for r in records]  # type: ignore[union-attr]


def test_other_files_are_not_recognised_as_tfrecord() -> None:
    record = encode_records(b"x")
    assert tfrecord.is_tfrecord(record)
    assert tfrecord.is_tfrecord(record[:12])
    assert tfrecord.is_tfrecord(gzip.compress(record))
    for head in (
        b"",
        record[:11],
        b"hello world, this is text",
        bytes(64),
        gzip.compress(b"no" * 40, mtime=0),
        b"\x1f\x8b\x08broken",
    ):
        assert not tfrecord.is_tfrecord(head)
