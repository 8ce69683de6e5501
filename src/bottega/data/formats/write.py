"""Records written as files that others read: WebDataset, TFRecord, Parquet, or JSON lines with media beside them.

All shards of a split are written aside and appear together at the end. A note in the folder says which files are ours;
only those are ever replaced.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

import numpy as np

from bottega.core.errors import DataError, EnvironmentProblem, UsageError
from bottega.data.records.archive_members import MAX_MEMBER_BYTES, MEDIA_SUFFIXES, detect_media_suffix
from bottega.data.records.record import Record
from bottega.storage.durable import (
    TEMPORARY_PREFIXES,
    flush,
    flush_many,
    move_files,
    remove_leftovers,
    scratch_folder,
    temporary_name,
    write_atomic,
)

OutputFormat = Literal["webdataset", "tfrecord", "parquet", "jsonl"]
SHARD_BYTES = 256 << 20
NOTE = ".bottega.json"
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)


class OutputShard(ABC):
    """One file being written. It may lie in a folder of its own below `folder`, named for the split."""

    path: Path
    size: int = 0
    """Bytes so far; when they are enough the next shard begins."""

    @abstractmethod
    def add(self, record: Record, name: str) -> None:
        """`name` is the record's key, made safe for a file name and unique in its split."""

    @abstractmethod
    def close(self) -> None: ...


def write_records(
    rows: Iterable[Record], folder: Path, *, to: OutputFormat, split: str = "train", shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """The files that were written: SPLIT-000000.tar and so on. Earlier ones of the same split are replaced."""
    if to not in get_args(OutputFormat):
        raise UsageError(f"records cannot be written as {to}; choose {', '.join(get_args(OutputFormat))}")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", split):
        raise UsageError(f"split {split!r} cannot be part of a file name; letters, digits, _ and - can")
    note = _ours(folder, to)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder, split)
        with scratch_folder(folder / split) as aside:
            files = _shards(rows, aside, to, split, shard_bytes)
            _publish(aside, folder, note, split)
    except OSError as error:
        if error.errno not in DISK:
            raise
        raise EnvironmentProblem(f"{folder} cannot be written: {error.strerror}") from error
    return [folder / file.relative_to(aside) for file in files]


def _shards(rows: Iterable[Record], folder: Path, to: OutputFormat, split: str, shard_bytes: int) -> list[Path]:
    files: list[Path] = []
    names = UniqueNames()
    shard: OutputShard | None = None
    try:
        for record in rows:
            if shard is None or shard.size >= shard_bytes:
                if shard is not None:
                    shard.close()
                    files.append(shard.path)
                shard = _shard(to, folder, split, len(files))
            shard.add(record, names.make_unique(record.key))
        if shard is None:
            raise DataError(f"there is nothing to write: {split} has no records")
        shard.close()
    except BaseException:
        if shard is not None:
            with suppress(Exception):  # what went wrong first is what is told
                shard.close()
        raise
    return [*files, shard.path]


def _shard(to: OutputFormat, folder: Path, split: str, number: int) -> OutputShard:
    # Each needs packages of its own.
    if to == "webdataset":
        from bottega.data.formats.tar_write import TarShard

        return TarShard(folder / f"{split}-{number:06d}.tar")
    if to == "tfrecord":
        from bottega.data.formats.tfrecord_write import TFRecordShard

        return TFRecordShard(folder / f"{split}-{number:06d}.tfrecord")
    if to == "parquet":
        from bottega.data.formats.columns import ParquetShard

        return ParquetShard(folder / f"{split}-{number:06d}.parquet")
    from bottega.data.formats.jsonlines import JsonLinesShard

    return JsonLinesShard(folder, split, number)


