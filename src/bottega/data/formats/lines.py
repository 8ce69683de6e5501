"""Lines with a label and a text: `spam<TAB>win a prize`, `__label__spam win a prize`, `1 a fine film`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.data.formats import compression as compressed
from bottega.data.formats.compression import open_decompressed
from bottega.data.formats.reader import Format, Piece
from bottega.data.records.record import ENCODING_HINT, BadRecord, Record

FASTTEXT_PREFIX = "__label__"
"""What fastText writes in front of every label."""
DIVIDERS = "\t|;,: "
SAMPLE_LINES = 200
LONGEST_LABEL = 64
MOST_LABELS = 0.5
"""Of the lines: where more of them differ in their label, it is not a label but the beginning of a text."""


class LineLayout(NamedTuple):
    """How a line is divided."""

    delimiter: str
    label_first: bool = True

    @property
    def columns(self) -> tuple[str, str]:
        return ("label", "text") if self.label_first else ("text", "label")


def read(piece: Piece, source: Source) -> Iterator[Record | BadRecord]:
    form = LineLayout(source.delimiter or " ", (source.columns or ("label",))[0] == "label")
    with open_decompressed(piece.file) as stream:
        for number, raw in enumerate(compressed.iter_lines(stream), start=1):
            key, where = f"{piece.name}:{number}", f"{piece.location}, line {number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip("\r\n")
            except UnicodeDecodeError as error:
                yield BadRecord(
                    key, where, f"not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}; {ENCODING_HINT}"
                )
                continue
            if not line.strip():
                continue
            parts = split_line(line, form)
            if parts is None:
                yield BadRecord(key, where, f"has no {form.delimiter!r} between a label and a text")
            else:
                yield Record(key, where, {"label": parts[0], "text": parts[1]})


def split_line(line: str, form: LineLayout) -> tuple[str | list[str], str] | None:
    """Label and text of a line; a list of labels where fastText's mark stands in front of several. None without a divider."""
    if line.startswith(FASTTEXT_PREFIX):
        words = line.split()
        labels = [word.removeprefix(FASTTEXT_PREFIX) for word in words if word.startswith(FASTTEXT_PREFIX)]
        text = " ".join(word for word in words if not word.startswith(FASTTEXT_PREFIX))
        return (labels[0] if len(labels) == 1 else labels), text
    line = line.lstrip() if form.delimiter == " " else line
    head, divider, tail = line.partition(form.delimiter) if form.label_first else line.rpartition(form.delimiter)
    if not divider:
        return None
    label, text = (head, tail) if form.label_first else (tail, head)
    return label.strip(), text.strip()


def detect_line_layout(files: Sequence[Path]) -> LineLayout:
    """How the lines of these files are divided: by the first sign that all of them have, with labels that repeat."""
    lines = _sample(files)
    for divider in DIVIDERS:
        for label_first in (True, False) if divider == "\t" else (True,):
            form = LineLayout(divider, label_first)
            if _fits([split_line(line, form) for line in lines]):
                return form
    shown = lines[0][:60] if lines else ""
    raise DataError(
        f"{files[0]}: a classifier reads a label and a text from each line, and no sign divides all lines into labels that "
        f"repeat and texts (the first: {shown!r}); write label, tab, text on each line, or give a table or JSON Lines"
    )


def _fits(parts: Sequence[tuple[str | list[str], str] | None]) -> bool:
    labels = [part[0] for part in parts if part is not None and part[1]]
    if len(labels) < len(parts) or not labels:
        return False
    names = [name for label in labels for name in ([label] if isinstance(label, str) else label)]
    if any(not name or len(name) > LONGEST_LABEL for name in names):
        return False
    return 2 <= len(set(names)) <= max(2, MOST_LABELS * len(names))


def _sample(files: Sequence[Path]) -> list[str]:
    found: list[str] = []
    for file in files:
        with open_decompressed(file) as stream:
            for raw in compressed.iter_lines(stream):
                line = raw.removeprefix(b"\xef\xbb\xbf").decode(errors="replace").strip("\r\n")
                found += [line] if line.strip() else []
                if len(found) >= SAMPLE_LINES:
                    return found
    return found


FORMAT = Format(kind="lines", suffixes=frozenset(), read=read)
