"""log.txt: the events of a run, one line each with time and level."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from bottega.redaction import redact_text
from bottega.storage.durable import open_without_following_links
from bottega.terminal import escape_controls

Level = Literal["INFO", "WARNING", "ERROR"]


class LogFile:
    """Appends to log.txt. Lines that cannot be written are dropped, so that a full disk never ends a run; links are not followed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, text: str, level: Level = "INFO") -> None:
        """Append `text`, each of its lines with time and level, without secrets."""
        prefix = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {level}"
        lines = escape_controls(redact_text(text)).splitlines()
        entries = [f"{prefix} {line}".rstrip() + "\n" for line in lines if line.strip()]
        with suppress(OSError), open(self.path, "ab", buffering=0, opener=open_without_following_links) as file:
            file.write("".join(entries).encode("utf-8", "replace"))
