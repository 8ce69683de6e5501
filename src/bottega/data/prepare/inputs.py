"""What a recipe's data comes to before anything is read: sources, the tables their rows go to, and pieces of work."""

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
from bottega.data.tables.cache import default_cache, get_or_build

# A process is given so many bytes at a time: small enough to lose little when it is killed, large enough that the part
# it writes costs nothing to open again.
JOB_BYTES = 8 << 20
MEDIA_JOB_BYTES = 64 << 20
# Small files cost by their number. Progress is told after each job, and 50,000 thumbnails would be a single one.
MOST_ITEMS = 1000
NAMED_PARTS = ("huggingface", "idx")
# Kinds that hold nothing to learn from, by the field a task reads.
FOREIGN = {
    "text": ("images", "audio", "video", "idx"),
    "image": ("audio", "video", "text"),
    "audio": ("images", "text", "idx"),
    "video": ("images", "audio", "text"),
    "x": ("images", "audio", "video", "text"),
}
MEDIA = {"x": "numbers"}
IN_TEXT = ("text", "lines", "jsonl", "json", "csv")
"""Kinds whose files are text in some encoding."""


@dataclass(frozen=True)
class Input:
    """One source, and where its rows go."""

    found: SourceFiles
    table: str
    """train, or train.0 and so on; validation; test; replay."""
    is_split: bool = False
    """Shares of it go to validation and test."""
    source: int | None = None
    """Which of a sequence it is of; None where that does not matter or is not known."""


class Item(NamedTuple):
    """A piece of one input. `table` is set where a piece belongs to one as a whole: the end of a single text."""

    input: int
    piece: Piece
    bytes: int
    table: str | None = None
    ends: bool = True
    """Whether a text ends with this piece."""


@dataclass(frozen=True)
class Shares:
    """How much of train is kept back."""

    validation: float | None
    test: float | None

    def __bool__(self) -> bool:
        return bool(self.validation or self.test)


def collect_inputs(data: Data) -> tuple[tuple[Input, ...], Shares]:
    """Held-out sources come first: of two equal rows the first stays, and that should not be the one in train."""
    sources = data.sources or (data.train,)
    held_out = [("validation", data.validation), ("test", data.test)]
    shares = Shares(*(part.split if part and isinstance(part.split, float) else None for _, part in held_out))
    if (shares.validation or 0) + (shares.test or 0) >= 1:
        raise UsageError("data.validation.split and data.test.split leave nothing of train; their sum must be below 1")
    found = [
        Input(_find_held_out(_labelled(_own(part, sources[i or 0]), sources, i), name), name, source=i)
        for name, part in held_out
        if part is not None and not isinstance(part.split, float)
        for i in _told_apart(part, data)
    ]
    folds = data.split is not None and data.split.folds is not None
    for i, source in enumerate(sources):
        key = "data.train" if data.sources is None else f"data.sources.{i}"
        table = "train" if len(sources) == 1 else f"train.{i}"
        number = i if data.mixture == "sequence" else None
        found.append(Input(_find(source, key), table, is_split=bool(shares) or folds, source=number))
    if data.replay is not None:
        options = data.replay.model_dump(exclude={"share"})
        found.append(Input(_find(Source(**options), "data.replay"), "replay"))
    return tuple(found), shares


def check_medium(inputs: tuple[Input, ...], medium: str) -> None:
    for input in inputs:
        if input.found.kind in FOREIGN[medium]:
            raise DataError(
                f"{input.found.root} holds {input.found.kind}, and the task learns from {MEDIA.get(medium, medium)}; "
                "name other data, or set data.train.kind where that was guessed wrongly"
            )


def _own(part: HeldOut, train: Source) -> Source:
    """A held-out source of its own, read as train is; without a path it is another named part of where train is from."""
    options, trained = part.model_dump(), train.model_dump()
    if part.path is None and part.kind != "embedded":
        return Source(**{**trained, "split": part.split})
    alike = {
        name: trained[name]
        for name in ("field", "label", "columns", "delimiter", "pattern", "encoding")
        if options[name] is None
    }
    return Source(**{**options, **alike})


