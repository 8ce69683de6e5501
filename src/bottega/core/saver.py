"""Asynchronous checkpointing: one writer thread, at most one save in flight, errors raised at the next step.

A thread is enough, because hashing, writing and fsync all release the GIL.
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

T = TypeVar("T")

NUM_ATTEMPTS = 2
"""Attempts before a save counts as failed."""
MAX_FAILED_SAVES = 3
"""Consecutive failed saves before the run ends: space on a full disk is often freed before the next save, but not always."""


class Saver:
    """Writes the checkpoints of a run, updates their links, and deletes old checkpoints."""

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
        self._finished_save: tuple[Progress, Path] | None = None
        self._error: BaseException | None = None
        self._num_failed_saves = 0
        self._num_bytes = 0

    def save(self, snapshot: Snapshot, progress: Progress) -> None:
        """Start writing a checkpoint in the background; waits only if the previous save is still running."""
        self.wait()
        copy = Progress.from_json(progress.to_json())
        self._thread = threading.Thread(
            target=self._save_in_thread, args=(snapshot, copy), name="bottega-saver", daemon=True
        )
        self._thread.start()

    def poll(self) -> None:
        """Report a save that has ended. Called at every step, so it must be cheap."""
        if self._thread is not None and not self._thread.is_alive():
            self._report_save(final=False)

    def wait(self, *, final: bool = False) -> None:
        """Wait until the current save is on disk. With `final`, a failure is raised at once, as no later save follows."""
        if self._thread is not None:
            self._thread.join()
            self._report_save(final=final)

    def wait_after_failure(self) -> None:
        """Wait for a save in flight after the run has failed; a second failure is only a warning."""
        try:
            self.wait()
        except Exception as error:
            self.warn(f"the last save failed as well: {error}")

    def _save_in_thread(self, snapshot: Snapshot, progress: Progress) -> None:
        try:
            files = snapshot.files()
            self._num_bytes = sum(array.nbytes for tensors in files.values() for array in tensors.values())
            path = retry(lambda: self._write_checkpoint(files, progress))
            try:
                retry(self._update_links_and_rotate)
            except OSError as error:
                self._error = error
            self._finished_save = (progress, path)
        except BaseException as error:
            self._error = error

    def _write_checkpoint(self, files: Mapping[str, Tensors], progress: Progress) -> Path:
        fields = progress.to_json()
        return checkpoint.write(
            self.folder, step=progress.step, files=files, progress=fields, fingerprint=self.fingerprint
        )

    def _update_links_and_rotate(self) -> None:
        """Update `last` and `best`, and delete old checkpoints. The best one is read from the checkpoints: links may be outdated."""
        checkpoint.update_links(self.folder)
        protect = [path for path in (checkpoint.find_best(self.folder)[0], self.resumed_from) if path]
        protect = [self.folder / path.name for path in protect if path.resolve().parent == self.folder.resolve()]
        checkpoint.delete_old_checkpoints(self.folder, keep=self.keep, protect=protect)

    def _report_save(self, *, final: bool) -> None:
        self._thread = None
        finished_save, self._finished_save = self._finished_save, None
        error, self._error = self._error, None
        if finished_save is not None:
            self._num_failed_saves = 0
            self.announce(*finished_save)
        if error is None:
            return
        if not isinstance(error, OSError):
            raise error
        self._num_failed_saves += 1
        problem = explain_os_error(error, self.folder, self._num_bytes)
        if finished_save is not None:
            self.warn(
                f"{problem}; the checkpoint is saved; the next save updates the links and deletes old checkpoints"
            )
            return
        if final or self._num_failed_saves >= MAX_FAILED_SAVES:
            raise problem from error
        self.warn(f"{problem}; older checkpoints are kept, the next save tries again")


def retry(work: Callable[[], T]) -> T:
    """Call `work`, and again at once after a disk error, while the state of this step is still in memory."""
    for _ in range(NUM_ATTEMPTS - 1):
        with suppress(OSError, CheckpointError):
            return work()
    return work()


def explain_os_error(error: OSError, path: Path, needed_bytes: int = 0) -> BottegaError:
    """Return the error for the user after writing a file or folder failed; `needed_bytes` is its size, 0 if unknown."""
    reason = {
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EFBIG: "the file would exceed the size limit (ulimit -f)",
        errno.EROFS: "the file system is read-only",
        errno.EACCES: "permission denied",
        errno.EPERM: "permission denied",
        errno.ENOTDIR: "a component of this path is a file; choose another folder",
        errno.EEXIST: "it is a file; choose another folder",
    }.get(error.errno or 0, error.strerror or str(error))
    try:
        free_note = f", {shutil.disk_usage(path if path.exists() else path.parent).free:,} bytes free"
    except OSError:
        free_note = ""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    size_note = f": needs {needed_bytes:,} bytes{free_note}" if needed_bytes else free_note if is_full else ""
    advice = "; free some space and run the same command to continue" if is_full else ""
    return EnvironmentProblem(f"cannot write {path}: {reason}{size_note}{advice}")
