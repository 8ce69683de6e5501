"""IDX and NumPy arrays: every row is read once for any piece size, and damaged files are refused."""

from __future__ import annotations

import gzip
import os
import struct
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.data.formats import arrays, idx
from bottega.data.formats.reader import Format, Piece
from bottega.data.records.record import Record

DATA = os.environ.get("BOTTEGA_DATA")
needs_data = pytest.mark.skipif(DATA is None, reason="BOTTEGA_DATA is not set")


def read_records(format: Format, file: Path, size: int = 1 << 20, **options: Any) -> list[Record]:
    source = Source(**options)
    pieces = format.list_pieces(file, file.name, source, size)
    return [record for piece in pieces for record in format.read(piece, source)]  # type: ignore[misc]


def encode_idx(array: np.ndarray) -> bytes:
    kind = {"u1": 8, "i4": 12, "f4": 13}[array.dtype.str[1:]]
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, kind, array.ndim, *array.shape)
    return head + array.astype(array.dtype.newbyteorder(">")).tobytes()


@needs_data
@pytest.mark.parametrize(("split", "count"), [(None, 60_000), ("train", 60_000), ("test", 10_000)])
def test_fashion_mnist(split: str | None, count: int) -> None:
    folder = Path(DATA or "", "image-fashion-mnist")
    images = folder / f"{'t10k' if split == 'test' else 'train'}-images-idx3-ubyte.gz"
    assert idx.find_images(folder, split) == images
    if split is None:
        return
    records = read_records(idx.FORMAT, folder, split=split)
    assert Counter(record.fields["label"] for record in records) == dict.fromkeys(range(10), count // 10)
    assert all(record.fields["image"].shape == (28, 28) for record in records)
    raw = gzip.decompress(images.read_bytes())
    assert b"".join(record.fields["image"].tobytes() for record in records) == raw[16:]
    assert records[-1].key == f"image-fashion-mnist/{images.name}:{count - 1}"


@needs_data
def test_listed_idx_folder_yields_one_piece() -> None:
    """Every file of a listed folder is passed to list_pieces; labels and other splits yield no pieces."""
    folder = Path(DATA or "", "image-fashion-mnist")
    for split, chosen in (("test", "t10k-images-idx3-ubyte.gz"), (None, "train-images-idx3-ubyte.gz")):
        source = Source(path=str(folder), split=split)
        pieces = [
            piece for file in sorted(folder.glob("*.gz")) for piece in idx.list_pieces(file, file.name, source, 1 << 20)
        ]
        assert pieces == [Piece(folder / chosen, chosen)]
    named = Source(path=str(folder / "t10k-images-idx3-ubyte.gz"))
    assert len(idx.list_pieces(folder / "t10k-images-idx3-ubyte.gz", "t10k", named, 1)) == 1


@given(
    hnp.arrays(
        st.sampled_from((np.uint8, np.int32, np.float32)),
        st.tuples(st.integers(0, 20), st.integers(1, 3), st.integers(1, 3)),
    ),
    st.integers(1, 100),
    st.booleans(),
)
def test_idx_of_any_dtype_round_trips(
    tmp_path_factory: pytest.TempPathFactory, array: np.ndarray, size: int, compressed: bool
) -> None:
    folder = tmp_path_factory.mktemp("idx")
    labels = np.arange(len(array), dtype=np.int32) - 3
    for name, values in (("a-train-images.idx3-ubyte", array), ("a-train-labels.idx1-ubyte", labels)):
        data = encode_idx(values)
        (folder / (f"{name}.gz" if compressed else name)).write_bytes(gzip.compress(data) if compressed else data)
    records = read_records(idx.FORMAT, folder, size)
    assert [record.fields["label"] for record in records] == labels.tolist()
    assert [record.key.rpartition(":")[2] for record in records] == [str(i) for i in range(len(array))]
    for record, row in zip(records, array, strict=True):
        assert record.fields["image"].dtype == array.dtype
        np.testing.assert_array_equal(record.fields["image"], row)


def test_idx_images_without_labels_have_no_label(tmp_path: Path) -> None:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(encode_idx(np.zeros((2, 3, 3), np.uint8)))
    assert [set(record.fields) for record in read_records(idx.FORMAT, tmp_path)] == [{"image"}] * 2


def test_inconsistent_idx_files_are_refused(tmp_path: Path) -> None:
    images, labels = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"
    images.write_bytes(encode_idx(np.zeros((4, 2, 2), np.uint8)))
    labels.write_bytes(encode_idx(np.zeros(3, np.uint8)))
    with pytest.raises(DataError, match=r"has 4 rows and .* has 3"):
        read_records(idx.FORMAT, images)
    labels.write_bytes(encode_idx(np.zeros((4, 1), np.uint8)))
    with pytest.raises(DataError, match="one per row"):
        read_records(idx.FORMAT, images)
    labels.write_bytes(encode_idx(np.zeros(4, np.uint8)))
    assert len(read_records(idx.FORMAT, images)) == 4
    for data, message in (
        (images.read_bytes()[:-1], "15 bytes follow"),
        (b"\0\0\x08", "not an IDX"),
        (b"text", "not an IDX"),
    ):
        images.write_bytes(data)
        with pytest.raises(DataError, match=message):
            read_records(idx.FORMAT, images)
    with pytest.raises(DataError, match=r"no IDX images of test; it has train"):
        read_records(idx.FORMAT, tmp_path, split="test")
    (tmp_path / "emnist-train-images-idx3-ubyte").write_bytes(b"")
    with pytest.raises(DataError, match="several"):
        read_records(idx.FORMAT, tmp_path)


arrays_of_rows = hnp.arrays(
    st.one_of(
        hnp.integer_dtypes(endianness="?"),
        hnp.floating_dtypes(endianness="?"),
        hnp.boolean_dtypes(),
        hnp.unicode_string_dtypes(max_len=4),
    ),
    st.tuples(st.integers(0, 9), st.integers(1, 3)) | st.tuples(st.integers(0, 9)),
)


def values_equal(value: Any, expected: np.ndarray) -> bool:
    if expected.ndim == 0:
        return type(value) is type(expected.item()) and np.array_equal(
            value, expected.item(), equal_nan=expected.dtype.kind == "f"
        )
    native = value.dtype == expected.dtype.newbyteorder("=")
    return native and np.array_equal(value, expected, equal_nan=expected.dtype.kind == "f")


@given(arrays_of_rows, st.integers(1, 40), st.sampled_from(("npy", "npz", "compressed", "folder")), st.booleans())
def test_every_row_is_read_once(
    tmp_path_factory: pytest.TempPathFactory, array: np.ndarray, size: int, form: str, fortran: bool
) -> None:
    folder = tmp_path_factory.mktemp("arrays")
    if fortran:
        array = np.asfortranarray(array)
    numbers = np.arange(len(array))
    file = folder / ("a.npy" if form == "npy" else "a.npz")
    if form == "npy":
        np.save(file, array)
    elif form == "folder":
        file = folder
        np.save(folder / "x.npy", array)
        np.save(folder / "y.npy", numbers)
    else:
        (np.savez if form == "npz" else np.savez_compressed)(file, x=array, y=numbers)
    records = read_records(arrays.FORMAT, file, size)
    assert [record.key for record in records] == [f"{file.name}:{i}" for i in range(len(array))]
    for i, record in enumerate(records):
        assert values_equal(record.fields["array" if form == "npy" else "x"], array[i])
        assert form == "npy" or record.fields["y"] == i


@pytest.mark.parametrize("form", ["npy", "npz", "compressed"])
def test_fortran_order_is_read_by_row(tmp_path: Path, form: str) -> None:
    array = np.asfortranarray(np.arange(12).reshape(4, 3))
    file = tmp_path / ("a.npy" if form == "npy" else "a.npz")
    if form == "npy":
        np.save(file, array)
    else:
        (np.savez if form == "npz" else np.savez_compressed)(file, array=array)
    assert [record.fields["array"].tolist() for record in read_records(arrays.FORMAT, file, 30)] == array.tolist()


def test_array_names_and_folder_listing(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.eye(3))
    np.save(tmp_path / "labels.npy", np.arange(3))
    assert read_records(arrays.FORMAT, tmp_path / "x.npy", field="inputs")[0].fields.keys() == {"inputs"}
    source = Source(path=str(tmp_path))
    pieces = [p for file in sorted(tmp_path.iterdir()) for p in arrays.list_pieces(file, file.name, source, 1 << 20)]
    assert pieces == [Piece(tmp_path, tmp_path.name, 0, 3)]
    assert read_records(arrays.FORMAT, tmp_path)[2].fields["labels"] == 2


def test_compressed_archives_are_read_in_little_memory(tmp_path: Path) -> None:
    import tracemalloc

    np.savez_compressed(tmp_path / "a.npz", x=np.arange(16 << 20, dtype=np.uint8).reshape(-1, 1024))
    tracemalloc.start()
    count = sum(1 for _ in arrays.read(Piece(tmp_path / "a.npz", "a"), Source()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 16 << 10
    assert peak < 4 << 20


def test_invalid_array_tables_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    np.savez(file, x=np.zeros(3), y=np.zeros(4))
    with pytest.raises(DataError, match=r"equally long along the first axis, the row \(x 3, y 4\)"):
        read_records(arrays.FORMAT, file)
    np.savez(file, x=np.zeros(3), y=np.array(4))
    with pytest.raises(DataError, match=r"'y' has shape \(\)"):
        read_records(arrays.FORMAT, file)
    np.savez(file)
    with pytest.raises(DataError, match="no arrays"):
        read_records(arrays.FORMAT, file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY")
        archive.writestr("readme.txt", b"hello")
    with pytest.raises(DataError, match=r"'readme\.txt': is not an array"):
        read_records(arrays.FORMAT, file)
    file.write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"a\.npz is not an npz file"):
        read_records(arrays.FORMAT, file)
    (tmp_path / "b").mkdir()
    with pytest.raises(DataError, match="no arrays"):
        read_records(arrays.FORMAT, tmp_path / "b")


@given(st.integers(0, 700), st.binary(min_size=1, max_size=3), st.booleans())
def test_damaged_archive_is_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, offset: int, noise: bytes, compressed: bool
) -> None:
    file = tmp_path_factory.mktemp("damaged") / "a.npz"
    (np.savez_compressed if compressed else np.savez)(file, x=np.arange(20), y=np.eye(20))
    data = bytearray(file.read_bytes())
    data[offset : offset + len(noise)] = noise
    file.write_bytes(data)
    message = str(file)
    try:
        read_records(arrays.FORMAT, file)
    except DataError as error:
        message = str(error)
    assert str(file) in message
    assert "\n" not in message
