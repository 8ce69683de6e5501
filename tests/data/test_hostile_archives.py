"""Files made to harm: each is a clean refusal that names the member, in little memory, with nothing written or run."""

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
# What one of these may take: a megabyte at a time is read, and a few copies of it are made.
PEAK = 24 << 20


@pytest.fixture(autouse=True)
def untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests run inside an empty folder two levels down. Whatever appears besides what they made is a failure."""
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    marker = tmp_path / "ran"
    monkeypatch.setenv("MARKER", str(marker))
    yield
    made = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.parent != inside}
    assert made <= {"a", "a/b"}
    assert not marker.exists()


class Trap:
    """Loading its pickle makes a file."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ('touch "$MARKER"',)


def objects() -> bytes:
    out = io.BytesIO()
    np.save(out, np.array([Trap()], dtype=object), allow_pickle=True)
    return out.getvalue()


def member(name: str, data: bytes = b"", **fields: Any) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.PAX_FORMAT) + data + bytes(-len(data) % 512)


GOOD = member("before.png", PNG)
LAST = member("later.png", PNG) + bytes(1024)


def read(format: Format, name: str, data: bytes, **options: Any) -> list[Record | BadRecord]:
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
        (member("../../escape.png", PNG), "../../escape.png", "leads out"),
        (member("x/../../escape.png", PNG), "x/../../escape.png", "leads out"),
        (member("..\\escape.png", PNG), "..\\escape.png", "leads out"),
        (member("/tmp/absolute.png", PNG), "/tmp/absolute.png", "absolute"),
        (member("C:/absolute.png", PNG), "C:/absolute.png", "absolute"),
        (member("../up", type=tarfile.DIRTYPE), "../up/", "leads out"),
        (member("link.png", type=tarfile.SYMTYPE, linkname="/etc/passwd"), "link.png", "symbolic link"),
        (member("hard.png", type=tarfile.LNKTYPE, linkname="before.png"), "hard.png", "hard link"),
        (member("null.png", type=tarfile.CHRTYPE, devmajor=1, devminor=3), "null.png", "device"),
        (member("disk.png", type=tarfile.BLKTYPE, devmajor=8), "disk.png", "device"),
        (member("pipe.png", type=tarfile.FIFOTYPE), "pipe.png", "pipe"),
        (member("odd.png", PNG, type=b"Z"), "odd.png", "unknown type"),
        (member("bell\a.png", PNG), "bell\a.png", "control character"),
        (member("line\n.png", PNG), "line\n.png", "control character"),
        (member("n" * 5000 + ".png", PNG), "n" * 5000 + ".png", "longer than"),
        (member("x.pkl", pickle.dumps(Trap())), "x.pkl", "not a supported kind of data"),
        (member("x.pickle", pickle.dumps(Trap())), "x.pickle", "not a supported kind of data"),
        (member("x.pyd", pickle.dumps(Trap())), "x.pyd", "not a supported kind of data"),
        (member("x.pth", pickle.dumps(Trap())), "x.pth", "not a supported kind of data"),
        (member("x.pt", pickle.dumps(Trap())), "x.pt", "not a supported kind of data"),
        (member("x.py", b"open('ran', 'w')"), "x.py", "not a supported kind of data"),
        (member("x.png.so", b"\x7fELF"), "x.png.so", "not a supported kind of data"),
        (member("x.ten", b"\0" * 64), "x.ten", "not a supported kind of data"),
        (member("README", b"text"), "README", "not a supported kind of data"),
        (member("x.npy", objects()), "x.npy", "Python objects"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
@pytest.mark.parametrize("packed", [False, True])
def test_members_that_are_refused(hostile: bytes, name: str, reason: str, packed: bool) -> None:
    archive = GOOD + hostile + LAST
    first, bad, last = read(tar.FORMAT, "a.tar", gzip.compress(archive) if packed else archive)
    assert isinstance(bad, BadRecord)
    assert bad.reason.startswith(f"member {name!r}: ")
    assert reason in bad.reason
    assert "\n" not in str(bad)
    assert bad.key.isprintable()
    assert isinstance(first, Record)
    assert isinstance(last, Record)
    if not packed:
        assert [sample.key for sample in tar.index_archive(Path("a.tar")) if not sample.problem][:1] == ["before"]


def test_a_refused_member_takes_its_sample_with_it() -> None:
    sample = member("x.png", PNG) + member("x.pkl", pickle.dumps(Trap())) + member("x.txt", b"hello")
    found = read(tar.FORMAT, "a.tar", GOOD + sample + LAST)
    assert [type(record) for record in found] == [Record, BadRecord, Record]
    listed = tar.index_archive(Path("a.tar"))
    assert [(bool(sample.fields), sample.problem is None) for sample in listed] == [
        (True, True),
        (False, False),
        (True, True),
    ]


@pytest.mark.parametrize(
    "second",
    [
        member("x.png", b"other"),
        member("./x.png", b"other"),
        member("x.PNG", b"other"),
        LAST[:-1024] + member("x.png", b"other"),
        LAST[:-1024] + member("x.txt", b"other"),
        LAST[:-1024] + member("./x.cls", b"1"),
    ],
)
def test_the_second_member_of_a_name_is_not_used(second: bytes) -> None:
    """First checked, last used: a trick that has worked on others."""
    found = read(tar.FORMAT, "a.tar", member("x.png", PNG) + second + bytes(1024))
    bad = [record for record in found if isinstance(record, BadRecord)]
    assert [record.key for record in bad] == ["a.tar:x"]
    assert not [r for r in found if isinstance(r, Record) and b"other" in r.fields.values()]


def pax(records: dict[str, str], kind: bytes = b"x") -> bytes:
    body = b""
    for key, value in records.items():
        line = f" {key}={value}\n".encode()
        length = len(line) + len(str(len(line) + 2))
        body += str(length).encode() + line
    return member("pax", body, type=kind)


def long_name(name: bytes) -> bytes:
    return member("././@LongLink", name + b"\0", type=tarfile.GNUTYPE_LONGNAME)


@pytest.mark.parametrize(
    ("archive", "reason"),
    [
        (long_name(b"a.png") + pax({"path": "b.png"}) + member("c.png", PNG), "two long names"),
        (pax({"path": "a.png"}) + pax({"path": "b.png"}) + member("c.png", PNG), "two long names"),
        (pax({"path": "../b.png"}) + member("c.png", PNG), "leads out"),
        (pax({"GNU.sparse.major": "1"}) + member("c.png", PNG), "sparse"),
        (long_name(b"/etc/passwd.png") + member("c.png", PNG), "absolute"),
        (long_name(b"\xff.png") + member("c.png", PNG), "UTF-8"),
    ],
)
def test_names_that_readers_understand_differently(archive: bytes, reason: str) -> None:
    _, bad, last = read(tar.FORMAT, "a.tar", GOOD + archive + LAST)
    assert isinstance(bad, BadRecord)
    assert reason in bad.reason
    assert isinstance(last, Record)


def lying(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    ("archive", "reason"),
    [
        (GOOD + lying("x.png", 1 << 60) + LAST, "more than remain"),
        (GOOD + lying("x.png", 900 << 20) + LAST, "more than remain"),
        (GOOD + pax({"size": str(1 << 50)}) + member("c.png", PNG) + LAST, "more than remain"),
        (GOOD + pax({"size": "-512"}) + member("c.png", PNG) + LAST, "not a number"),
        (pax({"path": "x.png"}, b"g") + GOOD + LAST, "global"),
        (member("x", b"y" * 70000, type=b"x") + GOOD + LAST, "header of 70000 bytes"),
        (lying("x", 1 << 40)[:156] + b"L" + lying("x", 1 << 40)[157:] + LAST, "tar header"),
        (member("pax", b"999999 path=x\n", type=b"x") + GOOD, "damaged PAX"),
        (member("pax", b"x" * 100, type=b"x") + GOOD, "damaged PAX"),
        (member("s.png", PNG, type=tarfile.GNUTYPE_SPARSE) + LAST, "sparse"),
        (GOOD + long_name(b"x.png"), "truncated"),
        (GOOD + b"#" * 512 + LAST, "tar header"),
        (b"#" * 4096, "tar header"),
        (b"short", "truncated"),
    ],
)
@pytest.mark.parametrize("packing", [None, gzip.compress, bz2.compress, lzma.compress])
def test_archives_whose_rest_cannot_be_found(archive: bytes, reason: str, packing: Any) -> None:
    data = archive if packing is None else packing(archive)
    with pytest.raises(DataError) as caught:
        read(tar.FORMAT, "a.tar", data)
    expected = "truncated" if packing is not None and reason == "more than remain" else reason
    assert expected in str(caught.value)
    assert str(caught.value).startswith(str(Path("a.tar").absolute()))
    assert "\n" not in str(caught.value)


def test_too_many_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar, "MAX_MEMBERS", 100)
    with pytest.raises(DataError, match="more than 100 members"):
        read(tar.FORMAT, "a.tar", b"".join(member(f"{i}.png") for i in range(101)) + LAST)


