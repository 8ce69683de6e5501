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


# Removed with their content. The end tag of a head is optional; the body then ends it.
_DROPPED = {
    name: re.compile(rf"</{name}\s*>|(?=<body\b)" if name == "head" else rf"</{name}\b[^<>]*>", re.IGNORECASE)
    for name in ("script", "style", "head", "title", "template", "noscript", "svg", "iframe", "canvas", "select")
}
# As in a browser, an unclosed one removes the rest: a truncated page often ends inside a script.
_SWALLOWS_THE_REST = frozenset(("script", "style"))

_PARAGRAPHS = _split_names(
    "p h1 h2 h3 h4 h5 h6 ul ol dl table blockquote pre article section header footer nav main aside figure form hr "
    "fieldset details body"
)
_LINES = _split_names("div li dt dd tr caption thead tbody tfoot address figcaption legend summary option label br")
_CELLS = frozenset(("td", "th"))
_INLINE = _split_names(
    "a abbr b big center code del em font html i img input ins kbd link meta s small span strong sub sup u"
)

# A value in quotes may hold < and >. The bounds keep hostile input linear: at most 4,000 characters from each "<".
_TAG = re.compile(
    r"""<(/?)([a-zA-Z][^\s/<>]*+)(?:(?:=\s{0,9}+"[^"]{0,200}+"|=\s{0,9}+'[^']{0,200}+'|[^<>=]{1,200}+|=){0,20}+|[^<>]*+)>"""
)
_COMMENT_END = re.compile("-->")
_DECLARATION = re.compile(r"<[!?/][^<>]*+>")
_MARKUP = re.compile(r"<[a-zA-Z/!?]")
_SPACE = re.compile(r"[ \t\n\r\f]+")

# Distinguishes a page from a text with a < b and c > d: a known element, closed at once or with an attribute.
_KNOWN = "|".join(sorted({*_DROPPED, *_PARAGRAPHS, *_LINES, *_CELLS, *_INLINE}, key=len, reverse=True))
_HTML = re.compile(rf"<!doctype\s|</?(?:{_KNOWN})\s*/?>|<(?:{_KNOWN})\s+[a-z:-]+\s*=", re.IGNORECASE)


def strip_html(text: str) -> str:
    """Return the text of a page; a text without HTML elements only has its entities decoded."""
    if "<" in text and (_HTML.search(text) or 0 <= text.find("<!--") < text.rfind("-->")):
        return _Page().read(text)
    return html.unescape(text) if "&" in text else text


@final
class _Page:
    """The text of one page, piece by piece."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.breaks = 2  # Line breaks at the end of what is written; the page begins as after an empty line.
        self.preformatted = 0
        self.never: set[str] = set()  # Ends searched for in vain, so that no second search reads the text again.

    def read(self, text: str) -> str:
        at = written = 0
        while markup := _MARKUP.search(text, at):
            start = markup.start()
            stop = self._after("-->", _COMMENT_END, text, start + 4) if text.startswith("<!--", start) else None
            tag = None if stop else _TAG.match(text, start)
            if stop is None and (match := tag or _DECLARATION.match(text, start)):
                stop = match.end()
            if stop is None:
                at = start + 1  # A lone "<" is text.
                continue
            self._write(text[written:start])
            at = written = self._tag(text, tag) if tag else stop
        self._write(text[written:])
        return "".join(self.pieces).rstrip()

    def _after(self, name: str, pattern: re.Pattern[str], text: str, start: int) -> int | None:
        if name not in self.never:
            if end := pattern.search(text, start):
                return end.end()
            self.never.add(name)
        return None

    def _tag(self, text: str, tag: re.Match[str]) -> int:
        """Write the breaks that a tag stands for, and return where to continue."""
        closes, name = bool(tag[1]), tag[2].lower()
        if name in _DROPPED and not closes and (name in _SWALLOWS_THE_REST or not tag[0].endswith("/>")):
            after = self._after(name, _DROPPED[name], text, tag.end())
            return after or (len(text) if name in _SWALLOWS_THE_REST else tag.end())
        if name == "br":
            self._break(min(self.breaks + 1, 2))
        elif name in _PARAGRAPHS:
            self._break(2)
        elif name in _LINES:
            self._break(1)
        elif name in _CELLS and not closes and not self.breaks:
            self._separate("\t")
        if name == "pre":
            self.preformatted = max(self.preformatted + (-1 if closes else 1), 0)
        return tag.end()

    def _write(self, text: str) -> None:
        if not self.preformatted:
            text = _SPACE.sub(" ", text)
            if self.breaks or (self.pieces and self.pieces[-1].endswith((" ", "\t"))):
                text = text.removeprefix(" ")
        if text:
            text = html.unescape(text) if "&" in text else text
            self.pieces.append(text)
            self.breaks = min(len(text) - len(text.rstrip("\n")), 2)

    def _separate(self, sign: str) -> None:
        if self.pieces:
            self.pieces[-1] = self.pieces[-1].removesuffix(" ")
            self.pieces.append(sign)

    def _break(self, count: int) -> None:
        """Write line breaks up to `count`, and remove the space before them."""
        if count > self.breaks:
            if not self.breaks and not self.preformatted:
                self.pieces[-1] = self.pieces[-1].rstrip(" \t")
            self.pieces.append("\n" * (count - self.breaks))
            self.breaks = count
