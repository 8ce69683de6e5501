"""Run a command on a pseudo-terminal: its raw output and the resulting screen."""

from __future__ import annotations

import os
import pty
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from small_run import environment
from warm_process import WarmCommand

# Control sequences of rich: colours, cursor visibility and movement, erased lines.
DRAWING = re.compile(r"\x1b\[(?:[0-9;]*m|\?25[lh]|\d*[AKG]|2?J)")
CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class TerminalOutput:
    """Exit code and raw terminal output of a command."""

    code: int
    raw: str

    @property
    def screen(self) -> str:
        """Return the text on the screen at the end."""
        lines, row, column = [""], 0, 0
        for part in re.split(r"(\x1b\[[0-9;?]*[a-zA-Z]|\r|\n)", self.raw):
            if part == "\r":
                column = 0
            elif part == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif part.startswith("\x1b["):
                if part.endswith("A"):
                    row = max(0, row - int(part[2:-1] or 1))
                elif part.endswith("K"):
                    lines[row] = ""
            else:
                lines[row] = lines[row].ljust(column)[:column] + part + lines[row][column + len(part) :]
                column += len(part)
        return "\n".join(lines)

    @property
    def commands(self) -> list[str]:
        """Return control characters other than those that draw bars and colours."""
        return CONTROLS.findall(DRAWING.sub("", self.raw))


def run_on_terminal(
    arguments: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> TerminalOutput:
    """Run the command with a terminal as its standard input, output and error."""
    controller, device = pty.openpty()
    with os.fdopen(controller, "rb", buffering=0) as terminal:
        variables = {"TERM": "xterm-256color", "COLUMNS": "200", "LINES": "50", **(env or {})}
        process = WarmCommand(
            arguments,
            stdin=device,
            stdout=device,
            stderr=device,
            cwd=cwd,
            env=environment(**variables),
            start_new_session=True,
        )
        os.close(device)
        received = b""
        while True:
            try:
                data = terminal.read(65536)
            except OSError:  # the last process has closed its side
                break
            if not data:
                break
            received += data
        return TerminalOutput(process.wait(), received.decode("utf-8", "replace"))
