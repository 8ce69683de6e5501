"""A text file is one document, unchanged; in pieces or packed it is the same text. No suffix gets past its limits."""

from __future__ import annotations

import bz2
import gzip
import lzma
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.core.noise import numpy_generator
from bottega.data.formats import compression, find_files, text
from bottega.data.records.record import BadRecord, Record


def read(path: Path, **options: str) -> list[Record | BadRecord]:
    found = find_files(Source(path=str(path), **options))  # type: ignore[arg-type]
    return [record for piece in found.list_pieces(1) for record in found.read(piece)]


def test_text_is_kept_as_it_is_but_for_the_mark_of_its_encoding(tmp_path: Path) -> None:
    raw = "\ufeffa\ufeff\r\nb\rc\n\n e\u0301\u2028".encode()
    file = tmp_path / "a.txt"
    file.write_bytes(raw)
    assert read(file) == [Record("a.txt", str(file), {"text": raw.decode("utf-8-sig"), "continued": False})]
    (tmp_path / "empty.txt").write_bytes(b"")
    assert read(tmp_path / "empty.txt") == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"abc\0def", "not text: NUL byte at offset 3"),
        (
            "naïve".encode("latin-1"),
            "not UTF-8: byte 0xef at offset 2; set data.train.encoding, such as latin-1 or utf-16, or convert it with iconv",
        ),
        (
            b"half a character \xe2\x82",
            "not UTF-8: byte 0xe2 at offset 17; set data.train.encoding, such as latin-1 or utf-16, or convert it with iconv",
        ),
    ],
)
def test_what_is_no_text_is_bad(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(content)
    assert read(file) == [BadRecord("a.txt", str(file), reason)]


# Characters of one to four bytes, and white space that is no newline before newlines: the two things a cut must mind.
TEXTS = st.text(st.sampled_from("ab1,é€😀\n\n \t\r\u00a0\u2028"), max_size=200)


@given(TEXTS, st.integers(4, 40))
@example("a" * 20, 10)
@example("a" * 21, 10)
def test_pieces_joined_are_the_file_packed_or_not(
    tmp_path_factory: pytest.TempPathFactory, whole: str, size: int
) -> None:
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_bytes(whole.encode())
    (folder / "a.txt.gz").write_bytes(gzip.compress(whole.encode()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "MAX_PIECE_BYTES", size)
        patch.setattr(text, "_WINDOW", 5)
        records = read(folder / "a.txt")
        unpacked = read(folder / "a.txt.gz")
    parts = [record.fields["text"] for record in records if isinstance(record, Record)]
    assert "".join(parts) == whole
    assert [record.fields["continued"] for record in records] == [True] * (len(parts) - 1) + [False] * bool(parts)
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + len(part.encode()))
    assert [record.key for record in records] == [f"a.txt@{start}" if start else "a.txt" for start in starts[:-1]]
    for part, following in pairwise(parts):
        # Long enough, not too long, and cut where safe_pieces would cut, unless there is no such place.
        assert size <= len(part.encode()) <= 2 * size
        is_safe = following[0] == "\n" and not part[-1].isspace()
        assert is_safe or 2 * size - len(part.encode()) < 4
    assert [record.fields for record in unpacked] == [record.fields for record in records]
    assert [record.key for record in unpacked] == [record.key.replace("a.txt", "a.txt.gz") for record in records]


def test_tokens_of_pieces_joined_are_those_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    monkeypatch.setattr(text, "MAX_PIECE_BYTES", 64)
    whole = "".join(f"{i} words' end,  \n\n\tand {'so ' * (i % 5)}on.\n" for i in range(200))
    (tmp_path / "a.txt").write_text(whole)
    split = ByteLevel(add_prefix_space=False).pre_tokenize_str
    parts = [record.fields["text"] for record in read(tmp_path / "a.txt") if isinstance(record, Record)]
    assert len(parts) > 50
    assert [word for part in parts for word, _ in split(part)] == [word for word, _ in split(whole)]


def test_a_bad_piece_costs_that_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "MAX_PIECE_BYTES", 10)
    file = tmp_path / "a.txt"
    file.write_bytes(b"0123456789\n0123\xff6789\n0123456789\n")
    first, bad, *rest = read(file)
    assert isinstance(first, Record)
    assert bad == BadRecord(
        "a.txt@10",
        f"{file}, from byte 10 on",
        "not UTF-8: byte 0xff at offset 15; set data.train.encoding, such as latin-1 or utf-16, or convert it with iconv",
    )
    assert all(isinstance(record, Record) for record in rest)