def test_a_sample_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar, "MAX_MEMBER_BYTES", 1000)
    big = member("x.png", bytes(1001)) + member("y.png", bytes(600)) + member("y.wav", bytes(600))
    for data in (GOOD + big + LAST, gzip.compress(GOOD + big + LAST)):
        _, bad, also, last = read(tar.FORMAT, "a.tar", data)
        assert "has 1001 bytes; a sample may have at most 1000" in str(bad)
        assert "makes its sample 1200 bytes" in str(also)
        assert isinstance(last, Record)


def test_a_compression_bomb() -> None:
    """A gigabyte of zeros in a megabyte, as one honest member and as an endless tail."""
    zeros = gzip.compress(bytes(16 << 20), 9)
    assert len(zeros) < 17_000
    for head in (lying("x.png", 1 << 30), GOOD + bytes(1024), member("x.png", PNG)[:512]):
        file = Path("bomb.tar.gz").absolute()
        file.write_bytes(gzip.compress(head) + zeros * 64)
        tracemalloc.start()
        with pytest.raises(DataError, match="bomb"):
            list(tar.read(Piece(file, "bomb"), Source()))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        # What may come out of any file before it has to be honest, twice while it is put together.
        assert peak < 200 << 20


def record(length: int, data: bytes, *, right: bool = True) -> bytes:
    head = struct.pack("<Q", length)
    checksum = mask_crc(crc32c(head)) ^ (not right)
    return head + struct.pack("<I", checksum) + data + struct.pack("<I", mask_crc(crc32c(data)))


