"""IDX, the format of MNIST and its kin: a file of images, and one of labels beside it with the same beginning of its name."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.data.formats.compression import is_compressed, open_decompressed
from bottega.data.formats.reader import Format, Piece, make_printable
from bottega.data.records.archive_members import CHUNK, MAX_MEMBER_BYTES, read_up_to
from bottega.data.records.record import BadRecord, Record

TYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
MAX_DIMENSIONS = 8
NAME = re.compile(r"(?P<part>.*?)[-_.]?(?P<what>images|labels)[-_.]idx(?P<dimensions>\d)-\w+?(\.gz)?", re.IGNORECASE)
PARTS = {"train": "train", "t10k": "test", "test": "test", "valid": "validation", "validation": "validation"}


def find_images(folder: Path, split: str | None) -> Path:
    """The file of images of one part; without a split that is train, or the only one there is."""
    files = [file for file in sorted(folder.iterdir()) if _what(file) == "images"]
    parts = {file: _part(file) for file in files}
    wanted = PARTS.get(split or "train", split or "train")
    found = [file for file in files if parts[file] == wanted]
    if split is None and len(files) == 1:
        return files[0]
    if not found:
        listed = ", ".join(sorted(set(parts.values()))) or "none"
        raise DataError(f"{folder} has no IDX images of {wanted}; it has {listed}; set split to one of them")
    if len(found) > 1:
        raise DataError(
            f"{folder} has several IDX images of {wanted}: {found[0].name}, {found[1].name}; name one as path"
        )
    return found[0]


def list_splits(path: Path) -> set[str]:
    """Return the parts that a folder has images of: train, test, validation."""
    files = sorted(path.iterdir()) if path.is_dir() else ()
    return {_part(file) for file in files if _what(file) == "images"}


def _what(file: Path) -> str | None:
    match = NAME.fullmatch(file.name)
    return match["what"].lower() if match else None


def _part(file: Path) -> str:
    """train of emnist-letters-train-images-idx3-ubyte."""
    match = NAME.fullmatch(file.name)
    word = re.split("[-_.]", match["part"].lower())[-1] if match else ""
    return PARTS.get(word, word)


def find_labels(images: Path) -> Path | None:
    """The labels beside a file of images, packed or not, or None."""
    match = NAME.fullmatch(images.name)
    if match is None:
        return None
    for other in sorted(images.parent.iterdir()):
        beside = NAME.fullmatch(other.name)
        if beside and beside["what"].lower() == "labels" and beside["part"].lower() == match["part"].lower():
            return other
    return None


def list_pieces(file: Path, name: str, source: Source, size: int) -> list[Piece]:
    """Ranges of rows. `file` is a file of images or a folder; one of labels is read with its images and is no piece."""
    if file.is_dir():
        file = find_images(file, source.split)
        name = make_printable(f"{name}/{file.name}" if name else file.name)
    if _what(file) == "labels":
        return []
    root = Path(source.path).expanduser() if source.path is not None else None
    if root == file.parent and find_images(root, source.split) != file:
        return []  # the folder of the recipe was listed: this is another part
    if is_compressed(file):
        return [Piece(file, name)]
    with open_decompressed(file) as stream:
        _, shape = _header(stream, file)
    rows = max(1, size // max(1, math.prod(shape[1:])))
    return [Piece(file, name, start, min(start + rows, shape[0])) for start in range(0, shape[0], rows)]


def read(piece: Piece, source: Source) -> Iterator[Record | BadRecord]:
    """Fields `image`, an array [h, w], and `label`, a whole number. Rows are counted from 0."""
    labels = find_labels(piece.file)
    images = _rows(piece.file, piece)
    if labels is None:
        for row, image in images:
            yield Record(f"{piece.name}:{row}", f"{piece.location}, row {row}", {"image": image})
        return
    _agree(piece.file, labels)
    for (row, image), (_, label) in zip(images, _rows(labels, piece), strict=True):
        yield Record(f"{piece.name}:{row}", f"{piece.location}, row {row}", {"image": image, "label": int(label)})


def _agree(images: Path, labels: Path) -> None:
    with open_decompressed(images) as stream:
        _, first = _header(stream, images)
    with open_decompressed(labels) as stream:
        dtype, second = _header(stream, labels)
    if len(second) != 1 or dtype.kind not in "iu":
        raise DataError(f"{labels} holds {dtype} of shape {second}; labels are whole numbers, one a row")
    if first[0] != second[0]:
        raise DataError(f"{images} has {first[0]} rows and {labels} has {second[0]}; they do not belong together")


def _rows(file: Path, piece: Piece) -> Iterator[tuple[int, Any]]:
    """(number, row), in blocks of about a megabyte: a header may say anything, so memory follows what is there."""
    with open_decompressed(file) as stream:
        dtype, shape = _header(stream, file)
        stop = shape[0] if piece.stop is None else piece.stop
        width = dtype.itemsize * math.prod(shape[1:])
        if piece.start:
            stream.seek(piece.start * width, os.SEEK_CUR)
        row, block = piece.start, max(1, CHUNK // width)
        while row < stop:
            count = min(block, stop - row)
            data = read_up_to(stream, count * width)
            whole = len(data) // width
            values = np.frombuffer(data, dtype, whole * width // dtype.itemsize).reshape(whole, *shape[1:])
            # A copy in the order of this machine, which may be written to.
            for values_of_row in values.astype(dtype.newbyteorder("=")):
                yield row, values_of_row
                row += 1
            if whole < count:
                raise DataError(f"{file} says it has {shape[0]} rows and ends after {row}; it was cut off")
        if piece.stop is None and stream.read(1):
            raise DataError(f"{file} says it has {shape[0]} rows and goes on after them; its header is wrong")


def _header(stream: BinaryIO, file: Path) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Two zeros, the type, the number of axes, and the length of each in four bytes."""
    magic = stream.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in TYPES or not 1 <= magic[3] <= MAX_DIMENSIONS:
        raise DataError(f"{file} is no IDX file: it begins with {magic.hex() or 'nothing'}")
    lengths = stream.read(4 * magic[3])
    if len(lengths) < 4 * magic[3]:
        raise DataError(f"{file} ends within its header; it was cut off")
    shape = tuple(int(length) for length in np.frombuffer(lengths, ">u4"))
    dtype = np.dtype(TYPES[magic[2]])
    row = dtype.itemsize * math.prod(shape[1:])
    if not 0 < row <= MAX_MEMBER_BYTES:
        raise DataError(f"{file} says it has rows of shape {shape[1:]}; one of 1 to {MAX_MEMBER_BYTES} bytes is read")
    if stream.seekable():
        found = os.fstat(stream.fileno()).st_size - stream.tell()
        if found != row * shape[0]:
            raise DataError(f"{file} says it has {shape[0]} rows of {row} bytes, and has {found} bytes")
    return dtype, shape


FORMAT = Format(
    kind="idx",
    suffixes=frozenset(f".{name}{packing}" for name in ("idx", "idx1-ubyte", "idx3-ubyte") for packing in ("", ".gz")),
    read=read,
    list_pieces=list_pieces,
    is_media=True,
)
