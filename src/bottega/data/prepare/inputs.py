"""Plan the inputs of a preparation before anything is read: sources, the tables their rows go to, and jobs."""

from __future__ import annotations

import codecs
import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from bottega.config.data import Data, HeldOut, Source
from bottega.core.errors import DataError, UsageError
from bottega.data.formats import SourceFiles, compression, find_files
from bottega.data.formats.fingerprint import hash_file, hash_files
from bottega.data.formats.idx import list_splits
from bottega.data.formats.reader import Piece
from bottega.data.tables.cache import get_or_build
from bottega.storage.cache_folder import default_cache

# Bytes per job: small enough to lose little when a process is killed, large enough that opening its results is cheap.
JOB_BYTES = 8 << 20
MEDIA_JOB_BYTES = 64 << 20
# Small files cost by number, and progress is reported per job: 50,000 thumbnails would otherwise be a single job.
MAX_ITEMS_PER_JOB = 1000
KINDS_WITH_SPLITS = ("huggingface", "idx")
# Kinds that cannot hold the field a task reads.
INCOMPATIBLE_KINDS = {
    "text": ("images", "audio", "video", "idx"),
    "image": ("audio", "video", "text"),
    "audio": ("images", "text", "idx"),
    "video": ("images", "audio", "text"),
    "x": ("images", "audio", "video", "text"),
}
MEDIUM_NAMES = {"x": "numbers"}
TEXT_KINDS = ("text", "lines", "jsonl", "json", "csv")
"""Kinds whose files are text in some encoding."""


@dataclass(frozen=True)
class Input:
    """One source and the table its rows go to."""

    source_files: SourceFiles
    table: str
    """train, or train.0 and so on; validation; test; replay."""
    is_split: bool = False
    """Whether fractions of its rows go to validation and test."""
    source_index: int | None = None
    """Number of its source in a sequence; None if there is no sequence or the source is unknown."""


class Item(NamedTuple):
    """A piece of one input, which is given by its index. `table` is set if the whole piece goes to one table, as the end of a
    single text does."""

    input: int
    piece: Piece
    bytes: int
    table: str | None = None
    is_text_end: bool = True
    """Whether the text ends with this piece."""


@dataclass(frozen=True)
class Shares:
    """The fractions of train that are held out. Class and field names are part of the key of prepared data, through repr."""

    validation: float | None
    test: float | None

    def __bool__(self) -> bool:
        return bool(self.validation or self.test)


def collect_inputs(data: Data) -> tuple[tuple[Input, ...], Shares]:
    """Return the inputs of a recipe and the fractions that are held out.

    Held-out sources come first: of two duplicates the first is kept, and this must be the held-out one.
    """
    sources = data.sources or (data.train,)
    sections = [("validation", data.validation), ("test", data.test)]
    fractions = Shares(
        *(section.split if section and isinstance(section.split, float) else None for _, section in sections)
    )
    if (fractions.validation or 0) + (fractions.test or 0) >= 1:
        raise UsageError(
            "data.validation.split and data.test.split leave nothing to train on; their sum must be below 1"
        )
    inputs = [
        Input(
            _find_held_out(_restrict_to_classes(_build_held_out_source(section, sources[i or 0]), sources, i), name),
            name,
            source_index=i,
        )
        for name, section in sections
        if section is not None and not isinstance(section.split, float)
        for i in _list_evaluated_sources(section, data)
    ]
    has_folds = data.split is not None and data.split.folds is not None
    for i, source in enumerate(sources):
        key = "data.train" if data.sources is None else f"data.sources.{i}"
        table = "train" if len(sources) == 1 else f"train.{i}"
        source_index = i if data.mixture == "sequence" else None
        inputs.append(
            Input(
                _find_source_files(source, key), table, is_split=bool(fractions) or has_folds, source_index=source_index
            )
        )
    if data.replay is not None:
        options = data.replay.model_dump(exclude={"share"})
        inputs.append(Input(_find_source_files(Source(**options), "data.replay"), "replay"))
    return tuple(inputs), fractions


def check_medium(inputs: tuple[Input, ...], medium: str) -> None:
    """Raise DataError for a source whose kind cannot hold the medium a task reads."""
    for input in inputs:
        if input.source_files.kind in INCOMPATIBLE_KINDS[medium]:
            raise DataError(
                f"{input.source_files.root} contains {input.source_files.kind}, but the task needs "
                f"{MEDIUM_NAMES.get(medium, medium)}; "
                "give other data, or set data.train.kind if it was detected wrongly"
            )


