"""Sheets of personalised pictures: what each person liked, what they wished for, and what was drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bottega.data.image.caption import captions_in
from bottega.data.image.page import BLUE, FAINT, GRID, Sheet
from bottega.data.present import whole

MARGIN, GAP = 24.0, 6.0
THUMB, PICTURE = 48.0, 80.0
"""Sides of what was liked and of what is drawn. At twice the size, 32 pixels become 96 and 160: each is a whole square."""
SHOWN = 6
"""Of a longer history the last ones, which say most of a person now."""
WISH = 96.0
HEAD, TEXT, LINE = 13.0, 11.0, 15.0
TITLE = 34.0
LEGEND = "below each: weights of soft tokens / keywords / wish"


@dataclass(frozen=True)
class Known:
    """Whom a picture is for, and what is known of them."""

    user: str
    history: Sequence[np.ndarray]
    """The last pictures that were liked, uint8 [h, w, 3]."""
    earlier: int
    """Items of the history that are not shown."""
    likes: str
    wish: str


@dataclass(frozen=True)
class Compared:
    """The same wish drawn without and with what is known."""

    known: Known
    without: np.ndarray
    personal: np.ndarray


@dataclass(frozen=True)
class Answer:
    """All pictures that were drawn for one wish, and what stands below each."""

    known: Known
    pictures: Sequence[np.ndarray]
    captions: Sequence[str]


def compare_sheet(people: Sequence[Compared], path: Path) -> None:
    """A row for each person: history, wish, without and with personalisation."""
    left = MARGIN
    wish = left + _history_width([one.known for one in people]) + 4 * GAP
    without = wish + WISH + 2 * GAP
    personal = without + PICTURE + 4 * GAP
    row = PICTURE + 3 * GAP
    sheet = Sheet(personal + PICTURE + MARGIN, MARGIN + TITLE + len(people) * row + MARGIN / 2)
    heads = [("history", left, "lm"), ("wish", wish + WISH / 2, "mm")]
    heads += [("without", without + PICTURE / 2, "mm"), ("with", personal + PICTURE / 2, "mm")]
    for words, x, anchor in heads:
        sheet.text(x, MARGIN + HEAD / 2, words, anchor=anchor, size=HEAD, fill=FAINT)
    for number, one in enumerate(people):
        top = MARGIN + TITLE + number * row
        sheet.line(left, top - 1.5 * GAP, personal + PICTURE, top - 1.5 * GAP, fill=GRID)
        _history(sheet, left, top, one.known.history, one.known.earlier)
        known = wish - left - 4 * GAP
        _lines(
            sheet,
            left,
            top + THUMB + LINE - 2,
            f"user {one.known.user} likes {one.known.likes or '(no keywords)'}",
            width=known,
        )
        _centred(sheet, wish + WISH / 2, top + PICTURE / 2, one.known.wish, width=WISH)
        sheet.paste(without, top, one.without, PICTURE)
        sheet.paste(personal, top, one.personal, PICTURE)
    _save(sheet, path)


def answer_sheet(answers: Sequence[Answer], path: Path, *, columns: int = 6) -> None:
    """A block for each person and wish: what is known, what was liked, and below it what was drawn."""
    most = min(columns, max(len(one.pictures) for one in answers))
    width = max(most * (PICTURE + GAP) - GAP, _history_width([one.known for one in answers]), 4 * PICTURE)
    line = PICTURE + LINE + GAP
    heads = [2 * LINE + 2 * GAP + (THUMB + 2 * GAP if one.known.history else 0) for one in answers]
    heights = [head + -(-len(one.pictures) // most) * line for head, one in zip(heads, answers, strict=True)]
    sheet = Sheet(width + 2 * MARGIN, MARGIN + sum(heights) + (len(answers) - 1) * 3 * GAP + LINE + MARGIN)
    top = MARGIN
    for one, head, height in zip(answers, heads, heights, strict=True):
        sheet.text(MARGIN, top + HEAD / 2, f"{one.known.wish}, for user {one.known.user}", anchor="lm", size=HEAD)
        liked = f"likes {one.known.likes}" if one.known.likes else "(no keywords)"
        _lines(sheet, MARGIN, top + HEAD / 2 + LINE + 2, liked, width=width)
        _history(sheet, MARGIN, top + 2 * LINE + GAP, one.known.history, one.known.earlier)
        for number, (picture, caption) in enumerate(zip(one.pictures, one.captions, strict=True)):
            row, column = divmod(number, most)
            x, y = MARGIN + column * (PICTURE + GAP), top + head + row * line
            sheet.paste(x, y, picture, PICTURE)
            sheet.text(x + PICTURE / 2, y + PICTURE + LINE / 2, caption, size=TEXT - 2, fill=FAINT)
        top += height + 3 * GAP
        if one is not answers[-1]:
            sheet.line(MARGIN, top - 2 * GAP, MARGIN + width, top - 2 * GAP, fill=GRID)
    sheet.text(MARGIN, top - GAP, LEGEND, anchor="lm", size=TEXT - 2, fill=FAINT)
    _save(sheet, path)


def _history_width(people: Sequence[Known]) -> float:
    return max(max(len(one.history) for one in people) * (THUMB + GAP) - GAP, 4 * THUMB)


def _history(sheet: Sheet, x: float, y: float, pictures: Sequence[np.ndarray], earlier: int) -> None:
    for number, picture in enumerate(pictures):
        sheet.paste(x + number * (THUMB + GAP), y, picture, THUMB)
    if earlier:
        end = x + len(pictures) * (THUMB + GAP)
        sheet.text(end, y + THUMB / 2, f"+{earlier}", anchor="lm", size=TEXT - 2, fill=FAINT)


def _lines(sheet: Sheet, x: float, y: float, words: str, *, width: float) -> None:
    for number, line in enumerate(captions_in([words], width, lambda text: sheet.width_of(text, TEXT))[0]):
        sheet.text(x, y + number * LINE, line, anchor="lm", size=TEXT, fill=FAINT)


def _centred(sheet: Sheet, x: float, y: float, words: str, *, width: float) -> None:
    lines = captions_in([words], width, lambda text: sheet.width_of(text, HEAD))[0]
    for number, line in enumerate(lines):
        sheet.text(x, y + (number - (len(lines) - 1) / 2) * (LINE + 2), line, size=HEAD, fill=BLUE)


def _save(sheet: Sheet, path: Path) -> None:
    with whole(path) as temporary:
        sheet.save(temporary)
