"""Filter texts by length, symbols, repetition and language, with a reason for each one dropped."""

from __future__ import annotations

import difflib
import unicodedata
from collections import Counter

from bottega.config.data import Filter
from bottega.core.errors import UsageError
from bottega.data.text.languages import LANGUAGES, count_words, detect_language

_ASCII_NON_SYMBOLS = bytes(code for code in range(128) if chr(code).isalnum() or chr(code).isspace())
_ASCII_SPACES = bytes(code for code in range(128) if chr(code).isspace())
# The two written forms of Norwegian, one language in our tables. "no" must be quoted in YAML, where it means false.
_LANGUAGE_ALIASES = {"nb": "no", "nn": "no"}


def check_filter(options: Filter) -> None:
    """Raise `UsageError` for a language code that cannot be detected, because it would drop every text."""
    for code in options.languages or ():
        if _normalize_code(code) not in LANGUAGES:
            near = difflib.get_close_matches(code.lower()[:2], sorted(LANGUAGES), n=1, cutoff=0.9)
            remedy = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(sorted(LANGUAGES))}"
            raise UsageError(f"data.filter.languages: {code!r} is not a language that can be detected; {remedy}")


def find_drop_reason(text: str, options: Filter) -> str | None:
    """Return why a text is dropped, or None if it is kept. Cheap checks come first."""
    if options.min_characters is not None and len(text) < options.min_characters:
        return "too short"
    if options.max_characters is not None and len(text) > options.max_characters:
        return "too long"
    if options.min_words is not None and count_words(text) < options.min_words:
        return "too few words"
    if options.max_symbol_share is not None and compute_symbol_fraction(text) > options.max_symbol_share:
        return "too many symbols"
    if options.max_repeated_share is not None and compute_repeated_line_fraction(text) > options.max_repeated_share:
        return "repeated lines"
    if options.languages is not None:
        code, _ = detect_language(text)
        if not code:
            return "unknown language"
        if code not in map(_normalize_code, options.languages):
            return "other language"
    return None


def compute_symbol_fraction(text: str) -> float:
    """Return the fraction of symbols among the characters that are not white space.

    A symbol is not a letter, digit or combining mark. Punctuation counts, so that no list of ordinary punctuation is
    needed: Shakespeare has 0.06, the source of argparse 0.16.
    """
    if text.isascii():
        raw = text.encode()
        symbols, spaces = (
            len(raw.translate(None, _ASCII_NON_SYMBOLS)),
            len(raw) - len(raw.translate(None, _ASCII_SPACES)),
        )
    else:
        # Vowel signs of Hindi or Thai are marks (category M), not letters; str.isalnum knows only letters.
        counts = Counter(text)
        spaces = sum(count for character, count in counts.items() if character.isspace())
        symbols = sum(
            count
            for character, count in counts.items()
            if not (character.isalnum() or character.isspace() or unicodedata.category(character)[0] == "M")
        )
    return symbols / max(len(text) - spaces, 1)


def compute_repeated_line_fraction(text: str) -> float:
    """Return the fraction of non-empty lines that repeat an earlier line."""
    lines = [stripped for line in text.split("\n") if (stripped := line.strip())]
    return 1 - len(set(lines)) / len(lines) if lines else 0.0


def _normalize_code(code: str) -> str:
    """Return the language code without case and region: en for EN and en-GB."""
    code = code.lower().replace("_", "-").partition("-")[0]
    return _LANGUAGE_ALIASES.get(code, code)
