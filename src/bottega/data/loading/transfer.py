"""Transfer large batches from worker processes through shared memory instead of pickling them.

A batch of 32 images of 224 x 224 in float32 is 19 MB. A socket copies it five times, which took half as long as decoding
it; page faults of new memory cost as much again, so segments that the trainer no longer uses are written again. The
memory is anonymous: a killed process leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
import socket
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, final

import numpy as np

# Smaller batches are as fast through the socket.
LARGE = 1 << 20
# Arrays are aligned to this for vector instructions.
ALIGNMENT = 64


@dataclass(frozen=True)
class ArrayLocation:
    """Type, shape and offset of an array in a segment."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class SharedBatch:
    """A batch whose arrays are in a segment; if that is new, its file descriptor follows."""

    batch: Any
    segment: int
    bytes: int
    is_new: bool


@final
class Sender:
    """Sends batches; the worker's side."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.segments: list[mmap.mmap] = []
        self.free: deque[int] = deque()

    def release(self, segments: list[int]) -> None:
        """Mark segments as free: the receiver holds no array of them. Called from the listening thread."""
        self.free.extend(segments)

    def send(self, batch: Any) -> None:
        """Send (batch, no error) as `Receiver.receive` expects it."""
        located, arrays, size = _locate_arrays(batch)
        if size < LARGE or not hasattr(os, "memfd_create"):
            self.connection.send((batch, None))
            return
        segment = self._free_segment(size)
        memory = None
        try:
            if segment is None:
                memory, segment = self._new_segment(size)
            view = self.segments[segment]
            for location, array in arrays:
                np.ndarray(location.shape, location.dtype, buffer=view, offset=location.offset)[...] = array
            self.connection.send((SharedBatch(located, segment, len(view), memory is not None), None))
            if memory is not None:
                with socket.socket(fileno=os.dup(self.connection.fileno())) as channel:
                    socket.send_fds(channel, [b"m"], [memory])
        finally:
            if memory is not None:
                os.close(memory)

    def _free_segment(self, size: int) -> int | None:
        for _ in range(len(self.free)):
            segment = self.free.popleft()
            if len(self.segments[segment]) >= size:
                return segment
            self.free.append(segment)
        return None

    def _new_segment(self, size: int) -> tuple[int, int]:
        memory = os.memfd_create("bottega-batch")
        try:
            os.ftruncate(memory, size)
            self.segments.append(mmap.mmap(memory, size))
        except BaseException:
            os.close(memory)
            raise
        return memory, len(self.segments) - 1


@final
class Receiver:
    """Receives batches; the trainer's side. `freed` are segments whose arrays are all garbage-collected."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.views: dict[int, mmap.mmap] = {}
        self.freed: deque[int] = deque()

    def receive(self) -> tuple[Any, Exception | None]:
        """Return (batch, None), or (None, error)."""
        batch, error = self.connection.recv()
        if not isinstance(batch, SharedBatch):
            return batch, error
        if batch.is_new:
            self.views[batch.segment] = self._map_segment(batch.bytes)
        # All arrays of the batch are views of this one, so it is collected with the last of them.
        lease = np.frombuffer(self.views[batch.segment], np.uint8)
        weakref.finalize(lease, self.freed.append, batch.segment)
        return _restore_arrays(batch.batch, lease), error

    def take_freed(self) -> list[int]:
        """Return the freed segments, each once. (Arrays may be collected while this runs.)"""
        return [self.freed.popleft() for _ in range(len(self.freed))]

    def _map_segment(self, size: int) -> mmap.mmap:
        with socket.socket(fileno=os.dup(self.connection.fileno())) as channel:
            message, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
        if not message or not descriptors:
            raise EOFError
        try:
            return mmap.mmap(descriptors[0], size)
        finally:
            os.close(descriptors[0])


def _locate_arrays(batch: Any) -> tuple[Any, list[tuple[ArrayLocation, np.ndarray]], int]:
    """Return the batch with locations in place of its arrays, those arrays, and the bytes they need."""
    arrays: list[tuple[ArrayLocation, np.ndarray]] = []
    end = 0

    def locate(value: Any) -> Any:
        nonlocal end
        if isinstance(value, Mapping):
            return {name: locate(inner) for name, inner in value.items()}
        if not isinstance(value, np.ndarray) or value.ndim == 0 or value.dtype.hasobject:
            return value
        location = ArrayLocation(value.dtype.str, value.shape, end)
        end += -(-value.nbytes // ALIGNMENT) * ALIGNMENT
        arrays.append((location, value))
        return location

    return locate(batch), arrays, end


def _restore_arrays(value: Any, lease: np.ndarray) -> Any:
    if isinstance(value, Mapping):
        return {name: _restore_arrays(inner, lease) for name, inner in value.items()}
    if not isinstance(value, ArrayLocation):
        return value
    return np.ndarray(value.shape, value.dtype, buffer=lease, offset=value.offset)
