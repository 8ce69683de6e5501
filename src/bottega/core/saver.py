"""Saving behind training: one writer thread, at most one save in flight, errors surface at the next step.

A thread is enough: hashing, writing and syncing all let go of the interpreter lock, and nothing is serialised object by
object.
"""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from bottega.core import checkpoint
from bottega.core.callback import Progress
from bottega.core.engine import Snapshot
from bottega.core.errors import BottegaError, CheckpointError, EnvironmentProblem
from bottega.core.types import Tensors
from bottega.terminal import print_notice

T = TypeVar("T")

TRIES = 2
"""How often one save is tried before it counts as failed."""
MAX_FAILED_SAVES = 3
"""Failed saves in a row before the run gives up: a full disk is often emptied by somebody, but not for ever."""


class Saver:
    """Owns the checkpoints folder of a running run."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        fingerprint: Mapping[str, Any],
        announce: Callable[[Progress, Path], None],
        warn: Callable[[str], None],
    ) -> None:
        self.folder, self.keep, self.fingerprint = folder, keep, fingerprint
        self.announce, self.warn = announce, warn
        self.resumed_from: Path | None = None
        self._thread: threading.Thread | None = None
        self._done: tuple[Progress, Path] | None = None
        self._error: BaseException | None = None
        self._failures = 0
        self._needed = 0

    def save(self, snapshot: Snapshot, progress: Progress) -> None:
        """Start writing; waits only if the previous save has not ended."""
        self.wait()
        kept = Progress.from_json(progress.to_json())
        self._thread = threading.Thread(target=self._write, args=(snapshot, kept), name="bottega-saver", daemon=True)
        self._thread.start()

    def poll(self) -> None:
        """Report a save that has ended. Called at every step, so it must cost nothing."""
        if self._thread is not None and not self._thread.is_alive():
            self._collect(final=False)

    def wait(self, *, final: bool = False) -> None:
        """Until what was started is on disk. With `final`, a failure ends the run at once: there is no later save."""
        if self._thread is not None:
            self._thread.join()
            self._collect(final=final)

    def wait_after_failure(self) -> None:
        """Let a save in flight end although the run has failed; the first error is the one to be told."""
        try:
            self.wait()
        except Exception as error:
            self.warn(f"the last save failed as well: {error}")

    def _write(self, snapshot: Snapshot, progress: Progress) -> None:
        try:
            files = snapshot.files()
            self._needed = sum(array.nbytes for tensors in files.values() for array in tensors.values())
            path = retry(lambda: self._commit(files, progress))
            try:
                retry(self._tidy)
            except OSError as error:
                self._error = error
            self._done = (progress, path)
        except BaseException as error:
            self._error = error

    def _commit(self, files: Mapping[str, Tensors], progress: Progress) -> Path:
        fields = progress.to_json()
        return checkpoint.write(
            self.folder, step=progress.step, files=files, progress=fields, fingerprint=self.fingerprint
        )

    def _tidy(self) -> None:
        """Links and rotation. What they keep is asked of the checkpoints: a link may be older than they are."""
        checkpoint.update_links(self.folder)
        protect = [path for path in (checkpoint.find_best(self.folder)[0], self.resumed_from) if path]
        protect = [self.folder / path.name for path in protect if path.resolve().parent == self.folder.resolve()]
        checkpoint.delete_old_checkpoints(self.folder, keep=self.keep, protect=protect)

    def _collect(self, *, final: bool) -> None:
        self._thread = None
        done, self._done = self._done, None
        error, self._error = self._error, None
        if done is not None:
            self._failures = 0
            self.announce(*done)
        if error is None:
            return
        if not isinstance(error, OSError):
            raise error
        self._failures += 1
        problem = explain_os_error(error, self.folder, self._needed)
        if done is not None:
            self.warn(f"{problem}; the checkpoint is saved, its links and the older ones are seen to at the next save")
            return
        if final or self._failures >= MAX_FAILED_SAVES:
            raise problem from error
        self.warn(f"{problem}; older checkpoints are kept, trying again at the next save")


def retry(work: Callable[[], T]) -> T:
    """At once after an error of the disk: the state is still in memory, and the next save would be of a later step."""
    for _ in range(TRIES - 1):
        with suppress(OSError, CheckpointError):
            return work()
    return work()


def explain_os_error(error: OSError, folder: Path, needed: int = 0) -> BottegaError:
    """An operating-system error in the words of somebody who has to fix it."""
    reason = {
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EFBIG: "the file would exceed the size limit (ulimit -f)",
        errno.EROFS: "the file system is read-only",
        errno.EACCES: "permission denied",
        errno.EPERM: "permission denied",
        errno.ENOTDIR: "a part of this path is a file; choose another folder",
        errno.EEXIST: "this is a file; choose another folder",
    }.get(error.errno or 0, error.strerror or str(error))
    try:
        free = f", {shutil.disk_usage(folder if folder.exists() else folder.parent).free:,} bytes free"
    except OSError:
        free = ""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    size = f": needs {needed:,} bytes{free}" if needed else free if is_full else ""
    advice = "; free some space, and the same command goes on" if is_full else ""
    return EnvironmentProblem(f"cannot write {folder}: {reason}{size}{advice}")


def check_disk_space(folder: Path, *, size: int, keep: int) -> None:
    """Refuse to start where the checkpoints cannot fit: hours later is too late to find out."""
    free = shutil.disk_usage(folder).free
    held = sum(
        path.stat().st_size for step in checkpoint.list_step_folders(folder) for path in step.iterdir()
    )  # of an earlier start; it makes room in time
    if size > free or size * 2 > free + held:
        raise EnvironmentProblem(
            f"cannot write {folder}: a checkpoint needs {size:,} bytes twice while it is replaced, {free:,} bytes free"
        )
    if size * (keep + 1) > free + held:
        print_notice(
            f"bottega: {keep} checkpoints of {size:,} bytes will not fit in the {free:,} bytes free; lower checkpoint.keep"
        )
