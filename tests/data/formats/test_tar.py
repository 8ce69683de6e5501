"""Archives give the samples that WebDataset would, found by the same headers that Python's tarfile finds."""

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

# A header holds 100 bytes of a name; PAX and GNU headers take over beyond that.
stems = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z"), exclude_characters="./\\:"), min_size=1)
keys = (
    st.lists(stems.map(lambda s: s[:90]), min_size=1, max_size=3).map("/".join).filter(lambda s: not s.endswith("__"))
)
archives = st.dictionaries(
    keys,
    st.dictionaries(st.sampled_from(("txt", "seg.png", "wav", "CLS")), st.binary(max_size=900), min_size=1),
    max_size=6,
)


def pack(files: dict[str, bytes], *, format: int = tarfile.PAX_FORMAT, mode: str = "w") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode, format=format) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def read(file: Path) -> list[Record | BadRecord]:
    return list(tar.read(Piece(file, file.name), Source()))


def only(file: Path) -> list[Record]:
    found = read(file)
    assert not [record for record in found if isinstance(record, BadRecord)]
    return found  # type: ignore[return-value]


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
def test_real_archives(name: str, count: int, fields: set[str]) -> None:
    records = only(Path(DATA or "", name))
    assert len(records) == len({record.key for record in records}) == count
    assert all(set(record.fields) == fields for record in records)
    types = {"cls": int, "json": dict, "txt": str, "csv": str, "jpg": bytes, "png": bytes}
    members = ((field, value) for record in records for field, value in record.fields.items() if field in types)
    assert all(type(value) is types[field] for field, value in members)


@needs_data
def test_what_stands_in_real_archives() -> None:
    first = only(Path(DATA or "", "readers-webdataset/cc12m-train-0000.tar"))[0]
    assert first.key == "cc12m-train-0000.tar:000000003"
    assert len(first.fields["jpg"]) == 103_637
    assert first.fields["jpg"].startswith(b"\xff\xd8\xff")
    assert only(Path(DATA or "", "readers-webdataset/csv.tar"))[1].key == "csv.tar:csv/1"
    assert sum(r.fields["cls"] in range(10) for r in only(Path(DATA or "", "readers-webdataset/sample.tgz"))) == 90


@needs_data
def test_three_thousand_recordings_as_a_stream() -> None:
    file = Path(DATA or "", "audio-fsdd/recordings.tar.xz")
    records = only(file)
    assert len(records) == 3000
    assert records[0].key == "recordings.tar.xz:recordings/0_george_0"
    with tarfile.open(file) as archive:
        theirs = {i.name: archive.extractfile(i).read() for i in archive if i.isreg()}  # type: ignore[union-attr]
    assert {f"{r.key.partition(':')[2]}.wav": r.fields["wav"] for r in records} == theirs


@needs_data
@pytest.mark.parametrize("file", real_archives(), ids=lambda file: file.name)
def test_tarfile_agrees_on_real_archives(file: Path) -> None:
    with tarfile.open(file) as archive:
        theirs = [(info.name, archive.extractfile(info).read()) for info in archive if info.isreg()]  # type: ignore[union-attr]
    with open_decompressed(file) as stream:
        members = tar._members(stream, Piece(file, file.name), bodies=True)
        assert [(member.name, member.data_fingerprint) for member in members] == theirs


@given(archives, st.sampled_from((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)), st.integers(1, 6000))
def test_tarfile_agrees_on_made_archives(
    tmp_path_factory: pytest.TempPathFactory, samples: dict[str, dict[str, bytes]], format: int, size: int
) -> None:
    file = tmp_path_factory.mktemp("tar") / "a.tar"
    files = {f"{key}.{field}": data for key, fields in samples.items() for field, data in fields.items()}
    file.write_bytes(pack(files, format=format))
    found = tar.index_archive(file)
    assert [sample.problem for sample in found] == [None] * len(samples)
    with tarfile.open(file) as archive:
        theirs = {info.name.lower(): (info.offset_data, info.size) for info in archive}
    assert {f"{s.key}.{f}".lower(): place for s in found for f, place in s.fields.items()} == theirs
    assert [sample.key for sample in found] == list(samples)
    # By random access, and in pieces cut anywhere between samples.
    with file.open("rb") as raw:
        for sample in found:
            for field, (offset, length) in sample.fields.items():
                original = samples[sample.key].get(field, samples[sample.key].get(field.upper()))
                assert os.pread(raw.fileno(), length, offset) == original
    cut = tar.list_pieces(file, "a.tar", Source(), size)
    assert [r for piece in cut for r in tar.read(piece, Source())] == read(file)
    assert all(piece.stop is None or piece.stop - piece.start >= min(size, 512) for piece in cut)


