"""The heartbeat between nodes, where no system can be asked whether a process lives, and what is made of what is known."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from bottega.engines import heartbeat
from bottega.engines.heartbeat import FINISHED, Heartbeat, Peer
from small_run import environment

# Two processes that take each other for one on another machine. The second is busy for long, then says so and waits.
NODE = """
import os, sys, time
from bottega.engines import heartbeat

heartbeat.BEAT, heartbeat.SILENT, heartbeat.TICK = 0.1, 3.0, 0.05
own = heartbeat._who()
heartbeat._who = lambda: {**own, "namespace": os.environ["RANK"], "host": "node" + os.environ["RANK"]}
with heartbeat.Heartbeat(int(os.environ["RANK"]), 2):
    until = time.monotonic() + 4
    while time.monotonic() < until:
        sum(range(1000))
    print("busy no more", flush=True)
    if os.environ["RANK"] == "0" or os.environ["ENDS"] == "no":
        time.sleep(100)
"""


def start_nodes(*, ends: bool) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, "-c", NODE],
            env=environment(**common, RANK=rank, ENDS="yes" if ends else "no"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]


def test_a_stopped_rank_of_another_node() -> None:
    first, second = start_nodes(ends=False)
    try:
        for process in (first, second):
            assert process.stdout is not None
            assert process.stdout.readline() == "busy no more\n", process.communicate()[1]
        second.send_signal(signal.SIGSTOP)
        _, err = first.communicate(timeout=60)
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
    assert first.returncode == 8
    assert err.startswith("bottega: rank 0: rank 1 on node1 has not answered for ")


def test_a_rank_that_has_finished_is_not_missed() -> None:
    first, second = start_nodes(ends=True)
    try:
        assert second.communicate(timeout=60)[0] == "busy no more\n"
        assert second.returncode == 0
        time.sleep(4.0)  # longer than silence may be
        assert first.poll() is None, first.communicate()[1]
    finally:
        first.kill()
        first.communicate()


@pytest.mark.parametrize(
    ("is_here", "beats", "silent", "expected"),
    [
        (True, 0, 21, "has not joined within 20 s"),
        (False, 0, 21, None),
        (False, 0, 121, "has not joined within 120 s"),
        (False, 5, 19, None),
        (False, 5, 21, "has not answered for 21 s"),
        (False, 5 + FINISHED, 1000, None),
    ],
)
def test_the_judgement(is_here: bool, beats: int, silent: float, expected: str | None) -> None:
    now = time.monotonic()
    peer = Peer(1, is_here, seen=now - silent, beats=beats, host="" if not beats else "node1")
    reason = Heartbeat(0, 2)._judge(peer, now)
    assert reason == expected if expected is None else reason is not None and expected in reason


def test_what_the_system_tells_of_a_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    peer = Peer(1, True)
    heartbeat._attach(peer, child.pid)
    assert peer.process is not None
    try:
        assert heartbeat._how_it_ended(peer.process) is None
        assert heartbeat._signal_of_stop(peer.process) is None
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert heartbeat._signal_of_stop(peer.process) in ("SIGSTOP", "a signal")
        assert heartbeat._how_it_ended(peer.process) is None
    finally:
        child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert heartbeat._how_it_ended(peer.process) == "was killed by SIGKILL"
    child.wait()
    assert heartbeat._how_it_ended(peer.process) == "has ended"
    assert peer.pidfd is not None
    os.close(peer.pidfd)
