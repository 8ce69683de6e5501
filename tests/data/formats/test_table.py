"""Delimiter and header of a table are detected from its content; a row is identified by its first line."""

from __future__ import annotations

import csv
import gzip
import io
import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.config.data import Source
from bottega.core.errors import DataError, UsageError
from bottega.data.formats import compression, find_files, table
from bottega.data.records.record import BadRecord, Record
from operations import CountedText

needs_data = pytest.mark.skipif("BOTTEGA_DATA" not in os.environ, reason="BOTTEGA_DATA is not set")


def read_records(path: Path, **options: object) -> list[Record | BadRecord]:
    source_files = find_files(Source(path=str(path), **options))  # type: ignore[arg-type]
    return [record for piece in source_files.list_pieces(1) for record in source_files.read(piece)]


def read_rows(path: Path, **options: object) -> list[dict[str, str]]:
    records = read_records(path, **options)
    assert all(isinstance(record, Record) for record in records), records
    return [record.fields for record in records if isinstance(record, Record)]


def write_table(folder: Path, content: str, name: str = "a.csv") -> Path:
    (folder / name).write_bytes(content.encode())
    return folder / name


@needs_data
@pytest.mark.parametrize(("split", "count"), [("train", 6920), ("dev", 872), ("test", 1821)])
def test_sst2(split: str, count: int) -> None:
    rows = read_rows(Path(os.environ["BOTTEGA_DATA"], "text-cls-sst2", f"{split}.tsv"))
    assert len(rows) == count
    assert all(row.keys() == {"text", "label"} and row["text"] for row in rows)
    assert {row["label"] for row in rows} == {"0", "1"}


@needs_data
def test_ljspeech() -> None:
    rows = read_rows(Path(os.environ["BOTTEGA_DATA"], "audio-ljspeech-sample", "metadata.csv"))
    assert [row["column_0"] for row in rows] == [f"LJ001-000{i}" for i in range(1, 9)]
    assert '"forty-two line Bible"' in rows[6]["column_1"]
    named = read_rows(
        Path(os.environ["BOTTEGA_DATA"], "audio-ljspeech-sample", "metadata.csv"), columns=("id", "text", "normalised")
    )
    assert [list(row.values()) for row in named] == [list(row.values()) for row in rows]
    assert named[7] == {
        "id": "LJ001-0008",
        "text": "has never been surpassed.",
        "normalised": "has never been surpassed.",
    }


CELLS = st.text(st.sampled_from('ab,;"\n é|'), max_size=8)


@given(
    st.integers(2, 4).flatmap(lambda width: st.lists(st.lists(CELLS, min_size=width, max_size=width), max_size=8)),
    st.sampled_from([",", ";"]),
    st.sampled_from(["\n", "\r\n"]),
)
def test_rows_round_trip_with_their_first_lines(
    tmp_path_factory: pytest.TempPathFactory, cells: list[list[str]], delimiter: str, end: str
) -> None:
    folder = tmp_path_factory.mktemp("table")
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=delimiter, lineterminator=end, quoting=csv.QUOTE_ALL)
    names = [f"name {'abcd'[i]}" for i in range(len(cells[0]) if cells else 2)]
    starts = []
    for row in [names, *cells]:
        starts.append(out.getvalue().count("\n") + 1)
        writer.writerow(row)
    file = write_table(folder, out.getvalue())
    compressed_file = folder / "a.csv.gz"
    compressed_file.write_bytes(gzip.compress(file.read_bytes()))
    for path in (file, compressed_file):
        records = read_records(path, delimiter=delimiter)
        assert [record.fields for record in records if isinstance(record, Record)] == [
            dict(zip(names, row, strict=True)) for row in cells
        ]
        assert [record.key for record in records] == [f"{path.name}:{start}" for start in starts[1:]]


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("text,label\ngood,1\n", ["text", "label"]),
        ("text;label\na, b;1\nc;2\n", ["text", "label"]),
        ("text\tlabel\na, b\t1\nc, d\t2\n", ["text", "label"]),
        ("id|text|more\n1|a, b|c\n", ["id", "text", "more"]),
        (",text,label\n0,a,b\n", ["column_0", "text", "label"]),
        ('"text, all","label"\n"a, b","c"\n', ["text, all", "label"]),
        ("text\na\nb\n", ["text"]),
        # Without a header: numbers, repeated values, numbered names, long or equal cells.
        ("good film,1\nbad film,0\n", ["text", "label"]),
        ("1,good film\n0,bad film\n", ["label", "text"]),
        ("good film,positive\nbad film,negative\nfine,positive\n", ["column_0", "column_1"]),
        ("a1.wav,hello\na2.wav,world\n", ["column_0", "column_1"]),
        (f"{'long ' * 20},x\nb,y\n", ["column_0", "column_1"]),
        ("same,same\nb,y\n", ["column_0", "column_1"]),
        ("1,2\n3,4\n", ["column_0", "column_1"]),
        ("1.5,-2e3,x\n3,4,y\n", ["column_0", "column_1", "column_2"]),
        ("\ufefftext,label\ngood,1\n", ["text", "label"]),
    ],
)
def test_delimiter_and_column_names_are_detected(tmp_path: Path, content: str, names: list[str]) -> None:
    rows = read_rows(write_table(tmp_path, content))
    assert list(rows[0]) == names
    has_header = not names[-1].startswith("column") and "," not in names and names != ["label", "text"]
    if content.startswith("good film"):
        has_header = False
    assert len(rows) == content.count("\n") - has_header


