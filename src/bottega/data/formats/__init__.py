"""A source of the recipe becomes files of one kind, cut into pieces that any process can read.

Each kind is one module with a FORMAT; it is imported when a source is of that kind, and its packages when it is read.
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
MEDIA = ("images", "audio", "video")

# What the records of a kind depend on besides the files. `field` and `label` choose among fields later.
OPTIONS = {
    "csv": ("columns", "delimiter"),
    "lines": ("columns", "delimiter"),
    "huggingface": ("split", "subset"),
    "idx": ("split",),
    "numpy": ("field",),
    **dict.fromkeys(MEDIA, ("columns", "delimiter")),
}

ProgressCallback = Callable[[str, int, int], None]
"""What is being done, how many bytes of how many."""

# In a folder of one kind, up to a quarter may be something else (a picture among texts); more is a mixture.
AGREEING = 0.75


@dataclass(frozen=True)
class SourceFiles:
    """A source with its files.

    A copy for another process is without them: reading a piece needs none, and 200,000 are 9 MB. (So are those that the
    `copy` module makes.)
    """

    source: Source
    """As in the recipe; the path is that of the copy where the recipe names one far away."""
    kind: str
    """Never auto. `shards` are ours, and are opened, not read."""
    root: Path
    files: list[Path] = field(compare=False, repr=False)
    split_name: str | None = None
    """Which of the named parts of a folder this is."""
    other_splits: tuple[str, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "files"}

    @property
    def format(self) -> Format:
        return get_format(self.kind)

    @property
    def is_media(self) -> bool:
        return self.kind != "shards" and self.format.is_media

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything the records depend on, wherever the files lie."""
        return self._hash(lambda stage, done, total: None)

    @cached_property
    def content(self) -> str:
        """A hash of the files that the records come from, however these are read."""
        self._hash(lambda stage, done, total: None)
        return str(vars(self)["content"])

    def hash_files(self, progress: ProgressCallback) -> None:
        """Compute the fingerprint now, which reads every file that was not hashed before, and say how far it is."""
        if "fingerprint" not in vars(self):
            vars(self)["fingerprint"] = self._hash(progress)

    def _hash(self, progress: ProgressCallback) -> str:
        options = [(name, getattr(self.source, name)) for name in OPTIONS.get(self.kind, ())]
        if self.source.pattern is not None:
            options.append(("pattern", self.source.pattern))
        digest = hashlib.sha256(f"{self.kind}\0{options}\0".encode())
        if self.kind == "huggingface":
            from bottega.data.formats.hub import hash_dataset

            version = hash_dataset(self.source).encode()
            digest.update(version)
            vars(self)["content"] = hashlib.sha256(version + f"\0{self.source.split or 'train'}".encode()).hexdigest()
            return digest.hexdigest()
        parts = [*self.files, *self._beside()]
        own, samples = set(self.files), hashlib.sha256()
        for file, content in zip(parts, hash_files(parts, partial(progress, "hash")), strict=True):
            # A table that the recipe names may lie anywhere, and is no other table there.
            name = self.relative_name(file) if file == self.root or file.is_relative_to(self.root) else file.name
            line = f"{name}\0{content}\0".encode(errors="surrogateescape")
            digest.update(line)
            if file in own:
                samples.update(line)
        vars(self)["content"] = samples.hexdigest()
        return digest.hexdigest()

    @property
    def total_bytes(self) -> int:
        """Of the files that pieces come from, packed as they are."""
        if self.kind == "huggingface":
            from bottega.data.formats.hub import count_bytes

            return count_bytes(self.source)
        return sum(file.stat().st_size for file in self.files)

    def list_pieces(self, size: int) -> list[Piece]:
        """All of it in order, in pieces of about `size` bytes where the kind can be cut."""
        cut = self.format.list_pieces
        return [piece for file in self.files for piece in cut(file, self.relative_name(file), self.source, size)]

    def read(self, piece: Piece) -> Iterator[Record | BadRecord]:
        records = self.format.read(piece, self.source)
        return (
            records if self.source.pattern is None else add_fields_from_names(records, re.compile(self.source.pattern))
        )

    def relative_name(self, file: Path) -> str:
        """What the keys of its records begin with."""
        return files.relative_name(self.root, file)

    def _beside(self) -> list[Path]:
        """Files that are no records and are read with them: tables about media, labels of images."""
        if self.kind == "idx":
            from bottega.data.formats import idx

            labels = (idx.find_labels(file) for file in self.files)
            return sorted({file for file in labels if file is not None} - set(self.files))
        if self.kind not in MEDIA:
            return []
        from bottega.data.formats.metadata import find_table

        root = self.root.parent if self.files == [self.root] else self.root
        one_each = {file.parent: file for file in self.files}
        tables = (find_table(file, root, self.source) for file in one_each.values())
        return sorted({table for table in tables if table is not None})


