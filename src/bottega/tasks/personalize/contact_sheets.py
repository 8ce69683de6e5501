"""Sheets of personalised pictures: what each person liked, what they wished for, and what was drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bottega.data.image.canvas import BLUE, FAINT, GRID, Canvas
from bottega.data.image.caption import fit_captions
from bottega.storage.durable import replacing_file

MARGIN, GAP = 24.0, 6.0
THUMB, PICTURE = 48.0, 80.0
"""Sides of what was liked and of what is drawn. At twice the size, 32 pixels become 96 and 160: each is a whole square."""
MAX_HISTORY_SHOWN = 6
"""Of a longer history the last ones, which say most of a person now."""
WISH = 96.0
HEAD, TEXT, LINE = 13.0, 11.0, 15.0
TITLE = 34.0
PAGE, COLUMNS = 1900.0, 12
"""How high a column of blocks may be, which is nearly 4,000 pixels, and how many there are: more is not looked at."""
ACROSS = 6
"""Pictures beside each other for one wish; of very many, as many as make a square."""
LEGEND = "below each: weights of soft tokens / keywords / wish"


@dataclass(frozen=True)
class UserSummary:
    """Whom a picture is for, and what is known of them."""

    user: str
    history: Sequence[np.ndarray]
    """The last pictures that were liked, uint8 [h, w, 3]."""
    earlier: int
    """Items of the history that are not shown."""
    likes: str
    wish: str


@dataclass(frozen=True)
class Comparison:
    """The same wish drawn without and with what is known."""

    summary: UserSummary
    without: np.ndarray
    personal: np.ndarray


@dataclass(frozen=True)
class GeneratedRow:
    """All pictures that were drawn for one wish, and what stands below each."""

    summary: UserSummary
    images: Sequence[np.ndarray]
    captions: Sequence[str]


def write_comparison_sheet(people: Sequence[Comparison], path: Path) -> None:
    """A row for each person: history, wish, without and with personalisation."""
    left = MARGIN
    wish = left + _history_width([one.summary for one in people]) + 4 * GAP
    without = wish + WISH + 2 * GAP
    personal = without + PICTURE + 4 * GAP
    row = PICTURE + 3 * GAP
    sheet = Canvas(personal + PICTURE + MARGIN, MARGIN + TITLE + len(people) * row + MARGIN / 2)
    heads = [("history", left, "lm"), ("wish", wish + WISH / 2, "mm")]
    heads += [("without", without + PICTURE / 2, "mm"), ("with", personal + PICTURE / 2, "mm")]
    for words, x, anchor in heads:
        sheet.draw_text(x, MARGIN + HEAD / 2, words, anchor=anchor, size=HEAD, fill=FAINT)
    for number, one in enumerate(people):
        top = MARGIN + TITLE + number * row
        sheet.draw_line(left, top - 1.5 * GAP, personal + PICTURE, top - 1.5 * GAP, fill=GRID)
        _history(sheet, left, top, one.summary.history, one.summary.earlier)
        known = wish - left - 4 * GAP
        _lines(
            sheet,
            left,
            top + THUMB + LINE - 2,
            f"user {one.summary.user} likes {one.summary.likes or '(no keywords)'}",
            width=known,
        )
        _centred(sheet, wish + WISH / 2, top + PICTURE / 2, one.summary.wish, width=WISH)
        sheet.paste_image(without, top, one.without, PICTURE)
        sheet.paste_image(personal, top, one.personal, PICTURE)
    _save(sheet, path)


def write_contact_sheet(answers: Sequence[GeneratedRow], path: Path) -> None:
    """A block for each person and wish: what is known, what was liked, and below it what was drawn. Blocks stand below each
    other as far as a page goes, and then beside each other."""
    num_pictures = max(len(one.images) for one in answers)
    across = min(num_pictures, max(ACROSS, math.ceil(math.sqrt(num_pictures))))
    width = max(across * (PICTURE + GAP) - GAP, _history_width([one.summary for one in answers]), 4 * PICTURE)
    blocks = [_block(one, across=across, width=width) for one in answers]
    columns = _columns([block.height for block in blocks])
    shown, high = sum(map(len, columns)), max(sum(blocks[i].height for i in column) for column in columns)
    sheet = Canvas(MARGIN + len(columns) * (width + MARGIN), MARGIN + high + MARGIN)
    for number, column in enumerate(columns):
        x, top = MARGIN + number * (width + MARGIN), MARGIN
        for place in column:
            if place != column[0]:
                sheet.draw_line(x, top - 2 * GAP, x + width, top - 2 * GAP, fill=GRID)
            _draw_block(sheet, blocks[place], x, top, across=across)
            top += blocks[place].height
    legend = f"{LEGEND}; {len(answers) - shown:,} more are not shown" if shown < len(answers) else LEGEND
    sheet.draw_text(MARGIN, MARGIN + high, legend, anchor="lm", size=TEXT - 2, fill=FAINT)
    _save(sheet, path)


@dataclass(frozen=True)
class _Block:
    answer: GeneratedRow
    wish: list[str]
    known: list[str]
    """What is said of the person, line by line."""
    head: float
    height: float
    """With the room below it."""


def _block(one: GeneratedRow, *, across: int, width: float) -> _Block:
    likes = f", who likes {one.summary.likes}" if one.summary.likes else " (no keywords)"
    wish = _broken(one.summary.wish, width, HEAD)
    known = _broken(f"for user {one.summary.user}{likes}", width, TEXT)
    head = (len(wish) + len(known)) * LINE + 2 * GAP + (THUMB + 2 * GAP if one.summary.history else 0)
    rows = math.ceil(len(one.images) / across)
    return _Block(one, wish, known, head, head + rows * (PICTURE + LINE + GAP) + 3 * GAP)


def _draw_block(sheet: Canvas, block: _Block, x: float, top: float, *, across: int) -> None:
    one, y = block.answer, top + HEAD / 2
    for line in block.wish:
        sheet.draw_text(x, y, line, anchor="lm", size=HEAD)
        y += LINE
    for line in block.known:
        sheet.draw_text(x, y, line, anchor="lm", size=TEXT, fill=FAINT)
        y += LINE
    _history(sheet, x, y - HEAD / 2 + GAP, one.summary.history, one.summary.earlier)
    for number, (picture, caption) in enumerate(zip(one.images, one.captions, strict=True)):
        row, column = divmod(number, across)
        left, y = x + column * (PICTURE + GAP), top + block.head + row * (PICTURE + LINE + GAP)
        sheet.paste_image(left, y, picture, PICTURE)
        sheet.draw_text(left + PICTURE / 2, y + PICTURE + LINE / 2, caption, size=TEXT - 2, fill=FAINT)


def _columns(heights: Sequence[float]) -> list[list[int]]:
    """The places of the blocks, column by column; those beyond `COLUMNS` are left out."""
    columns: list[list[int]] = [[]]
    used = 0.0
    for place, height in enumerate(heights):
        if columns[-1] and used + height > PAGE:
            if len(columns) == COLUMNS:
                break
            columns.append([])
            used = 0.0
        columns[-1].append(place)
        used += height
    return columns


def _history_width(people: Sequence[UserSummary]) -> float:
    return max(max(len(one.history) for one in people) * (THUMB + GAP) - GAP, 4 * THUMB)


def _history(sheet: Canvas, x: float, y: float, pictures: Sequence[np.ndarray], earlier: int) -> None:
    for number, picture in enumerate(pictures):
        sheet.paste_image(x + number * (THUMB + GAP), y, picture, THUMB)
    if earlier:
        end = x + len(pictures) * (THUMB + GAP)
        sheet.draw_text(end, y + THUMB / 2, f"+{earlier}", anchor="lm", size=TEXT - 2, fill=FAINT)


def _lines(sheet: Canvas, x: float, y: float, words: str, *, width: float) -> None:
    for number, line in enumerate(_broken(words, width, TEXT)):
        sheet.draw_text(x, y + number * LINE, line, anchor="lm", size=TEXT, fill=FAINT)


def _broken(words: str, width: float, size: float) -> list[str]:
    page = Canvas(1, 1)  # to measure with: how large the real one is depends on the lines
    return fit_captions([words], width, lambda text: page.measure_text(text, size))[0]


def _centred(sheet: Canvas, x: float, y: float, words: str, *, width: float) -> None:
    lines = _broken(words, width, HEAD)
    for number, line in enumerate(lines):
        sheet.draw_text(x, y + (number - (len(lines) - 1) / 2) * (LINE + 2), line, size=HEAD, fill=BLUE)


def _save(sheet: Canvas, path: Path) -> None:
    with replacing_file(path) as temporary:
        sheet.save(temporary)
