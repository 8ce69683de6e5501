"""Which files a path names: one, those of a folder, or those of a pattern; and what a file is by its name or first bytes."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from bottega.core.errors import DataError, UsageError
from bottega.data.formats import compression
from bottega.data.formats.reader import make_printable
from bottega.similar_names import find_similar_names

# What lies at the top of a folder of data to explain it, and is not the data.
DOCUMENTATION_NAMES = re.compile(
    r"(readme|licen[cs]e|copying|notice|source|sources|citation|changelog|authors)(\.(md|txt|rst|html))?", re.IGNORECASE
)
RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
MAX_EXPANDED = 1_000_000

HEAD_BYTES = 512
_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "images"),
    (b"\xff\xd8\xff", "images"),
    (b"GIF8", "images"),
    (b"fLaC", "audio"),
    (b"OggS", "audio"),
    (b"ID3", "audio"),
    (b"\x1a\x45\xdf\xa3", "video"),
    (b"PAR1", "parquet"),
    (b"ARROW1", "arrow"),
    (b"\x93NUMPY", "numpy"),
    (b"\x00\x00\x08\x01", "idx"),
    (b"\x00\x00\x08\x03", "idx"),
)
_RIFF = {b"WAVE": "audio", b"AVI ": "video", b"WEBP": "images"}
_FTYP = {b"M4A ": "audio", b"avif": "images", b"heic": "images"}


class Listing(NamedTuple):
    root: Path
    """What names are relative to; the file itself where there is only one."""
    files: list[Path]
    is_folder: bool
    """Found in a folder, where other files may lie as well; otherwise each one was named."""


def list_files(path: str) -> Listing:
    """Every file that `path` names, hidden ones left out, in the order of their names."""
    root = Path(path).expanduser()
    if root.is_file():
        return Listing(root, [root], is_folder=False)
    if root.is_dir():
        return Listing(root, _folder_files(root), is_folder=True)
    if RANGE.search(path) or glob.has_magic(path):
        files = sorted(_matches(path), key=Path.as_posix)
        return Listing(Path(os.path.commonpath([file.parent for file in files])), files, is_folder=False)
    if root.exists():
        raise DataError(f"{root} is neither a file nor a folder")
    raise _missing(root, path)


def list_files_of_all(paths: Sequence[str], choose: Callable[[Listing], list[Path]]) -> Listing:
    """The files of several paths, in the order of the paths; of folders, those that `choose` takes."""
    parts = [list_files(path) for path in paths]
    files = [file for part in parts for file in (choose(part) if part.is_folder else part.files)]
    files = list(dict.fromkeys(files))
    if not files:
        raise DataError(f"{', '.join(paths)}: no files in any of them; name files or folders that hold the data")
    root = Path(os.path.commonpath([file.absolute().parent for file in files]))
    return Listing(root, [file.absolute() for file in files], is_folder=False)


def relative_name(root: Path, file: Path) -> str:
    return make_printable(file.name if file == root else file.relative_to(root).as_posix())


def drop_documentation_files(listing: Listing) -> list[Path]:
    """The files of a folder less the notes at its top, unless there is nothing else."""
    data = [
        file for file in listing.files if file.parent != listing.root or not DOCUMENTATION_NAMES.fullmatch(file.name)
    ]
    return data or listing.files


def match_suffix(name: str, known: Mapping[str, str]) -> str | None:
    """The longest ending of a name that is known: .tar.gz before .gz."""
    parts = name.lower().split(".")
    endings = ("." + ".".join(parts[-count:]) for count in (3, 2, 1) if len(parts) > count)
    return next((ending for ending in endings if ending in known), None)


def uncompressed_suffix(name: str) -> str:
    """The suffix without that of a packing; empty where the name has none."""
    path = Path(name.lower())
    return Path(path.stem).suffix if path.suffix in compression.SUFFIXES else path.suffix


def detect_kind(file: Path) -> str | None:
    """What the first bytes say, unpacked where they are packed; None where they say nothing."""
    head = compression.read_head(file, HEAD_BYTES)
    if head[:4] == b"RIFF":
        return _RIFF.get(head[8:12])
    if head[4:8] == b"ftyp":
        return _FTYP.get(head[8:12], "video")
    if head[257:262] == b"ustar":
        return "webdataset"
    if is_transport_stream(head):
        return "video"
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            return kind
    from bottega.data.formats import tfrecord

    return "tfrecord" if tfrecord.is_tfrecord(head) else None


def is_transport_stream(head: bytes) -> bool:
    """MPEG's packets of 188 bytes, each with a G in front. Their suffix, .ts, is also that of TypeScript."""
    return head[:1] == head[188:189] == head[376:377] == b"G"


