"""List the files that a path names (a file, a folder or a pattern), and detect the kind of a file by name or first bytes."""

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

# Files at the top of a data folder that document it.
DOCUMENTATION_NAMES = re.compile(
    r"(readme|licen[cs]e|copying|notice|source|sources|citation|changelog|authors)(\.(md|txt|rst|html))?", re.IGNORECASE
)
BRACE_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
MAX_EXPANDED_NAMES = 1_000_000

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
    """The files that a path names."""

    root: Path
    """The folder that names are relative to; the file itself if there is only one."""
    files: list[Path]
    is_folder: bool
    """Whether the files are the content of a folder, which may hold other files too; otherwise each file was named."""


def list_files(path: str) -> Listing:
    """Return every file that `path` names, without hidden ones, sorted by name."""
    root = Path(path).expanduser()
    if root.is_file():
        return Listing(root, [root], is_folder=False)
    if root.is_dir():
        return Listing(root, _list_folder(root), is_folder=True)
    if BRACE_RANGE.search(path) or glob.has_magic(path):
        files = sorted(_expand_pattern(path), key=Path.as_posix)
        return Listing(Path(os.path.commonpath([file.parent for file in files])), files, is_folder=False)
    if root.exists():
        raise DataError(f"{root} is neither a file nor a folder")
    raise _make_missing_error(root, path)


def list_files_of_paths(paths: Sequence[str], choose: Callable[[Listing], list[Path]]) -> Listing:
    """Return the files of several paths, in the order of the paths; `choose` selects among the files of a folder."""
    listings = [list_files(path) for path in paths]
    files = [file for listing in listings for file in (choose(listing) if listing.is_folder else listing.files)]
    files = list(dict.fromkeys(files))
    if not files:
        raise DataError(f"{', '.join(paths)}: no files in any of them; give files or folders with data")
    root = Path(os.path.commonpath([file.absolute().parent for file in files]))
    return Listing(root, [file.absolute() for file in files], is_folder=False)


def get_relative_name(root: Path, file: Path) -> str:
    """Return the path of `file` below `root`, printable."""
    return make_printable(file.name if file == root else file.relative_to(root).as_posix())


def drop_documentation_files(listing: Listing) -> list[Path]:
    """Return the listed files without READMEs, licences and the like at the top, unless there is nothing else."""
    data = [
        file for file in listing.files if file.parent != listing.root or not DOCUMENTATION_NAMES.fullmatch(file.name)
    ]
    return data or listing.files


def match_suffix(name: str, suffixes: Mapping[str, str]) -> str | None:
    """Return the longest known suffix of a name (.tar.gz before .gz), or None."""
    parts = name.lower().split(".")
    endings = ("." + ".".join(parts[-count:]) for count in (3, 2, 1) if len(parts) > count)
    return next((ending for ending in endings if ending in suffixes), None)


def get_uncompressed_suffix(name: str) -> str:
    """Return the suffix of a name without the suffix of its compression; empty if there is none."""
    path = Path(name.lower())
    return Path(path.stem).suffix if path.suffix in compression.COMPRESSION_SUFFIXES else path.suffix


def detect_kind(file: Path) -> str | None:
    """Return the kind that the first bytes of a file, decompressed, indicate; None if the format is unknown."""
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
    """Return whether a file begins with MPEG packets: 188 bytes, each starting with G. (.ts is also TypeScript's suffix.)"""
    return head[:1] == head[188:189] == head[376:377] == b"G"


def expand_ranges(pattern: str) -> Iterator[str]:
    """Expand WebDataset's brace ranges: data-{000000..000012}.tar stands for thirteen names."""
    match = BRACE_RANGE.search(pattern)
    if not match:
        yield pattern
        return
    first, last = match.groups()
    # If the first number has leading zeros, its width is that of all numbers, as in a shell.
    width = len(first) if first.startswith("0") else 0
    if abs(int(last) - int(first)) >= MAX_EXPANDED_NAMES:
        raise UsageError(
            f"{pattern} expands to {abs(int(last) - int(first)) + 1:,} files; at most {MAX_EXPANDED_NAMES:,} are allowed; give a smaller range"
        )
    step = 1 if int(last) >= int(first) else -1
    for number in range(int(first), int(last) + step, step):
        yield from expand_ranges(f"{pattern[: match.start()]}{number:0{width}}{pattern[match.end() :]}")


