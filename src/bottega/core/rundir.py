"""The run directory: one writer, known names, nothing half-written."""

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

from bottega.core.callback import Progress
from bottega.core.errors import BottegaError, DirectoryInUse, UsageError
from bottega.core.saver import explain_os_error
from bottega.storage.durable import TEMPORARY_PREFIXES, is_locked, remove_leftovers, write_atomic

LOCK = "LOCK"


class RunDirectory:
    """Paths inside one run. Creating it touches nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.recipe = path / "recipe.yaml"
        self.environment = path / "environment.json"
        self.metrics = path / "metrics.jsonl"
        self.log = path / "log.txt"
        # Runs of earlier versions have it under another name.
        self.processor = path / ("codec" if (path / "codec").is_dir() else "processor")
        self.samples = path / "samples"
        self.final = path / "final"

    def create(self) -> None:
        """Make the folder where there is none. A folder of somebody else's, and links in our own, are refused."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.check_usable()
            probe = self.path / f".probe-{uuid.uuid4().hex[:8]}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise explain_os_error(error, self.path) from None

    def check_usable(self) -> None:
        """Refuse a folder that is not a run, and a run with links in it."""
        try:
            self.check_is_run()
            self.check_no_links()
        except OSError as error:
            raise explain_os_error(error, self.path) from None

    def check_is_run(self) -> None:
        """A folder is ours if it is empty or shows that a run was started in it: a lock with its owner, or what follows.
        Folds of a cross-validation are runs of their own.

        A recipe.yaml alone shows nothing, anybody may have one.
        """
        names = [name for name in os.listdir(self.path) if not name.startswith((*TEMPORARY_PREFIXES, "fold-"))]
        has_checkpoint = any(self.checkpoints.glob("step-*/MANIFEST.json"))
        if set(names) - {LOCK} and not has_checkpoint and not Lock(self).has_owner():
            raise UsageError(
                f"{self.path} is there already and is not a run, so nothing is written into it; choose another name=…, or "
                "move that folder away"
            )

    def check_no_links(self) -> None:
        """Writing through a link would change a file that is not the run's own."""
        for path in [*self.path.iterdir(), *(self.samples.iterdir() if self.samples.is_dir() else ())]:
            if path.is_symlink():
                raise UsageError(
                    f"{path} is a link to {os.readlink(path)}, and a run writes only into its own folder; remove the link, "
                    "or choose another name=…"
                )

    def remove_if_unused(self, created: Sequence[Path] = ()) -> None:
        """Delete the folder of a start that was refused, where it holds nothing but the lock and the log, with the parent
        folders that this start has made. The lock is still held."""
        ours = (self.path / LOCK, self.log)
        with suppress(OSError):  # somebody else uses it by now
            remove_leftovers(self.path)
            if {path.name for path in ours}.issuperset(os.listdir(self.path)):
                for path in ours:
                    path.unlink(missing_ok=True)
                for folder in created:
                    folder.rmdir()

    def must_exist(self) -> RunDirectory:
        if not self.recipe.is_file():
            raise UsageError(f"no run at {self.path}: {self.recipe.name} is not there{_nearest(self.path)}")
        return self

    def write(self, path: Path, text: str) -> None:
        """Whole or not at all."""
        try:
            write_atomic(path, text)
        except OSError as error:
            raise explain_os_error(error, path) from None

    def truncate_metrics(self, progress: Progress) -> None:
        """Forget lines written after the checkpoint we go on from, so that no step and no evaluation appears twice."""
        if not self.metrics.exists():
            return
        kept = []
        for line in self.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
                # By samples, which mean the same under any batch size. An evaluation that has to be made up for is
                # made again, although a process that died may have written it down.
                again = row["kind"] == "eval" and progress.evaluated < progress.step
                if row["samples"] < progress.samples + (not again):
                    kept.append(line)
            except (ValueError, KeyError, TypeError):
                continue  # the last line of a killed process
        self.write(self.metrics, "".join(line + "\n" for line in kept))


def is_run(path: Path) -> bool:
    """Whether a folder is the directory of a run that has begun."""
    return (path / "recipe.yaml").is_file()


def split_checkpoint_path(path: Path) -> tuple[Path, str | None]:
    """The run directory that a path names, and its checkpoint where it is RUN/checkpoints/best, last or step-00000500."""
    whole = Path(os.path.abspath(path))
    if whole.parent.name != "checkpoints" or not is_run(whole.parent.parent):
        return path, None
    run = path.parent.parent if len(path.parts) > 2 else whole.parent.parent
    number = whole.name.removeprefix("step-")
    return run, str(int(number)) if number.isdigit() else whole.name


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics.jsonl."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


class Lock:
    """One writer per run. The kernel drops the lock when the process dies, so none is ever stale."""

    def __init__(self, run: RunDirectory) -> None:
        self.path = run.path / LOCK
        self._handle: int | None = None

    def __enter__(self) -> Lock:
        handle = self._open()
        for _ in range(9):  # a file system whose inodes change must not keep us here for ever
            if _is_same_file(handle, self.path):
                break
            # The folder was set aside between the two calls: what we hold is the lock of a run that has moved.
            os.close(handle)
            handle = self._open()
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
        text = json.dumps(owner).encode()
        try:
            os.pwrite(handle, text, 0)  # before it is cut: a lock that names its owner is never empty again
            os.ftruncate(handle, len(text))
        except OSError as error:
            os.close(handle)
            raise explain_os_error(error, self.path) from None
        self._handle = handle
        return self

    def has_owner(self) -> bool:
        """Whether a run has ever held it."""
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            return _read_owner(handle) is not None
        finally:
            os.close(handle)

    def check_free(self) -> None:
        """Refuse a run that a process holds; nothing is created."""
        if is_locked(self.path):
            raise self._taken(os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW))

    def _open(self) -> int:
        """The locked file."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise explain_os_error(error, self.path) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._taken(handle) from None
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

    def _taken(self, handle: int) -> BottegaError:
        owner = _read_owner(handle)
        who = f"process {owner['pid']} on {owner['host']}, since {owner['started']}" if owner else "another process"
        os.close(handle)
        return DirectoryInUse(f"{self.path.parent} is in use by {who}; give this run another name=…")


def _is_same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _read_owner(handle: int) -> dict[str, Any] | None:
    """Who wrote a lock; None where that was not us."""
    try:
        owner, _ = json.JSONDecoder().raw_decode(
            os.pread(handle, 4096, 0).decode()
        )  # the end of a longer one may follow
        return {key: owner[key] for key in ("pid", "host", "started")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _nearest(path: Path) -> str:
    from bottega.similar_names import find_similar_names

    runs = [p.parent.name for p in path.parent.glob("*/recipe.yaml")] if path.parent.is_dir() else []
    near = find_similar_names(path.name, runs)
    return f"; did you mean {path.parent / near[0]}?" if near else "; `bottega train` makes one"
