"""Clean a text: normalise Unicode, remove invisible characters, normalise white space.

The order matters: invisible characters are removed before characters are composed (a soft hyphen between a letter and its accent
keeps them apart), and white space is normalised after (compatibility forms contain spaces). So cleaning is idempotent,
except for `html`: an escaped tag is text the first time and a tag the second.
"""

from __future__ import annotations

import re
import unicodedata

from bottega.config.data import Cleaning
from bottega.data.text.boilerplate import remove_boilerplate
from bottega.data.text.html import strip_html

# The characters at which str.splitlines breaks. If they were removed as control characters, two words would be joined.
_LINE_BREAK = re.compile("\r\n?|[\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
_ASCII_CONTROL = bytes(code for code in (*range(0x20), 0x7F) if code not in b"\t\n")

# Categories Cc, Cf, Co, Cs and the non-characters, as ranges: asking unicodedata for each of 1.1 million code points
# would take 0.2 s at import. Visible format characters stay (the Arabic number signs, the layout of hieroglyphs).
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ufffe\uffff\ufdd0-\ufdef\ud800-\udfff\ue000-\uf8ff"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f\U000f0000-\U0010ffff]"
)
# Persian, the scripts of India and joined emoji are spelled with the two joiners; elsewhere they are noise.
_JOINERS = ("\u200c", "\u200d")
_JOINABLE = "[\u0590-\u1fff\u2070-\U0010ffff]"
_STRAY_JOINER = re.compile(f"(?<!{_JOINABLE})[\u200c\u200d]|[\u200c\u200d](?!{_JOINABLE})")

_UNICODE_SPACE = re.compile("[\xa0\u1680\u2000-\u200a\u202f\u205f\u3000]")
_SPACE_RUN = re.compile("[ \t]{2,}+")
_EMPTY_LINES = re.compile("\n{3,}+")


def clean_text(text: str, options: Cleaning, *, is_start: bool = True, is_end: bool = True) -> str:
    """Return a cleaned text; `is_start` and `is_end` tell whether this piece starts and ends the whole text.

    White space at a cut is kept, or the words on its two sides would be joined.
    """
    original = text
    if options.html:
        text = strip_html(text)
    if options.control or options.whitespace:
        text = _normalise_breaks(text)
    if options.control:
        text = _remove_invisible(text)
    if not text.isascii():
        if options.unicode != "none":
            text = unicodedata.normalize(options.unicode, text)
        if options.control:
            text = _remove_stray_joiners(text, options)
    if options.whitespace:
        text = _normalise_spaces(text, is_start=is_start, is_end=is_end)
    if options.boilerplate:
        text = remove_boilerplate(text)
    if text and not is_start and not text[0].isspace():
        text = _shorten_space(original[: len(original) - len(original.lstrip())]) + text
    if text and not is_end and not text[-1].isspace():
        text += _shorten_space(original[len(original.rstrip()) :])
    return text


def _shorten_space(run: str) -> str:
    """Return the replacement of a run of white space: a line break if it contains one, else a space."""
    return "\n" if "\n" in run or "\r" in run else run and " "


def _normalise_breaks(text: str) -> str:
    # Most texts have none. Searching for a single character runs at 16 GB/s, for a regex character class at 0.1 GB/s.
    if text.isascii() and not any(character in text for character in "\r\x0b\x0c\x1c\x1d\x1e"):
        return text
    return _LINE_BREAK.sub("\n", text)


def _remove_invisible(text: str) -> str:
    if not text.isascii():
        return _INVISIBLE.sub("", text)
    raw = text.encode()
    cleaned = raw.translate(None, _ASCII_CONTROL)
    return text if len(cleaned) == len(raw) else cleaned.decode()


def _remove_stray_joiners(text: str, options: Cleaning) -> str:
    # When a joiner is removed, its neighbours may compose into a character beside which another joiner is stray.
    while any(joiner in text for joiner in _JOINERS):
        previous = text
        text = _STRAY_JOINER.sub("", text)
        if options.unicode != "none":
            text = unicodedata.normalize(options.unicode, text)
        if text == previous:
            break
    return text


def _normalise_spaces(text: str, *, is_start: bool, is_end: bool) -> str:
    """Collapse spaces, strip line ends, keep at most one empty line; a single tab stays, as it may separate columns.

    The indentation of a line is not changed: in code it has a meaning, and in prose it is harmless. Only the start of the
    whole text is stripped, because files of code do not begin with indentation and prose often does.
    """
    if not text.isascii():
        text = _UNICODE_SPACE.sub(" ", text)
    if "  " in text or "\t" in text:
        text = "\n".join(map(_normalise_line, text.split("\n")))
    elif " \n" in text:
        text = text.replace(" \n", "\n")
    if "\n\n\n" in text:
        text = _EMPTY_LINES.sub("\n\n", text)
    text = text.lstrip(" \t\n") if is_start else text
    return text.rstrip(" \t\n") if is_end else text


def _normalise_line(line: str) -> str:
    line = line.rstrip(" \t")
    body = line.lstrip(" \t")
    if "  " in body or "\t" in body:
        return line[: len(line) - len(body)] + _SPACE_RUN.sub(" ", body)
    return line
