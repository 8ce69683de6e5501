"""The kind of a source is detected from its files, records do not depend on its path, and wrong paths are explained."""

from __future__ import annotations

import gzip
import os
import pickle
import sqlite3
import tarfile
from pathlib import Path

import pytest
from data_files import relative_names, write_files

from bottega.config.data import Source
from bottega.core.errors import DataError, EnvironmentProblem, UsageError
from bottega.data.formats import FORMATS, files, find_files, fingerprint, get_format
from bottega.data.records.record import BadRecord

PNG = b"\x89PNG\r\n\x1a\n" + bytes(16)
ROW = b'{"text": "fine"}\n'

needs_data = pytest.mark.skipif("BOTTEGA_DATA" not in os.environ, reason="BOTTEGA_DATA is not set")


def real_path(name: str = "") -> Path:
    return Path(os.environ["BOTTEGA_DATA"], name)


def detect_kind(source: Source) -> str:
    return find_files(source).kind


REAL_KINDS = {
    "INDEX.md": "text",
    "SOURCE.txt": "text",
    ".tar.xz": "webdataset",
    "metadata.csv": "csv",
    ".flac": "audio",
    "-ubyte.gz": "idx",
    ".tfrecord": "tfrecord",
    "-of-00001.gz": "tfrecord",
    ".tar": "webdataset",
    ".tar.gz": "webdataset",
    ".tgz": "webdataset",
    ".tsv": "csv",
    ".jsonl.xz": "jsonl",
    "input.txt": "text",
    ".mp4": "video",
    ".avi": "video",
    ".mkv": "video",
}


@needs_data
def test_every_real_file_is_recognised() -> None:
    paths = [path for path in sorted(real_path().rglob("*")) if path.is_file()]
    assert len(paths) > 50
    for file in paths:
        expected = {kind for ending, kind in REAL_KINDS.items() if file.name.endswith(ending)}
        assert {detect_kind(Source(path=str(file)))} == expected, file


@needs_data
@pytest.mark.parametrize(
    ("folder", "kind", "count"),
    [
        ("text-lm-tinyshakespeare", "text", 1),
        ("text-cls-sst2", "csv", 1),
        ("image-fashion-mnist", "idx", 4),
        ("audio-fsdd", "webdataset", 1),
        ("audio-ljspeech-sample", "audio", 16),
        ("video-clips", "video", 12),
        ("readers-webdataset", "webdataset", 7),
        ("readers-tfrecord", "tfrecord", 5),
    ],
)
def test_every_real_folder_is_recognised(folder: str, kind: str, count: int) -> None:
    source_files = find_files(Source(path=str(real_path(folder))))
    assert (source_files.kind, len(source_files.paths), source_files.format.kind) == (kind, count, kind)
    assert source_files.is_media == source_files.format.is_media == (kind not in ("text", "csv", "tfrecord"))
    assert relative_names(Source(path=str(real_path(folder)), kind=kind)) == [
        source_files.get_relative_name(file) for file in source_files.paths
    ]  # type: ignore[arg-type]
    expected = source_files.fingerprint
    again = pickle.loads(pickle.dumps(source_files))
    assert (again, again.fingerprint) == (source_files, expected)
    assert source_files.total_bytes == sum(file.stat().st_size for file in source_files.paths)


def encode_tar(tmp_path: Path) -> bytes:
    with tarfile.open(tmp_path / "archive.tar", "w") as archive:
        archive.add(write_files(tmp_path, {"one.txt": b"1"}) / "one.txt", "one.txt")
    return (tmp_path / "archive.tar").read_bytes()


