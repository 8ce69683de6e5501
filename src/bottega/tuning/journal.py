"""The journal file that Optuna stores a study in, safe for `kill -9` and a full disk.

Optuna's own journal file is not used: its lock is a link that outlives a killed process for 30 seconds, and a line that was cut
off by a kill or a full disk makes every later read fail. Here the kernel releases the lock, and a cut line is removed before the next is
written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

from optuna.storages.journal import BaseJournalBackend

from bottega.core.errors import CheckpointError
from bottega.core.saver import explain_os_error
from bottega.storage.durable import append_locked, read_locked

JOURNAL_FILE = "journal.jsonl"


@final
class LockedJournal(BaseJournalBackend):
    """Lines of JSON in one file, appended under an exclusive lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets = [0]
        """Byte offset of each line that was read; the last one is the end of what was read."""
        path.touch(exist_ok=True)

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Yield the entries from a number on; a last line without its end was cut off by a kill."""
        number = min(log_number_from, len(self._offsets) - 1)
        data = read_locked(self._path, self._offsets[number])
        for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
            if number + 1 == len(self._offsets):
                self._offsets.append(self._offsets[number] + len(line))
            if number >= log_number_from:
                try:
                    yield json.loads(line)
                except ValueError:
                    raise CheckpointError(
                        f"{self._path}, line {number + 1}: damaged; restore the file, or start over with --fresh"
                    ) from None
            number += 1

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append entries; all of them or, if the disk is full, none."""
        data = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        try:
            append_locked(self._path, data)
        except OSError as error:
            raise explain_os_error(error, self._path) from None
