"""Rows round-trip for any piece size; a bad line is reported alone, by its line number."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.data.formats import compression, find_files, jsonlines, jsonlist
from bottega.data.records.record import BadRecord, Record
from operations import CountedText


def read_records(path: Path, size: int = 1 << 20, **options: str) -> list[Record | BadRecord]:
    source_files = find_files(Source(path=str(path), **options))  # type: ignore[arg-type]
    return [record for piece in source_files.list_pieces(size) for record in source_files.read(piece)]


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(TEXT, values, max_size=3),
    max_leaves=6,
)
ROWS = st.lists(st.dictionaries(TEXT, VALUES, max_size=4), max_size=12)


@given(ROWS, st.integers(1, 200), st.booleans(), st.sampled_from(["\n", "\r\n", "\n\n", " \n"]), st.booleans())
def test_rows_round_trip_for_any_piece_size(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], size: int, ascii: bool, end: str, ended: bool
) -> None:
    file = tmp_path_factory.mktemp("rows") / "a.jsonl"
    lines = end.join(json.dumps(row, ensure_ascii=ascii) for row in rows) + (end if ended else "")
    file.write_bytes(lines.encode())
    records = read_records(file, size)
    assert [record.fields for record in records if isinstance(record, Record)] == rows
    assert [record.key for record in records] == [f"a.jsonl:{1 + i * end.count(chr(10))}" for i in range(len(rows))]
    compressed_file = file.with_name("a.jsonl.gz")
    compressed_file.write_bytes(gzip.compress(lines.encode()))
    assert [record.fields for record in read_records(compressed_file, size) if isinstance(record, Record)] == rows
    as_list = file.with_name("a.json")
    as_list.write_text(json.dumps(rows, ensure_ascii=ascii, indent=1))
    assert [record.fields for record in read_records(as_list) if isinstance(record, Record)] == rows


def test_pieces_have_about_the_requested_size(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"".join(b'{"n": %d}\n' % i for i in range(10_000)))
    pieces = find_files(Source(path=str(file))).list_pieces(10_000)
    assert len(pieces) == file.stat().st_size // 10_000 + 1
    # 10 rows of 9 bytes, 90 of 10, 820 of 11: 10,010 bytes.
    assert [(piece.start, piece.records_before) for piece in pieces[:2]] == [(0, 0), (10_010, 920)]
    assert all(piece.stop == after.start for piece, after in pairwise(pieces))


GOOD = b'{"text": "fine"}\n\n'

BAD_LINES = [
    (b'{"text": "a",}', "line 3, column 14", "invalid JSON: Expecting property name enclosed in double quotes"),
    (b'{"text": "a"', "line 3, column 13", "invalid JSON: Expecting ',' delimiter"),
    (b'  {"text": "a"', "line 3, column 15", "invalid JSON: Expecting ',' delimiter"),
    (b'{"text": "a"} {"text": "b"}', "line 3, column 15", "invalid JSON: Extra data"),
    (b'{"NaN": "NaN", "text": NaN}', "line 3, column 24", "invalid JSON: NaN is not a JSON number"),
    (b'{"text": "a", "n": -Infinity}', "line 3, column 20", "invalid JSON: -Infinity is not a JSON number"),
    (b'["text"]', "line 3", 'a row must be an object such as {"text": "..."}, not list'),
    (b"null", "line 3", 'a row must be an object such as {"text": "..."}, not NoneType'),
    (b'{"text": "a\0"}', "line 3", "has a NUL byte at column 12"),
    (b"\0", "line 3", "has a NUL byte at column 1"),
    (
        b'{"text": "a\xff"}',
        "line 3",
        "not UTF-8: byte 0xff at column 12; set data.train.encoding, such as latin-1 or utf-16, or convert it with iconv",
    ),
    (
        b'{"text": "\xed\xa0\x80"}',
        "line 3",
        "not UTF-8: byte 0xed at column 11; set data.train.encoding, such as latin-1 or utf-16, or convert it with iconv",
    ),
    (b'{"text": "a\\ud800"}', "line 3", r"field 'text' has an unpaired surrogate ('\ud800') at character 1"),
    (b'{"a": {"b": ["\\uDC00"]}}', "line 3", r"field 'a' has an unpaired surrogate ('\udc00')"),
    (b'{"\\ud83d": 1}', "line 3", r"key '\ud83d' has an unpaired surrogate"),
    (b'{"text": "a", "b": {"x" : 1, "x": 2}}', "line 3", "key 'x' occurs twice in one object"),
    (b'{"text": "a", "t\\u0065xt": "b"}', "line 3", "key 'text' occurs twice in one object"),
    (b"[" * 200_000, "line 3", "invalid JSON: nested too deeply"),
    (b'{"a": ' * 200_000, "line 3", "invalid JSON: nested too deeply"),
    (b'{"text": "a\tb"}', "line 3, column 12", "invalid JSON: Invalid control character at"),
    (b"\xef\xbb\xbf{}", "line 3", "starts with a byte order mark; save the file as UTF-8 without one"),
]


@pytest.mark.parametrize(("line", "where", "reason"), BAD_LINES)
@pytest.mark.parametrize("size", [1 << 20, 7])
def test_bad_line_is_reported_alone(tmp_path: Path, line: bytes, where: str, reason: str, size: int) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(GOOD + line + b"\n" + GOOD)
    first, bad, last = read_records(file, size)
    assert bad == BadRecord("a.jsonl:3", f"{file}, {where}", reason)
    assert [record.key for record in (first, last)] == ["a.jsonl:1", "a.jsonl:4"]
    assert all(isinstance(record, Record) and record.fields == {"text": "fine"} for record in (first, last))
    assert "\n" not in str(bad)


def test_overlong_number_is_bad(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": ' + b"9" * 5000 + b"}\n" + GOOD)
    bad, good = read_records(tmp_path / "a.jsonl")
    assert isinstance(bad, BadRecord)
    assert bad.reason.startswith("invalid JSON: Exceeds the limit")
    assert isinstance(good, Record)


def test_byte_order_mark_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + GOOD + GOOD)
    bad, good = read_records(tmp_path / "a.jsonl")
    assert str(bad) == f"{tmp_path}/a.jsonl, line 1: starts with a byte order mark; save the file as UTF-8 without one"
    assert good.key == "a.jsonl:3"


@pytest.mark.parametrize("size", [1 << 20, 50])
def test_overlong_line_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(compression, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(compression, "_CHUNK_BYTES", 16)
    file = tmp_path / "a.jsonl"
    fits = json.dumps({"text": "x" * 88}).encode()
    assert len(fits) == 100
    file.write_bytes(fits + b"\n" + b" " + fits + b"\n" + b"y" * 5000 + b"\n" + GOOD + b"z" * 101)
    records = read_records(file, size)
    assert [record.key for record in records] == [f"a.jsonl:{line}" for line in (1, 2, 3, 4, 6)]
    assert [type(record) for record in records] == [Record, BadRecord, BadRecord, Record, BadRecord]
    assert str(records[2]) == f"{file}, line 3: longer than 100 bytes; write one JSON object per line"
    with file.open("rb", buffering=16) as stream:
        assert all(len(raw) <= 101 for raw in compression.iter_lines(stream))


def test_surrogate_pairs_are_decoded(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\\ud83d\\ude00 \\u00e9 \\\\ud800"}')
    (record,) = read_records(tmp_path / "a.jsonl")
    assert isinstance(record, Record)
    assert record.fields == {"text": "😀 é \\ud800"}


def test_compression_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "ALWAYS_ALLOWED_BYTES", 1 << 20)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(bytes(16 << 20)))
    with pytest.raises(DataError, match="like a compression bomb"):
        read_records(tmp_path / "a.jsonl.gz")


LIST = b'[\n {"text": "one"},\n %s,\n {"text": "two"}\n]'


@pytest.mark.parametrize(
    ("element", "reason"),
    [
        (b'["x"]', 'a row must be an object such as {"text": "..."}, not list'),
        (b'{"n": NaN}', "invalid JSON: NaN is not a JSON number"),
        (b'{"n": 1, "n": 2}', "key 'n' occurs twice in one object"),
        (b'{"text": "\\ud800"}', r"field 'text' has an unpaired surrogate ('\ud800') at character 0"),
    ],
)
@pytest.mark.parametrize("around", [b"%s", b'{"version": [1, {"data": 2}], "data": %s, "end": null}'])
def test_bad_list_element_is_reported_alone(tmp_path: Path, element: bytes, reason: str, around: bytes) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(around % (LIST % element))
    first, bad, last = read_records(file)
    assert bad == BadRecord("a.json:2", f"{file}, line 3, column 2", reason)
    assert [(record.key, record.fields["text"]) for record in (first, last) if isinstance(record, Record)] == [
        ("a.json:1", "one"),
        ("a.json:3", "two"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LIST % b'{"text": "x"', r"a\.json, line 4, column 2: invalid JSON: Expecting property name"),
        (LIST % b'{"text" "x"}', r"line 3, column 10: invalid JSON: Expecting ':' delimiter"),
        (b'[{"a": 1}\n{"a": 2}]', r"line 2, column 1: invalid JSON: expected , or \], got '\{'"),
        (b'[{"a": 1},\n', r"line 2, column 1: invalid JSON: Expecting value"),
        (b'[{"a": 1}', r"line 1, column 10: invalid JSON: expected , or \], got the end of the file"),
        (b'[{"a": "\xff"}]', r"line 1, column 9: not UTF-8: byte 0xff"),
        (b"\xef\xbb\xbf[]", r"starts with a byte order mark"),
        (b'{"a": 1}\n', r'is one object without "data"'),
        (b'{"a": 1}\n{"a": 2}\n', r"line 2, column 1: .* set kind: jsonl if each line is a row"),
        (b"3", r"line 1: expected a list of objects"),
        (b"", r"line 1: expected a list of objects"),
        (b'{"data": 3}', r"line 1: expected a list of objects"),
        (b"[" * 200_000, r"line 1, column 2: invalid JSON: nested too deeply"),
    ],
)
def test_invalid_json_list_is_refused_with_line_and_column(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_records(file)
    assert "\n" not in str(caught.value)


def test_memory_of_a_compressed_list_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert jsonlist.MAX_BYTES == 256 << 20
    size = 8 << 20
    file = tmp_path / "a.json.gz"
    file.write_bytes(gzip.compress(b'[{"text": "' + b"a" * size + b'"}]', 1))
    tracemalloc.start()
    try:
        (record,) = read_records(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(record, Record)
    # At most two copies at a time: bytes and text, then text and row. A third would exceed the limit.
    assert peak < 2.5 * size
    monkeypatch.setattr(jsonlist, "MAX_BYTES", size)
    with pytest.raises(DataError, match=r"larger than 8 MiB, .* convert it to JSON Lines"):
        read_records(file)


def test_unpaired_surrogate_affects_only_its_element(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"a": "\\ud800"}, {"a": "fine"}, {"a": "\\ud83d\\ude00"}, {"a": "\\udc00"}]')
    assert [isinstance(record, BadRecord) for record in read_records(tmp_path / "a.json")] == [True, False, False, True]


def test_file_that_shrinks_while_reading_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"{}\n" * 1000)
    monkeypatch.setattr(jsonlines.os.path, "getsize", lambda _: 10**6)
    for size in (1000, 1001, 5000):
        pieces = jsonlines.list_pieces(file, "a", Source(), size)
        assert sum(len(list(jsonlines.read(piece, Source()))) for piece in pieces) == 1000


def test_duplicate_key_check_is_linear(tmp_path: Path) -> None:
    row = "{" + ", ".join(f'"{i}": 1' for i in range(100_000)) + ', "99999": 2}'
    (tmp_path / "a.jsonl").write_text(row)
    (bad,) = read_records(tmp_path / "a.jsonl")
    assert isinstance(bad, BadRecord)
    assert bad.reason == "key '99999' occurs twice in one object"
    keys = [CountedText(i) for i in (*range(1000), 999)]
    before = CountedText.comparisons
    with pytest.raises(jsonlines.InvalidRow, match="key '999' occurs twice"):
        jsonlines._check_unique_keys([(key, 1) for key in keys])
    assert CountedText.comparisons - before < 10 * len(keys)


def test_oversized_json_list_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonlist, "MAX_BYTES", 10)
    (tmp_path / "a.json").write_text('[{"a": 1}, {"a": 1}]')
    with pytest.raises(
        DataError, match="the limit for a JSON list, which is loaded into memory; convert it to JSON Lines"
    ):
        read_records(tmp_path / "a.json")


def test_empty_lists_and_files_have_no_rows(tmp_path: Path) -> None:
    for name, content in (("a.json", "[ ]"), ("b.json", '{"data": []}'), ("a.jsonl", ""), ("b.jsonl", "\n \r\n\n")):
        (tmp_path / name).write_text(content)
        assert read_records(tmp_path / name) == []


def test_parse_row_equals_json_loads() -> None:
    text = '{"a": [1, 2.5, {"b": null}], "c": "\\u00e9\\"\\\\"}'
    assert jsonlines.parse_row(text) == json.loads(text)
