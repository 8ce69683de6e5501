"""The heartbeat between ranks: processes that stop, fail, finish or never join."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch.distributed as dist

from bottega.core.errors import Diverged, Interrupted
from bottega.engines.torch import heartbeat
from bottega.engines.torch.heartbeat import FAILED, FINISHED, Heartbeat, Peer
from small_run import environment

# Two processes that believe they are on different machines. Each is busy for a while and prints a line. Rank 0 then waits,
# and rank 1 keeps running, finishes or fails, as OUTCOME says.
NODE = """
import os, sys, time
from bottega.engines.torch import heartbeat

heartbeat.BEAT_SECONDS, heartbeat.SILENCE_TIMEOUT, heartbeat.TICK_SECONDS, heartbeat.FAILURE_GRACE_SECONDS = 0.1, 3.0, 0.05, 0.5
identity = heartbeat._get_process_identity()
heartbeat._get_process_identity = lambda: {**identity, "namespace": os.environ["RANK"], "host": "node" + os.environ["RANK"]}
with heartbeat.Heartbeat(int(os.environ["RANK"]), 2):
    until = time.monotonic() + (0 if os.environ["OUTCOME"] == "fails" else 4)
    while time.monotonic() < until:
        sum(range(1000))
    print("done computing", flush=True)
    if os.environ["RANK"] == "0" or os.environ["OUTCOME"] == "keeps running":
        time.sleep(100)
    if os.environ["OUTCOME"] == "fails":
        raise ValueError("an error of this rank alone")
"""


def start_nodes(*, outcome: str) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, "-c", NODE],
            env=environment(**common, RANK=rank, OUTCOME=outcome),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]


@pytest.mark.slow
def test_stopped_rank_on_a_different_node_ends_the_training() -> None:
    first, second = start_nodes(outcome="keeps running")
    try:
        for process in (first, second):
            assert process.stdout is not None
            assert process.stdout.readline() == "done computing\n", process.communicate()[1]
        second.send_signal(signal.SIGSTOP)
        _, err = first.communicate(timeout=60)
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
    assert first.returncode == 8
    assert err.startswith("bottega: rank 0: rank 1 on node1 has not responded for ")


@pytest.mark.slow
def test_finished_rank_is_not_reported_as_lost() -> None:
    first, second = start_nodes(outcome="finishes")
    try:
        assert second.communicate(timeout=60)[0] == "done computing\n"
        assert second.returncode == 0
        time.sleep(4.0)  # longer than heartbeat.SILENCE_TIMEOUT of a node
        assert first.poll() is None, first.communicate()[1]
    finally:
        first.kill()
        first.communicate()


def test_failed_rank_on_a_different_node_ends_the_training() -> None:
    first, second = start_nodes(outcome="fails")
    try:
        assert "an error of this rank alone" in second.communicate(timeout=60)[1]
        _, err = first.communicate(timeout=60)
    finally:
        first.kill()
        first.communicate()
    assert first.returncode == 8
    assert err.startswith("bottega: rank 0: rank 1 on node1 ended with an error; ")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the launcher's TCP store by one in memory."""
    store = dist.HashStore()
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(dist, "TCPStore", lambda *_, **__: store)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("error", "is_success"),
    [
        (None, True),
        (Interrupted("stopped by SIGTERM at step 3; saved", 85), True),
        (KeyboardInterrupt(), True),
        (Diverged("the loss was not finite"), False),
        (ValueError("a defect"), False),
    ],
)
@pytest.mark.usefixtures("store")
def test_only_a_successful_training_is_reported_as_finished(error: BaseException | None, is_success: bool) -> None:
    watch = Heartbeat(1, 2)
    with suppress(Interrupted, KeyboardInterrupt, Diverged, ValueError), watch:
        if error is not None:
            raise error
    beats = heartbeat._connect(1, watch.training_number).add("1/beats", 0)
    assert beats >= FINISHED if is_success else FAILED <= beats < FINISHED