def _told_apart(part: HeldOut, data: Data) -> list[int | None]:
    """The sources of a sequence that held-out data can be divided by: each has a part of that name, or classes."""
    sources = data.sources or ()
    has_parts = part.path is None and part.kind != "embedded"
    if data.mixture != "sequence" or not (has_parts or all(source.labels for source in sources)):
        return [None]
    return list(range(len(sources)))


def _labelled(held_out: Source, sources: Sequence[Source], number: int | None) -> Source:
    """With the classes of the source that it measures, or of all of them together where it measures all."""
    wanted = sources if number is None else [sources[number]]
    chosen = [source.labels for source in wanted if source.labels is not None]
    every = tuple(dict.fromkeys(label for labels in chosen for label in labels)) if len(chosen) == len(wanted) else None
    return held_out.model_copy(update={"labels": held_out.labels if number is None and held_out.labels else every})


def _find_held_out(source: Source, table: str) -> SourceFiles:
    """Return the files of validation or test; of a folder with named parts those of that name, or else of the other one.

    Without a name a folder's part is train, which must not be measured.
    """
    found = _find(source, f"data.{table}")
    if source.split is not None:
        return found
    parts = list_splits(found.root) if found.kind == "idx" else found.other_splits
    order = (table, "test" if table == "validation" else "validation")
    chosen = next((part for part in order if part in parts), None)
    return found if chosen is None else _find(source.model_copy(update={"split": chosen}), f"data.{table}")


def _find(source: Source, key: str) -> SourceFiles:
    found = find_utf8_files(source)
    if found.kind == "shards":
        raise UsageError(f"{key}: {source.path} holds shards, which are prepared already and stand alone as data.train")
    if source.split is not None and found.split_name is None and found.kind not in NAMED_PARTS:
        raise UsageError(f"{key}.split: {found.kind} has no part named {source.split!r}; leave it out")
    is_packed_text = found.kind == "text" and len(found.files) == 1 and compression.is_compressed(found.files[0])
    return _unpacked(found) if is_packed_text else found


def find_utf8_files(source: Source) -> SourceFiles:
    """The files of a source, as copies in UTF-8 where it says that they are in another encoding."""
    found = find_files(source)
    if source.encoding in (None, "utf-8"):
        return found
    if found.kind not in IN_TEXT:
        raise UsageError(
            f"encoding: {found.root} is {found.kind}, which says by itself how its texts are written; leave it out"
        )
    names = [found.relative_name(file) for file in found.files]
    parts = [f"{content} {name}" for content, name in zip(hash_files(found.files), names, strict=True)]
    key = hashlib.sha256("\n".join([str(source.encoding), *parts]).encode(errors="surrogateescape")).hexdigest()[:32]

    def build(folder: Path) -> None:
        for file, name in zip(found.files, names, strict=True):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            _recode(file, folder / name, str(source.encoding))

    folder = get_or_build(default_cache() / "recoded", key, build)
    copies = [folder / name for name in names]
    root = copies[0] if found.files == [found.root] else folder
    changed = found.source.model_copy(update={"path": str(root), "more_paths": None})
    return replace(found, root=root, files=copies, source=changed)


def _recode(file: Path, copy: Path, encoding: str) -> None:
    decoder, read = codecs.getincrementaldecoder(encoding)(), 0
    with compression.open_decompressed(file) as stream, copy.open("wb") as out:
        while True:
            raw = stream.read(1 << 20)
            try:
                out.write(decoder.decode(raw, final=not raw).encode())
            except UnicodeError as error:
                place = f" from byte {read + error.start} on" if isinstance(error, UnicodeDecodeError) else ""
                raise DataError(f"{file} is not {encoding}{place}; name another data.train.encoding") from None
            read += len(raw)
            if not raw:
                return


