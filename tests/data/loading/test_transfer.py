"""Large batches pass through shared memory unchanged, belong to the receiver, and their memory is reused."""

from __future__ import annotations

import gc
import socket
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from bottega.data.loading.transfer import MIN_SHARED_BYTES, Receiver, Sender


@pytest.fixture
def endpoints() -> Any:
    here, there = socket.socketpair()
    sender, receiver = Sender(Connection(there.detach())), Receiver(Connection(here.detach()))
    yield sender, receiver
    sender.connection.close()
    receiver.connection.close()


def build_batch(number: int, size: int = MIN_SHARED_BYTES) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    return {
        "image": rng.normal(size=(2, size // 8)).astype(np.float32),
        "rate": np.array(number, np.int32),
        "more": {"label": np.arange(5), "empty": np.empty((0, 3), np.float32)},
    }


def check_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            check_equal(actual[name], value)
        else:
            assert actual[name].dtype == value.dtype
            assert np.array_equal(actual[name], value)


@pytest.mark.parametrize("size", [16, MIN_SHARED_BYTES - 8, MIN_SHARED_BYTES, 3 * MIN_SHARED_BYTES + 8])
def test_batches_arrive_unchanged_and_writable(endpoints: Any, size: int) -> None:
    sender, receiver = endpoints
    sender.send(build_batch(1, size))
    received, error = receiver.receive()
    assert error is None
    check_equal(received, build_batch(1, size))
    received["image"] += 1  # a trainer may write into its batch


def test_held_memory_is_not_overwritten_and_freed_memory_is_reused(endpoints: Any) -> None:
    sender, receiver = endpoints
    sender.send(build_batch(0))
    first, _ = receiver.receive()
    held = first["image"][1:]  # a view is enough to hold it
    del first
    for number in range(1, 4):
        sender.send(build_batch(number))
        check_equal(receiver.receive()[0], build_batch(number))
        sender.release(receiver.take_freed())
    assert len(sender.segments) == 2, "one segment is held, one is reused"
    assert np.array_equal(held, build_batch(0)["image"][1:])
    del held
    gc.collect()
    assert receiver.take_freed() == [0]


def test_larger_batch_gets_a_larger_segment(endpoints: Any) -> None:
    sender, receiver = endpoints
    for size in (MIN_SHARED_BYTES, 2 * MIN_SHARED_BYTES, MIN_SHARED_BYTES):
        sender.send(build_batch(size, size))
        check_equal(receiver.receive()[0], build_batch(size, size))
        sender.release(receiver.take_freed())
    assert [
        len(view) >= size for view, size in zip(sender.segments, (MIN_SHARED_BYTES, 2 * MIN_SHARED_BYTES), strict=True)
    ] == [True, True]