@pytest.mark.parametrize("length", [2**62, 2**64 - 1, (1 << 30) + 1, 1 << 30, 2**31])
@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_records_that_say_they_are_huge(length: int, right: bool, packed: bool) -> None:
    data = record(0, b"") + record(length, b"x" * 5000, right=right) + record(0, b"")
    first, bad = read(tfrecord.FORMAT, "a.tfrecord", gzip.compress(data) if packed else data)
    assert isinstance(first, Record)
    assert isinstance(bad, BadRecord)
    assert bad.where.endswith("record 2 at byte 16")
    assert "truncated" in bad.reason or "cannot be located" in bad.reason


def test_records_above_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tfrecord, "MAX_MEMBER_BYTES", 1000)
    monkeypatch.setattr(tfrecord, "CHUNK", 500)
    first, bad = read(tfrecord.FORMAT, "a.tfrecord", record(0, b"") + record(2000, bytes(2000)) + record(0, b""))
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
def test_protocol_buffers_that_lie(data: bytes) -> None:
    (bad,) = read(tfrecord.FORMAT, "a.tfrecord", record(len(data), data))
    assert isinstance(bad, BadRecord)
    assert "not a tf.train.Example" in bad.reason


@pytest.mark.parametrize(
    "shape",
    [(2**32 - 1, 2**32 - 1, 2**32 - 1), (2**32 - 1, 28, 28), (10**6, 1, 1), (1, 2**15, 2**15), (5, 0, 7), (0,)],
)
@pytest.mark.parametrize("packed", [True, False])
def test_idx_headers_that_lie(shape: tuple[int, ...], packed: bool) -> None:
    data = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + bytes(3000)
    with pytest.raises(DataError) as caught:
        read(
            idx.FORMAT,
            "train-images-idx3-ubyte.gz" if packed else "train-images-idx3-ubyte",
            gzip.compress(data) if packed else data,
        )
    assert str(Path.cwd()) in str(caught.value)