def _unpacked(found: SourceFiles) -> SourceFiles:
    """A single text is cut where its end is kept back, and what is packed cannot be: so it is unpacked, once."""
    file = found.files[0]
    name = file.with_suffix("").name

    def build(folder: Path) -> None:
        with compression.open_decompressed(file) as packed, (folder / name).open("wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)

    key = hashlib.sha256(f"{hash_file(file)} {name}".encode(errors="surrogateescape")).hexdigest()[:32]
    plain = get_or_build(default_cache() / "unpacked", key, build) / name
    return replace(found, root=plain, files=[plain], source=found.source.model_copy(update={"path": str(plain)}))


def list_items(inputs: tuple[Input, ...], shares: Shares, *, cut_single_text: bool) -> list[Item]:
    """Every piece of every input, in order."""
    items: list[Item] = []
    for number, input in enumerate(inputs):
        size = MEDIA_JOB_BYTES if input.found.is_media else JOB_BYTES
        pieces = input.found.list_pieces(size)
        single = input.found.kind == "text" and len(input.found.files) == 1
        if single and input.is_split and cut_single_text:
            items += _cut(number, input, pieces, shares)
        else:
            items += [Item(number, piece, _bytes(piece)) for piece in pieces]
    return items


def _cut(number: int, input: Input, pieces: list[Piece], shares: Shares) -> list[Item]:
    """One text: its end is kept back, test last."""
    file = input.found.files[0]
    size = file.stat().st_size
    if size == 0:
        raise DataError(f"{file} is empty; give a file with text in it")
    validation = _boundary(file, int(size * (1 - (shares.validation or 0) - (shares.test or 0))))
    test = _boundary(file, int(size * (1 - (shares.test or 0)))) if shares.test else size
    borders = [(0, validation, input.table), (validation, test, "validation"), (test, size, "test")]
    wanted = [border for border in borders if border[2] == input.table or getattr(shares, border[2])]
    if any(start >= stop for start, stop, _ in wanted):
        share = shares.validation or shares.test
        raise DataError(f"{file} has {size} bytes, too few to keep {share:g} of it back")
    items = []
    for start, stop, table in wanted:
        for piece in pieces:
            low, high = max(start, piece.start), min(stop, size if piece.stop is None else piece.stop)
            if low < high:
                part = piece._replace(start=low, stop=high)
                items.append(Item(number, part, high - low, table, ends=high == stop))
    return items


def _boundary(file: Path, at: int) -> int:
    """The nearest place at or before `at` where a character of UTF-8 begins."""
    with file.open("rb") as stream:
        stream.seek(max(0, at - 3))
        head = stream.read(4)
    back = min(3, at)
    while back and len(head) > back and head[back] & 0xC0 == 0x80:
        back -= 1
        at -= 1
    return at


def _bytes(piece: Piece) -> int:
    """About: what counts rows rather than bytes has pieces of the size asked for."""
    try:
        size = piece.file.stat().st_size
    except OSError:
        return JOB_BYTES
    if piece.stop is None:
        return max(0, size - piece.start)
    return min(size, max(1, piece.stop - piece.start))


def group_into_jobs(items: list[Item], inputs: tuple[Input, ...]) -> tuple[tuple[Item, ...], ...]:
    """Items in groups of about equal bytes; a job is of one input, so that its parts are merged in order."""
    jobs: list[list[Item]] = []
    room, last = 0, -1
    for item in items:
        if item.input != last or item.bytes > room or len(jobs[-1]) >= MOST_ITEMS:
            jobs.append([])
            room = MEDIA_JOB_BYTES if inputs[item.input].found.is_media else JOB_BYTES
        jobs[-1].append(item)
        room -= item.bytes
        last = item.input
    return tuple(map(tuple, jobs))
