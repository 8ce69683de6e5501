"""A text file is one unchanged document, whether in pieces or compressed; size limits hold for every suffix."""

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


def read_records(path: Path, **options: str) -> list[Record | BadRecord]:
    source_files = find_files(Source(path=str(path), **options))  # type: ignore[arg-type]
    return [record for piece in source_files.list_pieces(1) for record in source_files.read(piece)]


def test_text_is_unchanged_except_for_the_byte_order_mark(tmp_path: Path) -> None:
    raw = "\ufeffa\ufeff\r\nb\rc\n\n e\u0301\u2028".encode()
    file = tmp_path / "a.txt"
    file.write_bytes(raw)
    assert read_records(file) == [Record("a.txt", str(file), {"text": raw.decode("utf-8-sig"), "continued": False})]
    (tmp_path / "empty.txt").write_bytes(b"")
    assert read_records(tmp_path / "empty.txt") == []


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
def test_invalid_text_is_a_bad_record(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(content)
    assert read_records(file) == [BadRecord("a.txt", str(file), reason)]


# Characters of one to four bytes, and other white space before newlines: the two cases that a cut must respect.
TEXTS = st.text(st.sampled_from("ab1,é€😀\n\n \t\r\u00a0\u2028"), max_size=200)


@given(TEXTS, st.integers(4, 40))
@example("a" * 20, 10)
@example("a" * 21, 10)
def test_joined_pieces_equal_the_file_compressed_or_not(
    tmp_path_factory: pytest.TempPathFactory, document: str, size: int
) -> None:
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_bytes(document.encode())
    (folder / "a.txt.gz").write_bytes(gzip.compress(document.encode()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "MAX_PIECE_BYTES", size)
        patch.setattr(text, "_WINDOW_BYTES", 5)
        records = read_records(folder / "a.txt")
        decompressed = read_records(folder / "a.txt.gz")
    parts = [record.fields["text"] for record in records if isinstance(record, Record)]
    assert "".join(parts) == document
    assert [record.fields["continued"] for record in records] == [True] * (len(parts) - 1) + [False] * bool(parts)
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + len(part.encode()))
    assert [record.key for record in records] == [f"a.txt@{start}" if start else "a.txt" for start in starts[:-1]]
    for part, following in pairwise(parts):
        # Long enough, not too long, and cut where split_at_safe_points would cut, unless there is no such position.
        assert size <= len(part.encode()) <= 2 * size
        is_safe = following[0] == "\n" and not part[-1].isspace()
        assert is_safe or 2 * size - len(part.encode()) < 4
    assert [record.fields for record in decompressed] == [record.fields for record in records]
    assert [record.key for record in decompressed] == [record.key.replace("a.txt", "a.txt.gz") for record in records]


def test_tokens_of_joined_pieces_equal_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    monkeypatch.setattr(text, "MAX_PIECE_BYTES", 64)
    document = "".join(f"{i} words' end,  \n\n\tand {'so ' * (i % 5)}on.\n" for i in range(200))
    (tmp_path / "a.txt").write_text(document)
    split = ByteLevel(add_prefix_space=False).pre_tokenize_str
    parts = [record.fields["text"] for record in read_records(tmp_path / "a.txt") if isinstance(record, Record)]
    assert len(parts) > 50
    assert [word for part in parts for word, _ in split(part)] == [word for word, _ in split(document)]


def test_bad_piece_is_reported_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "MAX_PIECE_BYTES", 10)
    file = tmp_path / "a.txt"
    file.write_bytes(b"0123456789\n0123\xff6789\n0123456789\n")
    first, bad, *rest = read_records(file)
    assert isinstance(first, Record)
    assert bad == BadRecord(
        "a.txt@10",
        f"{file}, from byte 10 on",
        "not UTF-8: byte 0xff at offset 15; set data.train.encoding, such as latin-1 or utf-16, or convert it with iconv",
    )
    assert all(isinstance(record, Record) for record in rest)


