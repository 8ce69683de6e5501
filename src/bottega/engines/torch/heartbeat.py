"""Liveness of the other ranks, monitored from threads beside training: a collective would wait for a lost rank for ever.

A rank that compiles, loads or saves for an hour is busy, not dead. On the same node the operating system reports whether
a process runs, is stopped or has ended. Between nodes each rank increments a counter in the launcher's store, and so does
a neighbour on its node while it sees the process alive.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import psutil
import torch.distributed as dist

from bottega.core.errors import Interrupted, PeerLost
from bottega.redaction import redact_text
from bottega.signals import exit_immediately
from bottega.terminal import escape_controls
from bottega.world import World, list_missing_variables, read_rank

BEAT_SECONDS = 2.0
"""Seconds between two beats."""
JOIN_BEAT_SECONDS = 0.2
"""Seconds between two beats until all ranks know each other's process; a rank lost before that cannot be named."""
SILENCE_TIMEOUT = 20.0
"""Seconds without a beat, or of being stopped, after which a rank counts as lost."""
LOCAL_JOIN_TIMEOUT, REMOTE_JOIN_TIMEOUT = 20.0, 120.0
"""Seconds that a rank of this node, or of another, may take to join; no limit while its process is seen alive."""
GRACE_SECONDS = 5.0
"""Seconds for the training thread to report by itself that a rank has ended."""
FAILURE_GRACE_SECONDS = 60.0
"""Seconds to wait after another rank failed: all ranks may fail in the same way, and each reports its error once its checkpoint is written."""
TICK_SECONDS = 1.0
"""Longest wait between two checks of the other ranks."""
FAILED, FINISHED = 1 << 39, 1 << 40
"""Added to the beats of a rank whose training has failed, or has finished."""
TRAINING_NUMBERS = itertools.count()
"""Numbers the training runs of this process; a run has the same number on all ranks."""
RESTART_HINT = "run the same command again"


@dataclass
class Peer:
    """The last known state of another rank."""

    rank: int
    is_local: bool
    last_seen: float = field(default_factory=time.monotonic)
    """When it was last known to be alive."""
    beats: int = 0
    host: str = ""
    process: psutil.Process | None = None
    pidfd: int | None = None
    end: str | None = None
    """A description of how its process ended; None while it runs."""
    ended_at: float = 0.0

    @property
    def name(self) -> str:
        """Rank, host and process number, for messages."""
        number = f" (process {self.process.pid})" if self.process is not None else ""
        return f"rank {self.rank}" + (f" on {self.host}" if self.host else "") + number


