"""Remove lines of web pages that are not prose: menus, notices, buttons, lists of links. Rule-based.

A line is removed if it
- is a notice: a short line with a phrase of cookie banners, copyright, sharing, signing in or subscribing;
- is a menu in one line: three or more items of at most four words each, separated by | or a bullet;
- consists of two or more links and hardly anything else.
A possible menu item (a line of at most five words without final punctuation and without a frequent word after the first, or a
link) is removed if three or more follow each other: a menu has one item per line, while a heading or an address stands
between paragraphs.
This also removes lists of single words, a short title right below a menu, and many lines of code; use it for web pages.
"""

from __future__ import annotations

import re

from bottega.data.text.languages import FREQUENT_WORDS, count_words

_MAX_NOTICE_WORDS = 30  # A longer line that mentions cookies is prose about cookies.
_MAX_ITEM_WORDS = 5
_MAX_ITEM_CHARACTERS = 40
_MIN_RUN_LENGTH = 3

# Searched anywhere in a line, but only if one of these words occurs: 7.7 MB/s instead of 2.9.
_NOTICE_HINTS = ("cookie", "privacy", "reserved", "newsletter", "javascript")
_NOTICE = re.compile(
    r"\b(?:we|site|website|page|blog)(?: and our partners)? uses? cookies\b|\b(?:accept|reject|manage) (?:all )?cookies\b"
    r"|\bcookie (?:policy|settings|preferences|notice)\b|\bprivacy policy\b.{0,40}\bterms\b"
    r"|\bterms (?:of|and) (?:use|service|conditions)\b.{0,40}\bprivacy\b|\ball rights reserved\b"
    r"|\bsubscribe to our newsletter\b|\benable javascript\b|\bjavascript (?:is disabled|to be enabled)\b"
)
_WHOLE_NOTICE = re.compile(
    r"(?:(?:©|\(c\)|copyright\b).{0,20}\b(?:19|20)\d\d\b.*|copyright (?:©|\(c\)).*"
    r"|(?:share|follow us|tweet|pin)(?: this)?(?: (?:article|post|page|story))?(?: (?:on|via|with)\b.*)?"
    r"|(?:sign|log) (?:in|up|out)(?: (?:to|for|or|with)\b.*)?|(?:skip|jump) to (?:main )?(?:content|navigation)"
    r"|(?:subscribe|sign up)(?: now)?(?: (?:to|for) (?:our|the|my)\b.*)?|(?:read|show|load|see) (?:more|less|all)\W*"
    r"|(?:click|tap) here\b.*|back to top|print this page|add to cart|\d+ (?:comments?|shares?|likes?)"
    r"|leave a (?:comment|reply)|powered by\b.{0,30}|advertisement|loading\W*)"
)
_MENU_SEPARATOR = re.compile(r"\s*[|•·»›‹«▪◦]\s*")
_LINK = re.compile(r"\[[^\]\n]{0,200}\]\([^)\s]{0,500}\)|(?:https?://|www\.)\S+", re.IGNORECASE)
_END_MARKS = tuple(".!?:;,…\"'”’»)]}-–—。！？；：，、」』）।؟")
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")


def remove_boilerplate(text: str) -> str:
    """Return the text without boilerplate lines; a text without any is returned unchanged."""
    lines = text.split("\n")
    removed: set[int] = set()
    run: list[int] = []
    for number, line in enumerate(lines):
        stripped = line.strip()
        if not stripped:
            continue  # Empty lines do not end a run: a menu may have one after each item.
        is_boilerplate = _is_boilerplate(stripped)
        if is_boilerplate:
            removed.add(number)
        if is_boilerplate or _is_menu_item(stripped):
            run.append(number)
            continue
        removed.update(run if len(run) >= _MIN_RUN_LENGTH else ())
        run = []
    removed.update(run if len(run) >= _MIN_RUN_LENGTH else ())
    return _join_remaining(lines, removed) if removed else text


def _is_boilerplate(line: str) -> bool:
    lowered = line.lower()
    notice = _WHOLE_NOTICE.fullmatch(lowered) or (
        any(word in lowered for word in _NOTICE_HINTS) and _NOTICE.search(lowered)
    )
    if notice and count_words(line) <= _MAX_NOTICE_WORDS:
        return True
    items = _MENU_SEPARATOR.split(line)
    if len(items) >= 3 and all(len(item.split()) <= 4 for item in items):
        return True
    return _count_links(line) >= 2


def _count_links(line: str) -> int:
    """Return the number of links of a line; 0 if the text outside them has a frequent word or is over half of the line."""
    if "](" not in line and "://" not in line and "www." not in line.lower():
        return 0
    outside, num_links = _LINK.subn("", line)
    if 2 * len(outside) > len(line) or any(word.lower() in FREQUENT_WORDS for word in _WORD.findall(outside)):
        return 0
    return num_links


def _is_menu_item(line: str) -> bool:
    if _count_links(line):
        return True
    if len(line) > _MAX_ITEM_CHARACTERS or line.endswith(_END_MARKS) or count_words(line) > _MAX_ITEM_WORDS:
        return False
    # Verse has short lines too, but nearly all of them have a word such as "the" or "of". The first word does not count,
    # and neither does any word of a line of two: "About us" and "All news" are items of menus.
    words = _WORD.findall(line)
    return len(words) <= 2 or not any(word.lower() in FREQUENT_WORDS for word in words[1:])


def _join_remaining(lines: list[str], removed: set[int]) -> str:
    """Join the remaining lines, without the empty lines between removed ones."""
    remaining: list[str] = []
    follows_gap = True
    for number, line in enumerate(lines):
        if number in removed:
            follows_gap = True
        elif line.strip():
            remaining.append(line)
            follows_gap = False
        elif not follows_gap or (remaining and remaining[-1].strip()):
            remaining.append(line)
    while remaining and not remaining[-1].strip():
        remaining.pop()
    return "\n".join(remaining)