def test_pieces_are_cut_near_the_size_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    file.write_bytes(pack({f"{i:04}.{suffix}": bytes(2000) for i in range(200) for suffix in ("png", "wav")}))
    pieces = tar.list_pieces(file, "a.tar", Source(), 100_000)
    assert len(pieces) == 10
    assert all(100_000 <= (p.stop or p.start + 100_000) - p.start < 106_000 for p in pieces)
    keys = [record.key for piece in pieces for record in tar.read(piece, Source())]
    assert keys == [f"a.tar:{i:04}" for i in range(200)]
    # A key that comes back is seen by one who reads the whole, so such an archive is not cut.
    file.write_bytes(pack({f"{i % 199:04}.{i}.png": bytes(2000) for i in range(200)}))
    assert tar.list_pieces(file, "a.tar", Source(), 100_000) == [Piece(file, "a.tar")]
    assert [r.key for r in read(file) if isinstance(r, BadRecord)] == ["a.tar:0000"]


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz", "zst"])
def test_compressed_archives(tmp_path: Path, mode: str) -> None:
    files = {f"{i}.{suffix}": PNG * i for i in range(1, 30) for suffix in ("png", "seg.png")}
    plain = tmp_path / "a.tar"
    plain.write_bytes(pack(files))
    file = tmp_path / f"a.tar.{mode.removeprefix('w:')}"
    if mode == "zst":
        zstandard = pytest.importorskip("zstandard")
        file.write_bytes(zstandard.compress(plain.read_bytes()))
    else:
        file.write_bytes(pack(files, mode=mode))
    assert [r.fields for r in only(file)] == [r.fields for r in only(plain)]
    assert tar.list_pieces(file, "a", Source(), 1) == [Piece(file, "a")]
    with pytest.raises(DataError, match="compressed"):
        tar.index_archive(file)


def test_members_become_values(tmp_path: Path) -> None:
    array, several = io.BytesIO(), io.BytesIO()
    np.save(array, np.arange(6).reshape(2, 3).T)
    np.savez_compressed(several, a=np.eye(2), b=np.array([1, 2], np.uint8))
    files = {
        "./x.jpg": b"\xff\xd8", "x.TXT": "gr\u00fc\u00df dich".encode(), "x.cls": b" 7\n", "x.json": b'{"a": [1, null]}',
        "x.npy": array.getvalue(), "x.npz": several.getvalue(), "x.csv": b"a,b\n", "x.seg.png": PNG, "x.index": b"-3",
    }  # fmt: skip
    file = tmp_path / "a.tar"
    file.write_bytes(pack(files))
    (record,) = only(file)
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
def test_members_that_are_not_what_they_say(tmp_path: Path, member: str, data: bytes, reason: str) -> None:
    file = tmp_path / "a.tar"
    file.write_bytes(pack({"w.png": PNG, "x.png": PNG, member: data, "y.png": PNG}))
    first, bad, last = read(file)
    assert isinstance(bad, BadRecord)
    assert (bad.key, bad.where) == ("a.tar:x", f"{file}, sample x")
    assert bad.reason.startswith(f"member {member!r}: ")
    assert reason in bad.reason
    assert isinstance(first, Record)
    assert isinstance(last, Record)


def test_what_is_no_data_of_a_sample_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    file.write_bytes(
        pack({".DS_Store": b"x", "a/._1.png": b"x", "__info__.json": b"{}", "a/1.png": PNG, "__a.png": PNG})
    )
    assert [record.key for record in only(file)] == ["a.tar:a/1", "a.tar:__a"]


