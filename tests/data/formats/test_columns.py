"""Parquet and Arrow give the same rows for any piece size, in plain types; media are bytes."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.data.formats import find_files
from bottega.data.records.record import BadRecord, Record

pa = pytest.importorskip("pyarrow")


def read_records(path: Path, size: int = 1) -> list[Record | BadRecord]:
    source_files = find_files(Source(path=str(path)))
    return [record for piece in source_files.list_pieces(size) for record in source_files.read(piece)]


def build_table(rows: int = 10) -> Any:
    noon = datetime.datetime(2024, 5, 17, 12, 0, 0, 250)
    tokyo = pa.timestamp("ms", "Asia/Tokyo")
    medium = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    return pa.table(
        {
            "text": [f"row {i}" for i in range(rows)],
            "number": list(range(rows)),
            "kind": pa.array(["a", "b"] * (rows // 2)).dictionary_encode(),
            "image": pa.array([{"bytes": b"png%d" % i, "path": "/etc/passwd"} for i in range(rows)], medium),
            "only_path": pa.array([{"bytes": None, "path": "/etc/passwd"}] * rows, medium),
            "images": pa.array([[{"bytes": b"x", "path": None}]] * rows, pa.list_(medium)),
            "vector": [[0.5, float(i)] for i in range(rows)],
            "time": pa.array([noon] * rows, pa.timestamp("us")),
            "nanoseconds": pa.array([1_700_000_000_123_456_789] * rows, pa.int64()).cast(pa.timestamp("ns")),
            "zoned": pa.array([noon] * rows, tokyo),
            "day": pa.array([noon.date()] * rows),
            "span": pa.array([datetime.timedelta(seconds=90)] * rows),
            "price": pa.array([Decimal("1.50")] * rows),
            "nested": [{"at": noon, "n": None}] * rows,
            "nothing": pa.nulls(rows),
        }
    )


EXPECTED = {
    "text": "row 3",
    "number": 3,
    "kind": "b",
    "image": b"png3",
    "only_path": None,
    "images": [b"x"],
    "vector": [0.5, 3.0],
    "time": "2024-05-17T12:00:00.000250",
    "nanoseconds": "2023-11-14T22:13:20.123456",
    "zoned": "2024-05-17T21:00:00+09:00",
    "day": "2024-05-17",
    "span": 90.0,
    "price": "1.50",
    "nested": {"at": "2024-05-17T12:00:00.000250", "n": None},
    "nothing": None,
}


def write_table(folder: Path, name: str, data: Any) -> Path:
    import pyarrow.feather
    import pyarrow.parquet

    path = folder / name
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(data, path, row_group_size=3)
    elif name == "compressed.feather":
        pyarrow.feather.write_feather(data, path, compression="zstd", chunksize=3)
    else:
        new = pa.ipc.new_stream if name == "stream.arrow" else pa.ipc.new_file
        with new(str(path), data.schema) as writer:
            writer.write_table(data, max_chunksize=3)
    return path


FILES = ["a.parquet", "file.arrow", "stream.arrow", "compressed.feather"]


@pytest.mark.parametrize("name", FILES)
def test_rows_have_plain_types_for_any_piece_size(tmp_path: Path, name: str) -> None:
    path = write_table(tmp_path, name, build_table())
    records = read_records(path)
    assert len(find_files(Source(path=str(path))).list_pieces(1)) == 4
    assert len(find_files(Source(path=str(path))).list_pieces(1 << 30)) == 1
    assert records[3] == Record(f"{name}:4", f"{path}, row 4", EXPECTED)
    assert [record.key for record in records] == [f"{name}:{row}" for row in range(1, 11)]
    assert read_records(path, 1 << 30) == read_records(path, 500) == records


@pytest.mark.parametrize("name", FILES)
def test_empty_tables_have_no_rows(tmp_path: Path, name: str) -> None:
    assert read_records(write_table(tmp_path, name, build_table(0))) == []


@pytest.mark.parametrize("name", FILES)
def test_damaged_table_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    path = write_table(tmp_path, name, build_table(1000))
    data = path.read_bytes()
    for content in (data[: len(data) // 2], b"", b"no table at all"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"{name} is damaged or of another format: .") as caught:
            read_records(path)
        assert "\n" not in str(caught.value)


def test_duplicate_column_names_are_refused(tmp_path: Path) -> None:
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(DataError, match="two columns are named 'a'"):
        read_records(write_table(tmp_path, "file.arrow", twice))
