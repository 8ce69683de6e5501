"""Text files with a label and a text on each line: `spam<TAB>win a prize`, `__label__spam win a prize`, `1 a fine film`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.data.formats import compression
from bottega.data.formats.compression import open_decompressed
from bottega.data.formats.reader import Format, Piece
from bottega.data.records.record import ENCODING_HINT, BadRecord, Record

FASTTEXT_PREFIX = "__label__"
"""fastText's mark in front of every label."""
DELIMITERS = "\t|;,: "
NUM_SAMPLE_LINES = 200
MAX_LABEL_LENGTH = 64
MAX_DISTINCT_SHARE = 0.5
"""Distinct labels as a fraction of all labels: if there are more, the first words are taken for the beginning of a text."""


class LineLayout(NamedTuple):
    """The delimiter between label and text, and which of them comes first."""

    delimiter: str
    is_label_first: bool = True

    @property
    def columns(self) -> tuple[str, str]:
        """Field names in the order of a line."""
        return ("label", "text") if self.is_label_first else ("text", "label")


def read(piece: Piece, source: Source) -> Iterator[Record | BadRecord]:
    """Yield a text and its label for each line that is not blank."""
    layout = LineLayout(source.delimiter or " ", (source.columns or ("label",))[0] == "label")
    with open_decompressed(piece.file) as stream:
        for number, raw in enumerate(compression.iter_lines(stream), start=1):
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
            parts = split_line(line, layout)
            if parts is None:
                yield BadRecord(key, where, f"has no {layout.delimiter!r} between label and text")
            else:
                yield Record(key, where, {"label": parts[0], "text": parts[1]})


def split_line(line: str, layout: LineLayout) -> tuple[str | list[str], str] | None:
    """Return label and text of a line, or None if it has no delimiter. Several fastText labels are returned as a list."""
    if line.startswith(FASTTEXT_PREFIX):
        words = line.split()
        labels = [word.removeprefix(FASTTEXT_PREFIX) for word in words if word.startswith(FASTTEXT_PREFIX)]
        text = " ".join(word for word in words if not word.startswith(FASTTEXT_PREFIX))
        return (labels[0] if len(labels) == 1 else labels), text
    line = line.lstrip() if layout.delimiter == " " else line
    head, delimiter, tail = (
        line.partition(layout.delimiter) if layout.is_label_first else line.rpartition(layout.delimiter)
    )
    if not delimiter:
        return None
    label, text = (head, tail) if layout.is_label_first else (tail, head)
    return label.strip(), text.strip()


def detect_line_layout(files: Sequence[Path]) -> LineLayout:
    """Detect the layout of the lines: the first delimiter that occurs in all lines and splits off labels that repeat."""
    lines = _read_sample_lines(files)
    for delimiter in DELIMITERS:
        for is_label_first in (True, False) if delimiter == "\t" else (True,):
            layout = LineLayout(delimiter, is_label_first)
            if _has_labels([split_line(line, layout) for line in lines]):
                return layout
    preview = lines[0][:60] if lines else ""
    raise DataError(
        f"{files[0]}: no delimiter splits all lines into a label that repeats and a text (the first line: {preview!r}); "
        "write label, tab, text on each line, or give a table or JSON Lines"
    )


def _has_labels(pairs: Sequence[tuple[str | list[str], str] | None]) -> bool:
    labels = [pair[0] for pair in pairs if pair is not None and pair[1]]
    if len(labels) < len(pairs) or not labels:
        return False
    names = [name for label in labels for name in ([label] if isinstance(label, str) else label)]
    if any(not name or len(name) > MAX_LABEL_LENGTH for name in names):
        return False
    return 2 <= len(set(names)) <= max(2, MAX_DISTINCT_SHARE * len(names))


def _read_sample_lines(files: Sequence[Path]) -> list[str]:
    lines: list[str] = []
    for file in files:
        with open_decompressed(file) as stream:
            for raw in compression.iter_lines(stream):
                line = raw.removeprefix(b"\xef\xbb\xbf").decode(errors="replace").strip("\r\n")
                lines += [line] if line.strip() else []
                if len(lines) >= NUM_SAMPLE_LINES:
                    return lines
    return lines


FORMAT = Format(kind="lines", suffixes=frozenset(), read=read)