def test_a_packed_text_cannot_be_cut_from_outside(tmp_path: Path) -> None:
    file = tmp_path / "a.txt.bz2"
    file.write_bytes(bz2.compress(b"0123456789"))
    found = find_files(Source(path=str(file)))
    with pytest.raises(DataError, match=r"a\.txt\.bz2 is compressed and can only be read from its beginning"):
        list(found.read(found.list_pieces(1)[0]._replace(stop=5)))


def packed(suffix: str, content: bytes) -> bytes:
    import zstandard

    zstd = zstandard.ZstdCompressor(write_checksum=True)  # as the command does, and the library does not
    return {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd.compress}[suffix](content)


@pytest.mark.parametrize("suffix", compression.COMPRESSION_SUFFIXES)
def test_packed_files(tmp_path: Path, suffix: str) -> None:
    content = numpy_generator(0, "packed").bytes(3000) * 400  # 1.2 MB, in several blocks
    file = tmp_path / f"a{suffix}"
    for parts in ([content], [content[:70], content[70:]], [b""], [b"", content[:9]]):
        # Several members are one stream, and zeros may stand between and behind them.
        file.write_bytes(b"".join(packed(suffix, part) + bytes(8) for part in parts) + bytes(1 << 17))
        with compression.open_decompressed(file) as stream:
            assert stream.read() == b"".join(parts)
        with compression.open_decompressed(file) as stream:
            assert b"".join(compression.iter_lines(stream)) == b"".join(parts)
    whole = packed(suffix, content)
    for cut in (len(whole) - 1, len(whole) // 2, 12):
        file.write_bytes(whole[:cut])
        with (
            pytest.raises(DataError, match=rf"a\{suffix} is truncated"),
            compression.open_decompressed(file) as stream,
        ):
            stream.read()
    middle = len(whole) // 2
    file.write_bytes(
        whole[:middle] + bytes(byte ^ 0x55 for byte in whole[middle : middle + 400]) + whole[middle + 400 :]
    )
    with (
        pytest.raises(DataError, match=rf"a\{suffix} is (damaged|truncated)"),
        compression.open_decompressed(file) as stream,
    ):
        stream.read()
    file.write_bytes(b"plain text")
    with pytest.raises(DataError, match=rf"is not a \w+ file; remove \{suffix} from its name"):
        compression.open_decompressed(file)
    file.write_bytes(whole + b"more")
    with (
        pytest.raises(DataError, match=rf"a\{suffix} is (damaged|truncated)"),
        compression.open_decompressed(file) as stream,
    ):
        stream.read()


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2"])
def test_a_bomb_is_stopped_early(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "ALWAYS_ALLOWED", 1 << 20)
    file = tmp_path / f"bomb{suffix}"
    file.write_bytes(packed(suffix, bytes(96 << 20)))
    given = 0

    def read_all() -> None:
        nonlocal given
        with compression.open_decompressed(file) as stream:
            while block := stream.read(1 << 20):
                given += len(block)

    tracemalloc.start()
    with pytest.raises(DataError, match="decompresses to more than 1,000 times its size, like a compression bomb"):
        read_all()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 68 << 20  # 32 MiB come out of a KiB of Zstandard, twice while they are joined
    # gzip packs zeros to a 1,029th; the reader cannot know before it has given as much of it as that allows.
    assert given < {".gz": 96 << 20, ".zst": 33 << 20, ".bz2": 3 << 20}[suffix]


@pytest.mark.parametrize("there", [0, 1, 150, 196, 200, 250, 299, 304, 399, 400, 404])
def test_a_file_that_became_shorter_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: int) -> None:
    monkeypatch.setattr(text, "MAX_PIECE_BYTES", 100)
    file = tmp_path / "a.txt"
    file.write_bytes(b"x" * there)
    monkeypatch.setattr(text.os.path, "getsize", lambda _: 10_000)
    pieces = text.list_pieces(file, "a", Source(), 1)
    found = [
        record.fields["text"] for piece in pieces for record in text.read(piece, Source()) if isinstance(record, Record)
    ]
    assert "".join(found) == "x" * there
