"""Write records in public formats: WebDataset, TFRecord, Parquet, or JSON Lines with media files beside them.

All shards of a split are written to a temporary folder and appear together at the end. A manifest in the folder lists the
files we wrote; only those are ever replaced.
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
    flush_all_or_sync,
    make_temporary_name,
    move_files,
    remove_leftovers,
    scratch_folder,
    write_atomic,
)

OutputFormat = Literal["webdataset", "tfrecord", "parquet", "jsonl"]
SHARD_BYTES = 256 << 20
MANIFEST = ".bottega.json"
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)


class OutputShard(ABC):
    """One shard being written: a file, or a folder named after the split."""

    path: Path
    size: int = 0
    """Bytes written so far; decides when the next shard begins."""

    @abstractmethod
    def add(self, record: Record, name: str) -> None:
        """Append a record. `name` is its key as a safe file name, unique in the split."""

    @abstractmethod
    def close(self) -> None: ...


def write_records(
    records: Iterable[Record], folder: Path, *, to: OutputFormat, split: str = "train", shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write records to shards SPLIT-000000.tar and so on, replacing earlier ones of the split; return their paths."""
    if to not in get_args(OutputFormat):
        raise UsageError(f"--to {to}: unknown format; choose from {', '.join(get_args(OutputFormat))}")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", split):
        raise UsageError(f"split {split!r} cannot be part of a file name; use letters, digits, _ and -")
    manifest = _read_manifest(folder, to)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder, split)
        with scratch_folder(folder / split) as temporary:
            files = _write_shards(records, temporary, to, split, shard_bytes)
            _publish(temporary, folder, manifest, split)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise EnvironmentProblem(f"cannot write {folder}: {error.strerror}") from error
    return [folder / file.relative_to(temporary) for file in files]


def _write_shards(
    records: Iterable[Record], folder: Path, to: OutputFormat, split: str, shard_bytes: int
) -> list[Path]:
    files: list[Path] = []
    names = UniqueNames()
    shard: OutputShard | None = None
    try:
        for record in records:
            if shard is None or shard.size >= shard_bytes:
                if shard is not None:
                    shard.close()
                    files.append(shard.path)
                shard = _open_shard(to, folder, split, len(files))
            shard.add(record, names.make_unique(record.key))
        if shard is None:
            raise DataError(f"split {split} has no records to write")
        shard.close()
    except BaseException:
        if shard is not None:
            with suppress(Exception):  # report the first error
                shard.close()
        raise
    return [*files, shard.path]


def _open_shard(to: OutputFormat, folder: Path, split: str, number: int) -> OutputShard:
    # Imported here: each needs packages of its own.
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


def _read_manifest(folder: Path, to: OutputFormat) -> dict[str, Any]:
    """Return the manifest of earlier output in the folder; raise UsageError if it holds any other file."""
    manifest: dict[str, Any] = {"to": to, "splits": {}}
    if not folder.exists():
        return manifest
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file; give a folder")
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        listed_files = [file for files in manifest["splits"].values() for file in files]
        if not isinstance(manifest["to"], str) or any(os.path.basename(file) != file for file in listed_files):
            raise ValueError("unexpected content")
        allowed_names = {MANIFEST, *listed_files}
    except FileNotFoundError:
        allowed_names = set()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"cannot read {folder / MANIFEST}: {error}; write to an empty folder") from error
    foreign_names = sorted(
        name for name in os.listdir(folder) if name not in allowed_names and not name.startswith(TEMPORARY_PREFIXES)
    )
    if foreign_names:
        raise UsageError(f"{folder} contains {foreign_names[0]}, which Bottega did not write; write to an empty folder")
    if manifest["to"] != to and any(manifest["splits"].values()):
        raise UsageError(f"{folder} already contains {manifest['to']} files; write {to} to another folder")
    return {**manifest, "to": to}


def _publish(temporary: Path, folder: Path, manifest: dict[str, Any], split: str) -> None:
    """Move the shards into place after flushing them. Meanwhile the manifest lists old and new files, in case the
    process is killed.
    """
    flush_all_or_sync(temporary)
    new_names = sorted(os.listdir(temporary))
    old_names = manifest["splits"].get(split, [])
    taken_names = {name for other_split, files in manifest["splits"].items() if other_split != split for name in files}
    if taken_names & set(new_names):
        raise UsageError(
            f"{folder} already contains {sorted(taken_names & set(new_names))[0]} of another split; write to another folder"
        )
    _save_manifest(folder, {**manifest, "splits": {**manifest["splits"], split: sorted({*old_names, *new_names})}})
    trash = make_temporary_name(folder / split, ".trash-")
    trash.mkdir()
    move_files([folder / name for name in old_names if (folder / name).exists()], trash)
    move_files([temporary / name for name in new_names], folder)
    shutil.rmtree(trash)
    _save_manifest(folder, {**manifest, "splits": {**manifest["splits"], split: new_names}})
    flush(folder)


def _save_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    write_atomic(folder / MANIFEST, json.dumps(manifest, indent=1))


class UniqueNames:
    """Record keys as file names of letters, digits, _ and -, unique even on file systems that ignore case."""

    def __init__(self) -> None:
        self._used: set[str] = set()

    def make_unique(self, key: str) -> str:
        """Return a safe name for a key, with a number if it is taken."""
        stem, _, suffix = key.rpartition(".")
        name = re.sub(r"[^\w-]+", "_", stem if suffix.lower() in MEDIA_SUFFIXES else key).strip("_-")
        name = name.encode()[:100].decode(errors="ignore") or "row"
        unique, number = name, 1
        while unique.casefold() in self._used:
            number += 1
            unique = f"{name}-{number}"
        self._used.add(unique.casefold())
        return unique


def encode_medium(field: str, value: Any, record: Record) -> tuple[str, bytes] | None:
    """Return (suffix, bytes) of a medium given as encoded bytes or as the Path of a file; None for other values."""
    if isinstance(value, Path):
        if value.stat().st_size > MAX_MEMBER_BYTES:
            raise DataError(f"{record.where}: {value} has more than {MAX_MEMBER_BYTES} bytes, the maximum for one file")
        data, suffix = value.read_bytes(), value.suffix[1:].lower()
    elif isinstance(value, bytes | bytearray | memoryview):
        data, suffix = bytes(value), field.rpartition(".")[2].lower()
    else:
        return None
    known_suffix = suffix if suffix in MEDIA_SUFFIXES else detect_media_suffix(data)
    if known_suffix is None:
        raise_field_error(
            record, field, "contains bytes of an unknown media type; write tfrecord or parquet to keep them"
        )
    return known_suffix, data


def to_json_value(value: Any) -> Any:
    """Convert numpy values to plain Python ones that JSON can hold."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    return value


def encode_json(value: Any, record: Record, field: str) -> bytes:
    """Encode a value as JSON; raise DataError naming the record and field if it cannot be."""
    try:
        return json.dumps(to_json_value(value), ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise_field_error(record, field, f"cannot be written as JSON: {error}")


def raise_field_error(record: Record, field: str, reason: str) -> NoReturn:
    """Raise DataError for a field of a record."""
    raise DataError(f"{record.where}: field {field!r} {reason}")