def test_archives_that_end_too_soon_or_go_on(tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    whole = pack({f"{i}.png": PNG for i in range(3)})
    blocks = 3 * 1024
    file.write_bytes(whole[:blocks])
    *records, bad = read(file)
    assert len(records) == 3
    assert isinstance(bad, BadRecord)
    assert "no end mark" in bad.reason
    assert len(tar.list_pieces(file, "a.tar", Source(), 1)) == 1
    file.write_bytes(whole + whole)
    *records, bad = read(file)
    assert len(records) == 3
    assert isinstance(bad, BadRecord)
    assert "after the end" in bad.reason
    file.write_bytes(whole[:2000])
    with pytest.raises(DataError, match=r"a\.tar: is truncated: member '1\.png'"):
        read(file)
    file.write_bytes(whole[:1100])
    with pytest.raises(DataError, match="truncated"):
        read(file)
    file.write_bytes(b"")
    with pytest.raises(DataError, match="empty"):
        read(file)


@given(st.binary(max_size=3), st.integers(0, 4000), st.integers(0, 5000))
def test_damage_is_said_and_never_crashes(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, place: int, end: int
) -> None:
    file = tmp_path_factory.mktemp("damaged") / "a.tar"
    whole = bytearray(
        pack({"a.json": b'{"x": 1}', "b" * 120 + ".txt": b"text", "b" * 120 + ".cls": b"1", "c.png": PNG})
    )
    whole[place : place + len(noise)] = noise
    file.write_bytes(whole[: end if end < 4000 else None])
    message, found = str(file), []
    try:
        found = read(file)
    except DataError as error:
        message = str(error)
    assert str(file) in message
    assert "\n" not in message
    assert all(isinstance(record, Record | BadRecord) for record in found)


def test_it_does_less_than_tarfile_and_no_more_for_a_late_member(tmp_path: Path) -> None:
    """benchmarks/data_speed.py has the seconds."""

    def archive(samples: int) -> Path:
        file = tmp_path / f"{samples}.tar"
        file.write_bytes(pack({f"{i:05}.{suffix}": bytes(300) for i in range(samples) for suffix in ("png", "wav")}))
        return file

    def theirs() -> None:
        with tarfile.open(archive(200)) as members:
            for info in members:
                members.extractfile(info).read()  # type: ignore[union-attr]

    few, many = (count_operations(lambda n=n: read(archive(n))) for n in (100, 200))
    none = count_operations(lambda: archive(200))
    assert many - none < 0.5 * (count_operations(theirs) - none)
    assert many - few < 1.1 * few


def test_names_of_old_formats(tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    name = "d" * 90 + "/" + "n" * 90 + ".txt"
    file.write_bytes(pack({name: b"ustar"}, format=tarfile.USTAR_FORMAT))
    assert [record.key for record in only(file)] == [f"a.tar:{name.removesuffix('.txt')}"]
    # A size over 8 GiB is written in base 256; here it is a lie, and told as one.
    info = tarfile.TarInfo("x.png")
    info.size = 9 << 30
    file.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(2048))
    with pytest.raises(DataError, match=str(9 << 30)):
        read(file)


def test_json_of_a_shard_is_plain_data(tmp_path: Path) -> None:
    value = {"__class__": "os.system", "args": ["x"]}
    file = tmp_path / "a.tar"
    file.write_bytes(pack({"x.json": json.dumps(value).encode()}))
    assert only(file)[0].fields == {"json": value, **value}


def test_what_was_packed_apart_is_unfolded(tmp_path: Path) -> None:
    def array(*values: int) -> bytes:
        out = io.BytesIO()
        np.save(out, np.array(values))
        return out.getvalue()

    together = {"fps": 8.0, "cls": 5, "txt": "no", "video": "no", "json": 1, "deep": {"a": 1}}
    files = {
        "x.npy": array(1), "x.video.npy": array(2), "x.txt": b"one", "x.source.txt": b"two", "x.txt.txt": b"three",
        "x.cls": b"7", "x.json": json.dumps(together).encode(), "x.text": b"four", "x.text.npy": array(3),
        "y.json": b"[1]", "z.both.txt": b"t", "z.both.npy": array(4),
    }  # fmt: skip
    file = tmp_path / "a.tar"
    file.write_bytes(pack(files))
    x, y, z = only(file)
    assert {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in x.fields.items()} == {
        "npy": [1], "video": [2], "txt": "one", "source": "two", "txt.txt": "three", "cls": 7, "json": together,
        "fps": 8.0, "deep": {"a": 1}, "text": "four", "text.npy": [3],
    }  # fmt: skip
    assert y.fields == {"json": [1]}
    assert z.fields == {"both": "t", "both.npy": np.array([4])}
    assert tar.index_archive(file)[0].fields.keys() == {name.partition(".")[2] for name in files if name[0] == "x"}


def test_our_own_export_comes_back(tmp_path: Path) -> None:
    fields = {"video": np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3), "fps": 12.5, "label": "cats"}
    said = {"caption": "a cat", "source": "clips/a.mp4", "condition": np.array([0.5, 1.0])}
    (file,) = write_records([Record("0", "here", {**fields, **said})], tmp_path / "out", to="webdataset")
    (record,) = only(file)
    for name, value in (fields | said).items():
        np.testing.assert_array_equal(record.fields[name], value)
