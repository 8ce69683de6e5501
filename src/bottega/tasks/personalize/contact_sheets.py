"""Contact sheets of personalised images: each user's history, wish and generated images."""

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
THUMB_SIDE, IMAGE_SIDE = 48.0, 80.0
"""Sides of liked and of generated images. A canvas has two pixels per unit: images of 32 pixels are enlarged by 3 and by 5."""
MAX_HISTORY_SHOWN = 6
"""Maximum number of images shown of a history: the last ones."""
WISH_WIDTH = 96.0
HEAD_SIZE, TEXT_SIZE, LINE_HEIGHT = 13.0, 11.0, 15.0
TITLE_HEIGHT = 34.0
MAX_COLUMN_HEIGHT, MAX_COLUMNS = 1900.0, 12
"""Maximum height of a column, nearly 4,000 pixels, and maximum number of columns."""
IMAGES_PER_LINE = 6
"""Images side by side for one wish, or the square root of their number if that is larger."""
LEGEND = "below each: weights of soft tokens / keywords / wish"


@dataclass(frozen=True)
class UserSummary:
    """What a contact sheet shows of a user."""

    user: str
    history: Sequence[np.ndarray]
    """The last liked images, uint8 (height, width, 3)."""
    num_earlier: int
    """Number of earlier items of the history, which are not shown."""
    likes: str
    wish: str


@dataclass(frozen=True)
class Comparison:
    """The same wish generated without and with personalisation."""

    summary: UserSummary
    baseline: np.ndarray
    personalised: np.ndarray


@dataclass(frozen=True)
class GeneratedRow:
    """All images for one wish, with a caption for each."""

    summary: UserSummary
    images: Sequence[np.ndarray]
    captions: Sequence[str]


def write_comparison_sheet(comparisons: Sequence[Comparison], path: Path) -> None:
    """Write a contact sheet with a row for each user: history, wish, image without and with personalisation."""
    left = MARGIN
    wish_x = left + _measure_history_width([comparison.summary for comparison in comparisons]) + 4 * GAP
    baseline_x = wish_x + WISH_WIDTH + 2 * GAP
    personalised_x = baseline_x + IMAGE_SIDE + 4 * GAP
    row_height = IMAGE_SIDE + 3 * GAP
    sheet = Canvas(
        personalised_x + IMAGE_SIDE + MARGIN, MARGIN + TITLE_HEIGHT + len(comparisons) * row_height + MARGIN / 2
    )
    heads = [("history", left, "lm"), ("wish", wish_x + WISH_WIDTH / 2, "mm")]
    heads += [("without", baseline_x + IMAGE_SIDE / 2, "mm"), ("with", personalised_x + IMAGE_SIDE / 2, "mm")]
    for title, x, anchor in heads:
        sheet.draw_text(x, MARGIN + HEAD_SIZE / 2, title, anchor=anchor, size=HEAD_SIZE, fill=FAINT)
    for number, comparison in enumerate(comparisons):
        top = MARGIN + TITLE_HEIGHT + number * row_height
        sheet.draw_line(left, top - 1.5 * GAP, personalised_x + IMAGE_SIDE, top - 1.5 * GAP, fill=GRID)
        _draw_history(sheet, left, top, comparison.summary.history, comparison.summary.num_earlier)
        width = wish_x - left - 4 * GAP
        _draw_lines(
            sheet,
            left,
            top + THUMB_SIDE + LINE_HEIGHT - 2,
            f"user {comparison.summary.user} likes {comparison.summary.likes or '(no keywords)'}",
            width=width,
        )
        _draw_centred_text(
            sheet, wish_x + WISH_WIDTH / 2, top + IMAGE_SIDE / 2, comparison.summary.wish, width=WISH_WIDTH
        )
        sheet.paste_image(baseline_x, top, comparison.baseline, IMAGE_SIDE)
        sheet.paste_image(personalised_x, top, comparison.personalised, IMAGE_SIDE)
    _save_sheet(sheet, path)


def write_contact_sheet(rows: Sequence[GeneratedRow], path: Path) -> None:
    """Write a contact sheet with a block for each user and wish: keywords, history, and the generated images below.

    Blocks fill one column after the other.
    """
    num_images = max(len(row.images) for row in rows)
    images_per_line = min(num_images, max(IMAGES_PER_LINE, math.ceil(math.sqrt(num_images))))
    width = max(
        images_per_line * (IMAGE_SIDE + GAP) - GAP,
        _measure_history_width([row.summary for row in rows]),
        4 * IMAGE_SIDE,
    )
    blocks = [_lay_out_block(row, images_per_line=images_per_line, width=width) for row in rows]
    columns = _split_columns([block.height for block in blocks])
    num_shown, height = sum(map(len, columns)), max(sum(blocks[i].height for i in column) for column in columns)
    sheet = Canvas(MARGIN + len(columns) * (width + MARGIN), MARGIN + height + MARGIN)
    for number, column in enumerate(columns):
        x, top = MARGIN + number * (width + MARGIN), MARGIN
        for index in column:
            if index != column[0]:
                sheet.draw_line(x, top - 2 * GAP, x + width, top - 2 * GAP, fill=GRID)
            _draw_block(sheet, blocks[index], x, top, images_per_line=images_per_line)
            top += blocks[index].height
    legend = f"{LEGEND}; {len(rows) - num_shown:,} more are not shown" if num_shown < len(rows) else LEGEND
    sheet.draw_text(MARGIN, MARGIN + height, legend, anchor="lm", size=TEXT_SIZE - 2, fill=FAINT)
    _save_sheet(sheet, path)


