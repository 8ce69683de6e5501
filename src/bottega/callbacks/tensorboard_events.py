"""TensorBoard's event files: written in the calling thread, in an order that survives kills, resumes and rollbacks."""

from __future__ import annotations

import io
import itertools
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\.")
_HEADER = struct.Struct("<QI")
"""The header of a record: the number of bytes of an event, and their checksum, which another checksum follows."""
_CHECKSUM_SIZE = 4


class EventFile:
    """An event file written in the calling thread; TensorBoard's own writer uses another thread, in which a full disk only prints a traceback.

    If a call cannot write all of its events, the events of that call are removed, so that the file ends with a complete event.
    """

    def __init__(self, folder: Path, *, purge_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        folder.mkdir(parents=True, exist_ok=True)
        self._file = io.FileIO(_make_later_path(folder), "xb")
        # On a START event TensorBoard discards what it has read from `purge_step` on: those steps were rolled back, or run by a
        # process that was killed before it saved them.
        start = Event(wall_time=time.time(), step=purge_step, session_log=SessionLog(status=SessionLog.START))
        try:
            self._write([Event(wall_time=time.time(), file_version="brain.Event:2"), start])
        except OSError:
            self._file.close()
            raise

    def add(self, summaries: Iterable[Any], step: int) -> None:
        """Write an event for each `Summary` at `step`."""
        from tensorboard.compat.proto.event_pb2 import Event

        self._write([Event(wall_time=time.time(), step=step, summary=summary) for summary in summaries])

    def close(self) -> None:
        """Close the file; closing it twice does nothing."""
        self._file.close()

    def _write(self, events: list[Any]) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        records = io.BytesIO()
        for event in events:
            RecordWriter(records).write(event.SerializeToString())
        complete_size, remaining = self._file.tell(), records.getbuffer()
        try:
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
        except OSError:
            self._file.truncate(complete_size)
            self._file.seek(complete_size)
            raise


def list_event_files(folder: Path) -> list[Path]:
    """Return the event files of a folder in the order in which TensorBoard reads them."""
    return sorted(path for path in folder.glob("events.out.tfevents.*") if _NAME.match(path.name))


def truncate_last_event(folder: Path, is_obsolete: Callable[[Any], bool]) -> None:
    """Remove the last complete event of the newest file if `is_obsolete`, and what a killed process may have left after it."""
    files = list_event_files(folder)
    if not files:
        return
    with files[-1].open("r+b") as file:
        records = list(_iterate_records(file))
        if records and (event := _read_event(file, *records[-1])) is not None and is_obsolete(event):
            file.truncate(records[-1][0])


def has_tag_at(folder: Path, prefix: str, step: int) -> bool:
    """Return whether an event of `step` has a tag with this prefix and was not discarded since. Reads all event files."""
    from tensorboard.compat.proto.event_pb2 import SessionLog

    is_logged = False
    for path in list_event_files(folder):
        with path.open("rb") as file:
            for event in (_read_event(file, offset, size) for offset, size in _iterate_records(file)):
                if event is None:
                    continue
                if event.session_log.status == SessionLog.START and event.step <= step:
                    is_logged = False
                elif event.step == step and any(value.tag.startswith(prefix) for value in event.summary.value):
                    is_logged = True
    return is_logged


def _read_event(file: IO[bytes], offset: int, size: int) -> Any:
    """Return the event of a record; None if it is damaged."""
    from tensorboard.compat.proto.event_pb2 import Event

    file.seek(offset + _HEADER.size)
    try:
        return Event.FromString(file.read(size))
    except Exception:  # protobuf has an error class of its own for damaged messages
        return None


def _iterate_records(file: IO[bytes]) -> Iterator[tuple[int, int]]:
    """Yield offset and size of each complete record. Only headers are read, so that large files cost little."""
    end = file.seek(0, os.SEEK_END)
    offset = 0
    while offset + _HEADER.size <= end:
        file.seek(offset)
        size, _ = _HEADER.unpack(file.read(_HEADER.size))
        next_offset = offset + _HEADER.size + size + _CHECKSUM_SIZE
        if next_offset > end:
            return
        yield offset, size
        offset = next_offset


def _make_later_path(folder: Path) -> Path:
    """Return the path of a new event file, whose name sorts after those of the existing ones.

    TensorBoard reads files in the order of their names, which are events.out.tfevents.SECONDS.HOST.PROCESS.NUMBER. So the seconds
    are those of the clock, or one more than the newest file's if that is later: two files of one second would be ordered by host and
    process, and the clock of another machine may be behind.
    """
    newest = max((int(match[1]) for path in list_event_files(folder) if (match := _NAME.match(path.name))), default=0)
    stem = f"events.out.tfevents.{max(int(time.time()), newest + 1):010d}.{socket.gethostname()}.{os.getpid()}"
    return next(path for number in itertools.count() if not (path := folder / f"{stem}.{number}").exists())