class Heartbeat:
    """Context around the training of one rank, which ends the process with exit code 8 when another rank is lost."""

    current: ClassVar[Heartbeat | None] = None

    def __init__(self, rank: int, world_size: int, *, log: Path | None = None) -> None:
        self.rank, self.world_size, self.log = rank, world_size, log
        local_size = World.from_environment().local_size
        watched_ranks = [
            peer_rank
            for peer_rank in range(world_size)
            if peer_rank != rank and (rank == 0 or peer_rank == 0 or _is_same_node(peer_rank, rank, local_size))
        ]
        self.peers = [Peer(peer_rank, _is_same_node(peer_rank, rank, local_size)) for peer_rank in watched_ranks]
        self.training_number = next(TRAINING_NUMBERS)
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._closed, self._wake = threading.Event(), threading.Event()
        self._last_exchange = time.monotonic()
        self._verdict: str | None = None
        """Why the job ends, as this rank or another has determined."""
        self._outcome = FINISHED
        """Added to this rank's beats at the end."""
        self._store_error: str | None = "no response"
        """Why there is no connection to the store; None while connected."""
        self._is_published = threading.Event()
        self._beat_thread = threading.Thread(target=self._exchange_beats, name="bottega-heartbeat", daemon=True)
        self._watch_thread = threading.Thread(target=self._watch, name="bottega-ranks", daemon=True)

    def __enter__(self) -> Self:
        Heartbeat.current = self
        self._beat_thread.start()
        self._watch_thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        Heartbeat.current = None
        is_stopped = isinstance(error, Interrupted | KeyboardInterrupt)  # then all ranks are stopped
        self._outcome = FINISHED if error is None or is_stopped else FAILED
        self._closed.set()
        self._wake.set()
        self._beat_thread.join(timeout=GRACE_SECONDS)

    def describe_loss(self) -> str:
        """Return which rank ended and how, after a collective failed because of it."""
        deadline = time.monotonic() + 2 * TICK_SECONDS
        while time.monotonic() < deadline:
            ended_peers = [peer for peer in self.peers if peer.end is not None]
            if ended_peers:
                return f"{ended_peers[0].name} {ended_peers[0].end}; {RESTART_HINT}"
            time.sleep(0.05)
        return f"rank {self.rank} of {self.world_size} lost the connection to another rank; {RESTART_HINT}"

    # Beats, in a thread that may block on the store.

    def _exchange_beats(self) -> None:
        try:
            store = _connect(self.rank, self.training_number)
            store.set(f"{self.rank}/who", json.dumps(_get_process_identity()))
        except Exception as error:  # _watch reports it when no beat arrives
            self._store_error = (str(error) or type(error).__name__).splitlines()[0]
            return
        self._store_error = None
        while not self._closed.is_set():
            with suppress(Exception):
                self._beat(store)
                self._last_exchange = time.monotonic()
            has_met_all = all(peer.host for peer in self.peers)
            self._wake.wait(BEAT_SECONDS if has_met_all else min(BEAT_SECONDS, JOIN_BEAT_SECONDS))
            if self._verdict is not None and not self._is_published.is_set():
                with suppress(Exception):
                    store.set("verdict", self._verdict)
                self._is_published.set()
        with suppress(Exception):
            store.add(f"{self.rank}/beats", self._outcome)

    def _beat(self, store: Any) -> None:
        store.add(f"{self.rank}/beats", 1)
        for peer in self.peers:
            beats = store.add(f"{peer.rank}/beats", 0)
            if beats != peer.beats:
                peer.beats, peer.last_seen = beats, time.monotonic()
            if not peer.host and store.check([f"{peer.rank}/who"]):
                self._identify(peer, json.loads(store.get(f"{peer.rank}/who")))
            if (
                peer.is_local
                and peer.process is not None
                and _find_stop_signal(peer.process) is None
                and peer.end is None
            ):
                store.add(f"{peer.rank}/beats", 1)  # its own thread may be blocked by the computation
        if self._verdict is None and store.check(["verdict"]):
            self._verdict = store.get("verdict").decode()
            self._is_published.set()

    def _identify(self, peer: Peer, identity: dict[str, Any]) -> None:
        own_identity = _get_process_identity()
        peer.last_seen = time.monotonic()
        if all(identity[key] == own_identity[key] for key in ("host", "namespace")):
            _monitor_process(peer, identity["pid"])
        peer.host = str(identity["host"])

    # Decisions, in a thread that never blocks.

    def _watch(self) -> None:
        launcher = _open_pidfd(self._launcher)
        while not self._closed.is_set():
            wait_start = time.monotonic()
            running = [peer for peer in self.peers if peer.end is None and peer.beats < FAILED]
            _wait_for_ends([launcher, *(peer.pidfd for peer in running)])
            now = time.monotonic()
            if now - wait_start > GRACE_SECONDS:  # this process was stopped itself, and maybe the others with it
                for peer in self.peers:
                    peer.last_seen = now
                continue
            if self._launcher is not None and os.getppid() != self._launcher and not self._closed.is_set():
                self._exit_process(f"the launcher (process {self._launcher}) has ended; {RESTART_HINT}")
            for peer in self.peers:
                if self._verdict is None and (reason := self._explain_loss(peer, now)) is not None:
                    self._verdict = f"{reason}; {RESTART_HINT}"
                    self._wake.set()
                    self._is_published.wait(2 * BEAT_SECONDS)
            if self._verdict is not None and not self._closed.is_set():
                self._end_job(self._verdict)
        self._beat_thread.join()  # it may have opened another pidfd meanwhile
        for pidfd in (launcher, *(peer.pidfd for peer in self.peers)):
            if pidfd is not None:
                os.close(pidfd)
        for peer in self.peers:
            peer.pidfd = None

    def _explain_loss(self, peer: Peer, now: float) -> str | None:
        """Return why a rank is lost; None while it is not."""
        if peer.beats >= FINISHED:
            return None
        if peer.beats >= FAILED:
            if peer.end is None:
                peer.end, peer.ended_at = "ended with an error", now
            return f"{peer.name} {peer.end}" if now - peer.ended_at > FAILURE_GRACE_SECONDS else None
        if peer.process is None and peer.is_local and now - peer.last_seen > GRACE_SECONDS:
            _monitor_process(peer, _find_sibling_pid(peer.rank))  # it has not joined yet, but may only be slow
        stop_signal = None
        if peer.process is not None:
            if peer.end is None:
                peer.end, peer.ended_at = _describe_end(peer.process), now
            if peer.end is not None:
                # The rank may have recorded in the store that it finished, so the store is read once more.
                is_store_read = (
                    self._last_exchange > peer.ended_at + BEAT_SECONDS or now - peer.ended_at > SILENCE_TIMEOUT
                )
                return f"{peer.name} {peer.end}" if now - peer.ended_at > GRACE_SECONDS and is_store_read else None
            stop_signal = _find_stop_signal(peer.process)
            if stop_signal is None:
                peer.last_seen = now
                return None
        silence = now - peer.last_seen
        if peer.beats == 0 and peer.process is None:
            limit = LOCAL_JOIN_TIMEOUT if peer.is_local else REMOTE_JOIN_TIMEOUT
            return f"{peer.name} did not join within {limit:.0f} s{self._describe_store()}" if silence > limit else None
        if silence < SILENCE_TIMEOUT:
            return None
        if stop_signal is not None:
            return f"{peer.name} was stopped by {stop_signal} {silence:.0f} s ago"
        return (
            f"{peer.name} has not responded for {silence:.0f} s: it is stopped, or its machine or the network is down"
        )

    def _describe_store(self) -> str:
        if self._store_error is None:
            return ""
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return f": rank {self.rank} has no connection to the store at {address} ({self._store_error})"

    def _end_job(self, reason: str) -> None:
        local_peers = [peer for peer in self.peers if peer.process is not None and peer.end is None]
        stopped_processes = [peer.process for peer in local_peers if peer.process and _find_stop_signal(peer.process)]
        is_reporter = all(peer.rank > self.rank for peer in local_peers if peer.process not in stopped_processes)
        for process in stopped_processes:
            with suppress(psutil.Error):
                process.kill()  # a launcher would wait half a minute for a stopped process
        self._exit_process(reason if is_reporter else None)

    def _exit_process(self, reason: str | None) -> None:
        reason = escape_controls(redact_text(reason)) if reason is not None else None
        if self.log is not None and reason is not None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
            with suppress(OSError), open(self.log, "a", opener=lambda path, _: os.open(path, flags)) as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} ERROR {reason}\n")
        exit_immediately(f"rank {self.rank}: {reason}" if reason is not None else None, PeerLost.code)


