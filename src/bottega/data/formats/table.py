"""Tables in text: commas, semicolons, tabs or bars between the cells, with or without a header. Cells are text."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, final

from bottega.config.data import Source
from bottega.core.errors import DataError, UsageError
from bottega.data.formats import compression as compressed
from bottega.data.formats.compression import SUFFIXES as PACKINGS
from bottega.data.formats.compression import open_decompressed
from bottega.data.formats.reader import Format, Piece
from bottega.data.records.record import ENCODING_HINT, BadRecord, Record, is_utf16

BY_SUFFIX = {".tsv": "\t", ".psv": "|"}
CANDIDATES = ",\t;|"
SAMPLE_ROWS = 100
SAMPLE_BYTES = 1 << 20
SAMPLE_CELL = 1 << 10
"""Characters that are kept of a cell: enough to tell names, numbers and text apart."""
LONGEST_NAME = 64
"""Of a column; a first row with a longer cell is data."""

READ_AGAIN = 1 << 30
"""So many bytes may be read twice because of quotation marks that do not match; a hostile file would ask for each."""

_NUMBER = re.compile(r"\s*[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\s*")


class Layout(NamedTuple):
    delimiter: str
    names: list[str]
    has_header: bool


def read(piece: Piece, source: Source) -> Iterator[Record | BadRecord]:
    return read_with_layout(piece, detect_layout(piece.file, source))


def read_with_layout(piece: Piece, layout: Layout) -> Iterator[Record | BadRecord]:
    with open_decompressed(piece.file) as stream:
        is_header = layout.has_header
        for line, cells in _rows(_Lines(stream, piece.file), layout.delimiter):
            key, where = f"{piece.name}:{line}", f"{piece.location}, line {line}"
            if isinstance(cells, str):
                yield BadRecord(key, where, cells)
            elif is_header:
                is_header = False
            elif len(cells) != len(layout.names):
                yield BadRecord(key, where, f"has {len(cells)} columns, and {len(layout.names)} are expected")
            else:
                yield Record(key, where, dict(zip(layout.names, cells, strict=True)))


def detect_layout(file: Path, source: Source) -> Layout:
    """How the cells of a table are divided and called."""
    delimiter = explicit_delimiter(file, source) or _delimiter(file)
    sample = _sample(file, delimiter)
    if not sample:
        return Layout(delimiter, [], has_header=False)
    if source.columns is not None:
        named = list(source.columns)
        return Layout(delimiter, named, has_header=[cell.strip() for cell in sample[0]] == named)
    if _is_data(sample):
        return Layout(delimiter, _invented(sample), has_header=False)
    return Layout(delimiter, parse_header(sample[0], file), has_header=True)


def parse_header(header: list[str], file: Path) -> list[str]:
    names = [cell.strip() or f"column_{at}" for at, cell in enumerate(header)]
    if len(set(names)) < len(names):
        (twice, _), *_ = Counter(names).most_common(1)
        raise DataError(
            f"{file}, line 1: two columns are called {twice!r}; name them with columns, or correct the header"
        )
    return names


def read_first_row(file: Path, delimiter: str) -> list[str] | None:
    """The cells of the first row that can be read, long ones cut."""
    return next(iter(_sample(file, delimiter)), None)


def explicit_delimiter(file: Path, source: Source) -> str | None:
    """What the recipe or the suffix says."""
    if source.delimiter in ("\n", "\r", '"', "\0"):
        raise UsageError(f"delimiter {source.delimiter!r} cannot divide the cells of a row")
    return source.delimiter or BY_SUFFIX.get(_suffix(file))


def _suffix(file: Path) -> str:
    path = Path(file.name.lower())
    return Path(path.stem).suffix if path.suffix in PACKINGS else path.suffix


def _delimiter(file: Path) -> str:
    """The one that divides the first rows into equally many cells, at least two; the most cells where several do."""

    def agreement(delimiter: str) -> tuple[float, int]:
        widths = [len(cells) for cells in _sample(file, delimiter)]
        if not widths or widths[0] < 2:
            return 0.0, 0
        return widths.count(widths[0]) / len(widths), widths[0]

    return max(CANDIDATES, key=agreement)


def _sample(file: Path, delimiter: str) -> list[list[str]]:
    """The first rows that can be read, at least one where there is one."""
    sample: list[list[str]] = []
    with open_decompressed(file) as stream:
        lines = _Lines(stream, file)
        for count, (_, cells) in enumerate(_rows(lines, delimiter), start=1):
            if not isinstance(cells, str):
                sample.append([cell[:SAMPLE_CELL] for cell in cells])
            if sample and (count >= SAMPLE_ROWS or lines.read >= SAMPLE_BYTES):
                break
    return sample


def _is_data(sample: list[list[str]]) -> bool:
    """Whether the first row is one of the data. Names are short, differ, are no numbers, and are not among the values."""
    first, rest = sample[0], sample[1:]
    filled = [cell for cell in first if cell.strip()]
    if any(_NUMBER.fullmatch(cell) or len(cell) > LONGEST_NAME for cell in filled) or len(set(filled)) < len(filled):
        return True
    for at, cell in enumerate(first):
        column = [row[at] for row in rest if at < len(row)]
        if cell.strip() and cell in column:
            return True  # positive, negative, positive
        if column and re.search(r"\d", cell) and all(_shape(cell) == _shape(other) for other in column):
            return True  # LJ001-0001, LJ001-0002
    return False


def _shape(cell: str) -> str:
    return re.sub(r"\d+", "0", cell)


def _invented(sample: list[list[str]]) -> list[str]:
    width = len(sample[0])
    numeric = [
        all(_NUMBER.fullmatch(row[at]) for row in sample if len(row) == width and row[at].strip())
        for at in range(width)
    ]
    if width == 2 and sum(numeric) == 1:
        return ["label", "text"] if numeric[0] else ["text", "label"]
    return [f"column_{at}" for at in range(width)]


def _rows(lines: _Lines, delimiter: str) -> Iterator[tuple[int, list[str] | str]]:
    """(line, cells) of every row that is not empty, or (line, what is wrong); the line is where the row begins.

    After an error reading goes on with the next line: a quotation mark that is never closed costs one row.
    """
    csv.field_size_limit(compressed.LINE_LIMIT)  # of the process; Python's own 128 KiB are too few for a document
    while True:
        # Between tabs and bars a quotation mark is part of the text.
        if delimiter in "\t|":
            reader = csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_NONE, strict=True)
        else:
            reader = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            for cells in reader:
                if cells:
                    yield lines.row, cells
                lines.begin()
            return
        except (csv.Error, _BadLine) as error:
            yield lines.row, _reason(error)
            lines.go_back()


def _reason(error: Exception) -> str:
    text = str(error)
    if text == "unexpected end of data":
        return "a quotation mark is opened and never closed"
    if text.startswith("new-line character"):
        return "has a carriage return within a cell; put such cells in quotation marks"
    if text.endswith("expected after '\"'"):
        return 'a closing quotation mark is followed by something else; quotation marks within a cell are doubled ("")'
    return text


class _BadLine(Exception):
    """A line that is no text."""


@final
class _Lines:
    """The lines of a stream as text, with the number of the one a row begins in, and back to the one behind it."""

    def __init__(self, stream: BinaryIO, file: Path) -> None:
        self._file = file
        self._lines = compressed.iter_lines(stream)
        self._size = self._read_again = 0
        self.read = 0
        """Bytes so far."""
        self._taken: list[bytes] = []
        self._again: list[bytes] = []
        self.row = 1

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        raw = self._again.pop() if self._again else next(self._lines)
        self._taken.append(raw)
        self._size += len(raw)
        self.read += len(raw)
        number = self.row + len(self._taken) - 1
        if self._size > compressed.LINE_LIMIT:
            raise _BadLine(f"longer than {compressed.LINE_LIMIT:,} bytes; is a quotation mark never closed?")
        if number == 1 and is_utf16(raw):
            raise _BadLine(f"the file is UTF-16, not UTF-8; {ENCODING_HINT}")
        if b"\0" in raw:
            raise _BadLine(f"has a NUL byte at column {raw.index(0) + 1} of line {number}")
        if number == 1:  # Excel begins with a byte order mark
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            place = f"byte 0x{raw[error.start]:02x} at column {error.start + 1} of line {number}"
            raise _BadLine(f"not UTF-8: {place}; {ENCODING_HINT}") from error

    def begin(self) -> None:
        """The next line is the first of a row."""
        self.row += len(self._taken)
        self._size = 0
        self._taken.clear()

    def go_back(self) -> None:
        """To the line behind the one the row began in."""
        again = self._taken[1:]
        self._read_again += sum(map(len, again))
        if self._read_again > READ_AGAIN:
            raise DataError(
                f"{self._file}, line {self.row}: its quotation marks do not match; set delimiter, or mend it"
            )
        self._again.extend(reversed(again))
        self._taken = self._taken[:1]
        self.begin()


FORMAT = Format(
    kind="csv",
    suffixes=frozenset(f"{suffix}{packing}" for suffix in (".csv", ".tsv", ".psv") for packing in ("", *PACKINGS)),
    read=read,
)