def test_ranks_that_fail_together_have_time_to_save_and_report() -> None:
    now = time.monotonic()
    peer = Peer(1, is_local=False, last_seen=now, beats=5 + FAILED, host="node1")
    watch = Heartbeat(0, 2)
    assert watch._explain_loss(peer, now) is None
    assert watch._explain_loss(peer, now + heartbeat.FAILURE_GRACE_SECONDS - 1) is None
    assert watch._explain_loss(peer, now + heartbeat.FAILURE_GRACE_SECONDS + 1) == "rank 1 on node1 ended with an error"


@pytest.mark.usefixtures("store")
def test_finished_process_is_not_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptor of an ended process is always ready, so that waiting for it would return at once."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    polled: list[list[int]] = []

    def record(pidfds: list[int | None]) -> None:
        polled.append([pidfd for pidfd in pidfds if pidfd is not None])
        time.sleep(0.01)

    monkeypatch.setattr(heartbeat, "_wait_for_ends", record)
    with Heartbeat(0, 2) as watch:
        store = heartbeat._connect(0, watch.training_number)
        store.add("1/beats", FINISHED)
        store.set("1/who", json.dumps({**heartbeat._get_process_identity(), "pid": child.pid}))
        (peer,) = watch.peers
        wait_until(lambda: peer.beats >= FINISHED and peer.pidfd is not None)
        count = len(polled)
        wait_until(lambda: len(polled) > count + 2)
        assert polled[-1] == []
    watch._watch_thread.join(timeout=30)
    assert peer.pidfd is None, "not closed"
    child.wait()


@pytest.mark.usefixtures("store")
def test_second_training_in_a_process_starts_with_an_empty_store() -> None:
    with Heartbeat(0, 2) as first:
        heartbeat._connect(1, first.training_number).add("1/beats", FINISHED)
    with Heartbeat(0, 2) as second:
        store = heartbeat._connect(0, second.training_number)
        wait_until(lambda: store.add("0/beats", 0) > 1)  # the first poll of the peers is over
        assert second.peers[0].beats == 0, "beats of the first training remain"


def test_a_store_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    called = threading.Event()

    def refuse(*_: object, **__: object) -> None:
        called.set()
        raise dist.DistNetworkError("The server socket has failed to listen: EADDRINUSE\nException raised from …")

    monkeypatch.setattr(dist, "TCPStore", refuse)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29999")
    now = time.monotonic()
    with Heartbeat(0, 2) as watch:
        assert called.wait(30)
    reason = watch._explain_loss(Peer(1, is_local=True, last_seen=now - 21), now)
    assert reason == (
        "rank 1 did not join within 20 s: rank 0 has no connection to the store at 127.0.0.1:29999 "
        "(The server socket has failed to listen: EADDRINUSE)"
    )


@pytest.mark.parametrize(
    ("is_local", "beats", "silence_seconds", "expected"),
    [
        (True, 0, 21, "did not join within 20 s"),
        (False, 0, 21, None),
        (False, 0, 121, "did not join within 120 s"),
        (False, 5, 19, None),
        (False, 5, 21, "has not responded for 21 s"),
        (False, 5 + FINISHED, 1000, None),
    ],
)
def test_lost_rank_is_reported_after_its_timeout(
    is_local: bool, beats: int, silence_seconds: float, expected: str | None
) -> None:
    now = time.monotonic()
    peer = Peer(1, is_local, last_seen=now - silence_seconds, beats=beats, host="" if not beats else "node1")
    reason = Heartbeat(0, 2)._explain_loss(peer, now)
    assert reason == expected if expected is None else reason is not None and expected in reason


def test_process_state_is_read_from_the_system() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    peer = Peer(1, True)
    heartbeat._monitor_process(peer, child.pid)
    assert peer.process is not None
    try:
        assert heartbeat._describe_end(peer.process) is None
        assert heartbeat._find_stop_signal(peer.process) is None
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert heartbeat._find_stop_signal(peer.process) in ("SIGSTOP", "a signal")
        assert heartbeat._describe_end(peer.process) is None
    finally:
        child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert heartbeat._describe_end(peer.process) == "was killed by SIGKILL"
    child.wait()
    assert heartbeat._describe_end(peer.process) == "has ended"
    assert peer.pidfd is not None
    os.close(peer.pidfd)
