"""Hugging Face datasets, by name on the hub, in a folder, or saved to disk; read from their Arrow files.

The datasets library downloads and converts them, once. Workers memory-map the Arrow files: no network, no decoding.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from bottega.config.data import Source
from bottega.core.errors import DataError, EnvironmentProblem, UsageError
from bottega.data.formats import columns, files
from bottega.data.formats.fingerprint import hash_files
from bottega.data.formats.reader import Format, Piece
from bottega.data.records.record import BadRecord, Record
from bottega.data.tables.cache import get_or_build
from bottega.models.folders.hub_access import offline_if_hub_unreachable
from bottega.storage.cache_folder import default_cache

DEFAULT_SPLIT = "train"


def list_pieces(file: Path, name: str, source: Source, size: int) -> list[Piece]:
    """Return consecutive record batches of the Arrow files as pieces; row numbers continue from file to file."""
    prefix = name if _find_local_folder(source) is not None else source.path or name
    all_pieces: list[Piece] = []
    rows_before = 0
    for arrow_file in _list_arrow_files(source):
        pieces = columns.ARROW.list_pieces(arrow_file, prefix, source, size)
        all_pieces += [piece._replace(records_before=piece.records_before + rows_before) for piece in pieces]
        rows_before += _count_rows(arrow_file)
    return all_pieces


def read(piece: Piece, source: Source) -> Iterator[Record | BadRecord]:
    """Yield the rows of the piece's record batches, each medium as its encoded bytes or the path of its file."""
    row = piece.records_before
    load_medium = partial(_resolve_medium, roots=_list_allowed_roots(source))
    for batch in columns.iter_arrow_batches(piece.file, piece.start, piece.stop):
        for fields in columns.iter_rows(batch, piece.file, load_medium):
            row += 1
            yield Record(f"{piece.name}:{row}", f"{piece.name}, row {row}", fields)


def hash_dataset(source: Source) -> str:
    """Return hashes of the local files, or for a dataset of the hub the library's fingerprint, which includes its version."""
    folder = _find_local_folder(source)
    if folder is None:
        return str(_load_dataset(source.path, source.subset, _get_split(source))._fingerprint)
    paths = files.list_files(str(folder)).files
    names = (files.get_relative_name(folder, file) for file in paths)
    return repr(list(zip(names, hash_files(paths), strict=True)))


def count_bytes(source: Source) -> int:
    """Return the size of the Arrow files that hold the rows."""
    return sum(file.stat().st_size for file in _list_arrow_files(source))


def _resolve_medium(content: bytes | None, path: str | None, *, roots: tuple[Path, ...]) -> bytes | Path | None:
    """Return the bytes of a medium, or its file if only a path is stored; never a file outside the dataset's folders."""
    if content is not None or path is None:
        return content
    file = Path(path).resolve()
    return file if any(file.is_relative_to(root) for root in roots) and file.is_file() else None


def _list_allowed_roots(source: Source) -> tuple[Path, ...]:
    """Return the folders that may hold files of the dataset: its own, and the caches of the library."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    caches = (os.environ.get(name) for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE"))
    roots = (_find_local_folder(source), home, *caches)
    return tuple(Path(root).expanduser().resolve() for root in roots if root)


def _find_local_folder(source: Source) -> Path | None:
    """Return the local folder of the dataset; None if it is on the hub."""
    assert source.path is not None
    root = Path(source.path).expanduser()
    if root.is_dir():
        return root
    if root.exists() or source.path.startswith((".", "/", "~")) or source.path.count("/") > 1:
        files.list_files(source.path)  # raises an error that names the missing file or folder
        raise DataError(f"{root} is a file; a Hugging Face dataset is a folder or a name such as owner/name")
    return None


def _get_split(source: Source) -> str | None:
    return source.split if isinstance(source.split, str) else None


def _import_datasets(path: str) -> Any:
    # The library reads this variable when it is imported: no usage reports on the user's behalf.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        import datasets
    except ImportError as error:
        raise EnvironmentProblem(f"{path}: reading it needs datasets; pip install 'bottega[hub]'") from error
    datasets.disable_progress_bars()
    for logger in ("datasets", "huggingface_hub"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    return datasets


def _list_arrow_files(source: Source) -> list[Path]:
    """Return the Arrow files whose rows, in order, are the dataset. A slice such as train[:10%] is written to new files."""
    dataset = _load_dataset(source.path, source.subset, _get_split(source))
    arrow_files = [Path(file["filename"]) for file in dataset.cache_files]
    if dataset._indices is None and sum(map(_count_rows, arrow_files)) == len(dataset):
        return arrow_files
    entry = get_or_build(
        default_cache() / "hub", dataset._fingerprint, lambda folder: dataset.save_to_disk(folder / "data")
    )
    return sorted((entry / "data").glob("*.arrow"))


def _count_rows(arrow_file: Path) -> int:
    return sum(batch.num_rows for batch in columns.iter_arrow_batches(arrow_file))


@lru_cache(maxsize=8)
def _load_dataset(path: str, subset: str | None, split: str | None) -> Any:
    """Load a dataset with the library: memory-mapped, nothing decoded."""
    library = _import_datasets(path)
    folder = _find_local_folder(Source(path=path))
    try:
        if folder is not None and (folder / "dataset_dict.json").is_file():
            return _choose_split(library.load_from_disk(folder), folder, split)
        if folder is not None and (folder / "state.json").is_file():
            if split is not None:
                raise UsageError(f"{folder} has a single split without a name; remove the key split")
            return library.load_from_disk(folder)
        if folder is not None:
            return library.load_dataset(str(folder), subset, split=split or DEFAULT_SPLIT)
        return _download(library, path, subset, split)
    except (UsageError, DataError, EnvironmentProblem):
        raise
    except Exception as error:
        raise _explain_error(path, error) from error


def _download(library: Any, path: str, subset: str | None, split: str | None) -> Any:
    with offline_if_hub_unreachable() as unreachable_reason:
        try:
            return library.load_dataset(path, subset, split=split or DEFAULT_SPLIT)
        except Exception as error:
            if unreachable_reason is None:
                raise
            raise EnvironmentProblem(
                f"{path} cannot be downloaded from the Hugging Face hub: {unreachable_reason}; check the network, or give the path of a "
                "copy"
            ) from error


def _choose_split(splits: Any, folder: Path, split: str | None) -> Any:
    if (split or DEFAULT_SPLIT) not in splits:
        raise DataError(f"{folder} has no split {split or DEFAULT_SPLIT!r}; set split to one of {', '.join(splits)}")
    return splits[split or DEFAULT_SPLIT]


def _explain_error(path: str, error: Exception) -> DataError | EnvironmentProblem:
    # Errors are recognised by name, because requests, httpx, huggingface_hub and datasets each have classes of their own.
    network_errors = {
        "ConnectionError",
        "OfflineModeIsEnabled",
        "LocalEntryNotFoundError",
        "HfHubHTTPError",
        "TransportError",
    }
    if network_errors & {error_type.__name__ for error_type in type(error).__mro__}:
        return EnvironmentProblem(
            f"{path} cannot be downloaded from the Hugging Face hub ({type(error).__name__}); check the network, or give "
            "the path of a copy"
        )
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    return DataError(f"{path} cannot be read as a Hugging Face dataset: {reason}")


FORMAT = Format(kind="huggingface", suffixes=frozenset(), read=read, list_pieces=list_pieces)
