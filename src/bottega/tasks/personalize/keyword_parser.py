"""Keywords in the free-form answer of a language model."""

from __future__ import annotations

import re

MAX_WORDS = 5
"""A part of a line with more words than this makes the line a sentence, which contains no keywords."""
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.S)
_BULLET = re.compile(r"^\s*(?:[-*+•·–—>]+\s|[•·]|\(?\d{1,2}[.)]\s)\s*")
_SEPARATOR = re.compile(r"[,;|/#•·、，；]|\s[-–—]\s|\s\(?\d{1,2}[.)]\s")
_PREFACE = re.compile(r"^\W*(?:sure|certainly|of course|okay|here|based on|i hope|let me know|note)\b", re.I)
_SURROUNDING = " \t\"'`*_.!:()[]{}<>“”‘’«»"


def parse_keywords(text: str, count: int, *, is_truncated: bool = False) -> tuple[str, ...]:
    """Return up to `count` keywords from an answer: a list with commas, bullets or numbers, quoted or not, with or without
    a preface.

    The last keyword of a truncated answer is dropped, since it may be incomplete.
    """
    words: list[str] = []
    is_list = False
    for line in _THOUGHT.sub("", text).strip().splitlines():
        is_item = _BULLET.match(line) is not None
        if (words and not line.strip()) or (is_list and not is_item):
            break  # text after the list
        parts = _parse_line(_BULLET.sub("", line))
        if parts:
            words, is_list = words + parts, is_item
    if is_truncated and len(words) > 1:
        words.pop()
    unique: dict[str, str] = {}
    for word in words:
        unique.setdefault(word.lower(), word)
    return tuple(unique.values())[:count]


def _parse_line(line: str) -> list[str]:
    """Return the keywords of one line; "Colours: red, blue" has red and blue."""
    head, colon, tail = line.partition(":")
    is_label = _PREFACE.match(head) or ("," not in head and len(head.split()) <= MAX_WORDS)
    if colon and is_label:
        line = tail
    elif _PREFACE.match(line):
        return []
    parts = [part.strip(_SURROUNDING) for part in _SEPARATOR.split(line)]
    parts = [re.sub(r"^(?:and|or|&)\s+", "", " ".join(part.split()), flags=re.I) for part in parts]
    if any(len(part.split()) > MAX_WORDS for part in parts):
        return []
    return [part for part in parts if any(letter.isalpha() for letter in part)]
