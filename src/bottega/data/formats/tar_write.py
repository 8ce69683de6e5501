"""WebDataset shards: a sample is consecutive members of one name, each with the suffix that says what it is.

Times and owners are zero, so the same records are the same bytes.
"""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path
from typing import Any, final

import numpy as np

from bottega.data.formats.write import OutputShard, encode_json, encode_medium, raise_field_error
from bottega.data.records.archive_members import INTEGER_SUFFIXES, TEXT_SUFFIXES
from bottega.data.records.record import Record

BLOCK = 512
LABELS = frozenset(("label", "class", "cls"))
MEDIUM_NAMES = frozenset(("image", "audio", "video"))
"""Fields that are named for a medium have only its suffix, as WebDataset's own users write it: 0001.jpg."""
LARGEST = 10**18


@final
class TarShard(OutputShard):
    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")

    def add(self, record: Record, name: str) -> None:
        for suffix, data in encode_members(record).items():
            info = tarfile.TarInfo(f"{name}.{suffix}")
            info.size = len(data)
            header = info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")
            self._file.write(header + data + bytes(-len(data) % BLOCK))
            self.size += len(header) + len(data) + -len(data) % BLOCK

    def close(self) -> None:
        if not self._file.closed:
            self._file.write(bytes(2 * BLOCK))
            self._file.close()


def encode_members(record: Record) -> dict[str, bytes]:
    """The members of a sample by suffix. Plain values without a suffix of their own stand together in .json."""
    out: dict[str, bytes] = {}
    together: dict[str, Any] = {}
    for field, value in record.fields.items():
        if not field or re.search(r"[/\\\x00-\x1f\x7f-\x9f]|^\.|\.$", field):
            raise_field_error(record, field, "a name that cannot be part of a file name")
        found = _member(field, value, record)
        if found is None:
            together[field] = value
            continue
        # A row may have both a `text` and a `txt`, or an `image` and a `png`.
        suffixes, data = found
        suffix = next((suffix for suffix in suffixes if suffix not in out), None)
        if suffix is None:
            raise_field_error(
                record, field, f"there are two members .{suffixes[0]}; field names differ by more than case"
            )
        out[suffix] = data
    if set(together) == {"json"}:
        together, out["json"] = {}, encode_json(together["json"], record, "json")
    if together or not out:
        if "json" in out:
            raise_field_error(record, "json", "the name of what plain values are written to; rename it")
        out["json"] = encode_json(together, record, ", ".join(together))
    return out


def _member(field: str, value: Any, record: Record) -> tuple[tuple[str, ...], bytes] | None:
    """The suffixes it can have, the best first, and the bytes; None for a plain value that has none."""
    name, last = field.lower(), field.lower().rpartition(".")[2]
    medium = encode_medium(field, value, record)
    if medium is not None:
        suffix, data = medium
        own = (name,) if last == suffix else ()
        short = (suffix,) if name in MEDIUM_NAMES else ()
        return (*own, *short, f"{name}.{suffix}"), data
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise_field_error(record, field, "an array of Python objects, which could only be written as pickles")
        stream = io.BytesIO()
        np.lib.format.write_array(stream, value, allow_pickle=False)
        return (name if last == "npy" else f"{name}.npy",), stream.getvalue()
    if isinstance(value, str) and name in LABELS and re.fullmatch("0|[1-9][0-9]{0,17}", value):
        return ("cls", f"{name}.cls"), value.encode()  # a number to every reader; the name of a class is a text
    # Text with a NUL is refused when it is read, and JSON can hold it.
    if isinstance(value, str) and "\0" not in value:
        try:
            data = value.encode()
        except UnicodeEncodeError:
            raise_field_error(record, field, "half a surrogate pair, which no file can hold")
        own = ("txt",) if name == "text" else (name,) if last in TEXT_SUFFIXES else ()
        return (*own, f"{name}.txt"), data
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and abs(int(value)) < LARGEST:
        if name in LABELS:
            return ("cls", f"{name}.cls"), str(int(value)).encode()
        if last in INTEGER_SUFFIXES:
            return (name,), str(int(value)).encode()
    return None