def test_kind_without_a_suffix_is_detected_from_the_first_bytes(tmp_path: Path) -> None:
    idx = b"\x00\x00\x08\x03" + bytes(12)
    # A length of 3 and three bytes, each with its masked CRC-32C: the beginning of any TFRecord file.
    from bottega.data.formats import crc32c

    length = (3).to_bytes(8, "little")
    record = length + crc32c.mask_crc(crc32c.crc32c(length)).to_bytes(4, "little") + b"abc" + bytes(4)
    riff = b"RIFF" + bytes(4)
    contents = {
        "images": (PNG, b"\xff\xd8\xff\xe0", riff + b"WEBP", b"GIF89a"),
        "audio": (b"fLaC", riff + b"WAVE", b"OggS", bytes(4) + b"ftypM4A "),
        "video": (bytes(4) + b"ftypisom", b"\x1a\x45\xdf\xa3", riff + b"AVI ", (b"G" + bytes(187)) * 3),
        "webdataset": (encode_tar(tmp_path),),
        "parquet": (b"PAR1",),
        "arrow": (b"ARROW1",),
        "numpy": (b"\x93NUMPY",),
        "idx": (idx,),
        "tfrecord": (record,),
        "text": (b"words", b"BZh is how it begins", b"RIFF-RAFF", b""),
    }
    for kind, heads in contents.items():
        for head in heads:
            for content in (head, gzip.compress(head)):
                file = tmp_path / "nameless"
                file.write_bytes(content)
                assert detect_kind(Source(path=str(file))) == kind, head
                numbered = tmp_path / "data-00000-of-00001.gz"
                numbered.write_bytes(gzip.compress(head))
                assert detect_kind(Source(path=str(numbered))) == kind


def test_typescript_is_text_and_a_transport_stream_is_video(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.ts": b"G = 1", "b.ts": (b"G" + bytes(187)) * 3})
    assert detect_kind(Source(path=str(tmp_path / "a.ts"))) == "text"
    assert detect_kind(Source(path=str(tmp_path / "b.ts"))) == "video"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.JSONL", "jsonl"),
        ("a.ndjson.zst", "jsonl"),
        ("my.data.jsonl.gz", "jsonl"),
        ("a.json.bz2", "json"),
        ("a.tsv.xz", "csv"),
        ("a.psv", "csv"),
        ("a.txt.gz", "text"),
        ("a.tar.xz", "webdataset"),
        ("a.TGZ", "webdataset"),
        ("a.feather", "arrow"),
        ("a.parquet", "parquet"),
        ("a.npz", "numpy"),
    ],
)
def test_kind_is_detected_from_the_suffix(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).write_bytes(b"")
    assert detect_kind(Source(path=str(tmp_path / name))) == kind


def test_every_kind_has_a_format() -> None:
    for kind in FORMATS:
        assert get_format(kind).kind == kind
        assert all(suffix == suffix.lower() and suffix.startswith(".") for suffix in get_format(kind).suffixes)


def test_embedded_corpus_is_read_without_a_path() -> None:
    source_files = find_files(Source())
    assert (source_files.kind, source_files.is_media) == ("embedded", False)
    records = [record for piece in source_files.list_pieces(1 << 20) for record in source_files.read(piece)]
    keys = [record.key for record in records]
    assert keys == sorted(keys)
    assert "argparse.py" in keys
    assert not any(part in ("test", "tests", "idlelib", "site-packages") for key in keys for part in key.split("/"))
    assert not any(isinstance(record, BadRecord) for record in records)
    assert 5e6 < sum(len(record.fields["text"]) for record in records) < 15e6
    assert source_files.fingerprint == find_files(Source(kind="embedded")).fingerprint


def test_folders_and_patterns_are_listed_in_name_order(tmp_path: Path) -> None:
    names = ("b.md", "a/z.txt", "a/y.py", "a.txt", ".hidden.txt", ".git/config.txt", "c.png", "a/unknown.xyz")
    write_files(tmp_path, dict.fromkeys(names, b"x"))
    os.mkfifo(tmp_path / "pipe.txt")
    assert relative_names(Source(path=str(tmp_path))) == ["a.txt", "a/y.py", "a/z.txt", "b.md"]
    assert relative_names(Source(path=str(tmp_path / "**" / "*.txt"))) == ["a.txt", "a/z.txt"]
    write_files(tmp_path, {f"many{i:02}.rst": b"x" for i in reversed(range(30))})
    assert relative_names(Source(path=str(tmp_path / "*.rst"))) == [f"many{i:02}.rst" for i in range(30)]
    assert relative_names(Source(path=str(tmp_path / "a"), kind="text")) == ["y.py", "z.txt"]


