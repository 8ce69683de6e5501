"""Remote data (object stores, HTTP) is downloaded once, whole, to the cache, and read from there.

The cache key is the hash of the URL and of the store's own metadata of each file (etag or checksum, size, time), so
each version has a copy of its own. Messages show URLs without credentials.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit

from bottega.config.credentials import restore_credentials
from bottega.core.errors import BottegaError, DataError, EnvironmentProblem, UsageError
from bottega.data.formats.files import expand_ranges
from bottega.data.tables.cache import get_or_build
from bottega.redaction import strip_credentials
from bottega.storage.cache_folder import default_cache

# Packages by scheme. Other schemes of fsspec are not allowed: some run commands or unpack archives.
SCHEMES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "http": "aiohttp",
    "https": "aiohttp",
    "memory": "fsspec",
    "file": "fsspec",
}
# Keys under which stores give the version of a file.
VERSION_KEYS = (
    "etag",
    "e_tag",
    "md5",
    "md5hash",
    "content_md5",
    "crc32c",
    "checksum",
    "generation",
    "version_id",
    "versionid",
)
TIME_KEYS = ("lastmodified", "last_modified", "mtime", "updated", "created")
MAX_FILES = 1_000_000
MAX_UNANNOUNCED_BYTES = 16 << 30
"""Limit for a file whose size the server does not give: it may be endless."""
MIN_FREE_BYTES = 1 << 30
"""Bytes of disk that a download leaves free; on a disk of less than 20 GiB, a twentieth of its size."""
MAX_SILENT_SECONDS = 60.0
"""Seconds without data after which a download fails; the total time is not limited."""
DATA_FOLDER = "data"


def download(url: str) -> Path:
    """Download a URL and return the local copy: a file, or a folder for a folder or a pattern."""
    url = restore_credentials(url)
    scheme = url.partition("://")[0].lower()
    if scheme not in SCHEMES:
        raise UsageError(
            f"{strip_credentials(url)}: unsupported scheme; choose from {', '.join(f'{name}://' for name in SCHEMES)}"
        )
    if scheme == "file":
        return Path(unquote(urlsplit(url).path))
    store, path = _open_store(url, scheme)
    try:
        files, is_folder = _list_files(store, path, url, is_http=scheme.startswith("http"))
        entry = _copy_to_cache(store, files, url)
    except BottegaError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{strip_credentials(url)} does not exist; check the address") from error
    except Exception as error:
        _raise_unreachable(url, error)
    return entry if is_folder else entry / next(iter(files))


def _open_store(url: str, scheme: str) -> tuple[Any, str]:
    try:
        import fsspec

        store, path = fsspec.core.url_to_fs(url, **_get_timeouts(scheme))
    except ImportError as error:
        raise EnvironmentProblem(
            f"{strip_credentials(url)}: reading {scheme}:// needs {SCHEMES[scheme]}; pip install 'bottega[cloud]'"
        ) from error
    except Exception as error:
        _raise_unreachable(url, error)
    return store, path


def _get_timeouts(scheme: str) -> dict[str, Any]:
    """Return time-outs for HTTP: by default a download would have to finish within five minutes."""
    if not scheme.startswith("http"):
        return {}
    try:
        from aiohttp import ClientTimeout
    except ImportError:
        return {}  # fsspec reports the missing package
    return {
        "client_kwargs": {
            "timeout": ClientTimeout(total=None, connect=MAX_SILENT_SECONDS, sock_read=MAX_SILENT_SECONDS)
        }
    }


def _raise_unreachable(url: str, error: Exception) -> NoReturn:
    public_url = strip_credentials(url)
    # The recipe of a resumed or evaluated run has its URLs without credentials.
    may_lack_credentials = url.startswith("http") and public_url == url
    credentials_hint = (
        "; if the address needs a signature or password, give it again in data.train.path or --data: they are never "
        "stored"
    )
    # Only the type of the error is shown: its text may hold a signed URL or a key.
    raise EnvironmentProblem(
        f"{public_url} cannot be reached ({type(error).__name__}); check the network and your credentials for it"
        f"{credentials_hint if may_lack_credentials else ''}"
    ) from error


def _list_files(store: Any, path: str, url: str, *, is_http: bool) -> tuple[dict[str, dict[str, Any]], bool]:
    """Return the store's metadata of each file, by its name relative to the folder, and whether the URL names several files."""
    if is_http:  # HTTP has no listing of folders
        name = PurePosixPath(urlsplit(path).path).name
        if not name:
            raise DataError(f"{strip_credentials(url)} names no file; give the address of a file")
        return {_check_safe_name(name, url): store.info(path)}, False
    is_pattern = any(mark in path for mark in "*?[{")
    is_folder = not is_pattern and store.isdir(path)
    if is_pattern:
        infos = {
            name: info
            for pattern in expand_ranges(path)
            for name, info in _find_matches(store, pattern, url, is_expanded=pattern != path)
        }
        root = _find_common_folder(list(infos))
    elif is_folder:
        root = path.rstrip("/")
        infos = {name: info for name, info in store.find(path, detail=True).items() if info["type"] == "file"}
    else:
        root = path.rpartition("/")[0]
        infos = {path: store.info(path)}
    if not infos:
        raise DataError(f"{strip_credentials(url)} has no files; check the address")
    if len(infos) > MAX_FILES:
        raise DataError(
            f"{strip_credentials(url)} contains {len(infos):,} files, more than {MAX_FILES:,}; pack them into shards"
        )
    infos_by_name = {
        _check_safe_name(name[len(root) :].removeprefix("/"), url): info for name, info in sorted(infos.items())
    }
    return infos_by_name, is_pattern or is_folder


