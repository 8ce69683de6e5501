"""Inputs of `bottega predict`, and the form of its predictions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.data.prepare.inputs import find_utf8_files
from bottega.data.prepare.rules import Rules
from bottega.data.records.record import BadRecord, Record


@dataclass(frozen=True)
class NewSamples:
    """Unlabelled samples: arguments of the command line, the path of `--data`, or lines of standard input."""

    inputs: Sequence[str] = ()
    data: str | None = None
    standard_input: TextIO | None = None

    @property
    def paths(self) -> list[str]:
        """`inputs` and `data` together, for a task whose samples are files."""
        return [*self.inputs, *([self.data] if self.data is not None else [])]


def is_missing(path: str) -> bool:
    """Return whether a path does not exist; URLs and glob patterns are checked later."""
    return (
        "://" not in path
        and not any(character in path for character in "*?[{")
        and not Path(path).expanduser().exists()
    )


def predict_class(names: Sequence[str], class_probabilities: Sequence[float]) -> dict[str, Any]:
    """Return the most likely class of a sample, its probability, and the probabilities of all classes."""
    best = max(range(len(class_probabilities)), key=class_probabilities.__getitem__)
    probabilities = dict(zip(names, class_probabilities, strict=True))
    return {"predicted": names[best], "probability": class_probabilities[best], "probabilities": probabilities}


def read_texts(path: str, training_source: Source) -> list[str]:
    """Return the texts of a file: its lines, or the rows of a table by the fields that the run was trained on."""
    options = training_source.model_dump(include={"field", "columns", "delimiter", "encoding"})
    listing = find_utf8_files(Source(path=path, **options))
    if listing.kind == "text":
        with listing.paths[0].open("rb") as file:
            return read_lines(file, where=path)
    rules, source_without_field = Rules("text"), listing.source.model_copy(update={"field": None})
    by_number = listing.kind == "csv"
    texts = []
    for piece in listing.list_pieces(1 << 20):
        for record in listing.read(piece):
            row = record if isinstance(record, BadRecord) else rules.apply(record, listing.source, by_number=by_number)
            if isinstance(row, BadRecord) and not isinstance(record, BadRecord) and training_source.field is not None:
                retried = rules.apply(record, source_without_field, by_number=by_number)
                row = row if isinstance(retried, BadRecord) else retried
            if isinstance(row, BadRecord):
                raise DataError(f"{row.where}: {row.reason.partition('; set data.train.field to the right one')[0]}")
            texts.append(row.fields["text"] if isinstance(row, Record) else "")
    return texts


def read_lines(lines: Iterable[str] | Iterable[bytes] | TextIO, *, where: str = "standard input") -> list[str]:
    """Return one text for each line, blank ones too, so that predictions line up with the input."""
    texts = []
    # As bytes where possible, so that an error can name the line.
    for number, line in enumerate(getattr(lines, "buffer", lines), start=1):
        if isinstance(line, bytes):
            try:
                line = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{where}, line {number}: not UTF-8: byte 0x{line[error.start]:02x} at column {error.start + 1}; "
                    "convert it, such as with iconv"
                ) from None
        texts.append(line.rstrip("\r\n"))
    return texts
