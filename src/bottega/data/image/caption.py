"""Captions as a small picture can carry them: in letters that the font has, on two lines, without what all have in common."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from itertools import takewhile

Measure = Callable[[str], float]
LINES = 2
# Pillow's own font has the letters of ASCII and these signs, and draws a box for any other.
SIGNS = frozenset("©«»°±·‹›⁄")
UNKNOWN = "?"
# These have no simpler form in Unicode.
PLAIN = str.maketrans(
    {"ß": "ss", "ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "æ": "ae", "Æ": "AE", "œ": "oe", "Œ": "OE", "đ": "d", "ð": "d"}
    | {"þ": "th", "ı": "i", "–": "-", "—": "-", "„": '"', "‚": "'", "‘": "'", "’": "'", "“": '"', "”": '"', "×": "x"}
)


def to_printable(text: str) -> str:
    """In one line, with accents taken off, and without what the font cannot show; ? where that leaves nothing."""
    text = " ".join(text.split())
    plain = unicodedata.normalize("NFKD", text.translate(PLAIN))
    shown = "".join(letter for letter in plain if letter in SIGNS or " " <= letter <= "~")
    return " ".join(shown.split()) or (UNKNOWN if text else "")


def fit_captions(texts: Sequence[str], width: float, measure: Measure) -> list[list[str]]:
    """The lines of each caption, none wider than `width`. What all of them begin or end with is dropped where one would
    be cut otherwise, because that is where they could be told apart."""
    plain = [to_printable(text) for text in texts]
    if any(_broken(text, width, measure)[1] for text in plain):
        plain = _differing(plain)
    fitting = []
    for text in plain:
        lines, rest = _broken(text, width, measure)
        fitting.append([*lines[:-1], _cut(f"{lines[-1]} {rest}", width, measure)] if rest else lines)
    return fitting


def _broken(text: str, width: float, measure: Measure) -> tuple[list[str], str]:
    """Lines, broken between words where there are such, and what does not fit any more."""
    lines: list[str] = []
    while text and len(lines) < LINES:
        end = _fitting(text, width, measure)
        if end < len(text) and text[end] != " ":
            end = max(text.rfind(" ", 0, end), 0) or end
        lines.append(text[:end])
        text = text[end:].strip()
    return lines or [""], text


def _fitting(text: str, width: float, measure: Measure) -> int:
    """How many letters fit on a line; one at least."""
    end = min(len(text), int(width))  # no letter is narrower than a pixel
    while end > 1 and measure(text[:end]) > width:
        end -= 1
    return max(end, 1)


def _cut(text: str, width: float, measure: Measure) -> str:
    end = _fitting(text, width - measure("..."), measure)
    return f"{text[:end].rstrip()}..."


def _differing(texts: list[str]) -> list[str]:
    words = [text.split(" ") for text in texts]
    if len(set(texts)) < 2:
        return texts
    # One word stays at least of the shortest.
    spare = min(map(len, words)) - 1
    first = min(_common(words), spare)
    last = min(_common([one[::-1] for one in words]), spare - first)
    before, after = "..." if first else "", "..." if last else ""
    return [before + " ".join(one[first : len(one) - last]) + after for one in words]


def _common(several: list[list[str]]) -> int:
    """How many words all of them begin with."""
    return len(list(takewhile(lambda words: len(set(words)) == 1, zip(*several, strict=False))))
