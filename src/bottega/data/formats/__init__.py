"""File formats: find the files of a recipe's source, detect their format, and cut them into pieces for worker processes.

Each format is one module. It is imported when a source is of that kind, and the packages it needs when a file is read.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from bottega.config.data import Source
from bottega.core.errors import DataError, UsageError
from bottega.data.formats import compression, files
from bottega.data.formats.fingerprint import hash_files
from bottega.data.formats.reader import Format, Piece
from bottega.data.formats.split_names import find_split_root, group_by_split, normalize_split_name
from bottega.data.records.record import BadRecord, Record

FORMATS = {
    "embedded": "embedded.FORMAT",
    "text": "text.FORMAT",
    "lines": "lines.FORMAT",
    "jsonl": "jsonlines.FORMAT",
    "json": "jsonlist.FORMAT",
    "csv": "table.FORMAT",
    "parquet": "columns.PARQUET",
    "arrow": "columns.ARROW",
    "huggingface": "hub.FORMAT",
    "tfrecord": "tfrecord.FORMAT",
    "webdataset": "tar.FORMAT",
    "images": "folders.IMAGES",
    "audio": "folders.AUDIO",
    "video": "folders.VIDEO",
    "idx": "idx.FORMAT",
    "numpy": "arrays.FORMAT",
}
MEDIA_KINDS = ("images", "audio", "video")

# Options of a source that change its records, by kind. `field` and `label` only choose among fields later.
OPTIONS_BY_KIND = {
    "csv": ("columns", "delimiter"),
    "lines": ("columns", "delimiter"),
    "huggingface": ("split", "subset"),
    "idx": ("split",),
    "numpy": ("field",),
    **dict.fromkeys(MEDIA_KINDS, ("columns", "delimiter")),
}

ProgressCallback = Callable[[str, int, int], None]
"""Called with the stage, the bytes done and the bytes in total."""

# Up to a quarter of the files of a folder may be of other kinds (an image among texts); if more are, the recipe must set
# the kind.
MIN_AGREEMENT = 0.75


@dataclass(frozen=True)
class SourceFiles:
    """The files of a source and the format they are read with.

    Copies, pickled or made by `copy`, leave out the list of files: reading a piece does not need it, and 200,000 paths
    are 9 MB.
    """

    source: Source
    """The source of the recipe. Its path is local: the copy of a remote source, or the folder of the chosen split."""
    kind: str
    """Never auto. `shards` is prepared data, which is opened rather than read."""
    root: Path
    paths: list[Path] = field(compare=False, repr=False)
    split_name: str | None = None
    """The split that these files belong to, if the files or sub-folders of the source name splits."""
    other_splits: tuple[str, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "paths"}

    @property
    def format(self) -> Format:
        return get_format(self.kind)

    @property
    def is_media(self) -> bool:
        """Whether its records are images, audio or video."""
        return self.kind != "shards" and self.format.is_media

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything the records depend on; independent of where the files are stored."""
        return self._compute_fingerprint(lambda stage, done, total: None)

    @cached_property
    def content_hash(self) -> str:
        """Hash of the files that hold the records, independent of the options they are read with."""
        self._compute_fingerprint(lambda stage, done, total: None)
        return str(vars(self)["content_hash"])

    def precompute_fingerprint(self, progress: ProgressCallback) -> None:
        """Compute the fingerprint now and report progress; every file whose hash is not cached is read."""
        if "fingerprint" not in vars(self):
            vars(self)["fingerprint"] = self._compute_fingerprint(progress)

    def _compute_fingerprint(self, progress: ProgressCallback) -> str:
        """Return the fingerprint, and store `content_hash`, which needs the hashes of the same files."""
        options = [(name, getattr(self.source, name)) for name in OPTIONS_BY_KIND.get(self.kind, ())]
        if self.source.pattern is not None:
            options.append(("pattern", self.source.pattern))
        digest = hashlib.sha256(f"{self.kind}\0{options}\0".encode())
        if self.kind == "huggingface":
            from bottega.data.formats.hub import hash_dataset

            version = hash_dataset(self.source).encode()
            digest.update(version)
            vars(self)["content_hash"] = hashlib.sha256(
                version + f"\0{self.source.split or 'train'}".encode()
            ).hexdigest()
            return digest.hexdigest()
        paths = [*self.paths, *self._list_auxiliary_files()]
        record_files, content_digest = set(self.paths), hashlib.sha256()
        for file, file_hash in zip(paths, hash_files(paths, partial(progress, "hash")), strict=True):
            # A metadata table named by the recipe may be outside the root; its location does not matter.
            name = self.get_relative_name(file) if file == self.root or file.is_relative_to(self.root) else file.name
            entry = f"{name}\0{file_hash}\0".encode(errors="surrogateescape")
            digest.update(entry)
            if file in record_files:
                content_digest.update(entry)
        vars(self)["content_hash"] = content_digest.hexdigest()
        return digest.hexdigest()

    @property
    def total_bytes(self) -> int:
        """Size of the files on disk; a compressed file counts with its compressed size."""
        if self.kind == "huggingface":
            from bottega.data.formats.hub import count_bytes

            return count_bytes(self.source)
        return sum(file.stat().st_size for file in self.paths)

    def list_pieces(self, size: int) -> list[Piece]:
        """Return all pieces in order, of about `size` bytes each if files of the format can be cut."""
        list_file_pieces = self.format.list_pieces
        return [
            piece
            for file in self.paths
            for piece in list_file_pieces(file, self.get_relative_name(file), self.source, size)
        ]

    def read(self, piece: Piece) -> Iterator[Record | BadRecord]:
        """Yield the records of one piece, with the fields that `pattern` finds in their names."""
        records = self.format.read(piece, self.source)
        return (
            records if self.source.pattern is None else add_fields_from_names(records, re.compile(self.source.pattern))
        )

    def get_relative_name(self, file: Path) -> str:
        """Return the path of `file` below the root, printable: the prefix of the keys of its records."""
        return files.get_relative_name(self.root, file)

    def _list_auxiliary_files(self) -> list[Path]:
        """Return files that are read along with the records: metadata tables of media, label files of IDX images."""
        if self.kind == "idx":
            from bottega.data.formats import idx

            labels = (idx.find_labels(file) for file in self.paths)
            return sorted({file for file in labels if file is not None} - set(self.paths))
        if self.kind not in MEDIA_KINDS:
            return []
        from bottega.data.formats.metadata import find_table

        root = self.root.parent if self.paths == [self.root] else self.root
        file_by_folder = {file.parent: file for file in self.paths}
        tables = (find_table(file, root, self.source) for file in file_by_folder.values())
        return sorted({table for table in tables if table is not None})


