"""Remote files are downloaded once, inside their cache folder; messages and keys contain no secrets."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bottega.config.data import Source
from bottega.core.errors import DataError, EnvironmentProblem, UsageError
from bottega.data.formats import find_files, remote
from bottega.data.records.record import Record
from bottega.redaction import CREDENTIALS_VARIABLE
from bottega.storage.cache_folder import default_cache

fsspec = pytest.importorskip("fsspec")

FILES = {"/far/a.jsonl": b'{"n": 1}\n', "/far/deep/b.jsonl": b'{"n": 2}\n{"n": 3}\n', "/far/deep/c.txt": b"text"}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(CREDENTIALS_VARIABLE, "{}")
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    for name, content in FILES.items():
        memory.pipe_file(name, content)
    yield memory
    memory.store.clear()


@pytest.fixture
def copies(store: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the downloaded files."""
    copied: list[str] = []
    original = type(store).get_file

    def get_file(self: Any, name: str, *arguments: Any, **options: Any) -> Any:
        copied.append(name)
        return original(self, name, *arguments, **options)

    monkeypatch.setattr(type(store), "get_file", get_file)
    return copied


def read_keys(path: str, **options: str) -> list[str]:
    source_files = find_files(Source(path=path, **options))  # type: ignore[arg-type]
    return [
        record.key
        for piece in source_files.list_pieces(1)
        for record in source_files.read(piece)
        if isinstance(record, Record)
    ]


def test_files_folders_and_patterns_are_downloaded_once(copies: list[str]) -> None:
    for _ in range(2):
        assert read_keys("memory://far/a.jsonl") == ["a.jsonl:1"]
        assert read_keys("memory://far", kind="jsonl") == ["a.jsonl:1", "deep/b.jsonl:1", "deep/b.jsonl:2"]
        assert read_keys("memory://far/**/*.jsonl") == ["a.jsonl:1", "deep/b.jsonl:1", "deep/b.jsonl:2"]
        assert read_keys("memory://far/deep/*.jsonl") == ["b.jsonl:1", "b.jsonl:2"]
    assert len(copies) == 1 + 3 + 2 + 1
    assert not list((default_cache() / "remote").glob("*.tmp"))


def test_changed_file_is_downloaded_again(store: Any, copies: list[str]) -> None:
    source = Source(path="memory://far/a.jsonl")
    first = find_files(source)
    assert first.source.path == str(first.root)
    assert first.root.is_relative_to(default_cache() / "remote")
    store.pipe_file("/far/a.jsonl", b'{"n": 9}\n')
    second = find_files(source)
    assert (len(copies), second.root.name) == (2, first.root.name)
    assert second.fingerprint != first.fingerprint
    assert first.root.read_bytes() == FILES["/far/a.jsonl"]


def test_brace_ranges_expand_to_remote_shards(store: Any) -> None:
    for i in range(3):
        store.pipe_file(f"/shards/d-{i:03}.jsonl", b'{"n": 1}\n')
    assert read_keys("memory://shards/d-{000..001}.jsonl") == ["d-000.jsonl:1", "d-001.jsonl:1"]
    message = (
        r"no file matches memory://shards/d-003\.jsonl, expanded from memory://shards/d-\{002\.\.003\}\.jsonl; check"
    )
    with pytest.raises(DataError, match=message):
        read_keys("memory://shards/d-{002..003}.jsonl")


def test_file_url_is_read_in_place(tmp_path: Path) -> None:
    (tmp_path / "with space.jsonl").write_bytes(b'{"n": 1}\n')
    address = (tmp_path / "with space.jsonl").as_uri()
    assert "%20" in address
    assert find_files(Source(path=address)).root == tmp_path / "with space.jsonl"