def find_files(source: Source) -> SourceFiles:
    """The files of a source and what they are. What lies far away is copied first, once."""
    if source.kind == "synthetic":
        raise UsageError("data of kind synthetic is made, not read; leave path out")
    if source.kind == "embedded" and source.path is not None:
        from bottega.data.formats import embedded

        source = embedded.resolve_named_texts(source)
    if source.kind == "embedded" or (source.kind == "auto" and source.path is None):
        from bottega.data.formats import embedded

        listing = embedded.list_standard_library()
        return SourceFiles(source, "embedded", listing.root, listing.files)
    if source.path is None:
        raise UsageError(f"data of kind {source.kind} needs a path")
    path = source.path
    if "://" in path:
        from bottega.data.formats.remote import download

        path = str(download(path))
        source = source.model_copy(update={"path": path})
    root = Path(path).expanduser()
    if source.more_paths:
        return _find_together(source, path)
    if source.kind == "huggingface" or (source.kind == "auto" and _is_saved_by_datasets(root)):
        return SourceFiles(source, "huggingface", root, [root])
    if source.kind in ("auto", "shards") and _is_prepared(root):
        return SourceFiles(source, "shards", root, files.list_files(path).files)
    if source.kind == "shards":
        raise DataError(f"{root} is no prepared data: a folder with meta.json is expected")
    listing = files.list_files(path)
    kind, chosen = _recognised(listing) if source.kind == "auto" else (source.kind, _of_kind(listing, source.kind))
    named = group_by_split(chosen) if listing.is_folder and kind != "idx" else {}
    if not named:
        return SourceFiles(source, kind, listing.root, chosen)
    wanted = normalize_split_name(source.split) if source.split is not None else "train"
    if wanted not in named:
        raise DataError(f"{root} has no part {source.split!r}; there is {', '.join(named)}")
    own = named[wanted]
    root = find_split_root(own, listing.root)
    others = tuple(sorted(set(named) - {wanted}))
    return SourceFiles(
        source.model_copy(update={"path": str(root)}), kind, root, own, split_name=wanted, other_splits=others
    )


def _find_together(source: Source, first: str) -> SourceFiles:
    """Several paths that are one source."""
    from bottega.data.formats.remote import download

    paths = [first, *(str(download(path)) if "://" in path else path for path in source.more_paths or ())]
    explicit = source.kind if source.kind != "auto" else None
    listing = files.list_files_of_all(
        paths, lambda part: _of_kind(part, explicit) if explicit else files.drop_documentation_files(part)
    )
    for path in paths:
        if _is_prepared(Path(path).expanduser()):
            raise UsageError(f"{path} holds shards, which are prepared already and stand alone as data.train")
    kind = explicit or _recognised(listing)[0]
    return SourceFiles(source, kind, listing.root, listing.files)


