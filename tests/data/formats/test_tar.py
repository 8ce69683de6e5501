"""Archives give the samples of WebDataset, and the same members as Python's tarfile."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.data.formats import tar
from bottega.data.formats.compression import open_decompressed
from bottega.data.formats.reader import Piece
from bottega.data.formats.write import write_records
from bottega.data.records.record import BadRecord, Record
from operations import count_operations

DATA = os.environ.get("BOTTEGA_DATA")
needs_data = pytest.mark.skipif(DATA is None, reason="BOTTEGA_DATA is not set")
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(200))

# A header holds 100 bytes of a name; longer names need PAX or GNU headers.
stems = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z"), exclude_characters="./\\:"), min_size=1)
keys = (
    st.lists(stems.map(lambda s: s[:90]), min_size=1, max_size=3).map("/".join).filter(lambda s: not s.endswith("__"))
)
archives = st.dictionaries(
    keys,
    st.dictionaries(st.sampled_from(("txt", "seg.png", "wav", "CLS")), st.binary(max_size=900), min_size=1),
    max_size=6,
)


def encode_tar(files: dict[str, bytes], *, format: int = tarfile.PAX_FORMAT, mode: str = "w") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode, format=format) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def read_records(file: Path) -> list[Record | BadRecord]:
    return list(tar.read(Piece(file, file.name), Source()))


def read_good_records(file: Path) -> list[Record]:
    records = read_records(file)
    assert not [record for record in records if isinstance(record, BadRecord)]
    return records  # type: ignore[return-value]


def real_archives() -> list[Path]:
    folder = Path(DATA or "/nowhere")
    return sorted((folder / "readers-webdataset").glob("*.t*[rz]"))


CC12M = {"caption", "url", "key", "status", "error_message", "width", "height", "exif"}
CC12M |= {"original_width", "original_height"}


@needs_data
@pytest.mark.parametrize(
    ("name", "count", "fields"),
    [
        ("readers-webdataset/sample.tgz", 90, {"cls", "png"}),
        ("readers-webdataset/cc12m-train-0000.tar", 32, {"jpg", "json", "txt", *CC12M}),
        ("readers-webdataset/csv.tar", 3, {"csv"}),
        ("readers-webdataset/csv.tar.gz", 3, {"csv"}),
        ("readers-webdataset/txt.tar", 3, {"txt"}),
        ("readers-webdataset/txt.tar.gz", 3, {"txt"}),
        ("readers-webdataset/256_ObjectCategories.tar", 6, {"jpg"}),
    ],
)
def test_real_archives_have_the_expected_records(name: str, count: int, fields: set[str]) -> None:
    records = read_good_records(Path(DATA or "", name))
    assert len(records) == len({record.key for record in records}) == count
    assert all(set(record.fields) == fields for record in records)
    types = {"cls": int, "json": dict, "txt": str, "csv": str, "jpg": bytes, "png": bytes}
    members = ((field, value) for record in records for field, value in record.fields.items() if field in types)
    assert all(type(value) is types[field] for field, value in members)


@needs_data
def test_contents_of_real_archives() -> None:
    first = read_good_records(Path(DATA or "", "readers-webdataset/cc12m-train-0000.tar"))[0]
    assert first.key == "cc12m-train-0000.tar:000000003"
    assert len(first.fields["jpg"]) == 103_637
    assert first.fields["jpg"].startswith(b"\xff\xd8\xff")
    assert read_good_records(Path(DATA or "", "readers-webdataset/csv.tar"))[1].key == "csv.tar:csv/1"
    assert (
        sum(r.fields["cls"] in range(10) for r in read_good_records(Path(DATA or "", "readers-webdataset/sample.tgz")))
        == 90
    )


@needs_data
def test_compressed_real_archive_is_streamed() -> None:
    file = Path(DATA or "", "audio-fsdd/recordings.tar.xz")
    records = read_good_records(file)
    assert len(records) == 3000
    assert records[0].key == "recordings.tar.xz:recordings/0_george_0"
    with tarfile.open(file) as archive:
        expected = {i.name: archive.extractfile(i).read() for i in archive if i.isreg()}  # type: ignore[union-attr]
    assert {f"{r.key.partition(':')[2]}.wav": r.fields["wav"] for r in records} == expected


@needs_data
@pytest.mark.parametrize("file", real_archives(), ids=lambda file: file.name)
def test_tarfile_agrees_on_real_archives(file: Path) -> None:
    with tarfile.open(file) as archive:
        expected = [(info.name, archive.extractfile(info).read()) for info in archive if info.isreg()]  # type: ignore[union-attr]
    with open_decompressed(file) as stream:
        members = tar._iter_members(stream, Piece(file, file.name), reads_bodies=True)
        assert [(member.name, member.data) for member in members] == expected


@given(archives, st.sampled_from((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)), st.integers(1, 6000))
def test_tarfile_agrees_on_generated_archives(
    tmp_path_factory: pytest.TempPathFactory, samples: dict[str, dict[str, bytes]], format: int, size: int
) -> None:
    file = tmp_path_factory.mktemp("tar") / "a.tar"
    files = {f"{key}.{field}": data for key, fields in samples.items() for field, data in fields.items()}
    file.write_bytes(encode_tar(files, format=format))
    indexed = tar.index_archive(file)
    assert [sample.problem for sample in indexed] == [None] * len(samples)
    with tarfile.open(file) as archive:
        expected = {info.name.lower(): (info.offset_data, info.size) for info in archive}
    assert {f"{s.key}.{f}".lower(): span for s in indexed for f, span in s.fields.items()} == expected
    assert [sample.key for sample in indexed] == list(samples)
    # By random access, and in pieces cut anywhere between samples.
    with file.open("rb") as raw:
        for sample in indexed:
            for field, (offset, length) in sample.fields.items():
                original = samples[sample.key].get(field, samples[sample.key].get(field.upper()))
                assert os.pread(raw.fileno(), length, offset) == original
    pieces = tar.list_pieces(file, "a.tar", Source(), size)
    assert [r for piece in pieces for r in tar.read(piece, Source())] == read_records(file)
    assert all(piece.stop is None or piece.stop - piece.start >= min(size, 512) for piece in pieces)


def test_pieces_have_about_the_requested_size(tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    file.write_bytes(encode_tar({f"{i:04}.{suffix}": bytes(2000) for i in range(200) for suffix in ("png", "wav")}))
    pieces = tar.list_pieces(file, "a.tar", Source(), 100_000)
    assert len(pieces) == 10
    assert all(100_000 <= (p.stop or p.start + 100_000) - p.start < 106_000 for p in pieces)
    keys = [record.key for piece in pieces for record in tar.read(piece, Source())]
    assert keys == [f"a.tar:{i:04}" for i in range(200)]
    # A repeated key is only detected when the archive is read as one piece, so it is not split.
    file.write_bytes(encode_tar({f"{i % 199:04}.{i}.png": bytes(2000) for i in range(200)}))
    assert tar.list_pieces(file, "a.tar", Source(), 100_000) == [Piece(file, "a.tar")]
    assert [r.key for r in read_records(file) if isinstance(r, BadRecord)] == ["a.tar:0000"]


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz", "zst"])
def test_compressed_archives_give_the_same_records(tmp_path: Path, mode: str) -> None:
    files = {f"{i}.{suffix}": PNG * i for i in range(1, 30) for suffix in ("png", "seg.png")}
    plain = tmp_path / "a.tar"
    plain.write_bytes(encode_tar(files))
    file = tmp_path / f"a.tar.{mode.removeprefix('w:')}"
    if mode == "zst":
        zstandard = pytest.importorskip("zstandard")
        file.write_bytes(zstandard.compress(plain.read_bytes()))
    else:
        file.write_bytes(encode_tar(files, mode=mode))
    assert [r.fields for r in read_good_records(file)] == [r.fields for r in read_good_records(plain)]
    assert tar.list_pieces(file, "a", Source(), 1) == [Piece(file, "a")]
    with pytest.raises(DataError, match="compressed"):
        tar.index_archive(file)


def test_members_are_decoded_by_suffix(tmp_path: Path) -> None:
    array, several = io.BytesIO(), io.BytesIO()
    np.save(array, np.arange(6).reshape(2, 3).T)
    np.savez_compressed(several, a=np.eye(2), b=np.array([1, 2], np.uint8))
    files = {
        "./x.jpg": b"\xff\xd8", "x.TXT": "gr\u00fc\u00df dich".encode(), "x.cls": b" 7\n", "x.json": b'{"a": [1, null]}',
        "x.npy": array.getvalue(), "x.npz": several.getvalue(), "x.csv": b"a,b\n", "x.seg.png": PNG, "x.index": b"-3",
    }  # fmt: skip
    file = tmp_path / "a.tar"
    file.write_bytes(encode_tar(files))
    (record,) = read_good_records(file)
    npy, npz = record.fields.pop("npy"), record.fields.pop("npz")
    assert record.fields == {
        "jpg": b"\xff\xd8", "txt": "gr\u00fc\u00df dich", "cls": 7, "json": {"a": [1, None]}, "a": [1, None],
        "csv": "a,b\n", "seg.png": PNG, "index": -3,
    }  # fmt: skip
    np.testing.assert_array_equal(npy, np.arange(6).reshape(2, 3).T)
    assert npz.keys() == {"a", "b"}
    np.testing.assert_array_equal(npz["a"], np.eye(2))
    assert record == (f"a.tar:{'x'}", f"{file}, sample x", record.fields)


@pytest.mark.parametrize(
    ("member", "data", "reason"),
    [
        ("x.cls", b"cat", "not an integer"),
        ("x.cls", b"9" * 30, "not an integer"),
        ("x.json", b'{"a": NaN}', "NaN"),
        ("x.json", b"[" * 100_000, "JSON"),
        ("x.json", b'"\\ud800"', "surrogate"),
        ("x.txt", b"a\xff", "UTF-8: byte 0xff at offset 1"),
        ("x.txt", b"a\0", "NUL byte at offset 1"),
        ("x.npy", b"\x93NUMPY\x01\x00", "not an array file"),
        ("x.npy", b"", "not an array file"),
        ("x.npz", b"PK", "not an npz file"),
    ],
)
def test_invalid_members_are_bad_records(tmp_path: Path, member: str, data: bytes, reason: str) -> None:
    file = tmp_path / "a.tar"
    file.write_bytes(encode_tar({"w.png": PNG, "x.png": PNG, member: data, "y.png": PNG}))
    first, bad, last = read_records(file)
    assert isinstance(bad, BadRecord)
    assert (bad.key, bad.where) == ("a.tar:x", f"{file}, sample x")
    assert bad.reason.startswith(f"member {member!r}: ")
    assert reason in bad.reason
    assert isinstance(first, Record)
    assert isinstance(last, Record)


def test_hidden_and_info_members_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    file.write_bytes(
        encode_tar({".DS_Store": b"x", "a/._1.png": b"x", "__info__.json": b"{}", "a/1.png": PNG, "__a.png": PNG})
    )
    assert [record.key for record in read_good_records(file)] == ["a.tar:a/1", "a.tar:__a"]


def test_truncated_and_concatenated_archives(tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    data = encode_tar({f"{i}.png": PNG for i in range(3)})
    blocks = 3 * 1024
    file.write_bytes(data[:blocks])
    *records, bad = read_records(file)
    assert len(records) == 3
    assert isinstance(bad, BadRecord)
    assert "no end mark" in bad.reason
    assert len(tar.list_pieces(file, "a.tar", Source(), 1)) == 1
    file.write_bytes(data + data)
    *records, bad = read_records(file)
    assert len(records) == 3
    assert isinstance(bad, BadRecord)
    assert "after the end" in bad.reason
    file.write_bytes(data[:2000])
    with pytest.raises(DataError, match=r"a\.tar: is truncated: member '1\.png'"):
        read_records(file)
    file.write_bytes(data[:1100])
    with pytest.raises(DataError, match="truncated"):
        read_records(file)
    file.write_bytes(b"")
    with pytest.raises(DataError, match="empty"):
        read_records(file)


@given(st.binary(max_size=3), st.integers(0, 4000), st.integers(0, 5000))
def test_damaged_archive_is_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, offset: int, end: int
) -> None:
    file = tmp_path_factory.mktemp("damaged") / "a.tar"
    data = bytearray(
        encode_tar({"a.json": b'{"x": 1}', "b" * 120 + ".txt": b"text", "b" * 120 + ".cls": b"1", "c.png": PNG})
    )
    data[offset : offset + len(noise)] = noise
    file.write_bytes(data[: end if end < 4000 else None])
    message, records = str(file), []
    try:
        records = read_records(file)
    except DataError as error:
        message = str(error)
    assert str(file) in message
    assert "\n" not in message
    assert all(isinstance(record, Record | BadRecord) for record in records)


def test_reading_is_linear_and_cheaper_than_tarfile(tmp_path: Path) -> None:
    """Measured in seconds by benchmarks/data_speed.py."""

    def write_archive(samples: int) -> Path:
        file = tmp_path / f"{samples}.tar"
        file.write_bytes(
            encode_tar({f"{i:05}.{suffix}": bytes(300) for i in range(samples) for suffix in ("png", "wav")})
        )
        return file

    def read_with_tarfile() -> None:
        with tarfile.open(write_archive(200)) as members:
            for info in members:
                members.extractfile(info).read()  # type: ignore[union-attr]

    few, many = (count_operations(lambda n=n: read_records(write_archive(n))) for n in (100, 200))
    none = count_operations(lambda: write_archive(200))
    assert many - none < 0.5 * (count_operations(read_with_tarfile) - none)
    assert many - few < 1.1 * few


def test_ustar_names_and_base_256_sizes(tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    name = "d" * 90 + "/" + "n" * 90 + ".txt"
    file.write_bytes(encode_tar({name: b"ustar"}, format=tarfile.USTAR_FORMAT))
    assert [record.key for record in read_good_records(file)] == [f"a.tar:{name.removesuffix('.txt')}"]
    # A size over 8 GiB is written in base 256; here it is false and refused.
    info = tarfile.TarInfo("x.png")
    info.size = 9 << 30
    file.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(2048))
    with pytest.raises(DataError, match=str(9 << 30)):
        read_records(file)


def test_json_of_a_shard_is_plain_data(tmp_path: Path) -> None:
    value = {"__class__": "os.system", "args": ["x"]}
    file = tmp_path / "a.tar"
    file.write_bytes(encode_tar({"x.json": json.dumps(value).encode()}))
    assert read_good_records(file)[0].fields == {"json": value, **value}


def test_json_and_suffixed_members_are_merged_into_fields(tmp_path: Path) -> None:
    def array(*values: int) -> bytes:
        out = io.BytesIO()
        np.save(out, np.array(values))
        return out.getvalue()

    json_fields = {"fps": 8.0, "cls": 5, "txt": "no", "video": "no", "json": 1, "deep": {"a": 1}}
    files = {
        "x.npy": array(1), "x.video.npy": array(2), "x.txt": b"one", "x.source.txt": b"two", "x.txt.txt": b"three",
        "x.cls": b"7", "x.json": json.dumps(json_fields).encode(), "x.text": b"four", "x.text.npy": array(3),
        "y.json": b"[1]", "z.both.txt": b"t", "z.both.npy": array(4),
    }  # fmt: skip
    file = tmp_path / "a.tar"
    file.write_bytes(encode_tar(files))
    x, y, z = read_good_records(file)
    assert {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in x.fields.items()} == {
        "npy": [1], "video": [2], "txt": "one", "source": "two", "txt.txt": "three", "cls": 7, "json": json_fields,
        "fps": 8.0, "deep": {"a": 1}, "text": "four", "text.npy": [3],
    }  # fmt: skip
    assert y.fields == {"json": [1]}
    assert z.fields == {"both": "t", "both.npy": np.array([4])}
    assert tar.index_archive(file)[0].fields.keys() == {name.partition(".")[2] for name in files if name[0] == "x"}


def test_written_webdataset_round_trips(tmp_path: Path) -> None:
    fields = {"video": np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3), "fps": 12.5, "label": "cats"}
    text_fields = {"caption": "a cat", "source": "clips/a.mp4", "condition": np.array([0.5, 1.0])}
    (file,) = write_records([Record("0", "here", {**fields, **text_fields})], tmp_path / "out", to="webdataset")
    (record,) = read_good_records(file)
    for name, value in (fields | text_fields).items():
        np.testing.assert_array_equal(record.fields[name], value)