def _build_held_out_source(section: HeldOut, train: Source) -> Source:
    """Return the source of held-out data, read like train; without a path it is another split of train's source."""
    options, train_options = section.model_dump(), train.model_dump()
    if section.path is None and section.kind != "embedded":
        return Source(**{**train_options, "split": section.split})
    inherited = {
        name: train_options[name]
        for name in ("field", "label", "columns", "delimiter", "pattern", "encoding")
        if options[name] is None
    }
    return Source(**{**options, **inherited})


def _list_evaluated_sources(section: HeldOut, data: Data) -> list[int | None]:
    """Return the indices of the sources that held-out data is read for, one by one; [None] reads it for all sources at once.

    A sequence reads it for each source, if each source has the split or lists its own classes.
    """
    sources = data.sources or ()
    has_splits = section.path is None and section.kind != "embedded"
    if data.mixture != "sequence" or not (has_splits or all(source.labels for source in sources)):
        return [None]
    return list(range(len(sources)))


def _restrict_to_classes(held_out: Source, sources: Sequence[Source], source_index: int | None) -> Source:
    """Return a held-out source with the classes of the training source that it evaluates, or of all of them."""
    evaluated = sources if source_index is None else [sources[source_index]]
    class_lists = [source.labels for source in evaluated if source.labels is not None]
    union = (
        tuple(dict.fromkeys(label for labels in class_lists for label in labels))
        if len(class_lists) == len(evaluated)
        else None
    )
    return held_out.model_copy(
        update={"labels": held_out.labels if source_index is None and held_out.labels else union}
    )


def _find_held_out(source: Source, table: str) -> SourceFiles:
    """Return the files of validation or test; for a folder with named splits, of the split of that name.

    If there is no such split, validation uses test and test uses validation; by default a folder's split would be train,
    which must not be evaluated.
    """
    files = _find_source_files(source, f"data.{table}")
    if source.split is not None:
        return files
    splits = list_splits(files.root) if files.kind == "idx" else files.other_splits
    candidates = (table, "test" if table == "validation" else "validation")
    split_name = next((split for split in candidates if split in splits), None)
    return (
        files
        if split_name is None
        else _find_source_files(source.model_copy(update={"split": split_name}), f"data.{table}")
    )


def _find_source_files(source: Source, key: str) -> SourceFiles:
    files = find_utf8_files(source)
    if files.kind == "shards":
        raise UsageError(f"{key}: {source.path} contains prepared shards, which can only be given alone, as data.train")
    if source.split is not None and files.split_name is None and files.kind not in KINDS_WITH_SPLITS:
        raise UsageError(f"{key}.split: {files.kind} has no split named {source.split!r}; remove it")
    is_compressed_text = files.kind == "text" and len(files.paths) == 1 and compression.is_compressed(files.paths[0])
    return _decompress(files) if is_compressed_text else files


def find_utf8_files(source: Source) -> SourceFiles:
    """Return the files of a source, or copies in UTF-8 if it gives another encoding."""
    files = find_files(source)
    if source.encoding in (None, "utf-8"):
        return files
    if files.kind not in TEXT_KINDS:
        raise UsageError(
            f"encoding: {files.root} is {files.kind}, which defines its own text encoding; remove encoding"
        )
    names = [files.get_relative_name(file) for file in files.paths]
    hashes = [f"{content} {name}" for content, name in zip(hash_files(files.paths), names, strict=True)]
    key = hashlib.sha256("\n".join([str(source.encoding), *hashes]).encode(errors="surrogateescape")).hexdigest()[:32]

    def build(folder: Path) -> None:
        for file, name in zip(files.paths, names, strict=True):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            _convert_to_utf8(file, folder / name, str(source.encoding))

    folder = get_or_build(default_cache() / "recoded", key, build)
    copies = [folder / name for name in names]
    root = copies[0] if files.paths == [files.root] else folder
    recoded_source = files.source.model_copy(update={"path": str(root), "more_paths": None})
    return replace(files, root=root, paths=copies, source=recoded_source)


def _convert_to_utf8(file: Path, copy: Path, encoding: str) -> None:
    decoder, num_bytes_read = codecs.getincrementaldecoder(encoding)(), 0
    with compression.open_decompressed(file) as stream, copy.open("wb") as out:
        while True:
            chunk = stream.read(1 << 20)
            try:
                out.write(decoder.decode(chunk, final=not chunk).encode())
            except UnicodeError as error:
                where = f" from byte {num_bytes_read + error.start} on" if isinstance(error, UnicodeDecodeError) else ""
                raise DataError(f"{file} is not {encoding}{where}; set another data.train.encoding") from None
            num_bytes_read += len(chunk)
            if not chunk:
                return


