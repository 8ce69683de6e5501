"""Child processes that run one probe each and report events, a JSON line each, so that a crash or a hang loses nothing before it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bottega.core.errors import first_line
from bottega.stop_with_parent import build_command
from bottega.terminal import print_result
from bottega.world import LAUNCH_VARIABLES

PACKAGE_ROOT = str(Path(__file__).parents[3])
MARK = "@bottega-doctor "
"""Begins an event; everything else that a library prints is only quoted if the process fails."""
START_SECONDS = 120.0
"""Seconds for Python to start and import torch, which takes a minute from a slow network file system."""
NUM_QUOTED_LINES = 20

Event = Mapping[str, Any]


@dataclass(frozen=True)
class ProbeResult:
    """The events of a probe in their order; `error` is why it did not end by itself, None if it did."""

    events: tuple[Event, ...]
    error: str | None = None

    def select(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind, without the kind."""
        return [{k: v for k, v in event.items() if k != "event"} for event in self.events if event["event"] == kind]

    @property
    def last_step(self) -> str | None:
        """What the probe was doing at the end."""
        steps = self.select("start")
        return str(steps[-1]["step"]) if steps else None


def emit(kind: str, **values: Any) -> None:
    """Send an event to the parent process."""
    print_result(MARK + json.dumps({"event": kind, **values}, default=str), is_data=True)


def run_probe_main(probe: Callable[[dict[str, Any]], None]) -> int:
    """Run a probe with the options of the command line; an exception becomes an event. Return the exit code."""
    try:
        probe(json.loads(sys.argv[1]))
    except Exception as error:
        emit("error", message=f"{type(error).__name__}: {first_line(error)}")
        return 1
    return 0


def build_probe_command(module: str, options: Mapping[str, Any]) -> list[str]:
    """Return the command of a probe: a module of this package."""
    return [sys.executable, "-m", f"{__package__}.{module}", json.dumps(options)]


def run_probes(
    commands: Sequence[Sequence[str]],
    *,
    seconds: float,
    start_seconds: float = START_SECONDS,
    pass_fds: Sequence[int] = (),
    on_step: Callable[[str], None] = lambda step: None,
) -> list[ProbeResult]:
    """Run the commands together until all have ended, one has failed, or none has sent an event for `seconds`.

    Every process has ended when this returns or raises. The first event of each may take `start_seconds`. A process that cannot be
    started, for lack of memory, files or processes, is an error of its result.
    """
    processes: list[subprocess.Popen[str]] = []
    messages: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()
    try:
        for index, command in enumerate(commands):
            processes.append(_start(command, pass_fds))
            threading.Thread(target=_read_lines, args=(processes[-1], index, messages), daemon=True).start()
        return _collect(processes, messages, seconds=seconds, start_seconds=start_seconds, on_step=on_step)
    except (OSError, RuntimeError) as error:
        return [ProbeResult((), f"no process can be started: {first_line(error)}") for _ in commands]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _start(command: Sequence[str], pass_fds: Sequence[int]) -> subprocess.Popen[str]:
    paths = [PACKAGE_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    environment |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        # A torch.py or random.py in the user's folder must not be imported, as `bottega` does not import it either.
        "PYTHONSAFEPATH": "1",
    }
    return subprocess.Popen(
        build_command(list(command)),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        pass_fds=pass_fds,
    )


def _read_lines(
    process: subprocess.Popen[str], index: int, messages: queue.SimpleQueue[tuple[int, str | None]]
) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            messages.put((index, line))
    messages.put((index, None))


def _collect(
    processes: Sequence[subprocess.Popen[str]],
    messages: queue.SimpleQueue[tuple[int, str | None]],
    *,
    seconds: float,
    start_seconds: float,
    on_step: Callable[[str], None],
) -> list[ProbeResult]:
    events: list[list[Event]] = [[] for _ in processes]
    other_lines: list[deque[str]] = [deque(maxlen=NUM_QUOTED_LINES) for _ in processes]
    errors: dict[int, str | None] = {}
    deadline = time.monotonic() + start_seconds
    while len(errors) < len(processes) and not any(errors.values()):
        try:
            index, line = messages.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            limit = seconds if all(events) else start_seconds
            return [
                ProbeResult(tuple(events[i]), errors.get(i, f"no answer for {limit:g} s"))
                for i in range(len(processes))
            ]
        if line is None:
            errors[index] = _describe_end(processes[index], events[index], other_lines[index])
        elif (event := _parse_event(line)) is not None:
            events[index].append(event)
            deadline = time.monotonic() + (seconds if all(events) else start_seconds)
            if events[index][-1]["event"] == "start":
                on_step(str(events[index][-1]["step"]))
        else:
            other_lines[index].append(line.strip())
    return [ProbeResult(tuple(events[i]), errors.get(i)) for i in range(len(processes))]


def _parse_event(line: str) -> Event | None:
    """Return the event of a line; None for what a library prints, which may interrupt an event."""
    try:
        event = json.loads(line.partition(MARK)[2])
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


def _describe_end(process: subprocess.Popen[str], events: Sequence[Event], other_lines: Sequence[str]) -> str | None:
    """Return why a process that has closed its output failed; None if it succeeded."""
    code = process.wait()
    if code == 0:
        return None
    messages = [str(event["message"]) for event in events if event["event"] == "error"]
    if messages:
        return messages[-1]
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    quoted = next((line for line in reversed(other_lines) if line), "")
    return f"exit code {code}" + (f": {quoted}" if quoted else "")
