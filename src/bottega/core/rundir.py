"""The run directory: its paths, its lock, and atomic writes."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from bottega.core.errors import BottegaError, DirectoryInUse, UsageError
from bottega.core.saver import explain_os_error
from bottega.redaction import redact_document
from bottega.storage.durable import TEMPORARY_PREFIXES, is_locked, remove_leftovers, write_atomic

LOCK = "LOCK"


class RunDirectory:
    """Paths inside the directory of one run. Constructing it touches nothing on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.recipe = path / "recipe.yaml"
        self.environment = path / "environment.json"
        self.metrics = path / "metrics.jsonl"
        self.log = path / "log.txt"
        # Earlier versions named this folder codec.
        self.processor = path / ("codec" if (path / "codec").is_dir() else "processor")
        self.samples = path / "samples"
        self.final = path / "final"

    def create(self) -> None:
        """Create the folder if it does not exist. Refuses a folder that is not a run, and links inside a run."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.check_usable()
            probe = self.path / f".probe-{uuid.uuid4().hex[:8]}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise explain_os_error(error, self.path) from None

    def check_usable(self) -> None:
        """Raise if the folder is not a run, or contains links."""
        try:
            self.check_is_run()
            self.check_no_links()
        except OSError as error:
            raise explain_os_error(error, self.path) from None

    def check_is_run(self) -> None:
        """Raise unless the folder is empty or a run was started in it.

        Signs of a run are a lock file with its owner, or a checkpoint. A recipe.yaml alone may be the user's own. Folds
        of a cross-validation are runs of their own and are ignored.
        """
        names = [name for name in os.listdir(self.path) if not name.startswith((*TEMPORARY_PREFIXES, "fold-"))]
        has_checkpoint = any(self.checkpoints.glob("step-*/MANIFEST.json"))
        if set(names) - {LOCK} and not has_checkpoint and not Lock(self).has_owner():
            raise UsageError(
                f"{self.path} exists and is not a run directory; choose another name=…, or move that folder away"
            )

    def check_no_links(self) -> None:
        """Raise if the run contains a link: writing through it would change a file outside the run."""
        for path in [*self.path.iterdir(), *(self.samples.iterdir() if self.samples.is_dir() else ())]:
            if path.is_symlink():
                raise UsageError(
                    f"{path} is a link to {os.readlink(path)}, and a run writes only inside its own folder; remove the "
                    "link, or choose another name=…"
                )

    def remove_if_unused(self, created: Sequence[Path] = ()) -> None:
        """Delete the folder of a refused start if it holds only the lock and the log, and the folders in `created`.

        The lock is still held.
        """
        start_files = (self.path / LOCK, self.log)
        with suppress(OSError):  # another process uses the folder by now
            remove_leftovers(self.path)
            if {path.name for path in start_files}.issuperset(os.listdir(self.path)):
                for path in start_files:
                    path.unlink(missing_ok=True)
                for folder in created:
                    folder.rmdir()

    def must_exist(self) -> RunDirectory:
        """Return the directory itself; raise UsageError if there is no run."""
        if not self.recipe.is_file():
            raise UsageError(f"no run at {self.path}: {self.recipe.name} is missing{_suggest_run(self.path)}")
        return self

    def write(self, path: Path, text: str, *, redact: bool = True) -> None:
        """Write a file atomically; secrets are redacted, except in data and in recipes, which `to_yaml` writes without any."""
        try:
            write_atomic(path, redact_document(text, path.suffix) if redact else text)
        except OSError as error:
            raise explain_os_error(error, path) from None


def is_run(path: Path) -> bool:
    """Return whether a folder is the directory of a run that has been started."""
    return (path / "recipe.yaml").is_file()


def split_checkpoint_path(path: Path) -> tuple[Path, str | None]:
    """Split RUN/checkpoints/NAME (best, last or step-00000500) into run and checkpoint; any other path is a run, with None."""
    absolute = Path(os.path.abspath(path))
    if absolute.parent.name != "checkpoints" or not is_run(absolute.parent.parent):
        return path, None
    run = path.parent.parent if len(path.parts) > 2 else absolute.parent.parent
    number = absolute.name.removeprefix("step-")
    return run, str(int(number)) if number.isdigit() else absolute.name


class Lock:
    """Exclusive lock of a run directory. The kernel releases it when the process dies, so it is never stale."""

    def __init__(self, run: RunDirectory) -> None:
        self.path = run.path / LOCK
        self._handle: int | None = None

    def __enter__(self) -> Lock:
        handle = self._open()
        for _ in range(9):  # bounded, for file systems whose inodes change
            if _is_same_file(handle, self.path):
                break
            # The folder was renamed between the two calls: this is the lock of the renamed run.
            os.close(handle)
            handle = self._open()
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
        text = json.dumps(owner).encode()
        try:
            os.pwrite(handle, text, 0)  # before truncating, so that a lock with an owner is never empty again
            os.ftruncate(handle, len(text))
        except OSError as error:
            os.close(handle)
            raise explain_os_error(error, self.path) from None
        self._handle = handle
        return self

    def has_owner(self) -> bool:
        """Return whether a run has ever held the lock."""
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            return _read_owner(handle) is not None
        finally:
            os.close(handle)

    def check_free(self) -> None:
        """Raise DirectoryInUse if a process holds the lock; creates nothing."""
        if is_locked(self.path):
            raise self._in_use_error(os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW))

    def _open(self) -> int:
        """Open and lock the file; return its descriptor."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise explain_os_error(error, self.path) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._in_use_error(handle) from None
        except OSError as error:
            os.close(handle)
            raise explain_os_error(error, self.path) from None
        return handle

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _in_use_error(self, handle: int) -> BottegaError:
        owner = _read_owner(handle)
        holder = f"process {owner['pid']} on {owner['host']}, since {owner['started']}" if owner else "another process"
        os.close(handle)
        return DirectoryInUse(f"{self.path.parent} is in use by {holder}; give this run another name=…")


def _is_same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _read_owner(handle: int) -> dict[str, Any] | None:
    """Return pid, host and start time from a lock file; None if it was not written by this program."""
    try:
        # The end of an earlier, longer text may follow, so only the first JSON value is read.
        owner, _ = json.JSONDecoder().raw_decode(os.pread(handle, 4096, 0).decode())
        return {key: owner[key] for key in ("pid", "host", "started")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _suggest_run(path: Path) -> str:
    from bottega.similar_names import find_similar_names

    runs = [p.parent.name for p in path.parent.glob("*/recipe.yaml")] if path.parent.is_dir() else []
    similar_names = find_similar_names(path.name, runs)
    return f"; did you mean {path.parent / similar_names[0]}?" if similar_names else "; start one with `bottega train`"