def test_compressed_text_cannot_be_read_from_the_middle(tmp_path: Path) -> None:
    file = tmp_path / "a.txt.bz2"
    file.write_bytes(bz2.compress(b"0123456789"))
    source_files = find_files(Source(path=str(file)))
    with pytest.raises(DataError, match=r"a\.txt\.bz2 is compressed and can only be read from its beginning"):
        list(source_files.read(source_files.list_pieces(1)[0]._replace(stop=5)))


def compress(suffix: str, content: bytes) -> bytes:
    import zstandard

    zstd = zstandard.ZstdCompressor(write_checksum=True)  # as the zstd command does by default, unlike the library
    return {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd.compress}[suffix](content)


@pytest.mark.parametrize("suffix", compression.COMPRESSION_SUFFIXES)
def test_compressed_files_round_trip_and_damage_is_refused(tmp_path: Path, suffix: str) -> None:
    content = numpy_generator(0, "packed").bytes(3000) * 400  # 1.2 MB, in several blocks
    file = tmp_path / f"a{suffix}"
    for parts in ([content], [content[:70], content[70:]], [b""], [b"", content[:9]]):
        # Several members form one stream, with zeros allowed between and after them.
        file.write_bytes(b"".join(compress(suffix, part) + bytes(8) for part in parts) + bytes(1 << 17))
        with compression.open_decompressed(file) as stream:
            assert stream.read() == b"".join(parts)
        with compression.open_decompressed(file) as stream:
            assert b"".join(compression.iter_lines(stream)) == b"".join(parts)
    data = compress(suffix, content)
    for cut in (len(data) - 1, len(data) // 2, 12):
        file.write_bytes(data[:cut])
        with (
            pytest.raises(DataError, match=rf"a\{suffix} is truncated"),
            compression.open_decompressed(file) as stream,
        ):
            stream.read()
    middle = len(data) // 2
    file.write_bytes(data[:middle] + bytes(byte ^ 0x55 for byte in data[middle : middle + 400]) + data[middle + 400 :])
    with (
        pytest.raises(DataError, match=rf"a\{suffix} is (damaged|truncated)"),
        compression.open_decompressed(file) as stream,
    ):
        stream.read()
    file.write_bytes(b"plain text")
    with pytest.raises(DataError, match=rf"is not a \w+ file; remove \{suffix} from its name"):
        compression.open_decompressed(file)
    file.write_bytes(data + b"more")
    with (
        pytest.raises(DataError, match=rf"a\{suffix} is (damaged|truncated)"),
        compression.open_decompressed(file) as stream,
    ):
        stream.read()


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2"])
def test_compression_bomb_is_stopped_early(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "ALWAYS_ALLOWED_BYTES", 1 << 20)
    file = tmp_path / f"bomb{suffix}"
    file.write_bytes(compress(suffix, bytes(96 << 20)))
    num_bytes = 0

    def read_all() -> None:
        nonlocal num_bytes
        with compression.open_decompressed(file) as stream:
            while block := stream.read(1 << 20):
                num_bytes += len(block)

    tracemalloc.start()
    with pytest.raises(DataError, match="decompresses to more than 1,000 times its size, like a compression bomb"):
        read_all()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 68 << 20  # 32 MiB come out of a KiB of Zstandard, twice while they are joined
    # gzip compresses zeros 1,029-fold, so the ratio is exceeded only near the end.
    assert num_bytes < {".gz": 96 << 20, ".zst": 33 << 20, ".bz2": 3 << 20}[suffix]


@pytest.mark.parametrize("length", [0, 1, 150, 196, 200, 250, 299, 304, 399, 400, 404])
def test_file_that_shrinks_while_reading_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(text, "MAX_PIECE_BYTES", 100)
    file = tmp_path / "a.txt"
    file.write_bytes(b"x" * length)
    monkeypatch.setattr(text.os.path, "getsize", lambda _: 10_000)
    pieces = text.list_pieces(file, "a", Source(), 1)
    texts = [
        record.fields["text"] for piece in pieces for record in text.read(piece, Source()) if isinstance(record, Record)
    ]
    assert "".join(texts) == "x" * length