def _find_matches(store: Any, pattern: str, url: str, *, is_expanded: bool) -> list[tuple[str, dict[str, Any]]]:
    """Return name and metadata of the files that match; `is_expanded` says that `pattern` is one of several in the URL."""
    try:
        matches = [(name, info) for name, info in store.glob(pattern, detail=True).items() if info["type"] == "file"]
    except ValueError as error:
        raise UsageError(f"{strip_credentials(url)} is not a valid pattern; write ** alone between slashes") from error
    if not matches:
        public_url, scheme = strip_credentials(url), url.partition("://")[0]
        expanded = strip_credentials(f"{scheme}://{pattern.lstrip('/')}")
        problem = f"{expanded}, expanded from {public_url}" if is_expanded else public_url
        raise DataError(f"no file matches {problem}; check the address")
    return matches


def _find_common_folder(names: list[str]) -> str:
    """Return the common parent folder of the names."""
    folders = [name.split("/")[:-1] for name in names]
    first, last = min(folders), max(folders)
    first_difference = next((i for i, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), None)
    return "/".join(first[: min(len(first), len(last)) if first_difference is None else first_difference])


def _check_safe_name(name: str, url: str) -> str:
    """Return a name that stays below the folder it is joined to, or raise DataError; stores allow any text as a name."""
    if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
        raise DataError(
            f"{strip_credentials(url)} contains a file named {name!r}, which cannot be copied to a folder: a name may have "
            "no empty part, no part . or .., and no zero byte; rename it there"
        )
    return name


def _copy_to_cache(store: Any, files: dict[str, dict[str, Any]], url: str) -> Path:
    versions = {name: _describe_version(store, info, url) for name, info in files.items()}
    key = hashlib.sha256(json.dumps([strip_credentials(url), versions], sort_keys=True).encode()).hexdigest()[:32]
    # In a sub-folder: the manifest of the cache entry is not data.
    return (
        get_or_build(
            default_cache() / "remote", key, lambda folder: _copy_files(store, files, folder / DATA_FOLDER, url)
        )
        / DATA_FOLDER
    )


def _describe_version(store: Any, info: dict[str, Any], url: str) -> list[str]:
    fields = {name.lower().replace("-", "_"): str(value) for name, value in info.items() if value is not None}
    tags = [f"{name}={fields[name]}" for name in (*VERSION_KEYS, *TIME_KEYS) if name in fields]
    if not tags and urlsplit(url).scheme not in ("http", "https"):
        tags = [store.ukey(info["name"])]
    if not tags:
        # Two files may differ only in the query of their URL, which strip_credentials removes from the cache key; so its hash is added.
        tags = [hashlib.sha256(urlsplit(url).query.encode()).hexdigest()]
    return [f"size={fields.get('size')}", *tags]


def _copy_files(store: Any, files: dict[str, dict[str, Any]], folder: Path, url: str) -> None:
    # A partial file may already have its full size, so the leftovers of an interrupted process are not reused.
    shutil.rmtree(folder, ignore_errors=True)
    for name, info in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        size, disk = info.get("size"), shutil.disk_usage(folder)
        available_bytes = disk.free - min(MIN_FREE_BYTES, disk.total // 20)
        if size is not None and size > available_bytes:
            raise EnvironmentProblem(
                f"{strip_credentials(url)}: {name} has {size:,} bytes, but {default_cache() / 'remote'} has room for "
                f"{max(0, available_bytes):,}; free some space, or set XDG_CACHE_HOME to a larger disk"
            )
        limit = size if size is not None else min(MAX_UNANNOUNCED_BYTES, available_bytes)
        try:
            store.get_file(info["name"], str(file), callback=_make_byte_limit(limit))
        except _TooLong:
            reason = (
                f"sends more than the {size:,} bytes it announced; try again"
                if size is not None
                else f"has sent {limit:,} bytes and does not announce its size; download it yourself, and give the path"
            )
            raise DataError(f"{strip_credentials(url)}: {name} {reason}") from None
        except FileNotFoundError as error:
            raise DataError(f"{strip_credentials(url)}: {name} no longer exists; try again") from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise EnvironmentProblem(
                    f"{strip_credentials(url)} cannot be copied to {default_cache() / 'remote'}: {error.strerror}; free some "
                    "space, or set XDG_CACHE_HOME to a folder that can be written"
                ) from error
            _raise_unreachable(url, error)
        copied_bytes = file.stat().st_size
        if size is not None and copied_bytes != size:
            raise DataError(
                f"{strip_credentials(url)}: {name} has {copied_bytes:,} of {size:,} bytes after the download; try again"
            )


class _TooLong(Exception):
    """More bytes arrived than allowed."""


def _make_byte_limit(limit: int) -> Any:
    """Return an fsspec callback that raises _TooLong once more than `limit` bytes are written."""
    from fsspec.callbacks import Callback

    class ByteLimit(Callback):
        def relative_update(self, inc: int = 1) -> None:
            super().relative_update(inc)
            if self.value > limit:
                raise _TooLong

        def absolute_update(self, value: int) -> None:
            super().absolute_update(value)
            if self.value > limit:
                raise _TooLong

    return ByteLimit()