def test_notes_and_metadata_tables_are_not_data(tmp_path: Path) -> None:
    notes = {"README.md": b"r", "LICENSE": b"l", "SOURCE.txt": b"s"}
    write_files(tmp_path / "rows", {"a.jsonl": ROW, **notes})
    assert (detect_kind(Source(path=str(tmp_path / "rows"))), relative_names(Source(path=str(tmp_path / "rows")))) == (
        "jsonl",
        ["a.jsonl"],
    )
    write_files(tmp_path / "texts", {"a.txt": b"t", "deep/README.md": b"d", **notes})
    assert relative_names(Source(path=str(tmp_path / "texts"))) == ["a.txt", "deep/README.md"]
    assert relative_names(Source(path=str(tmp_path / "texts"), kind="text")) == ["a.txt", "deep/README.md"]
    write_files(tmp_path / "only", notes)
    assert relative_names(Source(path=str(tmp_path / "only"))) == ["README.md", "SOURCE.txt"]
    write_files(tmp_path / "photos", {"cat/1.png": PNG, "metadata.csv": b"file_name,text\n1.png,a\n", **notes})
    assert (
        detect_kind(Source(path=str(tmp_path / "photos"))),
        relative_names(Source(path=str(tmp_path / "photos"))),
    ) == (
        "images",
        ["cat/1.png"],
    )


def test_mixed_kinds_are_refused_and_a_few_other_files_are_skipped(tmp_path: Path) -> None:
    write_files(tmp_path, {f"{i}.txt": b"t" for i in range(6)} | {"a.png": PNG, "b.png": PNG})
    assert len(relative_names(Source(path=str(tmp_path)))) == 6
    write_files(tmp_path, {"c.png": PNG})
    with pytest.raises(DataError, match=r"0\.txt is text and .*a\.png is images; set kind to text or images") as caught:
        find_files(Source(path=str(tmp_path)))
    assert "\n" not in str(caught.value)
    assert relative_names(Source(path=str(tmp_path), kind="images")) == ["a.png", "b.png", "c.png"]
    # Every file that matches a pattern counts.
    with pytest.raises(DataError, match=r"0\.txt is text and .*a\.png is images"):
        find_files(Source(path=str(tmp_path / "[0-5a].*")))


def test_brace_ranges_expand_to_shards(tmp_path: Path) -> None:
    write_files(tmp_path, {f"data-{i:06}.tar": b"" for i in range(8, 13)})
    source = Source(path=str(tmp_path / "data-{000008..000011}.tar"))
    assert (detect_kind(source), relative_names(source)) == ("webdataset", [f"data-{i:06}.tar" for i in range(8, 12)])
    assert relative_names(Source(path=str(tmp_path / "data-{000008..000011}.*"))) == relative_names(source)
    with pytest.raises(DataError, match=r"no file matches .*data-000013\.tar, expanded from .*\{000012\.\.000014\}"):
        find_files(Source(path=str(tmp_path / "data-{000012..000014}.tar")))
    with pytest.raises(UsageError, match="expands to 99,999,999 files"):
        find_files(Source(path=str(tmp_path / "{1..99999999}.tar")))
    assert list(files.expand_ranges("{9..11}-{1..0}")) == ["9-1", "9-0", "10-1", "10-0", "11-1", "11-0"]


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        (
            "table.xyz",
            "auto",
            r"table\.xyz: unknown suffix \.xyz; set kind to one of text, lines, jsonl",
        ),
        ("nothing", "auto", r"nothing has no file of a supported kind"),
        ("nothing", "text", r"nothing has no files with text \(.*\.txt"),
        ("mixed", "parquet", r"mixed has no files of kind parquet \(\.parquet\)"),
        ("mixed", "auto", r"a\.txt is text and .*b\.jsonl is jsonl; set kind"),
        ("mixed", "shards", r"mixed is not prepared data: expected a folder with meta\.json"),
        ("pipe", "auto", r"pipe is neither a file nor a folder"),
        ("emty.txt", "auto", r"emty\.txt does not exist; did you mean .*empty\.txt\?"),
        ("mixd/a.txt", "auto", r"mixd does not exist; did you mean .*mixed\?"),
        ("qqqqqqq", "auto", r"qqqqqqq does not exist; .* has no file with a similar name"),
        ("*.rst", "auto", r"no file matches .*\*\.rst"),
    ],
)
def test_bad_path_is_refused_in_one_line(tmp_path: Path, name: str, kind: str, message: str) -> None:
    write_files(tmp_path, {"empty.txt": b"", "table.xyz": b"a,b", "mixed/a.txt": b"a", "mixed/b.jsonl": ROW})
    (tmp_path / "nothing").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=message) as caught:
        find_files(Source(path=str(tmp_path / name), kind=kind))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_hub_name_needs_an_explicit_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"does not exist; .*hub set kind: huggingface"):
        find_files(Source(path="owner/name"))
    with pytest.raises(UsageError, match="kind jsonl needs a path"):
        find_files(Source(kind="jsonl"))
    with pytest.raises(UsageError, match="synthetic is generated and has no files"):
        find_files(Source(kind="synthetic"))


