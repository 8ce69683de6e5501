"""Errors for users, each class with its exit code.

Codes avoid 64-78 and 126-165, which shells and launchers use, unless a signal is meant.
"""

from __future__ import annotations

import re

from bottega.measurements import MemoryUse
from bottega.redaction import redact_text


class BottegaError(Exception):
    """Base class: a one-line message with what is wrong, where, and what to do. Shown without a traceback."""

    code = 1


class UsageError(BottegaError):
    """The command line or the recipe is wrong."""

    code = 2


class DataError(BottegaError):
    """The data cannot be read, is empty, or has changed."""

    code = 3


class CheckpointError(BottegaError):
    """A checkpoint is missing, damaged or does not fit the run."""

    code = 4


class EnvironmentProblem(BottegaError):
    """The machine cannot do it: disk, permission, missing device or package."""

    code = 5


class MissingDevice(EnvironmentProblem):
    """The machine does not have the device that the recipe names."""


class Diverged(BottegaError):
    """The loss or a gradient is not finite, and the policy is to stop training."""

    code = 6


class OutOfMemory(BottegaError):
    """The model or the micro-batch does not fit in memory; `memory` is what was in use, if it was measured."""

    code = 7
    memory: MemoryUse | None = None


class PeerLost(BottegaError):
    """Another rank ended or stopped responding; a restart may help."""

    code = 8


class DirectoryInUse(BottegaError):
    """Another process is writing this run."""

    code = 9


class Interrupted(BottegaError):
    """A signal stopped the run after its state was saved. Code 85 asks the scheduler for a restart, 130 is Ctrl-C."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def describe_error(error: BaseException) -> tuple[int, str]:
    """Return the exit code of an error and its message for the user, without secrets that libraries quote."""
    if isinstance(error, BottegaError):
        return error.code, redact_text(str(error))
    if isinstance(error, RecursionError):  # from a file of the user; no code of ours recurses that deeply
        return DataError.code, "a file is nested too deeply to be read (--debug shows where)"
    if isinstance(error, MemoryError):
        return OutOfMemory.code, "out of memory on the host; lower training.batch_size or use a smaller model"
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename is not None else ""
        return EnvironmentProblem.code, f"{where}{error.strerror}"
    if isinstance(error, KeyboardInterrupt):
        return 130, str(error) or "stopped by Ctrl-C"
    if type(error).__name__ == "OutOfMemoryError" or re.search("can't allocate memory|RESOURCE_EXHAUSTED", str(error)):
        # Errors of torch on a GPU, of torch on the host, and of JAX; no framework is imported here.
        return OutOfMemory.code, "out of memory; use a smaller model or lower training.micro_batch_size"
    text = redact_text(" ".join(str(error).split()))
    return 1, f"a bug in bottega: {type(error).__name__}: {text} (--debug shows where)"


def first_line(error: BaseException) -> str:
    """Return the first line of another library's message, joined with the second if the first ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
