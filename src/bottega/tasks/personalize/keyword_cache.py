"""Answers of a language model on disk, each decoded once.

A cache file holds lines of {"prompt": hash, "words": [...], "check": hash of both}; lines are appended and never changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from bottega.core.errors import EnvironmentProblem
from bottega.storage.cache_folder import default_cache
from bottega.storage.durable import flush
from bottega.terminal import print_notice


@final
class KeywordCache:
    """One file of answers for each model, precision, kind of device and set of decoding options.

    `compute_identity` returns everything besides the prompt that affects an answer. It is called on first use, because hashing
    a model takes long. Answers are stored by the hash of the prompt's tokens, so prompt templates are not part of the identity.
    """

    def __init__(self, compute_identity: Callable[[], tuple[Any, ...]], *, precision: str, folder: Path | None) -> None:
        self._folder = (default_cache() if folder is None else folder) / "keywords"
        self._compute_identity, self._precision = compute_identity, precision
        self._identity: tuple[Any, ...] | None = None

    def get_path(self, device: Any) -> Path:
        """Return the file of the answers that were computed on this kind of device."""
        if self._identity is None:
            self._identity = self._compute_identity()
        key = (*self._identity, self._precision, str(device).partition(":")[0])
        return self._folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.jsonl"

    def read(self, device: Any) -> dict[str, tuple[str, ...]]:
        """Return all answers by the hash of their prompt."""
        return read_cached_answers(self.get_path(device))

    def append(self, device: Any, answers: Mapping[str, tuple[str, ...]]) -> None:
        """Add answers to the file of this kind of device."""
        append_answers(self.get_path(device), answers)

    @contextmanager
    def lock(self, device: Any) -> Iterator[None]:
        """Let one process decode at a time: all ranks of a run need the same answers. A process that waits prints a line."""
        path = self.get_path(device)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = path.with_suffix(".lock").open("w")
        except OSError as error:
            raise _build_write_error(path, error) from error
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
            if row["check"] == _compute_checksum(prompt, words):
                answers[prompt] = words
        except (ValueError, TypeError, KeyError):
            continue
    return answers


def append_answers(path: Path, answers: Mapping[str, tuple[str, ...]]) -> None:
    """Append answers to a file and flush it to disk."""
    rows = [{"prompt": key, "words": words, "check": _compute_checksum(key, words)} for key, words in answers.items()]
    try:
        with path.open("a", encoding="utf-8") as stream:
            # Start with a line break: the last line may have been cut off.
            stream.write("\n" + "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        flush(path)
    except OSError as error:
        raise _build_write_error(path, error) from error


def _compute_checksum(prompt: str, words: tuple[str, ...]) -> str:
    return hashlib.sha256(repr((prompt, words)).encode()).hexdigest()[:16]


def _build_write_error(path: Path, error: OSError) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"cannot write keywords to {path.parent}: {error.strerror or error}; free some space, or set XDG_CACHE_HOME to a "
        "folder that can be written"
    )