def test_suffix_and_recipe_override_detection(tmp_path: Path) -> None:
    content = 'a,b\t"c\nd,e\tf\n'
    assert read_rows(write_table(tmp_path, content, "a.tsv")) == [{"a,b": "d,e", '"c': "f"}]
    assert read_rows(write_table(tmp_path, "a,b|c\nd,e|f\n", "a.psv")) == [{"a,b": "d,e", "c": "f"}]
    assert read_rows(write_table(tmp_path, "x y\n1 2\n"), delimiter=" ") == [{"x": "1", "y": "2"}]
    named = write_table(tmp_path, "good,fine\nbad,poor\n")
    assert read_rows(named) == [{"good": "bad", "fine": "poor"}]
    assert read_rows(named, columns=("a", "b")) == [{"a": "good", "b": "fine"}, {"a": "bad", "b": "poor"}]
    # A header equal to the configured columns is still a header.
    assert read_rows(named, columns=("good", "fine")) == [{"good": "bad", "fine": "poor"}]
    with pytest.raises(UsageError, match="cannot separate"):
        read_records(named, delimiter="\n")


BAD_ROWS = [
    ("one", "has 1 columns; expected 2"),
    ("one,two,three", "has 3 columns; expected 2"),
    (
        '"one"x,two',
        'text follows a closing quotation mark; write a quotation mark within a cell twice ("")',
    ),
    ('"one,two', "a quotation mark is never closed"),
    ("a\rb,c", "has a carriage return within a cell; put such cells in quotation marks"),
    ("a\0,b", "has a NUL byte at column 2 of line 5"),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS)
def test_bad_row_is_reported_alone(tmp_path: Path, row: str, reason: str) -> None:
    file = write_table(tmp_path, f'text,label\n"two\n\nlines",x\n{row}\nlast,y\nvery last,z\n')
    records = read_records(file)
    assert records[1] == BadRecord("a.csv:5", f"{file}, line 5", reason)
    assert [record.key for record in records] == ["a.csv:2", "a.csv:5", "a.csv:6", "a.csv:7"]
    assert [record.fields["label"] for record in records if isinstance(record, Record)] == ["x", "y", "z"]


def test_invalid_utf_8_is_reported_by_row(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(b"na\xefve,label\ntext,label\na,b\nc\xff,d\ne,f\n")
    records = read_records(file)
    assert [str(record) for record in records if isinstance(record, BadRecord)] == [
        f"{file}, line 1: not UTF-8: byte 0xef at column 3 of line 1; set data.train.encoding, such as latin-1 or utf-16, or convert it with iconv",
        f"{file}, line 4: not UTF-8: byte 0xff at column 2 of line 4; set data.train.encoding, such as latin-1 or utf-16, or convert it with iconv",
    ]
    assert [record.fields for record in records if isinstance(record, Record)] == [
        {"text": "a", "label": "b"},
        {"text": "e", "label": "f"},
    ]


def test_unclosed_rows_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "MAX_LINE_BYTES", 200)
    lines = "".join(f"row {i},x\n" for i in range(100))
    file = write_table(tmp_path, f'text,label\n"open,x\n{lines}{"w" * 300},x\nlast,y\n')
    records = read_records(file, delimiter=",")
    bad = [record for record in records if isinstance(record, BadRecord)]
    assert [record.key for record in bad] == ["a.csv:2", "a.csv:103"]
    assert all(
        record.reason == "longer than 200 bytes; look for a quotation mark that is never closed" for record in bad
    )
    assert len(records) == 103
    monkeypatch.setattr(table, "MAX_REREAD_BYTES", 100)
    with pytest.raises(DataError, match=r"a\.csv, line 2: too many unmatched quotation marks"):
        read_records(file, delimiter=",")


def test_large_cells_empty_cells_and_empty_files(tmp_path: Path) -> None:
    large = "word " * 100_000
    assert read_rows(write_table(tmp_path, f'text,label\n"{large}",\n')) == [{"text": large, "label": ""}]
    assert read_records(write_table(tmp_path, "")) == []
    assert read_records(write_table(tmp_path, "text,label\n\n\n")) == []
    with pytest.raises(DataError, match=r"a\.csv, line 1: two columns are named 'a'"):
        read_records(write_table(tmp_path, "a, a\nb,c\n"))


@pytest.mark.parametrize("mark", [",", "|"])
def test_layout_detection_uses_little_memory(tmp_path: Path, mark: str) -> None:
    cell = "word " * 200_000
    file = write_table(tmp_path, f"text{mark}label\n" + f"{cell}{mark}x\n" * 30)
    tracemalloc.start()
    try:
        layout = table.detect_layout(file, Source())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert layout == table.Layout(mark, ["text", "label"], has_header=True)
    assert peak < 10 << 20
    assert all(row["text"] == cell for row in read_rows(file))


def test_bad_rows_at_the_beginning_are_all_reported(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(b"caf\xe9,x\n" * 150)
    assert len([record for record in read_records(file) if isinstance(record, BadRecord)]) == 150
    file.write_bytes(b"caf\xe9,x\n" * 150 + b"text,label\na,b\n")
    assert [record.fields for record in read_records(file) if isinstance(record, Record)] == [
        {"text": "a", "label": "b"}
    ]


def test_duplicate_column_check_is_linear(tmp_path: Path) -> None:
    file = write_table(tmp_path, ",".join(f"c{i}" for i in range(100_000)) + ", c99999\n")
    with pytest.raises(DataError, match="two columns are named 'c99999'"):
        read_records(file)

    class Cell(CountedText):
        def strip(self, *_: object) -> CountedText:
            return self

    names = [Cell(f"c{i}") for i in (*range(1000), 999)]
    before = CountedText.comparisons
    with pytest.raises(DataError, match="two columns are named 'c999'"):
        table.parse_header(names, file)
    assert CountedText.comparisons - before < 10 * len(names)
