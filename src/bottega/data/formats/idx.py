"""IDX, the format of MNIST: a file of images, and beside it a file of labels whose name begins in the same way."""

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
from bottega.data.records.archive_members import CHUNK_BYTES, MAX_MEMBER_BYTES, read_up_to
from bottega.data.records.record import BadRecord, Record

DTYPES_BY_CODE = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
MAX_DIMENSIONS = 8
FILE_NAME = re.compile(
    r"(?P<split>.*?)[-_.]?(?P<content>images|labels)[-_.]idx(?P<dimensions>\d)-\w+?(\.gz)?", re.IGNORECASE
)
SPLIT_ALIASES = {"train": "train", "t10k": "test", "test": "test", "valid": "validation", "validation": "validation"}


def find_images(folder: Path, split: str | None) -> Path:
    """Return the image file of a split; if `split` is None, the only image file, or that of train."""
    files = [file for file in sorted(folder.iterdir()) if _parse_content(file) == "images"]
    splits = {file: _parse_split(file) for file in files}
    split_name = SPLIT_ALIASES.get(split or "train", split or "train")
    matching = [file for file in files if splits[file] == split_name]
    if split is None and len(files) == 1:
        return files[0]
    if not matching:
        available = ", ".join(sorted(set(splits.values()))) or "none"
        raise DataError(f"{folder} has no IDX images of {split_name}; it has {available}; set split to one of them")
    if len(matching) > 1:
        raise DataError(
            f"{folder} has several IDX images of {split_name}: {matching[0].name}, {matching[1].name}; give the path of one"
        )
    return matching[0]


def list_splits(path: Path) -> set[str]:
    """Return the splits whose images a folder contains: train, test, validation."""
    files = sorted(path.iterdir()) if path.is_dir() else ()
    return {_parse_split(file) for file in files if _parse_content(file) == "images"}


def _parse_content(file: Path) -> str | None:
    match = FILE_NAME.fullmatch(file.name)
    return match["content"].lower() if match else None


def _parse_split(file: Path) -> str:
    """Return the split of a file name, such as train of emnist-letters-train-images-idx3-ubyte."""
    match = FILE_NAME.fullmatch(file.name)
    word = re.split("[-_.]", match["split"].lower())[-1] if match else ""
    return SPLIT_ALIASES.get(word, word)


def find_labels(images: Path) -> Path | None:
    """Return the label file beside an image file, compressed or not, or None."""
    match = FILE_NAME.fullmatch(images.name)
    if match is None:
        return None
    for candidate in sorted(images.parent.iterdir()):
        candidate_match = FILE_NAME.fullmatch(candidate.name)
        if (
            candidate_match
            and candidate_match["content"].lower() == "labels"
            and candidate_match["split"].lower() == match["split"].lower()
        ):
            return candidate
    return None