@pytest.mark.parametrize("name", ["../../evil.txt", "a/../../evil.txt", "/evil.txt", "a//b.txt", "a/./b.txt"])
def test_names_that_lead_out_are_refused(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    info = {"name": f"/far/{name}", "type": "file", "size": 4}
    monkeypatch.setattr(type(store), "find", lambda self, path, **_: {f"{path}/{name}": info})
    with pytest.raises(DataError, match=r"which cannot be copied to a folder: .*; rename it there"):
        read_keys("memory://far")
    assert not list(tmp_path.rglob("evil*"))


def test_address_without_a_file_name_is_refused(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_open_store", lambda url, scheme: (store, url))
    with pytest.raises(DataError, match=r"https://far.example/ names no file; give the address of a file"):
        read_keys("https://far.example/")


def test_unreachable_store_is_reported_without_secrets(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "AKIASECRET"

    def refuse(*_: object, **__: object) -> None:
        raise OSError(f"403 for https://{secret}@bucket?signature={secret}")

    monkeypatch.setattr(type(store), "info", refuse)
    with pytest.raises(
        EnvironmentProblem, match=r"memory://far/a\.jsonl cannot be reached \(OSError\); check"
    ) as caught:
        read_keys(f"memory://{secret}@far/a.jsonl")
    assert secret not in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs"), ("az", "adlfs"), ("https", "aiohttp")]
)
def test_missing_driver_is_reported_by_name(
    store: Any, monkeypatch: pytest.MonkeyPatch, scheme: str, package: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ImportError("install it")

    monkeypatch.setattr(fsspec.core, "url_to_fs", refuse)
    with pytest.raises(EnvironmentProblem, match=rf"needs {package}; pip install 'bottega\[cloud\]'"):
        read_keys(f"{scheme}://bucket/a.txt")


def test_invalid_pattern_is_refused(store: Any) -> None:
    with pytest.raises(UsageError, match=r"memory://far/\*\*\.jsonl is not a valid pattern"):
        read_keys("memory://far/**.jsonl")


def test_unknown_schemes_are_refused(store: Any) -> None:
    for address in ("pipe://cat", "simplecache::s3://b/a.txt", "zip://a.txt::s3://b.zip", "ftp://x/a.txt"):
        with pytest.raises(UsageError, match="choose from s3://"):
            read_keys(address)


def test_missing_remote_files_are_refused(store: Any) -> None:
    with pytest.raises(DataError, match=r"memory://far/nothing\.txt does not exist"):
        read_keys("memory://far/nothing.txt")
    with pytest.raises(DataError, match=r"no file matches memory://far/\*\.png"):
        read_keys("memory://far/*.png")


def test_partial_download_is_never_used(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = type(store).get_file

    def write_part(self: Any, name: str, target: str, **options: Any) -> None:
        Path(target).write_bytes(FILES[name][:4])

    monkeypatch.setattr(type(store), "get_file", write_part)
    with pytest.raises(DataError, match="has 4 of 9 bytes after the download; try again"):
        read_keys("memory://far", kind="jsonl")
    assert [path.suffix for path in (default_cache() / "remote").iterdir()] == [".lock"]
    monkeypatch.setattr(type(store), "get_file", original)
    # The temporary folder of a dead process is replaced.
    (lock,) = (default_cache() / "remote").iterdir()
    lock.with_suffix(".tmp").mkdir()
    (lock.with_suffix(".tmp") / "a.jsonl").write_bytes(b"half")
    assert len(read_keys("memory://far", kind="jsonl")) == 3


def test_damaged_download_is_repeated(store: Any, copies: list[str]) -> None:
    first = find_files(Source(path="memory://far", kind="jsonl"))
    for damage in ("cut", "other", "gone"):
        before = len(copies)
        file = first.root / "deep" / "b.jsonl"
        if damage == "gone":
            file.unlink()
        else:
            file.write_bytes(FILES["/far/deep/b.jsonl"][:4] if damage == "cut" else b'{"n": 5}\n{"n": 6}\n')
        source_files = find_files(Source(path="memory://far", kind="jsonl"))
        assert source_files.root == first.root
        assert file.read_bytes() == FILES["/far/deep/b.jsonl"]
        assert len(copies) == before + 3


def test_manifest_of_the_cache_is_not_data(store: Any) -> None:
    store.pipe_file("/lists/MANIFEST.json", b'[{"n": 1}]')
    assert read_keys("memory://lists") == ["MANIFEST.json:1"]
    store.pipe_file("/lists/MANIFEST.json", b'[{"n": 1}, {"n": 2}]')
    assert read_keys("memory://lists") == ["MANIFEST.json:1", "MANIFEST.json:2"]


def test_failed_download_is_reported_without_secrets(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("403 for signature=AKIASECRET")

    monkeypatch.setattr(type(store), "get_file", refuse)
    with pytest.raises(EnvironmentProblem, match=r"memory://far/a\.jsonl cannot be reached \(OSError\)") as caught:
        read_keys("memory://far/a.jsonl")
    assert "AKIASECRET" not in str(caught.value)


def test_full_disk_is_reported(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_no_space(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(store), "get_file", raise_no_space)
    with pytest.raises(EnvironmentProblem, match=r"cannot be copied to .*remote: No space left on device; free some"):
        read_keys("memory://far/a.jsonl")


class EndlessFile:
    """A file without an end; `sent` counts the bytes read."""

    sent = 0

    def read(self, size: int) -> bytes:
        EndlessFile.sent += size
        return bytes(size)

    def __enter__(self) -> EndlessFile:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("size", "reason"),
    [(None, "does not announce its size; download it yourself"), (7 << 20, "sends more than the 7,340,032 bytes")],
)
def test_endless_download_is_stopped(
    store: Any, monkeypatch: pytest.MonkeyPatch, size: int | None, reason: str
) -> None:
    monkeypatch.setattr(remote, "MAX_UNANNOUNCED_BYTES", 12 << 20)
    monkeypatch.setattr(EndlessFile, "sent", 0)
    monkeypatch.setattr(type(store), "open", lambda *_, **__: EndlessFile())
    monkeypatch.setattr(type(store), "info", lambda *_, **__: {"name": "/far/a.jsonl", "type": "file", "size": size})
    with pytest.raises(DataError, match=reason):
        read_keys("memory://far/a.jsonl")
    assert EndlessFile.sent <= (12 << 20) + 2 * store.blocksize
    assert not [path for path in (default_cache() / "remote").rglob("*") if path.is_file() and path.stat().st_size]


def test_file_larger_than_the_disk_is_refused_before_download(
    store: Any, copies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    info = {"name": "/far/a.jsonl", "type": "file", "size": 1 << 60}
    monkeypatch.setattr(type(store), "info", lambda *_, **__: info)
    with pytest.raises(EnvironmentProblem, match=r"a\.jsonl has 1,152,921,504,606,846,976 bytes, but .* has room for"):
        read_keys("memory://far/a.jsonl")
    assert copies == []


def test_concurrent_readers_wait_for_one_download(store: Any, copies: list[str]) -> None:
    results: list[list[str]] = []
    threads = [
        threading.Thread(target=lambda: results.append(read_keys("memory://far", kind="jsonl"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
    assert len(results) == 4
    assert len(copies) == 3


class TaggedStore:
    """A file system that provides a unique key per file."""

    def ukey(self, name: str) -> str:
        return f"of {name}"


def test_version_is_built_from_store_metadata() -> None:
    def version(address: str, **info: Any) -> list[str]:
        return remote._describe_version(TaggedStore(), {"name": address, **info}, address)

    when = datetime.datetime(2024, 1, 1)
    assert version("s3://b/a", ETag='"x"', size=3, LastModified=when) == [
        "size=3",
        'etag="x"',
        "lastmodified=2024-01-01 00:00:00",
    ]
    assert version("gs://b/a", size=3) == ["size=3", "of gs://b/a"]
    assert version("https://b/a?t=1", ETag="x") == version("https://b/a?t=2", ETag="x")
    assert version("https://b/a?t=secret") != version("https://b/a?t=2")
    assert "secret" not in str(version("https://b/a?t=secret"))