def _ours(folder: Path, to: OutputFormat) -> dict[str, Any]:
    """The note about earlier writing here; an error where there is anything it does not name."""
    note: dict[str, Any] = {"to": to, "splits": {}}
    if not folder.exists():
        return note
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a folder to write to")
    try:
        note = json.loads((folder / NOTE).read_bytes())
        ours = [file for files in note["splits"].values() for file in files]
        if not isinstance(note["to"], str) or any(os.path.basename(file) != file for file in ours):
            raise ValueError("it is not as we write it")
        known = {NOTE, *ours}
    except FileNotFoundError:
        known = set()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{folder / NOTE} cannot be read ({error}); write to an empty folder") from error
    other = sorted(name for name in os.listdir(folder) if name not in known and not name.startswith(TEMPORARY_PREFIXES))
    if other:
        raise UsageError(f"{folder} holds {other[0]}, which was not written here; write to an empty folder")
    if note["to"] != to and any(note["splits"].values()):
        raise UsageError(f"{folder} holds {note['to']} already; write {to} to another folder")
    return {**note, "to": to}


def _publish(aside: Path, folder: Path, note: dict[str, Any], split: str) -> None:
    """Into place, every byte on disk first. While it lasts the note names old and new, so that a kill leaves both ours."""
    flush_many(aside)
    new = sorted(os.listdir(aside))
    old = note["splits"].get(split, [])
    taken = {name for other, files in note["splits"].items() if other != split for name in files}
    if taken & set(new):
        raise UsageError(f"{folder} has a {sorted(taken & set(new))[0]} of another split; write to another folder")
    _save(folder, {**note, "splits": {**note["splits"], split: sorted({*old, *new})}})
    trash = temporary_name(folder / split, ".trash-")
    trash.mkdir()
    move_files([folder / name for name in old if (folder / name).exists()], trash)
    move_files([aside / name for name in new], folder)
    shutil.rmtree(trash)
    _save(folder, {**note, "splits": {**note["splits"], split: new}})
    flush(folder)


def _save(folder: Path, note: dict[str, Any]) -> None:
    write_atomic(folder / NOTE, json.dumps(note, indent=1))


class UniqueNames:
    """Keys as file names: letters, digits, _ and -, and no two alike, also where case does not count."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def make_unique(self, key: str) -> str:
        stem, _, suffix = key.rpartition(".")
        name = re.sub(r"[^\w-]+", "_", stem if suffix.lower() in MEDIA_SUFFIXES else key).strip("_-")
        name = name.encode()[:100].decode(errors="ignore") or "row"
        unique, number = name, 1
        while unique.casefold() in self._seen:
            number += 1
            unique = f"{name}-{number}"
        self._seen.add(unique.casefold())
        return unique


def encode_medium(field: str, value: Any, record: Record) -> tuple[str, bytes] | None:
    """The suffix and the bytes of an encoded medium, given as bytes or as the Path of a file; None for other values."""
    if isinstance(value, Path):
        if value.stat().st_size > MAX_MEMBER_BYTES:
            raise DataError(f"{record.where}: {value} is larger than {MAX_MEMBER_BYTES} bytes")
        data, suffix = value.read_bytes(), value.suffix[1:].lower()
    elif isinstance(value, bytes | bytearray | memoryview):
        data, suffix = bytes(value), field.rpartition(".")[2].lower()
    else:
        return None
    found = suffix if suffix in MEDIA_SUFFIXES else detect_media_suffix(data)
    if found is None:
        raise_field_error(record, field, "bytes of no kind that is known; write tfrecord or parquet to keep them")
    return found, data


def to_json_value(value: Any) -> Any:
    """Without numpy: what JSON can hold."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): to_json_value(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(part) for part in value]
    return value


def encode_json(value: Any, record: Record, field: str) -> bytes:
    try:
        return json.dumps(to_json_value(value), ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise_field_error(record, field, f"cannot be written as JSON: {error}")


def raise_field_error(record: Record, field: str, reason: str) -> NoReturn:
    raise DataError(f"{record.where}: field {field!r}: {reason}")
