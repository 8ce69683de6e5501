"""Write WebDataset shards: a sample is consecutive members of one name, each with a suffix for its type.

Times and owners are zero, so equal records give equal bytes.
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

BLOCK_BYTES = 512
LABEL_FIELDS = frozenset(("label", "class", "cls"))
MEDIUM_FIELDS = frozenset(("image", "audio", "video"))
"""Fields of these names get only the suffix of the medium, as is usual in WebDataset: 0001.jpg."""
MAX_INTEGER = 10**18


@final
class TarShard(OutputShard):
    """One tar file being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")

    def add(self, record: Record, name: str) -> None:
        for suffix, data in encode_members(record).items():
            info = tarfile.TarInfo(f"{name}.{suffix}")
            info.size = len(data)
            header = info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")
            self._file.write(header + data + bytes(-len(data) % BLOCK_BYTES))
            self.size += len(header) + len(data) + -len(data) % BLOCK_BYTES

    def close(self) -> None:
        if not self._file.closed:
            self._file.write(bytes(2 * BLOCK_BYTES))
            self._file.close()


def encode_members(record: Record) -> dict[str, bytes]:
    """Return the members of a sample by suffix. Values without a suffix of their own are stored together in .json."""
    members: dict[str, bytes] = {}
    json_values: dict[str, Any] = {}
    for field, value in record.fields.items():
        if not field or re.search(r"[/\\\x00-\x1f\x7f-\x9f]|^\.|\.$", field):
            raise_field_error(record, field, "cannot be part of a file name; rename the field")
        member = _encode_member(field, value, record)
        if member is None:
            json_values[field] = value
            continue
        # A row may have both a `text` and a `txt`, or an `image` and a `png`.
        suffixes, data = member
        suffix = next((suffix for suffix in suffixes if suffix not in members), None)
        if suffix is None:
            raise_field_error(
                record,
                field,
                f"would be a second member .{suffixes[0]}; give fields names that differ by more than case",
            )
        members[suffix] = data
    if set(json_values) == {"json"}:
        json_values, members["json"] = {}, encode_json(json_values["json"], record, "json")
    if json_values or not members:
        if "json" in members:
            raise_field_error(record, "json", "is reserved for the member with plain values; rename the field")
        members["json"] = encode_json(json_values, record, ", ".join(json_values))
    return members


def _encode_member(field: str, value: Any, record: Record) -> tuple[tuple[str, ...], bytes] | None:
    """Return the possible suffixes of a field, the best first, and its bytes; None for a value that belongs in .json."""
    name, last_suffix = field.lower(), field.lower().rpartition(".")[2]
    medium = encode_medium(field, value, record)
    if medium is not None:
        suffix, data = medium
        own_suffixes = (name,) if last_suffix == suffix else ()
        short_suffixes = (suffix,) if name in MEDIUM_FIELDS else ()
        return (*own_suffixes, *short_suffixes, f"{name}.{suffix}"), data
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise_field_error(record, field, "is an array of Python objects, which could only be written as pickles")
        stream = io.BytesIO()
        np.lib.format.write_array(stream, value, allow_pickle=False)
        return (name if last_suffix == "npy" else f"{name}.npy",), stream.getvalue()
    if isinstance(value, str) and name in LABEL_FIELDS and re.fullmatch("0|[1-9][0-9]{0,17}", value):
        return ("cls", f"{name}.cls"), value.encode()  # readers take .cls for a number; class names are text
    # Text with a NUL is refused on reading; JSON can hold it.
    if isinstance(value, str) and "\0" not in value:
        try:
            data = value.encode()
        except UnicodeEncodeError:
            raise_field_error(record, field, "has an unpaired surrogate, which cannot be encoded")
        own_suffixes = ("txt",) if name == "text" else (name,) if last_suffix in TEXT_SUFFIXES else ()
        return (*own_suffixes, f"{name}.txt"), data
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and abs(int(value)) < MAX_INTEGER:
        if name in LABEL_FIELDS:
            return ("cls", f"{name}.cls"), str(int(value)).encode()
        if last_suffix in INTEGER_SUFFIXES:
            return (name,), str(int(value)).encode()
    return None
