"""Start a command that receives SIGTERM when the process that started it dies: python -m bottega.stop_with_parent PID COMMAND...

The kernel sends the signal (Linux only), so it also arrives after `kill -9`. A trial or a fold then saves a checkpoint and ends,
and no process is left behind. Elsewhere a left-over process trains on, and the next start waits for its lock.
"""

from __future__ import annotations

import os
import signal
import sys

PR_SET_PDEATHSIG, PR_GET_PDEATHSIG = 1, 2
"""Options of prctl(2): the signal sent to this process when its parent dies. It survives exec, and children do not inherit it."""


def build_command(command: list[str]) -> list[str]:
    """Return `command` wrapped so that its process stops with this one."""
    if sys.platform != "linux":
        return command
    return [sys.executable, "-m", "bottega.stop_with_parent", str(os.getpid()), *command]


def stops_with_parent() -> bool:
    """Return whether the kernel sends SIGTERM to this process when its parent dies; it does so once for each thread of the parent."""
    if sys.platform != "linux":
        return False
    import ctypes

    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number))
    return number.value == signal.SIGTERM


def main(words: list[str]) -> None:
    """Ask for the signal, then replace this process with the command."""
    import ctypes

    parent, command = int(words[0]), words[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != parent:  # it died before the signal was asked for
        sys.exit(128 + signal.SIGTERM)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
