"""Where texts come from: the standard library's sources, text files, or JSON lines; read strictly, never changed."""

from __future__ import annotations

import difflib
import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from pydantic import BaseModel, ConfigDict

from bottega.core.errors import DataError, EnvironmentProblem, UsageError

PROSE = (".txt", ".text", ".md", ".rst", ".tex", ".html", ".css", ".yaml", ".yml", ".toml", ".xml")
CODE = (".py", ".pyi", ".sh", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".sql")
TEXT_SUFFIXES = frozenset((*PROSE, *CODE))
JSON_LINES = frozenset((".jsonl", ".ndjson"))
USUAL_FIELDS = ("text", "content", "document")

# Left out of the embedded corpus: tests, code tables, what some distributions package apart, and what belongs to one
# installation; so one version of Python gives one corpus nearly everywhere.
PACKAGED_APART = ("idlelib", "lib2to3", "turtledemo", "tkinter", "distutils", "ensurepip")
INSTALLED = ("site-packages", "dist-packages", "lib-dynload", "__pycache__", "sitecustomize.py", "usercustomize.py")
EMBEDDED_WITHOUT = frozenset(("test", "tests", "__phello__", "encodings", *PACKAGED_APART, *INSTALLED))


class TextSource(BaseModel):
    """Texts to read. `auto` goes by the suffix of the path, and is `embedded` where there is none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["auto", "embedded", "text", "jsonl"] = "auto"
    path: str | None = None
    field: str | None = None
    """Of a JSON row; the usual ones are tried where none is named."""


class Document(NamedTuple):
    name: str
    text: str


def read_documents(source: TextSource) -> Iterator[Document]:
    """The documents in the order of their names. Empty ones are left out; none at all is an error."""
    kind, root, files = resolve(source)
    found = False
    for file in files:
        name = file.name if file == root else file.relative_to(root).as_posix()
        if kind == "jsonl":
            documents: Iterator[Document] = _rows(file, name, source.field)
        else:
            documents = iter((Document(name, _text(file)),))
        for document in documents:
            if document.text:
                found = True
                yield document
    if not found:
        where = f"{root} is empty" if files == [root] else f"the {len(files)} files of {root} are all empty"
        raise DataError(f"{where}; give a file with text in it")


def fingerprint(source: TextSource) -> str:
    """A hash of everything the documents depend on."""
    kind, root, files = resolve(source)
    digest = hashlib.sha256(f"{kind}\0{source.field or '' if kind == 'jsonl' else ''}\0".encode())
    for file in files:
        digest.update(f"{file.name if file == root else file.relative_to(root).as_posix()}\0".encode())
        with _opened(file) as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def resolve(source: TextSource) -> tuple[str, Path, list[Path]]:
    """The kind, the root that names are relative to, and the files."""
    if source.kind == "embedded" or (source.kind == "auto" and source.path is None):
        root = Path(sysconfig.get_paths()["stdlib"])
        return (
            "embedded",
            root,
            _found(_embedded_files(root), f"{root} has no Python sources; name a corpus of your own"),
        )
    if source.path is None:
        raise UsageError(f"data of kind {source.kind} needs a path")
    root = Path(source.path).expanduser()
    if root.is_file():
        return _kind(source, [root]), root, [root]
    suffixes = {"jsonl": JSON_LINES, "text": TEXT_SUFFIXES}.get(source.kind, TEXT_SUFFIXES | JSON_LINES)
    listed = ", ".join(sorted(suffixes))
    if root.is_dir():
        files = _found(_folder_files(root, suffixes), f"{root} has no files with text ({listed})")
    elif glob.has_magic(source.path):
        matches = [Path(match) for match in glob.glob(str(root), recursive=True)]
        files = _found([file for file in matches if file.is_file()], f"no file matches {source.path}")
        files.sort(key=Path.as_posix)
        root = Path(os.path.commonpath([file.parent for file in files]))
    elif root.exists():
        raise DataError(f"{root} is neither a file nor a folder")
    else:
        _missing(root)
    return _kind(source, files), root, files


def _kind(source: TextSource, files: list[Path]) -> str:
    if source.kind != "auto":
        return source.kind
    unknown = [file for file in files if file.suffix and file.suffix not in TEXT_SUFFIXES | JSON_LINES]
    if unknown:
        raise DataError(
            f"{unknown[0]}: {unknown[0].suffix} is no suffix of text or JSON lines; set kind to text or jsonl"
        )
    rows = [file for file in files if file.suffix in JSON_LINES]
    if rows and len(rows) < len(files):
        other = next(file for file in files if file.suffix not in JSON_LINES)
        raise DataError(f"{rows[0]} holds rows and {other} text; set kind to jsonl or text, or name one of them")
    return "jsonl" if rows else "text"


def _found(files: list[Path], otherwise: str) -> list[Path]:
    if not files:
        raise DataError(otherwise)
    return files


def _embedded_files(root: Path) -> list[Path]:
    files = _folder_files(root, frozenset((".py",)), without=EMBEDDED_WITHOUT)
    # Generated when that Python was built, so no two machines agree on it.
    return [file for file in files if not file.name.startswith("_sysconfigdata")]


def _folder_files(root: Path, suffixes: frozenset[str], *, without: frozenset[str] = frozenset()) -> list[Path]:
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in without and not name.startswith(".")]
        for name in names:
            if Path(name).suffix in suffixes and name not in without and not name.startswith("."):
                files.append(Path(folder, name))
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def _missing(path: Path) -> NoReturn:
    parent = path.parent
    while not parent.is_dir() and parent != parent.parent:
        path, parent = parent, parent.parent
    near = difflib.get_close_matches(path.name, sorted(os.listdir(parent)), n=1, cutoff=0.5)
    remedy = f"did you mean {parent / near[0]}?" if near else f"{parent} holds nothing of a similar name"
    raise DataError(f"{path} does not exist; {remedy}")


def _opened(file: Path) -> Any:
    try:
        return file.open("rb")
    except PermissionError as error:
        raise EnvironmentProblem(f"{file} may not be read: permission denied") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from error


def _text(file: Path) -> str:
    with _opened(file) as stream:
        raw: bytes = stream.read()
    nul = raw.find(b"\0")
    if nul != -1:
        raise DataError(f"{file} is no text: it has a NUL byte at offset {nul}")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}; convert it to UTF-8"
        ) from error


def _rows(file: Path, name: str, field: str | None) -> Iterator[Document]:
    with _opened(file) as stream:
        for number, raw in enumerate(stream, start=1):
            if raw.strip():
                yield Document(f"{name}:{number}", _field(_row(raw, file, number), field, f"{file}, line {number}"))


def _row(raw: bytes, file: Path, number: int) -> Any:
    where = f"{file}, line {number}"
    if number == 1 and raw.startswith(b"\xef\xbb\xbf"):
        raise DataError(f"{where}: starts with a byte order mark; save the file as UTF-8 without one")
    nul = raw.find(b"\0")
    if nul != -1:
        raise DataError(f"{where}: has a NUL byte at column {nul + 1}")
    try:
        return json.loads(raw.rstrip().decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where}, column {error.colno}: no valid JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: no valid JSON: {error}") from error


def _field(row: Any, field: str | None, where: str) -> str:
    if not isinstance(row, dict):
        example = json.dumps({field or "text": "..."})
        raise DataError(f"{where}: a row must be an object such as {example}, not {type(row).__name__}")
    field = field or next((name for name in USUAL_FIELDS if name in row), "text")
    if field not in row:
        near = difflib.get_close_matches(field, row, n=1)
        remedy = f"did you mean {near[0]!r}?" if near else f"the row has {', '.join(map(repr, row)) or 'no fields'}"
        raise DataError(f"{where}: no field {field!r}; {remedy}")
    text = row[field]
    if not isinstance(text, str):
        raise DataError(f"{where}: field {field!r} must be text, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: field {field!r} has half a surrogate pair ({text[error.start]!r}) at character {error.start}"
        ) from error
    return text


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