def test_prepared_data_is_recognised(tmp_path: Path) -> None:
    write_files(tmp_path, {"meta.json": b"{}", "train/tokens.bin": b"1234"})
    assert detect_kind(Source(path=str(tmp_path))) == detect_kind(Source(path=str(tmp_path), kind="shards")) == "shards"
    assert not find_files(Source(path=str(tmp_path))).is_media
    write_files(tmp_path / "texts", {"meta.json": b"{}", "a.txt": b"", "b.txt": b"", "c.txt": b""})
    assert detect_kind(Source(path=str(tmp_path / "texts"))) == "text"


def test_home_and_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, {"corpus/a.txt": b"a"})
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert (
        relative_names(Source(path="~/corpus"))
        == relative_names(Source(path="corpus"))
        == relative_names(Source(path="~/corpus/*"))
        == ["a.txt"]
    )


def test_permission_error_is_an_environment_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    source_files = find_files(Source(path=str(tmp_path / "a.txt")))
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(EnvironmentProblem, match=r"cannot read .*a\.txt: permission denied"):
        list(source_files.read(source_files.list_pieces(1)[0]))
    with pytest.raises(EnvironmentProblem, match=r"cannot read .*a\.txt: permission denied"):
        _ = source_files.fingerprint


def test_pickled_source_files_are_small_and_read_the_same(tmp_path: Path) -> None:
    dimension = b"\0\0\0\1"
    idx3, idx1 = b"\x00\x00\x08\x03" + dimension * 3 + b"\5", b"\x00\x00\x08\x01" + dimension + b"\7"
    table = {"metadata.csv": b"file_name,text\n7.png,seven\n"}
    write_files(tmp_path / "photos", {f"{i}.png": PNG for i in range(1000)} | table)
    write_files(tmp_path / "idx", {"train-images-idx3-ubyte": idx3, "train-labels-idx1-ubyte": idx1})
    write_files(tmp_path / "rows", {"a.jsonl": ROW})
    for kind, name in (("images", "photos"), ("idx", "idx"), ("jsonl", "rows")):
        source_files = find_files(Source(path=str(tmp_path / name)))
        pieces = source_files.list_pieces(1 << 20)
        sent = pickle.dumps(source_files)
        assert len(sent) < 2000
        again = pickle.loads(sent)
        assert (again, again.kind, again.is_media) == (source_files, kind, source_files.is_media)
        here, there = (repr([list(side.read(piece)) for piece in pieces]) for side in (source_files, again))
        assert here == there
        assert "Record" in here
        assert "Bad" not in here
        with pytest.raises(AttributeError):  # it is not mistaken for a source without files
            again.list_pieces(1)


