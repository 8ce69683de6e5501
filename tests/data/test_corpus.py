"""Texts are read strictly and in one order; what is wrong with a file is said in one line that names the place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bottega.core.errors import BottegaError, DataError, EnvironmentProblem, UsageError
from bottega.data.corpus import TextSource, fingerprint, read_documents


def read(path: Path | str, **options: str) -> list[tuple[str, str]]:
    return [tuple(document) for document in read_documents(TextSource(path=str(path), **options))]  # type: ignore[arg-type]


def test_the_embedded_corpus_needs_nothing() -> None:
    documents = list(read_documents(TextSource(kind="embedded")))
    names = [document.name for document in documents]
    assert names == sorted(names)
    assert "argparse.py" in names
    assert not any(part in ("test", "tests", "idlelib", "site-packages") for name in names for part in name.split("/"))
    assert 5e6 < sum(len(document.text) for document in documents) < 15e6
    assert documents == list(read_documents(TextSource()))
    assert fingerprint(TextSource()) == fingerprint(TextSource(kind="embedded"))


def test_text_is_kept_as_it_is(tmp_path: Path) -> None:
    raw = "\ufeffa\r\nb\rc\n\n e\u0301\u2028".encode()
    (tmp_path / "a.txt").write_bytes(raw)
    assert read(tmp_path / "a.txt") == [("a.txt", raw.decode())]


def test_folders_and_patterns_are_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b.md", "a/z.txt", "a/y.py", "a.txt", ".hidden.txt", ".git/config.txt", "c.png", "empty.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.txt" else name)
    assert [name for name, _ in read(tmp_path)] == ["a.txt", "a/y.py", "a/z.txt", "b.md"]
    assert [name for name, _ in read(tmp_path / "**" / "*.txt")] == ["a.txt", "a/z.txt"]
    for i in reversed(range(30)):
        (tmp_path / f"many{i:02}.rst").write_text("x")
    assert [name for name, _ in read(tmp_path / "*.rst")] == [f"many{i:02}.rst" for i in range(30)]
    assert read(tmp_path / "a", kind="text") == [("y.py", "a/y.py"), ("z.txt", "a/z.txt")]


def test_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(
        '{"text": "one\\u2028"}\n\n{"text": "two\u2028", "n": 1}\r\n{"text": ""}\n{"content": "3"}'.encode()
    )
    assert read(file) == [("a.jsonl:1", "one\u2028"), ("a.jsonl:3", "two\u2028"), ("a.jsonl:5", "3")]
    file.write_text('{"body": "x", "text": "y"}')
    assert read(tmp_path, field="body") == [("a.jsonl:1", "x")]


GOOD = b'{"text": "fine"}\n\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a",}', r"a\.jsonl, line 3, column \d+: no valid JSON"),
        (b'{"text": "a"', r"line 3, column 13: no valid JSON"),
        (b'{"text": NaN}', r"line 3: .*NaN"),
        (b'{"text": "a", "n": -Infinity}', r"line 3: .*-Infinity"),
        (b'["text"]', r"line 3: a row must be an object such as .*, not list"),
        (b'{"texts": "a"}', r"line 3: no field 'text'; did you mean 'texts'\?"),
        (b'{"body": "a", "id": 1}', r"line 3: no field 'text'; the row has 'body', 'id'"),
        (b'{"text": 5}', r"line 3: field 'text' must be text, not int"),
        (b'{"text": null}', r"line 3: field 'text' must be text, not NoneType"),
        (b'{"text": "a\0"}', r"line 3: has a NUL byte at column 12"),
        (b'{"text": "a\xff"}', r"line 3: not UTF-8: byte 0xff at column 12"),
        (b'{"text": "a\\ud800"}', r"line 3: .* half a surrogate pair .* character 1"),
        (b"[" * 200_000, r"line 3: no valid JSON"),
        (b'{"text": ' + b"9" * 5000 + b"}", r"line 3: no valid JSON"),
    ],
)
def test_a_bad_row_is_named_by_its_physical_line(tmp_path: Path, line: bytes, message: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(GOOD + line + b"\n" + GOOD)
    with pytest.raises(DataError, match=message) as caught:
        read(file)
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_in_json_lines_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + GOOD)
    with pytest.raises(DataError, match="line 1: starts with a byte order mark"):
        read(tmp_path / "a.jsonl")


def bad_files(folder: Path) -> None:
    (folder / "empty.txt").write_text("")
    (folder / "empty.jsonl").write_text("\n")
    (folder / "binary.txt").write_bytes(b"abc\0def")
    (folder / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (folder / "table.csv").write_text("a,b")
    (folder / "nothing").mkdir()
    (folder / "mixed").mkdir()
    (folder / "mixed" / "a.txt").write_text("a")
    (folder / "mixed" / "b.jsonl").write_bytes(GOOD)
    os.mkfifo(folder / "pipe")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty.txt", r"empty\.txt is empty"),
        ("empty.jsonl", r"empty\.jsonl is empty"),
        ("binary.txt", r"binary\.txt is no text: it has a NUL byte at offset 3"),
        ("latin.txt", r"latin\.txt is not UTF-8: byte 0xef at offset 2"),
        ("table.csv", r"table\.csv: \.csv is no suffix of text or JSON lines; set kind"),
        ("nothing", r"nothing has no files with text \(.*\.txt"),
        ("mixed", r"b\.jsonl holds rows and .*a\.txt text; set kind"),
        ("pipe", r"pipe is neither a file nor a folder"),
        ("emty.txt", r"emty\.txt does not exist; did you mean .*empty\.txt\?"),
        ("mixd/a.txt", r"mixd does not exist; did you mean .*mixed\?"),
        ("qqqqqqq", r"qqqqqqq does not exist; .* holds nothing of a similar name"),
        ("*.rst", r"no file matches .*\*\.rst"),
    ],
)
def test_a_bad_path_is_answered_in_one_line(tmp_path: Path, name: str, message: str) -> None:
    bad_files(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_path_is_needed_and_must_be_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="kind jsonl needs a path"):
        list(read_documents(TextSource(kind="jsonl")))
    (tmp_path / "a.txt").write_text("a")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(EnvironmentProblem, match=r"a\.txt may not be read"):
        read(tmp_path / "a.txt")


def test_the_fingerprint_follows_names_and_contents(tmp_path: Path) -> None:
    seen = set()
    (tmp_path / "a").mkdir()
    for name, content in (("a/x.txt", "1"), ("a/x.txt", "2"), ("a/y.txt", "1")):
        (tmp_path / name).write_text(content)
        seen.add(fingerprint(TextSource(path=str(tmp_path / "a"))))
        assert len(seen) == len(set(seen))
    assert len(seen) == 3
    (tmp_path / "a").rename(tmp_path / "b")
    assert fingerprint(TextSource(path=str(tmp_path / "b"))) in seen


def test_every_problem_has_an_exit_code() -> None:
    assert issubclass(DataError, BottegaError)
    assert (DataError("").code, EnvironmentProblem("").code) == (3, 5)
