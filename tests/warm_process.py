"""Run `bottega` commands as forks of a warm process, to save the start of Python and the import of torch.

Arguments, environment, working directory, standard files, signals and exit codes are those of a separate process. Tests
of the start itself (signals during imports, import hooks, launchers) start a new Python: see `command` of small_run.py.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

PIPE = subprocess.PIPE
STANDARD_FILES = 3


class WarmCommand:
    """A running command, with the methods of `subprocess.Popen` that tests use; `stdout` and `stderr` are text."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        stdin: int | IO[Any] = subprocess.DEVNULL,
        stdout: int | IO[Any] = PIPE,
        stderr: int | IO[Any] = PIPE,
        start_new_session: bool = False,
        setup_code: str = "",
    ) -> None:
        """`setup_code` is Python code that is run before the command, in its process."""
        request = {
            "arguments": [str(word) for word in arguments],
            "env": dict(env),
            "cwd": str(cwd or Path.cwd()),
            "start_new_session": start_new_session,
            "setup_code": setup_code,
        }
        self.returncode: int | None = None
        self._readers: dict[str, threading.Thread] = {}
        self._received: dict[str, str] = {}
        ours, theirs = socket.socketpair()
        self._answers = ours.makefile("r")
        descriptors, temporary = [], [theirs.detach()]
        for name, target in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr)):
            if target == PIPE:
                reader, target = os.pipe()
                self._collect(name, reader)
                temporary.append(target)
            elif target == subprocess.DEVNULL:
                target = os.open(os.devnull, os.O_RDWR)
                temporary.append(target)
            descriptors.append(target if isinstance(target, int) else target.fileno())
        with _lock:
            socket.send_fds(_connect(), [json.dumps(request).encode()], [*descriptors, temporary[0]])
        for descriptor in temporary:
            os.close(descriptor)
        ours.close()
        self.pid = int(self._answers.readline())
        self._waiter = threading.Thread(target=self._wait_for_end, daemon=True)
        self._waiter.start()

    def _collect(self, name: str, descriptor: int) -> None:
        def read() -> None:
            with os.fdopen(descriptor, "rb") as pipe:
                self._received[name] = pipe.read().decode("utf-8", "replace")

        self._readers[name] = threading.Thread(target=read, daemon=True)
        self._readers[name].start()

    def _wait_for_end(self) -> None:
        with self._answers:
            line = self._answers.readline()
        assert line, "the process that forks commands has died"
        self.returncode = os.waitstatus_to_exitcode(int(line))

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._waiter.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("bottega", timeout or 0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        for reader in self._readers.values():
            reader.join(timeout)
        return self._received.get("stdout", ""), self._received.get("stderr", "")

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_lock = threading.Lock()
_control: socket.socket | None = None


def _connect() -> socket.socket:
    """Return the socket of the server of this process, which is started with the first command."""
    global _control
    if _control is None:
        _control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        descriptor = theirs.fileno()
        # The server detaches itself and ends with the socket: tests inspect and end the children of this process.
        subprocess.run([sys.executable, __file__, str(descriptor)], pass_fds=[descriptor], check=True)
        theirs.close()
        assert _control.recv(1) == b"+", "the process that forks commands could not start"
    return _control


def serve(control: socket.socket) -> list[str] | None:
    """Fork a child for each request until the socket is closed; in a child, return the arguments of its command."""
    children: dict[int, socket.socket] = {}
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno())
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is woken:
                    woken.recv(4096)
                    _report_ended(children)
                    continue
                message, descriptors, _, _ = socket.recv_fds(control, 1 << 20, STANDARD_FILES + 1)
                if not message:
                    for pid in children:
                        os.kill(pid, signal.SIGKILL)
                    return None
                pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for other in (control, woken, waker, *children.values()):
                        other.close()
                    return _become_command(json.loads(message), descriptors)
                for descriptor in descriptors[:STANDARD_FILES]:
                    os.close(descriptor)
                children[pid] = socket.socket(fileno=descriptors[STANDARD_FILES])
                children[pid].sendall(f"{pid}\n".encode())


def _report_ended(children: dict[int, socket.socket]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with children.pop(pid) as answers:
            try:
                answers.sendall(f"{status}\n".encode())
            except BrokenPipeError:
                pass  # the requester has ended


def _become_command(request: dict[str, Any], descriptors: list[int]) -> list[str]:
    if request["start_new_session"]:
        os.setsid()
    os.close(descriptors[STANDARD_FILES])
    for number, descriptor in enumerate(descriptors[:STANDARD_FILES]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.path[:0] = added
    # As Python does at its start: line buffering for a terminal, block buffering for a file.
    sys.stdin = sys.__stdin__ = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(
        2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
    )
    sys.argv = ["bottega", *request["arguments"]]
    for script in filter(Path.is_file, (Path(path) / "sitecustomize.py" for path in added)):
        runpy.run_path(str(script))  # as Python does at its start
    exec(request["setup_code"], {})
    return request["arguments"]


def warm_up() -> None:
    """Import everything that commands need by running the most common ones once."""
    import torch

    import bottega
    from bottega import cli
    from small_run import train, write_text

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run = train(
            Path(folder), write_text(Path(folder) / "text.txt"), **{"training.max_steps": 2, "evaluation.every": 2}
        )
        saved = bottega.load(run.path)
        saved.evaluate()
        cli.main(["plan", "classify", "--json", "--check"])
    gc.collect()
    gc.freeze()


def main() -> int:
    if os.fork():
        return 0
    os.setsid()
    control = socket.socket(fileno=int(sys.argv[1]))
    standard_output = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    warm_up()
    sys.stdout.flush()
    os.dup2(standard_output, 1)
    control.send(b"+")
    if serve(control) is None:
        return 0
    from bottega.__main__ import main as run_command

    return run_command()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