def test_fingerprint_depends_on_names_contents_and_options_only(tmp_path: Path) -> None:
    fingerprints = []
    for name, content in (("a/x.csv", "1,2"), ("a/x.csv", "1,3"), ("a/y.csv", "1,2")):
        write_files(tmp_path, {name: content.encode()})
        fingerprints.append(find_files(Source(path=str(tmp_path / "a"))).fingerprint)
    assert len(set(fingerprints)) == 3
    (tmp_path / "a").rename(tmp_path / "b")
    moved = find_files(Source(path=str(tmp_path / "b")))
    assert moved.fingerprint == fingerprints[-1]
    for option in ({"columns": ("u", "v")}, {"delimiter": ";"}, {"kind": "text"}):
        changed = Source(path=str(tmp_path / "b" / "x.csv"), **option)  # type: ignore[arg-type]
        assert find_files(changed).fingerprint != find_files(Source(path=str(tmp_path / "b" / "x.csv"))).fingerprint
    assert find_files(Source(path=str(tmp_path / "b"), weight=2.0, limit=5)).fingerprint == moved.fingerprint


def test_fingerprint_covers_companion_files(tmp_path: Path) -> None:
    idx3, idx1 = b"\x00\x00\x08\x03" + bytes(12), b"\x00\x00\x08\x01" + bytes(4)
    write_files(tmp_path, {"1.png": PNG, "train-images-idx3-ubyte": idx3, "train-labels-idx1-ubyte": idx1})
    for path, companion in (("1.png", "metadata.csv"), ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")):
        before = find_files(Source(path=str(tmp_path / path))).fingerprint
        write_files(tmp_path, {companion: b"file_name,text\n1.png,one\n"})
        assert find_files(Source(path=str(tmp_path / path))).fingerprint != before


def test_hash_is_cached_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hashed: list[str] = []
    original = fingerprint._hash_uncached
    monkeypatch.setattr(fingerprint, "_hash_uncached", lambda name: hashed.append(name) or original(name))
    paths = [write_files(tmp_path, {name: name.encode()}) / name for name in ("a", "b")]
    first = fingerprint.hash_files([*paths, paths[0]])
    assert first[0] == first[2] != first[1]
    assert len(hashed) == 2
    # A file written a moment ago may change again within the same timestamp, so its hash is not cached.
    assert fingerprint.hash_files(paths) == first[:2]
    assert len(hashed) == 4
    monkeypatch.setattr(fingerprint, "RACY_NS", -1)
    for _ in range(2):
        assert fingerprint.hash_file(paths[0]) == first[0]
    assert len(hashed) == 5
    status = paths[0].stat()
    paths[0].write_bytes(b"c")
    os.utime(paths[0], ns=(status.st_atime_ns, status.st_mtime_ns))  # same size and modification time
    assert fingerprint.hash_file(paths[0]) != first[0]
    # With an unusable database, files are hashed again.
    (tmp_path / "cache" / "bottega" / "hashes.sqlite").write_bytes(b"no database at all" * 100)
    assert fingerprint.hash_file(paths[1]) == first[1]

    def fail_to_connect(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(sqlite3, "connect", fail_to_connect)
    assert fingerprint.hash_file(paths[1]) == first[1]
    with pytest.raises(DataError, match=r"cannot read .*nowhere: No such file"):
        fingerprint.hash_file(tmp_path / "nowhere")


def test_hash_of_a_file_changed_while_hashing_is_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprint, "RACY_NS", -1)
    file = write_files(tmp_path, {"a": b"old"}) / "a"
    original = fingerprint._hash_uncached

    def hash_and_change(name: str) -> str:
        result = original(name)
        file.write_bytes(b"new one")
        return result

    monkeypatch.setattr(fingerprint, "_hash_uncached", hash_and_change)
    old = fingerprint.hash_file(file)
    monkeypatch.setattr(fingerprint, "_hash_uncached", original)
    assert fingerprint.hash_file(file) != old


def test_folders_without_a_file_are_refused_by_name(tmp_path: Path) -> None:
    folders = [tmp_path / "e1", tmp_path / "e2"]
    for folder in folders:
        folder.mkdir()
    (folders[0] / ".hidden").write_text("not data")
    for kind in ("auto", "text"):
        with pytest.raises(DataError) as caught:
            find_files(Source(path=str(folders[0]), more_paths=(str(folders[1]),), kind=kind))
        assert str(folders[0]) in str(caught.value)
        assert "\n" not in str(caught.value)
    (folders[1] / "a.txt").write_text("data")
    assert find_files(Source(path=str(folders[0]), more_paths=(str(folders[1]),))).paths == [folders[1] / "a.txt"]
