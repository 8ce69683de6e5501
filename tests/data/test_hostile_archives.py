"""Malicious files: each is refused by member name, in little memory, with nothing written or executed."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import pickle
import struct
import tarfile
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.data.formats import arrays, idx, tar, tfrecord
from bottega.data.formats.crc32c import crc32c, mask_crc
from bottega.data.formats.reader import Format, Piece
from bottega.data.records.record import BadRecord, Record

PNG = b"\x89PNG\r\n\x1a\n"
# Memory limit of one read: files are read a megabyte at a time, with a few copies of it.
PEAK = 24 << 20


@pytest.fixture(autouse=True)
def no_side_effects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run each test in an empty folder two levels down and fail if any file appears outside it."""
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    marker = tmp_path / "ran"
    monkeypatch.setenv("MARKER", str(marker))
    yield
    created = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.parent != inside}
    assert created <= {"a", "a/b"}
    assert not marker.exists()


class Trap:
    """An object whose unpickling creates a file."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ('touch "$MARKER"',)


def encode_object_array() -> bytes:
    out = io.BytesIO()
    np.save(out, np.array([Trap()], dtype=object), allow_pickle=True)
    return out.getvalue()


def encode_member(name: str, data: bytes = b"", **fields: Any) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.PAX_FORMAT) + data + bytes(-len(data) % 512)


GOOD = encode_member("before.png", PNG)
LAST = encode_member("later.png", PNG) + bytes(1024)


def read_records(format: Format, name: str, data: bytes, **options: Any) -> list[Record | BadRecord]:
    file = Path(name).absolute()
    file.write_bytes(data)
    source = Source(**options)
    tracemalloc.start()
    try:
        pieces = format.list_pieces(file, file.name, source, 1 << 12)
        return [record for piece in pieces for record in format.read(piece, source)]
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < PEAK + 2 * len(data), f"{peak} bytes of memory"


@pytest.mark.parametrize(
    ("hostile", "name", "reason"),
    [
        (encode_member("../../escape.png", PNG), "../../escape.png", "leads out"),
        (encode_member("x/../../escape.png", PNG), "x/../../escape.png", "leads out"),
        (encode_member("..\\escape.png", PNG), "..\\escape.png", "leads out"),
        (encode_member("/tmp/absolute.png", PNG), "/tmp/absolute.png", "absolute"),
        (encode_member("C:/absolute.png", PNG), "C:/absolute.png", "absolute"),
        (encode_member("../up", type=tarfile.DIRTYPE), "../up/", "leads out"),
        (encode_member("link.png", type=tarfile.SYMTYPE, linkname="/etc/passwd"), "link.png", "symbolic link"),
        (encode_member("hard.png", type=tarfile.LNKTYPE, linkname="before.png"), "hard.png", "hard link"),
        (encode_member("null.png", type=tarfile.CHRTYPE, devmajor=1, devminor=3), "null.png", "device"),
        (encode_member("disk.png", type=tarfile.BLKTYPE, devmajor=8), "disk.png", "device"),
        (encode_member("pipe.png", type=tarfile.FIFOTYPE), "pipe.png", "pipe"),
        (encode_member("odd.png", PNG, type=b"Z"), "odd.png", "unknown type"),
        (encode_member("bell\a.png", PNG), "bell\a.png", "control character"),
        (encode_member("line\n.png", PNG), "line\n.png", "control character"),
        (encode_member("n" * 5000 + ".png", PNG), "n" * 5000 + ".png", "longer than"),
        (encode_member("x.pkl", pickle.dumps(Trap())), "x.pkl", "not a supported kind of data"),
        (encode_member("x.pickle", pickle.dumps(Trap())), "x.pickle", "not a supported kind of data"),
        (encode_member("x.pyd", pickle.dumps(Trap())), "x.pyd", "not a supported kind of data"),
        (encode_member("x.pth", pickle.dumps(Trap())), "x.pth", "not a supported kind of data"),
        (encode_member("x.pt", pickle.dumps(Trap())), "x.pt", "not a supported kind of data"),
        (encode_member("x.py", b"open('ran', 'w')"), "x.py", "not a supported kind of data"),
        (encode_member("x.png.so", b"\x7fELF"), "x.png.so", "not a supported kind of data"),
        (encode_member("x.ten", b"\0" * 64), "x.ten", "not a supported kind of data"),
        (encode_member("README", b"text"), "README", "not a supported kind of data"),
        (encode_member("x.npy", encode_object_array()), "x.npy", "Python objects"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
@pytest.mark.parametrize("compressed", [False, True])
def test_harmful_members_are_refused(hostile: bytes, name: str, reason: str, compressed: bool) -> None:
    archive = GOOD + hostile + LAST
    first, bad, last = read_records(tar.FORMAT, "a.tar", gzip.compress(archive) if compressed else archive)
    assert isinstance(bad, BadRecord)
    assert bad.reason.startswith(f"member {name!r}: ")
    assert reason in bad.reason
    assert "\n" not in str(bad)
    assert bad.key.isprintable()
    assert isinstance(first, Record)
    assert isinstance(last, Record)
    if not compressed:
        assert [sample.key for sample in tar.index_archive(Path("a.tar")) if not sample.problem][:1] == ["before"]


def test_refused_member_rejects_its_sample() -> None:
    sample = (
        encode_member("x.png", PNG) + encode_member("x.pkl", pickle.dumps(Trap())) + encode_member("x.txt", b"hello")
    )
    records = read_records(tar.FORMAT, "a.tar", GOOD + sample + LAST)
    assert [type(record) for record in records] == [Record, BadRecord, Record]
    samples = tar.index_archive(Path("a.tar"))
    assert [(bool(sample.fields), sample.problem is None) for sample in samples] == [
        (True, True),
        (False, False),
        (True, True),
    ]


@pytest.mark.parametrize(
    "second",
    [
        encode_member("x.png", b"other"),
        encode_member("./x.png", b"other"),
        encode_member("x.PNG", b"other"),
        LAST[:-1024] + encode_member("x.png", b"other"),
        LAST[:-1024] + encode_member("x.txt", b"other"),
        LAST[:-1024] + encode_member("./x.cls", b"1"),
    ],
)
def test_duplicate_member_name_is_refused(second: bytes) -> None:
    """Readers that check the first member and use the last can be tricked."""
    records = read_records(tar.FORMAT, "a.tar", encode_member("x.png", PNG) + second + bytes(1024))
    bad = [record for record in records if isinstance(record, BadRecord)]
    assert [record.key for record in bad] == ["a.tar:x"]
    assert not [r for r in records if isinstance(r, Record) and b"other" in r.fields.values()]


def encode_pax(records: dict[str, str], kind: bytes = b"x") -> bytes:
    body = b""
    for key, value in records.items():
        line = f" {key}={value}\n".encode()
        length = len(line) + len(str(len(line) + 2))
        body += str(length).encode() + line
    return encode_member("pax", body, type=kind)


def encode_long_name(name: bytes) -> bytes:
    return encode_member("././@LongLink", name + b"\0", type=tarfile.GNUTYPE_LONGNAME)


@pytest.mark.parametrize(
    ("archive", "reason"),
    [
        (encode_long_name(b"a.png") + encode_pax({"path": "b.png"}) + encode_member("c.png", PNG), "two long names"),
        (encode_pax({"path": "a.png"}) + encode_pax({"path": "b.png"}) + encode_member("c.png", PNG), "two long names"),
        (encode_pax({"path": "../b.png"}) + encode_member("c.png", PNG), "leads out"),
        (encode_pax({"GNU.sparse.major": "1"}) + encode_member("c.png", PNG), "sparse"),
        (encode_long_name(b"/etc/passwd.png") + encode_member("c.png", PNG), "absolute"),
        (encode_long_name(b"\xff.png") + encode_member("c.png", PNG), "UTF-8"),
    ],
)
def test_ambiguous_member_names_are_refused(archive: bytes, reason: str) -> None:
    _, bad, last = read_records(tar.FORMAT, "a.tar", GOOD + archive + LAST)
    assert isinstance(bad, BadRecord)
    assert reason in bad.reason
    assert isinstance(last, Record)


def encode_false_size(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    ("archive", "reason"),
    [
        (GOOD + encode_false_size("x.png", 1 << 60) + LAST, "more than remain"),
        (GOOD + encode_false_size("x.png", 900 << 20) + LAST, "more than remain"),
        (GOOD + encode_pax({"size": str(1 << 50)}) + encode_member("c.png", PNG) + LAST, "more than remain"),
        (GOOD + encode_pax({"size": "-512"}) + encode_member("c.png", PNG) + LAST, "not a number"),
        (encode_pax({"path": "x.png"}, b"g") + GOOD + LAST, "global"),
        (encode_member("x", b"y" * 70000, type=b"x") + GOOD + LAST, "header of 70000 bytes"),
        (encode_false_size("x", 1 << 40)[:156] + b"L" + encode_false_size("x", 1 << 40)[157:] + LAST, "tar header"),
        (encode_member("pax", b"999999 path=x\n", type=b"x") + GOOD, "damaged PAX"),
        (encode_member("pax", b"x" * 100, type=b"x") + GOOD, "damaged PAX"),
        (encode_member("s.png", PNG, type=tarfile.GNUTYPE_SPARSE) + LAST, "sparse"),
        (GOOD + encode_long_name(b"x.png"), "truncated"),
        (GOOD + b"#" * 512 + LAST, "tar header"),
        (b"#" * 4096, "tar header"),
        (b"short", "truncated"),
    ],
)
@pytest.mark.parametrize("packing", [None, gzip.compress, bz2.compress, lzma.compress])
def test_unreadable_headers_are_refused(archive: bytes, reason: str, packing: Any) -> None:
    data = archive if packing is None else packing(archive)
    with pytest.raises(DataError) as caught:
        read_records(tar.FORMAT, "a.tar", data)
    expected = "truncated" if packing is not None and reason == "more than remain" else reason
    assert expected in str(caught.value)
    assert str(caught.value).startswith(str(Path("a.tar").absolute()))
    assert "\n" not in str(caught.value)


def test_too_many_members_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar, "MAX_MEMBERS", 100)
    with pytest.raises(DataError, match="more than 100 members"):
        read_records(tar.FORMAT, "a.tar", b"".join(encode_member(f"{i}.png") for i in range(101)) + LAST)


def test_oversized_samples_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar, "MAX_MEMBER_BYTES", 1000)
    big = encode_member("x.png", bytes(1001)) + encode_member("y.png", bytes(600)) + encode_member("y.wav", bytes(600))
    for data in (GOOD + big + LAST, gzip.compress(GOOD + big + LAST)):
        _, bad, also, last = read_records(tar.FORMAT, "a.tar", data)
        assert "has 1001 bytes; a sample may have at most 1000" in str(bad)
        assert "makes its sample 1200 bytes" in str(also)
        assert isinstance(last, Record)


def test_compression_bomb_is_refused() -> None:
    """A gigabyte of zeros compressed to a megabyte: as one member of that size, and after the last member."""
    zeros = gzip.compress(bytes(16 << 20), 9)
    assert len(zeros) < 17_000
    for head in (encode_false_size("x.png", 1 << 30), GOOD + bytes(1024), encode_member("x.png", PNG)[:512]):
        file = Path("bomb.tar.gz").absolute()
        file.write_bytes(gzip.compress(head) + zeros * 64)
        tracemalloc.start()
        with pytest.raises(DataError, match="bomb"):
            list(tar.read(Piece(file, "bomb"), Source()))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        # The size that any file may unpack to before its ratio is checked, twice while it is joined.
        assert peak < 200 << 20


def encode_record(length: int, data: bytes, *, right: bool = True) -> bytes:
    head = struct.pack("<Q", length)
    checksum = mask_crc(crc32c(head)) ^ (not right)
    return head + struct.pack("<I", checksum) + data + struct.pack("<I", mask_crc(crc32c(data)))


@pytest.mark.parametrize("length", [2**62, 2**64 - 1, (1 << 30) + 1, 1 << 30, 2**31])
@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("compressed", [True, False])
def test_false_record_lengths_are_refused(length: int, right: bool, compressed: bool) -> None:
    data = encode_record(0, b"") + encode_record(length, b"x" * 5000, right=right) + encode_record(0, b"")
    first, bad = read_records(tfrecord.FORMAT, "a.tfrecord", gzip.compress(data) if compressed else data)
    assert isinstance(first, Record)
    assert isinstance(bad, BadRecord)
    assert bad.where.endswith("record 2 at byte 16")
    assert "truncated" in bad.reason or "cannot be located" in bad.reason


def test_records_above_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tfrecord, "MAX_MEMBER_BYTES", 1000)
    monkeypatch.setattr(tfrecord, "CHUNK_BYTES", 500)
    first, bad = read_records(
        tfrecord.FORMAT, "a.tfrecord", encode_record(0, b"") + encode_record(2000, bytes(2000)) + encode_record(0, b"")
    )
    assert isinstance(first, Record)
    assert "its length, 2000, is damaged or above 1000" in str(bad)


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a\xff\xff\xff\xff\x0f",
        b"\x0a" + b"\xff" * 9 + b"\x01",
        b"\x0a" + b"\xff" * 11,
        b"\x0b" * 1000,
        b"\x0a\x7f" * 5000,
        pickle.dumps(Trap()),
    ],
)
def test_malformed_protocol_buffers_are_refused(data: bytes) -> None:
    (bad,) = read_records(tfrecord.FORMAT, "a.tfrecord", encode_record(len(data), data))
    assert isinstance(bad, BadRecord)
    assert "not a tf.train.Example" in bad.reason


@pytest.mark.parametrize(
    "shape",
    [(2**32 - 1, 2**32 - 1, 2**32 - 1), (2**32 - 1, 28, 28), (10**6, 1, 1), (1, 2**15, 2**15), (5, 0, 7), (0,)],
)
@pytest.mark.parametrize("compressed", [True, False])
def test_false_idx_headers_are_refused(shape: tuple[int, ...], compressed: bool) -> None:
    data = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + bytes(3000)
    with pytest.raises(DataError) as caught:
        read_records(
            idx.FORMAT,
            "train-images-idx3-ubyte.gz" if compressed else "train-images-idx3-ubyte",
            gzip.compress(data) if compressed else data,
        )
    assert str(Path.cwd()) in str(caught.value)


def encode_npy(descr: str, shape: str, data: bytes = bytes(100)) -> bytes:
    head = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + data


HOSTILE_ARRAYS = [
    (encode_object_array(), "Python objects"),
    (encode_npy("'|O'", "(12,)"), "Python objects"),
    (encode_npy("'<f8'", f"({2**60},)"), "is damaged: its header states"),
    (encode_npy("'<f8'", "(-1, -100)"), "shape"),
    (encode_npy("'|S0'", f"({2**60},)", b""), "is damaged: its header states"),
    (encode_npy("'<f8'", f"({2**60}, 0)", b""), "1 to"),
    (encode_npy("[('a', '|O')]", "(12,)"), "numbers and text"),
    (encode_npy("'M8[s]'", "(12,)"), "numbers and text"),
    (encode_npy("__import__('os').system('touch \"$MARKER\"')", "(12,)"), "not an array file"),
    (encode_npy("'<f8'", "(" * 5000 + ")" * 5000), "not an array file"),
    (b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**31) + b"x" * 100, "not an array file"),
    (b"\x93NUMPY\x09\x00" + bytes(100), "not an array file"),
    (pickle.dumps(Trap()), "not an array file"),
    (b"", "not an array file"),
]


@pytest.mark.parametrize(("data", "reason"), HOSTILE_ARRAYS)
@pytest.mark.parametrize("form", ["npy", "npz", "compressed"])
def test_malformed_arrays_are_refused(data: bytes, reason: str, form: str) -> None:
    if form != "npy":
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED if form == "npz" else zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("x.npy", data)
        data = out.getvalue()
    with pytest.raises(DataError, match=reason) as caught:
        read_records(arrays.FORMAT, "a.npy" if form == "npy" else "a.npz", data)
    assert str(caught.value).startswith(str(Path.cwd()))
    assert "\n" not in str(caught.value)


def encode_zip(files: dict[str, bytes], kind: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", kind) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (encode_zip({"../x.npy": encode_npy("'|u1'", "(100,)")}), "leads out"),
        (encode_zip({"/x.npy": encode_npy("'|u1'", "(100,)")}), "absolute"),
        (encode_zip({"x.pkl": pickle.dumps(Trap())}), "is not an array"),
        (encode_zip({"x.npy": encode_npy("'|u1'", "(100,)")}, zipfile.ZIP_LZMA), "unusual method"),
        (encode_zip({"x.npy": encode_npy("'|u1'", f"({80 << 20},)", bytes(80 << 20))}), "zip bomb"),
    ],
)
def test_zip_archives_that_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        read_records(arrays.FORMAT, "a.npz", data)
    (bad,) = read_records(tar.FORMAT, "a.tar", encode_member("x.npz", data) + bytes(1024))
    assert isinstance(bad, BadRecord)
    assert reason in bad.reason


def test_duplicate_names_in_a_zip_are_refused() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("x.npy", encode_npy("'|u1'", "(100,)"))
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("x.npy", encode_npy("'|u1'", "(100,)"))
    with pytest.raises(DataError, match="two with the same name"):
        read_records(arrays.FORMAT, "a.npz", out.getvalue())


def test_unpickling_the_trap_creates_the_marker() -> None:
    """Otherwise the other tests of this file could not fail."""
    marker = Path(os.environ["MARKER"])
    pickle.loads(pickle.dumps(Trap()))
    assert marker.exists()
    marker.unlink()