def add_fields_from_names(
    records: Iterator[Record | BadRecord], pattern: re.Pattern[str]
) -> Iterator[Record | BadRecord]:
    """Records with the fields that their names hold: 3_anna_12.wav says digit, speaker and take."""
    for record in records:
        found = pattern.search(record.key) if isinstance(record, Record) else None
        if isinstance(record, BadRecord):
            yield record
        elif found is None:
            yield BadRecord(
                record.key, record.where, f"its name {record.key!r} does not fit the pattern {pattern.pattern!r}"
            )
        else:
            yield record._replace(fields={**record.fields, **found.groupdict(default="")})


@cache
def get_format(kind: str) -> Format:
    module, _, name = FORMATS[kind].partition(".")
    found = getattr(import_module(f"{__name__}.{module}"), name)
    assert isinstance(found, Format)
    return found


@cache
def _kinds() -> dict[str, str]:
    """Which kind a suffix stands for. The first of FORMATS has those that two claim."""
    return {suffix: kind for kind in reversed(FORMATS) for suffix in get_format(kind).suffixes}


def _file_kind(file: Path) -> str | None:
    """By suffix, and where that tells nothing by content."""
    suffix = files.match_suffix(file.name, _kinds())
    if suffix == ".ts" and files.is_transport_stream(compression.read_head(file, files.HEAD_BYTES)):
        return "video"
    return files.detect_kind(file) if suffix is None else _kinds()[suffix]


def _recognised(listing: files.Listing) -> tuple[str, list[Path]]:
    if not listing.is_folder:
        kinds = {file: _file_kind(file) or _named_without_suffix(file) for file in listing.files}
        return _agreed(kinds, at_least=1.0), listing.files
    found = {file: kind for file in files.drop_documentation_files(listing) if (kind := _file_kind(file)) is not None}
    if not found:
        raise DataError(f"{listing.root} has no files that can be read (kinds: {', '.join(FORMATS)})")
    counted = found
    if any(kind in MEDIA for kind in found.values()):
        from bottega.data.formats.metadata import TABLES

        counted = {file: kind for file, kind in found.items() if file.name not in TABLES}
    kind = _agreed(counted, at_least=AGREEING)
    return kind, [file for file in found if found[file] == kind]


def _agreed(kinds: dict[Path, str], *, at_least: float) -> str:
    kind, count = Counter(kinds.values()).most_common(1)[0]
    if count < at_least * len(kinds):
        file = next(file for file in kinds if kinds[file] == kind)
        other = next(file for file in kinds if kinds[file] != kind)
        raise DataError(
            f"{file} is {kind} and {other} is {kinds[other]}; set kind to {kind} or {kinds[other]}, or name one of them"
        )
    return kind


def _named_without_suffix(file: Path) -> str:
    suffix = files.uncompressed_suffix(file.name)
    if suffix:
        kinds = ", ".join(kind for kind in FORMATS if kind not in ("embedded", "huggingface"))
        raise DataError(f"{file}: {suffix} is no suffix that is known here; set kind to one of {kinds}")
    return "text"


def _of_kind(listing: files.Listing, kind: str) -> list[Path]:
    """What was named is taken at its word; from a folder, what bears the suffix or has the content."""
    if not listing.is_folder:
        return listing.files
    known = get_format(kind).suffixes

    def belongs(file: Path) -> bool:
        if files.match_suffix(file.name, dict.fromkeys(known, kind)) is not None:
            return True
        return files.match_suffix(file.name, _kinds()) is None and files.detect_kind(file) == kind

    found = [file for file in files.drop_documentation_files(listing) if belongs(file)]
    if not found:
        what = "files with text" if kind == "text" else f"files of kind {kind}"
        raise DataError(f"{listing.root} has no {what} ({', '.join(sorted(known))})")
    return found


def _is_saved_by_datasets(root: Path) -> bool:
    names = ("state.json", "dataset_info.json")
    return (root / "dataset_dict.json").is_file() or all((root / name).is_file() for name in names)


def _is_prepared(root: Path) -> bool:
    return (root / "meta.json").is_file() and any(root.rglob("*.bin"))