def find_files(source: Source) -> SourceFiles:
    """Return the files of a source and their format. Remote files are downloaded first, once."""
    if source.kind == "synthetic":
        raise UsageError("data of kind synthetic is generated and has no files; remove path")
    if source.kind == "embedded" and source.path is not None:
        from bottega.data.formats import embedded

        source = embedded.resolve_named_texts(source)
    if source.kind == "embedded" or (source.kind == "auto" and source.path is None):
        from bottega.data.formats import embedded

        listing = embedded.list_standard_library()
        return SourceFiles(source, "embedded", listing.root, listing.files)
    if source.path is None:
        raise UsageError(f"data of kind {source.kind} needs a path; set data.train.path")
    path = source.path
    if "://" in path:
        from bottega.data.formats.remote import download

        path = str(download(path))
        source = source.model_copy(update={"path": path})
    root = Path(path).expanduser()
    if source.more_paths:
        return _find_files_of_paths(source, path)
    if source.kind == "huggingface" or (source.kind == "auto" and _is_saved_by_datasets(root)):
        return SourceFiles(source, "huggingface", root, [root])
    if source.kind in ("auto", "shards") and _is_prepared(root):
        return SourceFiles(source, "shards", root, files.list_files(path).files)
    if source.kind == "shards":
        raise DataError(
            f"{root} is not prepared data: expected a folder with meta.json; run `bottega prepare --out` to write one"
        )
    listing = files.list_files(path)
    kind, chosen_files = (
        _detect_kind(listing) if source.kind == "auto" else (source.kind, _select_files_of_kind(listing, source.kind))
    )
    splits = group_by_split(chosen_files) if listing.is_folder and kind != "idx" else {}
    if not splits:
        return SourceFiles(source, kind, listing.root, chosen_files)
    split = normalize_split_name(source.split) if source.split is not None else "train"
    if split not in splits:
        raise DataError(f"{root} has no split {source.split!r}; set split to one of {', '.join(splits)}")
    split_files = splits[split]
    root = find_split_root(split_files, listing.root)
    other_splits = tuple(sorted(set(splits) - {split}))
    return SourceFiles(
        source.model_copy(update={"path": str(root)}),
        kind,
        root,
        split_files,
        split_name=split,
        other_splits=other_splits,
    )


def _find_files_of_paths(source: Source, first_path: str) -> SourceFiles:
    """Return the files of several paths as one source."""
    from bottega.data.formats.remote import download

    paths = [first_path, *(str(download(path)) if "://" in path else path for path in source.more_paths or ())]
    explicit_kind = source.kind if source.kind != "auto" else None
    listing = files.list_files_of_paths(
        paths,
        lambda folder_listing: (
            _select_files_of_kind(folder_listing, explicit_kind)
            if explicit_kind
            else files.drop_documentation_files(folder_listing)
        ),
    )
    for path in paths:
        if _is_prepared(Path(path).expanduser()):
            raise UsageError(
                f"{path} contains prepared shards, which cannot be joined with other paths; give it alone as data.train"
            )
    kind = explicit_kind or _detect_kind(listing)[0]
    return SourceFiles(source, kind, listing.root, listing.files)


