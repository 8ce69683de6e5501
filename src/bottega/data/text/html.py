"""Extract the text of an HTML page: remove tags, scripts, styles and comments; blocks become lines, entities characters.

The tags are found by a scanner of our own, since the standard library's parser takes time that grows with the square
of the text (Python 3.11.7: 70 s for 90 kB of "<a "); here every character is looked at a bounded number of times,
nothing recurses, and the result is never longer than the text. Entities are the standard library's.
"""

from __future__ import annotations

import html
import re
from typing import final


def _split_names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Elements removed with their content, and the pattern of their end. A head without an end tag ends where the body begins.
_DROPPED_ELEMENTS = {
    name: re.compile(rf"</{name}\s*>|(?=<body\b)" if name == "head" else rf"</{name}\b[^<>]*>", re.IGNORECASE)
    for name in ("script", "style", "head", "title", "template", "noscript", "svg", "iframe", "canvas", "select")
}
# If one of these is not closed, the rest of the page is removed, as in a browser: a truncated page often ends inside a script.
_DROPPED_TO_END = frozenset(("script", "style"))

_PARAGRAPH_ELEMENTS = _split_names(
    "p h1 h2 h3 h4 h5 h6 ul ol dl table blockquote pre article section header footer nav main aside figure form hr "
    "fieldset details body"
)
_LINE_ELEMENTS = _split_names(
    "div li dt dd tr caption thead tbody tfoot address figcaption legend summary option label br"
)
_CELL_ELEMENTS = frozenset(("td", "th"))
_INLINE_ELEMENTS = _split_names(
    "a abbr b big center code del em font html i img input ins kbd link meta s small span strong sub sup u"
)

# An attribute value in quotes may contain < and >. The limits keep the time for hostile input linear: at most 4,000
# characters are read from each "<".
_TAG = re.compile(
    r"""<(/?)([a-zA-Z][^\s/<>]*+)(?:(?:=\s{0,9}+"[^"]{0,200}+"|=\s{0,9}+'[^']{0,200}+'|[^<>=]{1,200}+|=){0,20}+|[^<>]*+)>"""
)
_COMMENT_END = re.compile("-->")
_DECLARATION = re.compile(r"<[!?/][^<>]*+>")
_MARKUP = re.compile(r"<[a-zA-Z/!?]")
_SPACE = re.compile(r"[ \t\n\r\f]+")

# Distinguishes a page from a text with a < b and c > d: a known element, closed at once or with an attribute.
_ELEMENT_NAMES = "|".join(
    sorted(
        {*_DROPPED_ELEMENTS, *_PARAGRAPH_ELEMENTS, *_LINE_ELEMENTS, *_CELL_ELEMENTS, *_INLINE_ELEMENTS},
        key=len,
        reverse=True,
    )
)
_HTML = re.compile(rf"<!doctype\s|</?(?:{_ELEMENT_NAMES})\s*/?>|<(?:{_ELEMENT_NAMES})\s+[a-z:-]+\s*=", re.IGNORECASE)


def strip_html(text: str) -> str:
    """Return the text of a page; a text without HTML elements only has its entities decoded."""
    if "<" in text and (_HTML.search(text) or 0 <= text.find("<!--") < text.rfind("-->")):
        return _Page().read(text)
    return html.unescape(text) if "&" in text else text


@final
class _Page:
    """Collects the text of one page piece by piece."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.num_breaks = 2  # Line breaks at the end of the text so far; the page begins as if after an empty line.
        self.pre_depth = 0
        # Names of the ends that do not occur in the rest of the text, which is then not searched for them again.
        self.missing_ends: set[str] = set()

    def read(self, text: str) -> str:
        position = written_end = 0
        while markup := _MARKUP.search(text, position):
            start = markup.start()
            stop = self._find_end("-->", _COMMENT_END, text, start + 4) if text.startswith("<!--", start) else None
            tag = None if stop else _TAG.match(text, start)
            if stop is None and (match := tag or _DECLARATION.match(text, start)):
                stop = match.end()
            if stop is None:
                position = start + 1  # A lone "<" is text.
                continue
            self._write(text[written_end:start])
            position = written_end = self._write_tag(text, tag) if tag else stop
        self._write(text[written_end:])
        return "".join(self.pieces).rstrip()

    def _find_end(self, name: str, pattern: re.Pattern[str], text: str, start: int) -> int | None:
        """Return the position after the first match of `pattern` from `start` on; None if there is none."""
        if name not in self.missing_ends:
            if end := pattern.search(text, start):
                return end.end()
            self.missing_ends.add(name)
        return None

    def _write_tag(self, text: str, tag: re.Match[str]) -> int:
        """Write the breaks or tab that a tag stands for, and return the position in the page to continue at."""
        is_end_tag, name = bool(tag[1]), tag[2].lower()
        if name in _DROPPED_ELEMENTS and not is_end_tag and (name in _DROPPED_TO_END or not tag[0].endswith("/>")):
            end = self._find_end(name, _DROPPED_ELEMENTS[name], text, tag.end())
            return end or (len(text) if name in _DROPPED_TO_END else tag.end())
        if name == "br":
            self._write_breaks(min(self.num_breaks + 1, 2))
        elif name in _PARAGRAPH_ELEMENTS:
            self._write_breaks(2)
        elif name in _LINE_ELEMENTS:
            self._write_breaks(1)
        elif name in _CELL_ELEMENTS and not is_end_tag and not self.num_breaks:
            self._write_separator("\t")
        if name == "pre":
            self.pre_depth = max(self.pre_depth + (-1 if is_end_tag else 1), 0)
        return tag.end()

    def _write(self, text: str) -> None:
        if not self.pre_depth:
            text = _SPACE.sub(" ", text)
            if self.num_breaks or (self.pieces and self.pieces[-1].endswith((" ", "\t"))):
                text = text.removeprefix(" ")
        if text:
            text = html.unescape(text) if "&" in text else text
            self.pieces.append(text)
            self.num_breaks = min(len(text) - len(text.rstrip("\n")), 2)

    def _write_separator(self, separator: str) -> None:
        if self.pieces:
            self.pieces[-1] = self.pieces[-1].removesuffix(" ")
            self.pieces.append(separator)

    def _write_breaks(self, count: int) -> None:
        """Write line breaks until the text ends in at least `count` of them, and remove the space before them."""
        if count > self.num_breaks:
            if not self.num_breaks and not self.pre_depth:
                self.pieces[-1] = self.pieces[-1].rstrip(" \t")
            self.pieces.append("\n" * (count - self.num_breaks))
            self.num_breaks = count
