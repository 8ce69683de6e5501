"""Large batches come through shared memory unchanged, are the receiver's own, and their memory is used again."""

from __future__ import annotations

import gc
import socket
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from bottega.data.loading.transfer import LARGE, Receiver, Sender


@pytest.fixture
def ends() -> Any:
    here, there = socket.socketpair()
    sender, receiver = Sender(Connection(there.detach())), Receiver(Connection(here.detach()))
    yield sender, receiver
    sender.connection.close()
    receiver.connection.close()


def batch(number: int, size: int = LARGE) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    return {
        "image": rng.normal(size=(2, size // 8)).astype(np.float32),
        "rate": np.array(number, np.int32),
        "more": {"label": np.arange(5), "empty": np.empty((0, 3), np.float32)},
    }


def check(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            check(got[name], value)
        else:
            assert got[name].dtype == value.dtype
            assert np.array_equal(got[name], value)


@pytest.mark.parametrize("size", [16, LARGE - 8, LARGE, 3 * LARGE + 8])
def test_what_is_sent_arrives(ends: Any, size: int) -> None:
    sender, receiver = ends
    sender.send(batch(1, size))
    got, error = receiver.receive()
    assert error is None
    check(got, batch(1, size))
    got["image"] += 1  # a trainer may write into its batch


def test_memory_that_is_held_is_not_written_and_memory_let_go_is_used_again(ends: Any) -> None:
    sender, receiver = ends
    sender.send(batch(0))
    first, _ = receiver.receive()
    held = first["image"][1:]  # a view is enough to hold it
    del first
    for number in range(1, 4):
        sender.send(batch(number))
        check(receiver.receive()[0], batch(number))
        sender.release(receiver.take_freed())
    assert len(sender.segments) == 2, "one is held, one is written again and again"
    assert np.array_equal(held, batch(0)["image"][1:])
    del held
    gc.collect()
    assert receiver.take_freed() == [0]


def test_a_larger_batch_gets_larger_memory(ends: Any) -> None:
    sender, receiver = ends
    for size in (LARGE, 2 * LARGE, LARGE):
        sender.send(batch(size, size))
        check(receiver.receive()[0], batch(size, size))
        sender.release(receiver.take_freed())
    assert [len(view) >= size for view, size in zip(sender.segments, (LARGE, 2 * LARGE), strict=True)] == [True, True]