def add_fields_from_names(
    records: Iterator[Record | BadRecord], pattern: re.Pattern[str]
) -> Iterator[Record | BadRecord]:
    """Add the named groups of `pattern`, matched against each key, as fields: 3_anna_12.wav gives digit, speaker and take."""
    for record in records:
        match = pattern.search(record.key) if isinstance(record, Record) else None
        if isinstance(record, BadRecord):
            yield record
        elif match is None:
            yield BadRecord(
                record.key, record.where, f"its name {record.key!r} does not match the pattern {pattern.pattern!r}"
            )
        else:
            yield record._replace(fields={**record.fields, **match.groupdict(default="")})


@cache
def get_format(kind: str) -> Format:
    """Return the format of a kind, importing its module."""
    module, _, name = FORMATS[kind].partition(".")
    format = getattr(import_module(f"{__name__}.{module}"), name)
    assert isinstance(format, Format)
    return format


@cache
def _map_suffixes_to_kinds() -> dict[str, str]:
    """Map each suffix to its kind; if two formats claim a suffix, it belongs to the one listed first in FORMATS."""
    return {suffix: kind for kind in reversed(FORMATS) for suffix in get_format(kind).suffixes}


def _detect_file_kind(file: Path) -> str | None:
    """Return the kind of a file by its suffix, or by its content if the suffix is unknown."""
    suffix = files.match_suffix(file.name, _map_suffixes_to_kinds())
    if suffix == ".ts" and files.is_transport_stream(compression.read_head(file, files.HEAD_BYTES)):
        return "video"
    return files.detect_kind(file) if suffix is None else _map_suffixes_to_kinds()[suffix]


def _detect_kind(listing: files.Listing) -> tuple[str, list[Path]]:
    if not listing.is_folder:
        kinds = {file: _detect_file_kind(file) or _assume_text(file) for file in listing.files}
        return _choose_common_kind(kinds, min_share=1.0), listing.files
    kinds = {
        file: kind for file in files.drop_documentation_files(listing) if (kind := _detect_file_kind(file)) is not None
    }
    if not kinds:
        raise DataError(f"{listing.root} has no file of a supported kind ({', '.join(FORMATS)})")
    data_kinds = kinds
    if any(kind in MEDIA_KINDS for kind in kinds.values()):
        from bottega.data.formats.metadata import TABLE_NAMES

        data_kinds = {file: kind for file, kind in kinds.items() if file.name not in TABLE_NAMES}
    kind = _choose_common_kind(data_kinds, min_share=MIN_AGREEMENT)
    return kind, [file for file in kinds if kinds[file] == kind]


def _choose_common_kind(kinds: dict[Path, str], *, min_share: float) -> str:
    kind, count = Counter(kinds.values()).most_common(1)[0]
    if count < min_share * len(kinds):
        file = next(file for file in kinds if kinds[file] == kind)
        other_file = next(file for file in kinds if kinds[file] != kind)
        raise DataError(
            f"{file} is {kind} and {other_file} is {kinds[other_file]}; set kind to {kind} or {kinds[other_file]}, or give the path of one of them"
        )
    return kind


def _assume_text(file: Path) -> str:
    suffix = files.get_uncompressed_suffix(file.name)
    if suffix:
        kinds = ", ".join(kind for kind in FORMATS if kind not in ("embedded", "huggingface"))
        raise DataError(f"{file}: unknown suffix {suffix}; set kind to one of {kinds}")
    return "text"


def _select_files_of_kind(listing: files.Listing, kind: str) -> list[Path]:
    """Return the listed files of a kind: all of them if each was named; from a folder, the files whose suffix or content fits."""
    if not listing.is_folder:
        return listing.files
    suffixes = get_format(kind).suffixes

    def is_of_kind(file: Path) -> bool:
        if files.match_suffix(file.name, dict.fromkeys(suffixes, kind)) is not None:
            return True
        return files.match_suffix(file.name, _map_suffixes_to_kinds()) is None and files.detect_kind(file) == kind

    matching = [file for file in files.drop_documentation_files(listing) if is_of_kind(file)]
    if not matching:
        description = "files with text" if kind == "text" else f"files of kind {kind}"
        raise DataError(f"{listing.root} has no {description} ({', '.join(sorted(suffixes))})")
    return matching


def _is_saved_by_datasets(root: Path) -> bool:
    names = ("state.json", "dataset_info.json")
    return (root / "dataset_dict.json").is_file() or all((root / name).is_file() for name in names)


def _is_prepared(root: Path) -> bool:
    return (root / "meta.json").is_file() and any(root.rglob("*.bin"))