def expand_ranges(pattern: str) -> Iterator[str]:
    """WebDataset's way to name shards: data-{000000..000012}.tar is thirteen names."""
    found = RANGE.search(pattern)
    if not found:
        yield pattern
        return
    first, last = found.groups()
    # Zeros in front of the first number set the width of all of them, as in a shell.
    width = len(first) if first.startswith("0") else 0
    if abs(int(last) - int(first)) >= MAX_EXPANDED:
        raise UsageError(f"{pattern} names {abs(int(last) - int(first)) + 1:,} files; {MAX_EXPANDED:,} is the most")
    step = 1 if int(last) >= int(first) else -1
    for number in range(int(first), int(last) + step, step):
        yield from expand_ranges(f"{pattern[: found.start()]}{number:0{width}}{pattern[found.end() :]}")


def _matches(path: str) -> set[Path]:
    files: set[Path] = set()
    for pattern in expand_ranges(path):
        matches = glob.glob(str(Path(pattern).expanduser()), recursive=True)
        found = [Path(match) for match in matches if os.path.isfile(match)]
        if glob.has_magic(pattern):
            _refuse_links(found, _fixed(pattern))
        if not found:
            of = "" if pattern == path else f", which {path} asks for"
            raise DataError(f"no file matches {pattern}{of}")
        files.update(found)
    return files


def _fixed(pattern: str) -> Path:
    """The folder of a pattern in front of its first wildcard."""
    path = Path(pattern).expanduser()
    return next(parent for parent in path.parents if not glob.has_magic(str(parent)))


def _refuse_links(paths: Iterable[Path], root: Path) -> None:
    """A link below a folder may lead anywhere on this machine, and whoever packed the folder chose where."""
    real, is_link = root.resolve(), cache(Path.is_symlink)
    for path in paths:
        # os.walk enters no link, and a pattern does: then what leads out is a folder above the file.
        below = (path, *path.parents)[: len(path.parts) - len(root.parts)]
        for link in filter(is_link, reversed(below)):
            try:
                target = link.resolve()
            except (OSError, RuntimeError):
                break  # links in a circle are no files
            if not target.is_relative_to(real):
                raise DataError(
                    f"{make_printable(str(link))} is a link to {make_printable(str(target))}, outside {root}; copy that into the "
                    "folder, or name it as a source of its own"
                )


def _folder_files(root: Path) -> list[Path]:
    names: list[str] = []
    links: list[Path] = []
    waiting = [str(root)]
    while waiting:
        # The kind of an entry comes with its name; a look at each file would take twenty times as long.
        with _scanned(waiting.pop()) as entries:
            for entry in entries:
                if entry.name.startswith(".") or entry.name == "__pycache__":
                    continue
                if entry.is_symlink():
                    links.append(Path(entry.path))
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif _is_regular(entry):  # a pipe or a socket would be waited on for ever
                    names.append(entry.path)
    _refuse_links(links, root)
    return [Path(name) for name in sorted(names, key=_posix)]


def check_exists(path: str) -> None:
    """Refuse a local file or folder that is not there; addresses and patterns are looked up when they are read."""
    root = Path(path).expanduser()
    if "://" not in path and not glob.has_magic(path) and not RANGE.search(path) and not root.exists():
        raise _missing(root, path)


def _posix(name: str) -> str:
    return name.replace(os.sep, "/")


@contextmanager
def _scanned(folder: str) -> Iterator[Iterable[os.DirEntry[str]]]:
    """The entries of a folder; none where it cannot be read, as os.walk has it."""
    try:
        entries = os.scandir(folder)
    except OSError:
        yield ()
        return
    with entries:
        yield entries


def _is_regular(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:
        return False


def _missing(root: Path, asked: str) -> DataError:
    path, parent = root, root.parent
    while not parent.is_dir() and parent != parent.parent:
        path, parent = parent, parent.parent
    near = find_similar_names(path.name, sorted(os.listdir(parent)))
    remedy = f"did you mean {parent / near[0]}?" if near else f"{parent} holds nothing of a similar name"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", asked) and not asked.startswith("."):
        remedy += "; for a data set of the Hugging Face hub set kind: huggingface"
    return DataError(f"{path} does not exist; {remedy}")
