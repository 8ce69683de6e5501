"""CSV and its relatives: cells separated by commas, semicolons, tabs or pipes, with or without a header. Cells are text."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, final

from bottega.config.data import Source
from bottega.core.errors import DataError, UsageError
from bottega.data.formats import compression
from bottega.data.formats.compression import COMPRESSION_SUFFIXES, open_decompressed
from bottega.data.formats.reader import Format, Piece
from bottega.data.records.record import ENCODING_HINT, BadRecord, Record, is_utf16

DELIMITER_BY_SUFFIX = {".tsv": "\t", ".psv": "|"}
CANDIDATE_DELIMITERS = ",\t;|"
NUM_SAMPLE_ROWS = 100
SAMPLE_BYTES = 1 << 20
MAX_SAMPLE_CELL_LENGTH = 1 << 10
"""Characters of a cell that are read into the sample: enough to tell names, numbers and text apart."""
MAX_NAME_LENGTH = 64
"""Maximum length of a column name; a first row with a longer cell is data."""

MAX_REREAD_BYTES = 1 << 30
"""Bytes that may be read again after unmatched quotation marks; a hostile file would make that quadratic."""

_NUMBER = re.compile(r"\s*[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\s*")


class Layout(NamedTuple):
    """Delimiter and column names of a table."""

    delimiter: str
    names: list[str]
    has_header: bool


def read(piece: Piece, source: Source) -> Iterator[Record | BadRecord]:
    """Yield the rows of a table whose layout is detected."""
    return read_with_layout(piece, detect_layout(piece.file, source))


def read_with_layout(piece: Piece, layout: Layout) -> Iterator[Record | BadRecord]:
    """Yield the rows of a table of a known layout."""
    with open_decompressed(piece.file) as stream:
        is_header = layout.has_header
        for line, cells in _read_rows(_Lines(stream, piece.file), layout.delimiter):
            key, where = f"{piece.name}:{line}", f"{piece.location}, line {line}"
            if isinstance(cells, str):
                yield BadRecord(key, where, cells)
            elif is_header:
                is_header = False
            elif len(cells) != len(layout.names):
                yield BadRecord(key, where, f"has {len(cells)} columns; expected {len(layout.names)}")
            else:
                yield Record(key, where, dict(zip(layout.names, cells, strict=True)))


def detect_layout(file: Path, source: Source) -> Layout:
    """Detect the delimiter, the header and the column names of a table."""
    delimiter = find_explicit_delimiter(file, source) or _detect_delimiter(file)
    sample = _read_sample(file, delimiter)
    if not sample:
        return Layout(delimiter, [], has_header=False)
    if source.columns is not None:
        names = list(source.columns)
        return Layout(delimiter, names, has_header=[cell.strip() for cell in sample[0]] == names)
    if _is_first_row_data(sample):
        return Layout(delimiter, _choose_default_names(sample), has_header=False)
    return Layout(delimiter, parse_header(sample[0], file), has_header=True)


def parse_header(header: list[str], file: Path) -> list[str]:
    """Return the column names of a header row; an empty cell is named by its number."""
    names = [cell.strip() or f"column_{index}" for index, cell in enumerate(header)]
    if len(set(names)) < len(names):
        (repeated, _), *_ = Counter(names).most_common(1)
        raise DataError(
            f"{file}, line 1: two columns are named {repeated!r}; set data.train.columns, or correct the header"
        )
    return names


def read_first_row(file: Path, delimiter: str) -> list[str] | None:
    """Return the cells of the first readable row, long ones truncated; None for an empty table."""
    return next(iter(_read_sample(file, delimiter)), None)


def find_explicit_delimiter(file: Path, source: Source) -> str | None:
    """Return the delimiter given by the recipe or the suffix, or None."""
    if source.delimiter in ("\n", "\r", '"', "\0"):
        raise UsageError(f"delimiter {source.delimiter!r} cannot separate the cells of a row; choose another character")
    return source.delimiter or DELIMITER_BY_SUFFIX.get(_get_uncompressed_suffix(file))


def _get_uncompressed_suffix(file: Path) -> str:
    path = Path(file.name.lower())
    return Path(path.stem).suffix if path.suffix in COMPRESSION_SUFFIXES else path.suffix


def _detect_delimiter(file: Path) -> str:
    """Return the delimiter that splits most of the first rows into as many cells as the first row, at least two.

    If several do so equally well, it is the one with the most cells.
    """

    def measure_agreement(delimiter: str) -> tuple[float, int]:
        widths = [len(cells) for cells in _read_sample(file, delimiter)]
        if not widths or widths[0] < 2:
            return 0.0, 0
        return widths.count(widths[0]) / len(widths), widths[0]

    return max(CANDIDATE_DELIMITERS, key=measure_agreement)


def _read_sample(file: Path, delimiter: str) -> list[list[str]]:
    """Return the first readable rows, at least one if there is one."""
    sample: list[list[str]] = []
    with open_decompressed(file) as stream:
        lines = _Lines(stream, file)
        for count, (_, cells) in enumerate(_read_rows(lines, delimiter), start=1):
            if not isinstance(cells, str):
                sample.append([cell[:MAX_SAMPLE_CELL_LENGTH] for cell in cells])
            if sample and (count >= NUM_SAMPLE_ROWS or lines.num_bytes_read >= SAMPLE_BYTES):
                break
    return sample


def _is_first_row_data(sample: list[list[str]]) -> bool:
    """Return whether the first row is data. Column names are short, distinct, not numbers, and not among the values."""
    first_row, other_rows = sample[0], sample[1:]
    nonempty_cells = [cell for cell in first_row if cell.strip()]
    if any(_NUMBER.fullmatch(cell) or len(cell) > MAX_NAME_LENGTH for cell in nonempty_cells) or len(
        set(nonempty_cells)
    ) < len(nonempty_cells):
        return True
    for index, cell in enumerate(first_row):
        column = [row[index] for row in other_rows if index < len(row)]
        if cell.strip() and cell in column:
            return True  # positive, negative, positive
        if column and re.search(r"\d", cell) and all(_mask_digits(cell) == _mask_digits(other) for other in column):
            return True  # LJ001-0001, LJ001-0002
    return False


def _mask_digits(cell: str) -> str:
    return re.sub(r"\d+", "0", cell)


def _choose_default_names(sample: list[list[str]]) -> list[str]:
    width = len(sample[0])
    is_numeric = [
        all(_NUMBER.fullmatch(row[index]) for row in sample if len(row) == width and row[index].strip())
        for index in range(width)
    ]
    if width == 2 and sum(is_numeric) == 1:
        return ["label", "text"] if is_numeric[0] else ["text", "label"]
    return [f"column_{index}" for index in range(width)]


def _read_rows(lines: _Lines, delimiter: str) -> Iterator[tuple[int, list[str] | str]]:
    """Yield (line, cells) of every row that is not empty, or (line, error message); the line is the first one of the row.

    After an error reading continues with the next line, so that an unclosed quotation mark costs one row.
    """
    csv.field_size_limit(
        compression.MAX_LINE_BYTES
    )  # for the whole process; the default of 128 KiB is too small for a document
    while True:
        # In files separated by tabs or pipes a quotation mark is part of the text.
        if delimiter in "\t|":
            reader = csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_NONE, strict=True)
        else:
            reader = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            for cells in reader:
                if cells:
                    yield lines.row_start, cells
                lines.begin_row()
            return
        except (csv.Error, _BadLine) as error:
            yield lines.row_start, _explain_error(error)
            lines.go_back()


def _explain_error(error: Exception) -> str:
    text = str(error)
    if text == "unexpected end of data":
        return "a quotation mark is never closed"
    if text.startswith("new-line character"):
        return "has a carriage return within a cell; put such cells in quotation marks"
    if text.endswith("expected after '\"'"):
        return 'text follows a closing quotation mark; write a quotation mark within a cell twice ("")'
    return text


class _BadLine(Exception):
    """A line that is too long or not UTF-8 text."""


@final
class _Lines:
    """The lines of a stream as text, with the number of the first line of the current row, and a way back to its second line."""

    def __init__(self, stream: BinaryIO, file: Path) -> None:
        self._file = file
        self._lines = compression.iter_lines(stream)
        self._row_bytes = self._reread_bytes = 0
        self.num_bytes_read = 0
        """Bytes read so far, including those read again."""
        self._row_lines: list[bytes] = []
        self._returned_lines: list[bytes] = []
        self.row_start = 1

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        raw = self._returned_lines.pop() if self._returned_lines else next(self._lines)
        self._row_lines.append(raw)
        self._row_bytes += len(raw)
        self.num_bytes_read += len(raw)
        number = self.row_start + len(self._row_lines) - 1
        if self._row_bytes > compression.MAX_LINE_BYTES:
            raise _BadLine(
                f"longer than {compression.MAX_LINE_BYTES:,} bytes; look for a quotation mark that is never closed"
            )
        if number == 1 and is_utf16(raw):
            raise _BadLine(f"the file is UTF-16, not UTF-8; {ENCODING_HINT}")
        if b"\0" in raw:
            raise _BadLine(f"has a NUL byte at column {raw.index(0) + 1} of line {number}")
        if number == 1:  # Excel writes a byte order mark
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            location = f"byte 0x{raw[error.start]:02x} at column {error.start + 1} of line {number}"
            raise _BadLine(f"not UTF-8: {location}; {ENCODING_HINT}") from error

    def begin_row(self) -> None:
        """Start a new row with the next line."""
        self.row_start += len(self._row_lines)
        self._row_bytes = 0
        self._row_lines.clear()

    def go_back(self) -> None:
        """Go back to the second line of the current row, and start a new row there."""
        returned_lines = self._row_lines[1:]
        self._reread_bytes += sum(map(len, returned_lines))
        if self._reread_bytes > MAX_REREAD_BYTES:
            raise DataError(
                f"{self._file}, line {self.row_start}: too many unmatched quotation marks; set delimiter, or correct the file"
            )
        self._returned_lines.extend(reversed(returned_lines))
        self._row_lines = self._row_lines[:1]
        self.begin_row()


FORMAT = Format(
    kind="csv",
    suffixes=frozenset(
        f"{suffix}{compression}" for suffix in (".csv", ".tsv", ".psv") for compression in ("", *COMPRESSION_SUFFIXES)
    ),
    read=read,
)
