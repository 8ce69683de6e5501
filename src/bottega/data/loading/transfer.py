"""Large batches from a worker process without pickling them: written once into memory that both processes map.

A batch of 32 pictures of 224 x 224 in floats is 19 MB. Through a socket it is copied five times, which took half as long
as decoding it; and new memory costs as much again, page by page, so what the trainer has let go of is written anew. The
memory has no name: a killed process leaves nothing behind.
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

# Below this a message through the socket is as fast.
LARGE = 1 << 20
# Arrays begin at multiples of this, as vector instructions like it.
ALIGNMENT = 64


@dataclass(frozen=True)
class ArrayLocation:
    """Where an array stands in a segment."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class SharedBatch:
    """A batch whose arrays stand in a segment; a new segment's descriptor follows."""

    batch: Any
    segment: int
    bytes: int
    is_new: bool


@final
class Sender:
    """The worker's side."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.segments: list[mmap.mmap] = []
        self.free: deque[int] = deque()

    def release(self, segments: list[int]) -> None:
        """The other side holds no array of these any more. Called from the thread that listens."""
        self.free.extend(segments)

    def send(self, batch: Any) -> None:
        """The answer (batch, no error), as `Receiver.receive` expects it."""
        placed, arrays, size = _placed(batch)
        if size < LARGE or not hasattr(os, "memfd_create"):
            self.connection.send((batch, None))
            return
        segment = self._free_segment(size)
        memory = None
        try:
            if segment is None:
                memory, segment = self._new_segment(size)
            view = self.segments[segment]
            for place, array in arrays:
                np.ndarray(place.shape, place.dtype, buffer=view, offset=place.offset)[...] = array
            self.connection.send((SharedBatch(placed, segment, len(view), memory is not None), None))
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
    """The trainer's side. `freed` are the segments whose arrays are all gone; they are told to the worker."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.views: dict[int, mmap.mmap] = {}
        self.freed: deque[int] = deque()

    def receive(self) -> tuple[Any, Exception | None]:
        """What was sent: a batch, or the error in its place."""
        batch, error = self.connection.recv()
        if not isinstance(batch, SharedBatch):
            return batch, error
        if batch.is_new:
            self.views[batch.segment] = self._mapped(batch.bytes)
        # All arrays of the batch are views of this one, so it goes with the last of them.
        lease = np.frombuffer(self.views[batch.segment], np.uint8)
        weakref.finalize(lease, self.freed.append, batch.segment)
        return _found(batch.batch, lease), error

    def take_freed(self) -> list[int]:
        """Each once. (Arrays may be collected at any moment, also while this runs.)"""
        return [self.freed.popleft() for _ in range(len(self.freed))]

    def _mapped(self, size: int) -> mmap.mmap:
        with socket.socket(fileno=os.dup(self.connection.fileno())) as channel:
            message, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
        if not message or not descriptors:
            raise EOFError
        try:
            return mmap.mmap(descriptors[0], size)
        finally:
            os.close(descriptors[0])


def _placed(batch: Any) -> tuple[Any, list[tuple[ArrayLocation, np.ndarray]], int]:
    """The batch with places in place of its arrays, those arrays, and the bytes they need."""
    arrays: list[tuple[ArrayLocation, np.ndarray]] = []
    end = 0

    def place(value: Any) -> Any:
        nonlocal end
        if isinstance(value, Mapping):
            return {name: place(inner) for name, inner in value.items()}
        if not isinstance(value, np.ndarray) or value.ndim == 0 or value.dtype.hasobject:
            return value
        one = ArrayLocation(value.dtype.str, value.shape, end)
        end += -(-value.nbytes // ALIGNMENT) * ALIGNMENT
        arrays.append((one, value))
        return one

    return place(batch), arrays, end


def _found(value: Any, lease: np.ndarray) -> Any:
    if isinstance(value, Mapping):
        return {name: _found(inner, lease) for name, inner in value.items()}
    if not isinstance(value, ArrayLocation):
        return value
    return np.ndarray(value.shape, value.dtype, buffer=lease, offset=value.offset)
