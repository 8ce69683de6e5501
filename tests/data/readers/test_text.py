"""A text file is one document, unchanged; in pieces it is the same text, and the same tokens."""

from __future__ import annotations

import bz2
import gzip
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bottega.core.errors import DataError
from bottega.data.readers import find, text
from bottega.data.record import Bad, Record
from bottega.schema.data import Source


def read(path: Path, **options: str) -> list[Record | Bad]:
    found = find(Source(path=str(path), **options))  # type: ignore[arg-type]
    return [record for piece in found.pieces(1) for record in found.read(piece)]


def test_text_is_kept_as_it_is(tmp_path: Path) -> None:
    raw = "\ufeffa\r\nb\rc\n\n e\u0301\u2028".encode()
    file = tmp_path / "a.txt"
    file.write_bytes(raw)
    assert read(file) == [Record("a.txt", str(file), {"text": raw.decode(), "continued": False})]
    (tmp_path / "empty.txt").write_bytes(b"")
    assert read(tmp_path / "empty.txt") == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"abc\0def", "no text: it has a NUL byte at offset 3"),
        ("naïve".encode("latin-1"), "not UTF-8: byte 0xef at offset 2; convert it to UTF-8"),
        (b"half a character \xe2\x82", "not UTF-8: byte 0xe2 at offset 17; convert it to UTF-8"),
    ],
)
def test_what_is_no_text_is_bad(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(content)
    assert read(file) == [Bad("a.txt", str(file), reason)]


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
        patch.setattr(text, "LONGEST", size)
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

    monkeypatch.setattr(text, "LONGEST", 64)
    whole = "".join(f"{i} words' end,  \n\n\tand {'so ' * (i % 5)}on.\n" for i in range(200))
    (tmp_path / "a.txt").write_text(whole)
    split = ByteLevel(add_prefix_space=False).pre_tokenize_str
    parts = [record.fields["text"] for record in read(tmp_path / "a.txt") if isinstance(record, Record)]
    assert len(parts) > 50
    assert [word for part in parts for word, _ in split(part)] == [word for word, _ in split(whole)]


def test_a_bad_piece_costs_that_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "LONGEST", 10)
    file = tmp_path / "a.txt"
    file.write_bytes(b"0123456789\n0123\xff6789\n0123456789\n")
    first, bad, *rest = read(file)
    assert isinstance(first, Record)
    assert bad == Bad("a.txt@10", f"{file}, from byte 10 on", "not UTF-8: byte 0xff at offset 15; convert it to UTF-8")
    assert all(isinstance(record, Record) for record in rest)


def test_a_packed_text_cannot_be_cut_from_outside(tmp_path: Path) -> None:
    file = tmp_path / "a.txt.bz2"
    file.write_bytes(bz2.compress(b"0123456789"))
    found = find(Source(path=str(file)))
    with pytest.raises(DataError, match=r"a\.txt\.bz2 is packed and cannot be read from its middle"):
        list(found.read(found.pieces(1)[0]._replace(stop=5)))
