"""What can go wrong for a person, each kind with the exit code a scheduler can act on.

Codes stay out of 64-78 and 126-165, which shells and launchers use, except where a signal is really meant.
"""

from __future__ import annotations


class BottegaError(Exception):
    """A message for people: one line, naming the thing, its value and the remedy. Shown without a traceback."""

    code = 1


class UsageError(BottegaError):
    """The command line or the recipe is wrong."""

    code = 2


class DataError(BottegaError):
    """The data cannot be read, is empty, or has changed."""

    code = 3


class CheckpointError(BottegaError):
    """No checkpoint that was asked for can be trusted."""

    code = 4


class EnvironmentProblem(BottegaError):
    """The machine says no: disk, permission, missing device or package."""

    code = 5


class Diverged(BottegaError):
    """The loss or a gradient is not finite, and the policy is to stop."""

    code = 6


class OutOfMemory(BottegaError):
    """The model and the micro-batch do not fit."""

    code = 7


class PeerLost(BottegaError):
    """Another rank died or stopped answering; a restart may help."""

    code = 8


class DirectoryInUse(BottegaError):
    """Another process is writing this run."""

    code = 9


class Interrupted(BottegaError):
    """A signal asked for a stop, and the state is saved. 85 asks the scheduler to start us again, 130 is Ctrl-C."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def describe_error(error: BaseException) -> tuple[int, str]:
    """The exit code of an error, and the line that people read."""
    if isinstance(error, BottegaError):
        return error.code, str(error)
    if isinstance(error, RecursionError):  # of a file from anywhere; our own code calls itself to no such depth
        return DataError.code, "a file is nested too deeply to be read (--debug shows where)"
    if isinstance(error, MemoryError):
        return OutOfMemory.code, "out of memory on the host; lower training.batch_size or use a smaller model"
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename is not None else ""
        return EnvironmentProblem.code, f"{where}{error.strerror}"
    if isinstance(error, KeyboardInterrupt):
        return 130, str(error) or "stopped by Ctrl-C"
    if type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error):
        # torch's, on a GPU and on the host; its name is looked at so that torch need not be imported here.
        return OutOfMemory.code, "out of memory; use a smaller model or lower training.micro_batch_size"
    text = " ".join(str(error).split())
    return 1, f"a bug in bottega: {type(error).__name__}: {text} (--debug shows where)"


def first_line(error: BaseException) -> str:
    """What another library says went wrong, short enough for a line of ours; with the next one where it only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
