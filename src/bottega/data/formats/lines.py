"""Lines with a label and a text: `spam<TAB>win a prize`, `__label__spam win a prize`, `1 a fine film`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.data.formats import compressed
from bottega.data.formats.compressed import unpacked
from bottega.data.formats.reader import Format, Piece
from bottega.data.records.record import CONVERT, Bad, Record

MARK = "__label__"
"""What fastText writes in front of every label."""
DIVIDERS = "\t|;,: "
SAMPLE_LINES = 200
LONGEST_LABEL = 64
MOST_LABELS = 0.5
"""Of the lines: where more of them differ in their label, it is not a label but the beginning of a text."""


class LineForm(NamedTuple):
    """How a line is divided."""

    divider: str
    label_first: bool = True

    @property
    def columns(self) -> tuple[str, str]:
        return ("label", "text") if self.label_first else ("text", "label")


def read(piece: Piece, source: Source) -> Iterator[Record | Bad]:
    form = LineForm(source.delimiter or " ", (source.columns or ("label",))[0] == "label")
    with unpacked(piece.file) as stream:
        for number, raw in enumerate(compressed.lines(stream), start=1):
            key, where = f"{piece.name}:{number}", f"{piece.place}, line {number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip("\r\n")
            except UnicodeDecodeError as error:
                yield Bad(
                    key, where, f"not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}; {CONVERT}"
                )
                continue
            if not line.strip():
                continue
            parts = divide(line, form)
            if parts is None:
                yield Bad(key, where, f"has no {form.divider!r} between a label and a text")
            else:
                yield Record(key, where, {"label": parts[0], "text": parts[1]})


def divide(line: str, form: LineForm) -> tuple[str | list[str], str] | None:
    """Label and text of a line; a list of labels where fastText's mark stands in front of several. None without a divider."""
    if line.startswith(MARK):
        words = line.split()
        labels = [word.removeprefix(MARK) for word in words if word.startswith(MARK)]
        text = " ".join(word for word in words if not word.startswith(MARK))
        return (labels[0] if len(labels) == 1 else labels), text
    line = line.lstrip() if form.divider == " " else line
    head, divider, tail = line.partition(form.divider) if form.label_first else line.rpartition(form.divider)
    if not divider:
        return None
    label, text = (head, tail) if form.label_first else (tail, head)
    return label.strip(), text.strip()


def recognise(files: Sequence[Path]) -> LineForm:
    """How the lines of these files are divided: by the first sign that all of them have, with labels that repeat."""
    lines = _sample(files)
    for divider in DIVIDERS:
        for label_first in (True, False) if divider == "\t" else (True,):
            form = LineForm(divider, label_first)
            if _fits([divide(line, form) for line in lines]):
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
        with unpacked(file) as stream:
            for raw in compressed.lines(stream):
                line = raw.removeprefix(b"\xef\xbb\xbf").decode(errors="replace").strip("\r\n")
                found += [line] if line.strip() else []
                if len(found) >= SAMPLE_LINES:
                    return found
    return found


FORMAT = Format(kind="lines", suffixes=frozenset(), read=read)