@dataclass(frozen=True)
class _Block:
    row: GeneratedRow
    wish_lines: list[str]
    """Lines of the wish."""
    user_lines: list[str]
    """Lines about the user."""
    head_height: float
    height: float
    """Height with the gap below."""


def _lay_out_block(row: GeneratedRow, *, images_per_line: int, width: float) -> _Block:
    likes = f", who likes {row.summary.likes}" if row.summary.likes else " (no keywords)"
    wish = _wrap(row.summary.wish, width, HEAD_SIZE)
    user = _wrap(f"for user {row.summary.user}{likes}", width, TEXT_SIZE)
    head = (len(wish) + len(user)) * LINE_HEIGHT + 2 * GAP + (THUMB_SIDE + 2 * GAP if row.summary.history else 0)
    num_lines = math.ceil(len(row.images) / images_per_line)
    return _Block(row, wish, user, head, head + num_lines * (IMAGE_SIDE + LINE_HEIGHT + GAP) + 3 * GAP)


def _draw_block(sheet: Canvas, block: _Block, x: float, top: float, *, images_per_line: int) -> None:
    row, y = block.row, top + HEAD_SIZE / 2
    for text in block.wish_lines:
        sheet.draw_text(x, y, text, anchor="lm", size=HEAD_SIZE)
        y += LINE_HEIGHT
    for text in block.user_lines:
        sheet.draw_text(x, y, text, anchor="lm", size=TEXT_SIZE, fill=FAINT)
        y += LINE_HEIGHT
    _draw_history(sheet, x, y - HEAD_SIZE / 2 + GAP, row.summary.history, row.summary.num_earlier)
    for number, (image, caption) in enumerate(zip(row.images, row.captions, strict=True)):
        line, column = divmod(number, images_per_line)
        left, y = x + column * (IMAGE_SIDE + GAP), top + block.head_height + line * (IMAGE_SIDE + LINE_HEIGHT + GAP)
        sheet.paste_image(left, y, image, IMAGE_SIDE)
        sheet.draw_text(
            left + IMAGE_SIDE / 2, y + IMAGE_SIDE + LINE_HEIGHT / 2, caption, size=TEXT_SIZE - 2, fill=FAINT
        )


def _split_columns(heights: Sequence[float]) -> list[list[int]]:
    """Return the indices of the blocks by column; blocks that do not fit into MAX_COLUMNS columns are left out."""
    columns: list[list[int]] = [[]]
    used_height = 0.0
    for index, height in enumerate(heights):
        if columns[-1] and used_height + height > MAX_COLUMN_HEIGHT:
            if len(columns) == MAX_COLUMNS:
                break
            columns.append([])
            used_height = 0.0
        columns[-1].append(index)
        used_height += height
    return columns


def _measure_history_width(users: Sequence[UserSummary]) -> float:
    return max(max(len(user.history) for user in users) * (THUMB_SIDE + GAP) - GAP, 4 * THUMB_SIDE)


def _draw_history(sheet: Canvas, x: float, y: float, images: Sequence[np.ndarray], num_earlier: int) -> None:
    for number, image in enumerate(images):
        sheet.paste_image(x + number * (THUMB_SIDE + GAP), y, image, THUMB_SIDE)
    if num_earlier:
        end = x + len(images) * (THUMB_SIDE + GAP)
        sheet.draw_text(end, y + THUMB_SIDE / 2, f"+{num_earlier}", anchor="lm", size=TEXT_SIZE - 2, fill=FAINT)


def _draw_lines(sheet: Canvas, x: float, y: float, text: str, *, width: float) -> None:
    for number, line in enumerate(_wrap(text, width, TEXT_SIZE)):
        sheet.draw_text(x, y + number * LINE_HEIGHT, line, anchor="lm", size=TEXT_SIZE, fill=FAINT)


def _wrap(text: str, width: float, size: float) -> list[str]:
    page = Canvas(1, 1)  # only to measure text: the size of the sheet depends on the lines
    return fit_captions([text], width, lambda line: page.measure_text(line, size))[0]


def _draw_centred_text(sheet: Canvas, x: float, y: float, text: str, *, width: float) -> None:
    lines = _wrap(text, width, HEAD_SIZE)
    for number, line in enumerate(lines):
        sheet.draw_text(x, y + (number - (len(lines) - 1) / 2) * (LINE_HEIGHT + 2), line, size=HEAD_SIZE, fill=BLUE)


def _save_sheet(sheet: Canvas, path: Path) -> None:
    with replacing_file(path) as temporary:
        sheet.save(temporary)
