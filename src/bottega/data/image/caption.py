"""Fit captions below thumbnails: printable characters, two lines, without words that all captions have in common."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from itertools import takewhile

Measure = Callable[[str], float]
"""Returns the width of a text in pixels."""
MAX_LINES = 2
# Pillow's default font has ASCII and these characters, and draws a box for any other.
FONT_SYMBOLS = frozenset("©«»°±·‹›⁄")
PLACEHOLDER = "?"
# Characters that Unicode does not decompose.
ASCII_REPLACEMENTS = str.maketrans(
    {"ß": "ss", "ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "æ": "ae", "Æ": "AE", "œ": "oe", "Œ": "OE", "đ": "d", "ð": "d"}
    | {"þ": "th", "ı": "i", "–": "-", "—": "-", "„": '"', "‚": "'", "‘": "'", "’": "'", "“": '"', "”": '"', "×": "x"}
)


def to_printable(text: str) -> str:
    """Return the text on one line, without accents and characters the font lacks; "?" if nothing is left."""
    text = " ".join(text.split())
    decomposed = unicodedata.normalize("NFKD", text.translate(ASCII_REPLACEMENTS))
    printable = "".join(character for character in decomposed if character in FONT_SYMBOLS or " " <= character <= "~")
    return " ".join(printable.split()) or (PLACEHOLDER if text else "")


def fit_captions(texts: Sequence[str], width: float, measure: Measure) -> list[list[str]]:
    """Wrap each caption to at most two lines of `width` pixels, as measured by `measure`.

    If a caption would be truncated, the words that all captions begin or end with are dropped, because they do not help to
    tell captions apart.
    """
    captions = [to_printable(text) for text in texts]
    if any(_wrap(text, width, measure)[1] for text in captions):
        captions = _drop_common_words(captions)
    fitted = []
    for text in captions:
        lines, remainder = _wrap(text, width, measure)
        fitted.append([*lines[:-1], _truncate(f"{lines[-1]} {remainder}", width, measure)] if remainder else lines)
    return fitted


def _wrap(text: str, width: float, measure: Measure) -> tuple[list[str], str]:
    """Return the lines of a text, broken between words if possible, and the remainder that does not fit."""
    lines: list[str] = []
    while text and len(lines) < MAX_LINES:
        end = _count_fitting_characters(text, width, measure)
        if end < len(text) and text[end] != " ":
            end = max(text.rfind(" ", 0, end), 0) or end
        lines.append(text[:end])
        text = text[end:].strip()
    return lines or [""], text


def _count_fitting_characters(text: str, width: float, measure: Measure) -> int:
    """Return how many characters fit on a line, at least 1."""
    num_characters = min(len(text), int(width))  # no character is narrower than a pixel
    while num_characters > 1 and measure(text[:num_characters]) > width:
        num_characters -= 1
    return max(num_characters, 1)


def _truncate(text: str, width: float, measure: Measure) -> str:
    end = _count_fitting_characters(text, width - measure("..."), measure)
    return f"{text[:end].rstrip()}..."


def _drop_common_words(texts: list[str]) -> list[str]:
    captions = [text.split(" ") for text in texts]
    if len(set(texts)) < 2:
        return texts
    # Keep at least one word of the shortest caption.
    max_dropped = min(map(len, captions)) - 1
    num_leading = min(_count_common_words(captions), max_dropped)
    num_trailing = min(_count_common_words([caption[::-1] for caption in captions]), max_dropped - num_leading)
    prefix, suffix = "..." if num_leading else "", "..." if num_trailing else ""
    return [prefix + " ".join(caption[num_leading : len(caption) - num_trailing]) + suffix for caption in captions]


def _count_common_words(captions: list[list[str]]) -> int:
    """Return how many words all captions begin with."""
    return len(list(takewhile(lambda words: len(set(words)) == 1, zip(*captions, strict=False))))