def watch_ranks(log: Path) -> Heartbeat | None:
    """Return the heartbeat of this rank; None if it is alone, or if the launcher has not set the rank variables.

    Rank 0 also writes the reason for ending the job to the file `log`.
    """
    world = World.from_environment()
    if world.size == 1 or list_missing_variables():
        return None
    return Heartbeat(world.rank, world.size, log=log if world.is_main else None)


def _is_same_node(rank: int, other_rank: int, local_size: int) -> bool:
    """Return whether two ranks are on one node; launchers number ranks node by node."""
    return rank // local_size == other_rank // local_size


def _connect(rank: int, training_number: int) -> Any:
    """Return the launcher's store, or that of rank 0 if the launcher has none, with a key prefix for this start and training run."""
    has_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and not has_agent_store,
        timeout=timedelta(seconds=REMOTE_JOIN_TIMEOUT),
        wait_for_workers=False,
        multi_tenant=True,
    )
    return dist.PrefixStore(f"bottega/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{training_number}", store)


def _get_process_identity() -> dict[str, Any]:
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return {"host": socket.gethostname(), "pid": os.getpid(), "namespace": namespace}


def _monitor_process(peer: Peer, pid: int | None) -> None:
    """Start monitoring the process of a rank on this node; does nothing without a pid."""
    if pid is not None and (peer.process is None or peer.process.pid != pid):
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            peer.pidfd, peer.process = _open_pidfd(pid), process
            peer.host = peer.host or socket.gethostname()


def _find_sibling_pid(rank: int) -> int | None:
    """Return the pid of the process that our launcher has started as this rank."""
    with suppress(psutil.Error):
        for child in psutil.Process(os.getppid()).children():
            with suppress(psutil.Error):
                if read_rank(child.environ()) == rank:
                    return child.pid
    return None


def _open_pidfd(pid: int | None) -> int | None:
    if pid is None or not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _wait_for_ends(pidfds: list[int | None]) -> None:
    """Wait for one tick, or until one of these processes ends."""
    poll = select.poll()
    for pidfd in pidfds:
        if pidfd is not None:
            poll.register(pidfd, select.POLLIN)
    poll.poll(TICK_SECONDS * 1000)


def _describe_end(process: psutil.Process) -> str | None:
    """Return how a process ended; None if it still runs. The signal can be read until the parent has waited for the process."""
    try:
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            return None
    except psutil.Error:
        return "has ended"
    status = _read_wait_status(process.pid)
    if status is None:
        return "has ended"
    number = status & 0x7F
    return f"was killed by {_format_signal(number)}" if number else f"ended with exit code {status >> 8}"


def _find_stop_signal(process: psutil.Process) -> str | None:
    """Return the name of the signal that has stopped a process; None if it is not stopped."""
    try:
        if process.status() != psutil.STATUS_STOPPED:
            return None
    except psutil.Error:
        return None
    status = _read_wait_status(process.pid) or 0
    return _format_signal(status >> 8 if status & 0x7F == 0x7F else status & 0x7F) if status else "a signal"


def _read_wait_status(pid: int) -> int | None:
    """Return the last field of /proc/PID/stat: how a process ended or was stopped."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").split()[-1])
    except (OSError, ValueError):
        return None


def _format_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