def _decompress(files: SourceFiles) -> SourceFiles:
    """Decompress a single text, once: its end may be held out, and a compressed file cannot be cut."""
    file = files.paths[0]
    name = file.with_suffix("").name

    def build(folder: Path) -> None:
        with compression.open_decompressed(file) as compressed_stream, (folder / name).open("wb") as out:
            shutil.copyfileobj(compressed_stream, out, 1 << 20)

    key = hashlib.sha256(f"{hash_file(file)} {name}".encode(errors="surrogateescape")).hexdigest()[:32]
    text_file = get_or_build(default_cache() / "unpacked", key, build) / name
    return replace(
        files, root=text_file, paths=[text_file], source=files.source.model_copy(update={"path": str(text_file)})
    )


def list_items(inputs: tuple[Input, ...], fractions: Shares, *, cut_single_text: bool) -> list[Item]:
    """Return every piece of every input, in order."""
    items: list[Item] = []
    for number, input in enumerate(inputs):
        job_bytes = MEDIA_JOB_BYTES if input.source_files.is_media else JOB_BYTES
        pieces = input.source_files.list_pieces(job_bytes)
        is_single_text = input.source_files.kind == "text" and len(input.source_files.paths) == 1
        if is_single_text and input.is_split and cut_single_text:
            items += _cut_text(number, input, pieces, fractions)
        else:
            items += [Item(number, piece, _estimate_bytes(piece)) for piece in pieces]
    return items


def _cut_text(number: int, input: Input, pieces: list[Piece], fractions: Shares) -> list[Item]:
    """Cut a single text by bytes: the beginning goes to train, then follow validation and test."""
    file = input.source_files.paths[0]
    size = file.stat().st_size
    if size == 0:
        raise DataError(f"{file} is empty; give a file with data in it")
    validation_start = _find_character_start(
        file, int(size * (1 - (fractions.validation or 0) - (fractions.test or 0)))
    )
    test_start = _find_character_start(file, int(size * (1 - (fractions.test or 0)))) if fractions.test else size
    all_ranges = [
        (0, validation_start, input.table),
        (validation_start, test_start, "validation"),
        (test_start, size, "test"),
    ]
    ranges = [entry for entry in all_ranges if entry[2] == input.table or getattr(fractions, entry[2])]
    if any(start >= stop for start, stop, _ in ranges):
        fraction = fractions.validation or fractions.test
        raise DataError(
            f"{file} has {size} bytes, too few to hold out a fraction of {fraction:g}; add text or raise the split"
        )
    items = []
    for start, stop, table in ranges:
        for piece in pieces:
            low, high = max(start, piece.start), min(stop, size if piece.stop is None else piece.stop)
            if low < high:
                cut_piece = piece._replace(start=low, stop=high)
                items.append(Item(number, cut_piece, high - low, table, is_text_end=high == stop))
    return items


def _find_character_start(file: Path, offset: int) -> int:
    """Return the last offset at or before `offset` where a UTF-8 character begins."""
    with file.open("rb") as stream:
        stream.seek(max(0, offset - 3))
        surrounding_bytes = stream.read(4)
    position = min(3, offset)
    while position and len(surrounding_bytes) > position and surrounding_bytes[position] & 0xC0 == 0x80:
        position -= 1
        offset -= 1
    return offset


def _estimate_bytes(piece: Piece) -> int:
    """Return the approximate size of a piece; pieces counted in rows have about the requested size."""
    try:
        size = piece.file.stat().st_size
    except OSError:
        return JOB_BYTES
    if piece.stop is None:
        return max(0, size - piece.start)
    return min(size, max(1, piece.stop - piece.start))


def group_into_jobs(items: list[Item], inputs: tuple[Input, ...]) -> tuple[tuple[Item, ...], ...]:
    """Group items into jobs of about equal size; a job is of one input, so that results are merged in order."""
    jobs: list[list[Item]] = []
    remaining_bytes, last_input = 0, -1
    for item in items:
        if item.input != last_input or item.bytes > remaining_bytes or len(jobs[-1]) >= MAX_ITEMS_PER_JOB:
            jobs.append([])
            remaining_bytes = MEDIA_JOB_BYTES if inputs[item.input].source_files.is_media else JOB_BYTES
        jobs[-1].append(item)
        remaining_bytes -= item.bytes
        last_input = item.input
    return tuple(map(tuple, jobs))