def list_pieces(file: Path, name: str, source: Source, size: int) -> list[Piece]:
    """Return ranges of rows of an image file, or of the image file of a folder. Label files are read with their images."""
    if file.is_dir():
        file = find_images(file, source.split)
        name = make_printable(f"{name}/{file.name}" if name else file.name)
    if _parse_content(file) == "labels":
        return []
    root = Path(source.path).expanduser() if source.path is not None else None
    if root == file.parent and find_images(root, source.split) != file:
        return []  # a file of another split in the folder that the recipe names
    if is_compressed(file):
        return [Piece(file, name)]
    with open_decompressed(file) as stream:
        _, shape = _read_header(stream, file)
    rows_per_piece = max(1, size // max(1, math.prod(shape[1:])))
    return [
        Piece(file, name, start, min(start + rows_per_piece, shape[0])) for start in range(0, shape[0], rows_per_piece)
    ]


def read(piece: Piece, source: Source) -> Iterator[Record | BadRecord]:
    """Yield records with `image`, an array (height, width), and `label`, an integer. Rows are counted from 0."""
    labels = find_labels(piece.file)
    images = _read_rows(piece.file, piece)
    if labels is None:
        for row, image in images:
            yield Record(f"{piece.name}:{row}", f"{piece.location}, row {row}", {"image": image})
        return
    _check_labels(piece.file, labels)
    for (row, image), (_, label) in zip(images, _read_rows(labels, piece), strict=True):
        yield Record(f"{piece.name}:{row}", f"{piece.location}, row {row}", {"image": image, "label": int(label)})


def _check_labels(images: Path, labels: Path) -> None:
    with open_decompressed(images) as stream:
        _, images_shape = _read_header(stream, images)
    with open_decompressed(labels) as stream:
        dtype, labels_shape = _read_header(stream, labels)
    if len(labels_shape) != 1 or dtype.kind not in "iu":
        raise DataError(f"{labels} contains {dtype} of shape {labels_shape}; labels must be integers, one per row")
    if images_shape[0] != labels_shape[0]:
        raise DataError(
            f"{images} has {images_shape[0]} rows and {labels} has {labels_shape[0]}; give files that belong together"
        )


def _read_rows(file: Path, piece: Piece) -> Iterator[tuple[int, Any]]:
    """Yield (row number, values). About a megabyte is read at a time, since the header may lie about the size."""
    with open_decompressed(file) as stream:
        dtype, shape = _read_header(stream, file)
        stop = shape[0] if piece.stop is None else piece.stop
        row_bytes = dtype.itemsize * math.prod(shape[1:])
        if piece.start:
            stream.seek(piece.start * row_bytes, os.SEEK_CUR)
        row, rows_per_read = piece.start, max(1, CHUNK_BYTES // row_bytes)
        while row < stop:
            count = min(rows_per_read, stop - row)
            data = read_up_to(stream, count * row_bytes)
            num_rows = len(data) // row_bytes
            values = np.frombuffer(data, dtype, num_rows * row_bytes // dtype.itemsize).reshape(num_rows, *shape[1:])
            # A writable copy in native byte order.
            for values_of_row in values.astype(dtype.newbyteorder("=")):
                yield row, values_of_row
                row += 1
            if num_rows < count:
                raise DataError(f"{file} is truncated: its header states {shape[0]} rows and it ends after {row}")
        if piece.stop is None and stream.read(1):
            raise DataError(f"{file} is damaged: its header states {shape[0]} rows and more data follows them")


def _read_header(stream: BinaryIO, file: Path) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the dtype and shape in the header: two zero bytes, the type, the number of axes, and each length in four bytes."""
    magic = stream.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in DTYPES_BY_CODE or not 1 <= magic[3] <= MAX_DIMENSIONS:
        raise DataError(f"{file} is not an IDX file: it begins with {magic.hex() or 'nothing'}")
    lengths = stream.read(4 * magic[3])
    if len(lengths) < 4 * magic[3]:
        raise DataError(f"{file} is truncated: it ends within its header")
    shape = tuple(int(length) for length in np.frombuffer(lengths, ">u4"))
    dtype = np.dtype(DTYPES_BY_CODE[magic[2]])
    row_bytes = dtype.itemsize * math.prod(shape[1:])
    if not 0 < row_bytes <= MAX_MEMBER_BYTES:
        raise DataError(
            f"{file}: its header states rows of shape {shape[1:]}; a row must have 1 to {MAX_MEMBER_BYTES} bytes"
        )
    if stream.seekable():
        available = os.fstat(stream.fileno()).st_size - stream.tell()
        if available != row_bytes * shape[0]:
            raise DataError(
                f"{file} is damaged: its header states {shape[0]} rows of {row_bytes} bytes, but {available} bytes follow"
            )
    return dtype, shape


FORMAT = Format(
    kind="idx",
    suffixes=frozenset(
        f".{name}{compression}" for name in ("idx", "idx1-ubyte", "idx3-ubyte") for compression in ("", ".gz")
    ),
    read=read,
    list_pieces=list_pieces,
    is_media=True,
)
