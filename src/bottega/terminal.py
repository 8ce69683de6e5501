"""The only door to the terminal: what comes from outside is escaped, and a console that cannot be written ends nothing.

Samples, file names, keys and tensor names may hold escape codes that set a window's title, read the clipboard or hide a
line. They are shown as `\\x1b`, never sent. Files and --json keep them as they are.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any, TextIO

# Controls but for newline, tab and the return of a Windows line; separators and directions that move what is around them;
# lone surrogates, which a name of bytes that are no UTF-8 has, and no stream can write.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)"
)


def escape_controls(text: str) -> str:
    """Return `text` with every character that a terminal would obey spelled out; newlines and tabs stay."""
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


class OutputClosed(Exception):
    """Whoever read our standard output has closed it, as `| head` does."""


def print_result(text: str, *, end: str = "\n") -> None:
    """Print what a verb was asked for on standard output.

    Raises ReaderGone where nobody reads it any more, and OSError where it cannot be written.
    """
    if sys.stdout is None:
        return  # closed by whoever started us
    try:
        sys.stdout.write(escape_controls(text) + end)
        sys.stdout.flush()
    except BrokenPipeError:
        raise OutputClosed from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from None


def print_notice(text: str) -> None:
    """Print a line for people on standard error, or nothing where that cannot be written."""
    try:
        if sys.stderr is not None:  # while a bar is drawn, this is rich's, which writes above it
            sys.stderr.write(escape_controls(text) + "\n")  # at once: processes must not tear each other's lines
    except (OSError, ValueError):
        pass


class ResultStream:
    """Standard output for a text that is read while it is generated."""

    def write(self, text: str) -> int:
        print_result(text, end="")
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""


class ConsoleStream:
    """Standard error as a file that never fails: a closed pipe or a full disk under it must not end a training.

    `error` is what the last write that failed met with. Later writes are tried again: somebody may make room.
    """

    def __init__(self) -> None:
        self.error: OSError | None = None

    def _standard_error(self) -> TextIO | None:
        """Looked up each time, because tests and rich put something else there; rich's would come back to us."""
        return getattr(sys.stderr, "rich_proxied_file", sys.stderr)

    def write(self, text: str) -> int:
        stream = self._standard_error()
        if stream is not None:
            try:
                stream.write(text)
                stream.flush()
            except OSError as error:
                self.error = error
            except ValueError:  # a closed file object
                pass
        return len(text)

    def flush(self) -> None:
        """Every write has been flushed."""

    @property
    def encoding(self) -> str:
        return getattr(self._standard_error(), "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        try:
            stream = self._standard_error()
            return stream is not None and stream.isatty()
        except ValueError:
            return False

    def fileno(self) -> int:
        stream = self._standard_error()
        if stream is None:
            raise OSError("standard error is closed")
        return stream.fileno()


def open_console(*, quiet: bool = False) -> Any:
    """Return a rich console on standard error. Texts that come from outside go through `escape_controls` first."""
    from rich.console import Console

    return Console(file=ConsoleStream(), quiet=quiet, highlight=False)  # type: ignore[arg-type]


def reserve_standard_files() -> None:
    """Put the null device where a standard file is closed, so that no file of a run gets its number and what is meant for
    a terminal."""
    for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, mode)
            if null != number:
                os.dup2(null, number)
                os.close(null)


def drop_unwritable_output() -> None:
    """Let the interpreter leave with our exit code: what is left in a stream that cannot be written would make it 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            try:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)
            except (OSError, ValueError):
                pass
