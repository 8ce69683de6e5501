"""All output to the terminal: external text is escaped, secrets are redacted, and a console that cannot be written does not end a run.

Samples, file names, keys and tensor names may contain escape codes that set a window's title, read the clipboard or hide a
line. They are printed as `\\x1b`. Files and --json keep them unchanged.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any, TextIO

from bottega.redaction import redact_text

# Control characters except newline, tab and the carriage return of a Windows line; Unicode separators and direction marks that
# reorder the text around them; lone surrogates, which file names that are not UTF-8 have and no stream can write.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)"
)


def escape_controls(text: str) -> str:
    """Return `text` with control characters escaped; newlines and tabs stay."""
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


class OutputClosed(Exception):
    """The reader of standard output has closed it, as `| head` does."""


def print_result(text: str, *, end: str = "\n", is_data: bool = False) -> None:
    """Print the result of a verb to standard output; secrets are redacted, except in data such as generated text.

    Raises OutputClosed if the reader has closed it, and OSError if it cannot be written.
    """
    if sys.stdout is None:
        return  # closed by the parent process
    try:
        sys.stdout.write(escape_controls(text if is_data else redact_text(text)) + end)
        sys.stdout.flush()
    except BrokenPipeError:
        raise OutputClosed from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from None


def print_notice(text: str) -> None:
    """Print a message to standard error, or nothing if that cannot be written."""
    try:
        if sys.stderr is not None:  # while a progress bar is shown, this is rich's stream, which prints above it
            # In one write, so that lines of several processes do not mix.
            sys.stderr.write(escape_controls(redact_text(text)) + "\n")
    except (OSError, ValueError):
        pass


class ResultStream:
    """Standard output as a stream, for text that is printed while it is generated."""

    def write(self, text: str) -> int:
        """Print `text` at once."""
        print_result(text, end="", is_data=True)
        return len(text)

    def flush(self) -> None:
        """Do nothing: every write is flushed."""


class ConsoleStream:
    """Standard error as a file that never fails, because a closed pipe or a full disk must not end a run.

    `error` is the error of the last failed write. Later writes are tried again.
    """

    def __init__(self) -> None:
        self.error: OSError | None = None

    def _get_stream(self) -> TextIO | None:
        """Look up the stream each time, because tests and rich replace it; rich's replacement would write to this object again."""
        return getattr(sys.stderr, "rich_proxied_file", sys.stderr)

    def write(self, text: str) -> int:
        """Write and flush `text`; an error is stored in `error`."""
        stream = self._get_stream()
        if stream is not None:
            try:
                stream.write(redact_text(text))
                stream.flush()
            except OSError as error:
                self.error = error
            except ValueError:  # a closed file object
                pass
        return len(text)

    def flush(self) -> None:
        """Do nothing: every write is flushed."""

    @property
    def encoding(self) -> str:
        """The encoding of standard error."""
        return getattr(self._get_stream(), "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether standard error is a terminal."""
        try:
            stream = self._get_stream()
            return stream is not None and stream.isatty()
        except ValueError:
            return False

    def fileno(self) -> int:
        """The file descriptor of standard error."""
        stream = self._get_stream()
        if stream is None:
            raise OSError("standard error is closed")
        return stream.fileno()


def open_console(*, quiet: bool = False) -> Any:
    """Return a rich console on standard error. Escape external text with `escape_controls` before printing it."""
    from rich.console import Console

    return Console(file=ConsoleStream(), quiet=quiet, highlight=False)  # type: ignore[arg-type]


def reserve_standard_files() -> None:
    """Open the null device for each closed standard stream, so that no other file gets its descriptor and its output."""
    for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, mode)
            if null != number:
                os.dup2(null, number)
                os.close(null)


def drop_unwritable_output() -> None:
    """Discard output that cannot be written, because flushing it at exit would change the exit code to 120."""
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