def npy(descr: str, shape: str, data: bytes = bytes(100)) -> bytes:
    head = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + data


HOSTILE_ARRAYS = [
    (objects(), "Python objects"),
    (npy("'|O'", "(12,)"), "Python objects"),
    (npy("'<f8'", f"({2**60},)"), "is damaged: its header states"),
    (npy("'<f8'", "(-1, -100)"), "shape"),
    (npy("'|S0'", f"({2**60},)", b""), "is damaged: its header states"),
    (npy("'<f8'", f"({2**60}, 0)", b""), "1 to"),
    (npy("[('a', '|O')]", "(12,)"), "numbers and text"),
    (npy("'M8[s]'", "(12,)"), "numbers and text"),
    (npy("__import__('os').system('touch \"$MARKER\"')", "(12,)"), "not an array file"),
    (npy("'<f8'", "(" * 5000 + ")" * 5000), "not an array file"),
    (b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**31) + b"x" * 100, "not an array file"),
    (b"\x93NUMPY\x09\x00" + bytes(100), "not an array file"),
    (pickle.dumps(Trap()), "not an array file"),
    (b"", "not an array file"),
]


@pytest.mark.parametrize(("data", "reason"), HOSTILE_ARRAYS)
@pytest.mark.parametrize("form", ["npy", "npz", "packed"])
def test_arrays_that_lie(data: bytes, reason: str, form: str) -> None:
    if form != "npy":
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED if form == "npz" else zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("x.npy", data)
        data = out.getvalue()
    with pytest.raises(DataError, match=reason) as caught:
        read(arrays.FORMAT, "a.npy" if form == "npy" else "a.npz", data)
    assert str(caught.value).startswith(str(Path.cwd()))
    assert "\n" not in str(caught.value)


def zipped(files: dict[str, bytes], kind: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", kind) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (zipped({"../x.npy": npy("'|u1'", "(100,)")}), "leads out"),
        (zipped({"/x.npy": npy("'|u1'", "(100,)")}), "absolute"),
        (zipped({"x.pkl": pickle.dumps(Trap())}), "is not an array"),
        (zipped({"x.npy": npy("'|u1'", "(100,)")}, zipfile.ZIP_LZMA), "unusual method"),
        (zipped({"x.npy": npy("'|u1'", f"({80 << 20},)", bytes(80 << 20))}), "zip bomb"),
    ],
)
def test_zip_archives_that_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        read(arrays.FORMAT, "a.npz", data)
    (bad,) = read(tar.FORMAT, "a.tar", member("x.npz", data) + bytes(1024))
    assert isinstance(bad, BadRecord)
    assert reason in bad.reason


def test_names_that_come_twice_in_a_zip() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("x.npy", npy("'|u1'", "(100,)"))
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("x.npy", npy("'|u1'", "(100,)"))
    with pytest.raises(DataError, match="two of one name"):
        read(arrays.FORMAT, "a.npz", out.getvalue())


def test_the_trap_works() -> None:
    """Otherwise the tests above would show nothing."""
    marker = Path(os.environ["MARKER"])
    pickle.loads(pickle.dumps(Trap()))
    assert marker.exists()
    marker.unlink()
