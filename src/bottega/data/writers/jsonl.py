"""JSON lines. Media lie beside them as files: SPLIT/metadata.jsonl and SPLIT/0001.png, the layout of Hugging Face's
folders of images or audio, where `file_name` says which file a row is about."""

from __future__ import annotations

from io import BufferedWriter
from pathlib import Path
from typing import Any, final

from bottega.core.errors import DataError
from bottega.data.records.record import Record
from bottega.data.writers import Shard, as_json, encoded


@final
class LineShard(Shard):
    """Whether there are media is told by the first row. A split with media is one file: its rows are small."""

    def __init__(self, folder: Path, split: str, number: int) -> None:
        self._folder = folder / split
        self.path = folder / f"{split}-{number:06d}.jsonl"
        self._file: BufferedWriter | None = None
        self._has_media = False

    def add(self, record: Record, name: str) -> None:
        media = {field: found for field, value in record.fields.items() if (found := encoded(field, value, record))}
        if self._file is None:
            self._has_media = bool(media)
            if media:
                self._folder.mkdir()
                self.path = self._folder / "metadata.jsonl"
            self._file = self.path.open("wb")
        if media and not self._has_media:
            raise DataError(f"{record.where}: has {', '.join(media)}, and the rows before it have no media")
        row: dict[str, Any] = {}
        for number, (field, (suffix, data)) in enumerate(media.items()):
            # Names have no dot, so this is no other row's file.
            file = f"{name}.{suffix}" if number == 0 else f"{name}.{number}.{suffix}"
            with (self._folder / file).open("xb") as out:
                out.write(data)
            row["file_name" if number == 0 else f"{field}_file_name"] = file
        row |= {field: value for field, value in record.fields.items() if field not in media and field not in row}
        line = as_json(row, record, ", ".join(row)) + b"\n"
        self._file.write(line)
        self.size += 0 if self._has_media else len(line)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