def _expand_pattern(path: str) -> set[Path]:
    files: set[Path] = set()
    for pattern in expand_ranges(path):
        matches = glob.glob(str(Path(pattern).expanduser()), recursive=True)
        paths = [Path(match) for match in matches if os.path.isfile(match)]
        if glob.has_magic(pattern):
            _refuse_outside_links(paths, _find_folder_before_wildcard(pattern))
        if not paths:
            expanded_from = "" if pattern == path else f", expanded from {path}"
            raise DataError(f"no file matches {pattern}{expanded_from}")
        files.update(paths)
    return files


def _find_folder_before_wildcard(pattern: str) -> Path:
    """Return the folder of a pattern before its first wildcard."""
    path = Path(pattern).expanduser()
    return next(parent for parent in path.parents if not glob.has_magic(str(parent)))


def _refuse_outside_links(paths: Iterable[Path], root: Path) -> None:
    """Raise DataError for links that lead out of `root`: the author of the folder could point them at any file here."""
    real_root, is_link = root.resolve(), cache(Path.is_symlink)
    for path in paths:
        # A pattern follows links to folders, so the link may be a folder above the file.
        path_and_parents = (path, *path.parents)[: len(path.parts) - len(root.parts)]
        for link in filter(is_link, reversed(path_and_parents)):
            try:
                target = link.resolve()
            except (OSError, RuntimeError):
                break  # a link that leads back to itself is not a file
            if not target.is_relative_to(real_root):
                raise DataError(
                    f"{make_printable(str(link))} is a link to {make_printable(str(target))}, outside {root}; copy the target "
                    "into the folder, or give it as a source of its own"
                )


def _list_folder(root: Path) -> list[Path]:
    file_names: list[str] = []
    links: list[Path] = []
    pending_folders = [str(root)]
    while pending_folders:
        # scandir gives the type of an entry with its name; a stat of each file would take twenty times as long.
        with _scan_folder(pending_folders.pop()) as entries:
            for entry in entries:
                if entry.name.startswith(".") or entry.name == "__pycache__":
                    continue
                if entry.is_symlink():
                    links.append(Path(entry.path))
                if entry.is_dir(follow_symlinks=False):
                    pending_folders.append(entry.path)
                elif _is_regular_file(entry):  # reading a pipe or a socket could block for ever
                    file_names.append(entry.path)
    _refuse_outside_links(links, root)
    return [Path(name) for name in sorted(file_names, key=_to_posix)]


def check_exists(path: str) -> None:
    """Raise DataError for a local file or folder that does not exist; URLs and patterns are resolved when they are read."""
    root = Path(path).expanduser()
    if "://" not in path and not glob.has_magic(path) and not BRACE_RANGE.search(path) and not root.exists():
        raise _make_missing_error(root, path)


def _to_posix(name: str) -> str:
    return name.replace(os.sep, "/")


@contextmanager
def _scan_folder(folder: str) -> Iterator[Iterable[os.DirEntry[str]]]:
    """Yield the entries of a folder; like os.walk, none if it cannot be read."""
    try:
        entries = os.scandir(folder)
    except OSError:
        yield ()
        return
    with entries:
        yield entries


def _is_regular_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:
        return False


def _make_missing_error(root: Path, value: str) -> DataError:
    path, parent = root, root.parent
    while not parent.is_dir() and parent != parent.parent:
        path, parent = parent, parent.parent
    similar_names = find_similar_names(path.name, sorted(os.listdir(parent)))
    remedy = (
        f"did you mean {parent / similar_names[0]}?" if similar_names else f"{parent} has no file with a similar name"
    )
    if re.fullmatch(r"[\w.-]+/[\w.-]+", value) and not value.startswith("."):
        remedy += "; for a dataset on the Hugging Face hub set kind: huggingface"
    return DataError(f"{path} does not exist; {remedy}")
