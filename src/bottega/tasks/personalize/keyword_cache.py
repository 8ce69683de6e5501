"""What a language model answered: keywords out of whatever it said, and answers that are kept on disk.

A file is lines of {"prompt": hash, "words": [...], "check": hash of both}, added to and never changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bottega.core.errors import EnvironmentProblem
from bottega.storage.durable import flush
from bottega.terminal import print_notice

_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.S)
_BULLET = re.compile(r"^\s*(?:[-*+•·–—>]+\s|[•·]|\(?\d{1,2}[.)]\s)\s*")
_BETWEEN = re.compile(r"[,;|/#•·、，；]|\s[-–—]\s|\s\(?\d{1,2}[.)]\s")
_PREFACE = re.compile(r"^\W*(?:sure|certainly|of course|okay|here|based on|i hope|let me know|note)\b", re.I)
_AROUND = " \t\"'`*_.!:()[]{}<>“”‘’«»"
MOST_WORDS = 5


def parse_keywords(text: str, count: int, *, is_cut: bool = False) -> tuple[str, ...]:
    """The keywords in whatever was said: a list with commas, bullets or numbers, quoted or not, after a preface or none.

    A line with a part of many words is a sentence, and has none. `is_cut` is an answer that did not come to its end: its
    last word may be half of one.
    """
    found: list[str] = []
    is_list = False
    for line in _THOUGHT.sub("", text).strip().splitlines():
        is_item = _BULLET.match(line) is not None
        if (found and not line.strip()) or (is_list and not is_item):
            break  # what follows a list is no part of it
        parts = _parts(_BULLET.sub("", line))
        if parts:
            found, is_list = found + parts, is_item
    if is_cut and len(found) > 1:
        found.pop()
    kept: dict[str, str] = {}
    for word in found:
        kept.setdefault(word.lower(), word)
    return tuple(kept.values())[:count]


def _parts(line: str) -> list[str]:
    """The keywords of one line; "Colours: red, blue" is about red and blue."""
    head, colon, tail = line.partition(":")
    is_label = _PREFACE.match(head) or ("," not in head and len(head.split()) <= MOST_WORDS)
    if colon and is_label:
        line = tail
    elif _PREFACE.match(line):
        return []
    parts = [part.strip(_AROUND) for part in _BETWEEN.split(line)]
    parts = [re.sub(r"^(?:and|or|&)\s+", "", " ".join(part.split()), flags=re.I) for part in parts]
    if any(len(part.split()) > MOST_WORDS for part in parts):
        return []
    return [part for part in parts if any(letter.isalpha() for letter in part)]


def read_cached_answers(path: Path) -> dict[str, tuple[str, ...]]:
    """A line that a killed process or a bad disk left damaged is as if it were not there."""
    found: dict[str, tuple[str, ...]] = {}
    if not path.is_file():
        return found
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
            prompt, words = str(row["prompt"]), tuple(map(str, row["words"]))
            if row["check"] == _check(prompt, words):
                found[prompt] = words
        except (ValueError, TypeError, KeyError):
            continue
    return found


def append_answers(path: Path, answers: Mapping[str, tuple[str, ...]]) -> None:
    rows = [{"prompt": key, "words": words, "check": _check(key, words)} for key, words in answers.items()]
    try:
        with path.open("a", encoding="utf-8") as stream:
            # A line break first: what is before may have been cut.
            stream.write("\n" + "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        flush(path)
    except OSError as error:
        raise _unkept(path, error) from error


def _check(prompt: str, words: tuple[str, ...]) -> str:
    return hashlib.sha256(repr((prompt, words)).encode()).hexdigest()[:16]


@contextmanager
def lock_answers(path: Path) -> Iterator[None]:
    """One process answers at a time: ranks of a run all want the same answers. Who waits says so."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock").open("w")
    except OSError as error:
        raise _unkept(path, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print_notice("bottega: another process asks this language model for keywords; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _unkept(path: Path, error: OSError) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"keywords cannot be kept in {path.parent}: {error.strerror or error}; free some space, or set XDG_CACHE_HOME to a "
        "folder that can be written"
    )
