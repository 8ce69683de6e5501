"""Answers of a language model on disk, each decoded once.

A cache file holds lines of {"prompt": hash, "words": [...], "check": hash of both}; lines are appended and never changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bottega.core.errors import EnvironmentProblem
from bottega.storage.durable import flush
from bottega.terminal import print_notice


@contextmanager
def lock_answers(path: Path) -> Iterator[None]:
    """Let one process decode at a time: all ranks of a run need the same answers. A process that waits prints a line."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock").open("w")
    except OSError as error:
        raise _unwritable(path, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print_notice("bottega: waiting for another process that generates keywords with this language model")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def read_cached_answers(path: Path) -> dict[str, tuple[str, ...]]:
    """Return the keywords in a file by the hash of their prompt.

    A line damaged by a killed process or a bad disk is skipped; a missing file is empty.
    """
    answers: dict[str, tuple[str, ...]] = {}
    if not path.is_file():
        return answers
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
            prompt, words = str(row["prompt"]), tuple(map(str, row["words"]))
            if row["check"] == _checksum(prompt, words):
                answers[prompt] = words
        except (ValueError, TypeError, KeyError):
            continue
    return answers


def append_answers(path: Path, answers: Mapping[str, tuple[str, ...]]) -> None:
    """Append answers to a file and flush it to disk."""
    rows = [{"prompt": key, "words": words, "check": _checksum(key, words)} for key, words in answers.items()]
    try:
        with path.open("a", encoding="utf-8") as stream:
            # Start with a line break: the last line may have been cut off.
            stream.write("\n" + "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        flush(path)
    except OSError as error:
        raise _unwritable(path, error) from error


def _checksum(prompt: str, words: tuple[str, ...]) -> str:
    return hashlib.sha256(repr((prompt, words)).encode()).hexdigest()[:16]


def _unwritable(path: Path, error: OSError) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"cannot write keywords to {path.parent}: {error.strerror or error}; free some space, or set XDG_CACHE_HOME to a "
        "folder that can be written"
    )
