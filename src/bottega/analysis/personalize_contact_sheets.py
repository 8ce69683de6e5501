"""Pictures of an evaluation over people: what each liked, wished for and was drawn, arm by arm; and the arms as bars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bottega.data.image.canvas import BLUE, FAINT, GRID, INK, ORANGE, Canvas
from bottega.data.image.caption import fit_captions
from bottega.data.output_files import build_numbered_paths, explain_write_errors

ROWS = 8
"""People on a page."""
SIDE, SMALL, GAP, MARGIN, TOP = 84.0, 40.0, 10.0, 16.0, 84.0
WORDS = 150.0
"""Room for the wish and the keywords."""
MEANING = {"none": "the wish alone", "keywords": "with words", "soft": "with trained tokens", "both": "the method"}
MEANING |= {"picked": "its best by CLIP", "shuffled": "with a stranger's history", "target": "what the person took"}
COLOURS = {"none": "#8d8b9b", "keywords": "#a8862a", "soft": "#2e8b6f", "both": BLUE, "picked": "#8a4fa3"}
COLOURS |= {"shuffled": ORANGE, "target": "#c9c8d3"}


@dataclass(frozen=True)
class PersonRow:
    """One person's row."""

    user: str
    wish: str
    keywords: Sequence[str]
    history_images: Sequence[np.ndarray]
    """`SHOWN` at most: uint8 [h, w, 3]."""
    images_by_arm: Mapping[str, np.ndarray]
    """Arm -> uint8 [h, w, 3]."""


def write_contact_sheets(people: Sequence[PersonRow], folder: Path) -> list[Path]:
    """Pages of (history | wish | none | ... | both | shuffled | target), numbered."""
    for old in folder.glob("[0-9]*.png"):  # of an evaluation of more people
        if old.stem.isdecimal():
            old.unlink()
    pages = [people[first : first + ROWS] for first in range(0, len(people), ROWS)]
    files = build_numbered_paths(folder, len(pages), ".png")
    for page, path in zip(pages, files, strict=True):
        with explain_write_errors(path):
            _page(page, path)
    return files


def _page(people: Sequence[PersonRow], path: Path) -> None:
    arms = list(people[0].images_by_arm)
    columns = min(3, max((len(one.history_images) for one in people), default=0))
    wide = MARGIN + max(1, columns) * (SMALL + 4) + GAP
    left = wide + WORDS
    width = max(left + len(arms) * (SIDE + GAP), MARGIN + _width(_explained(arms)))
    page = Canvas(width + MARGIN, TOP + len(people) * (SIDE + 2 * GAP))
    page.draw_text(MARGIN, 20, "what each liked and wished for, and what was drawn", anchor="lm", size=16)
    page.draw_text(MARGIN, 42, _explained(arms), anchor="lm", size=11, fill=FAINT)
    page.draw_text(MARGIN, 68, "history", anchor="lm", fill=FAINT)
    page.draw_text(wide, 68, "wish, and keywords", anchor="lm", fill=FAINT)
    for number, arm in enumerate(arms):
        page.draw_text(left + number * (SIDE + GAP), 68, arm, anchor="lm", fill=INK)
    for row, one in enumerate(people):
        top = TOP + row * (SIDE + 2 * GAP)
        for place, liked in enumerate(one.history_images):
            x, y = MARGIN + place % 3 * (SMALL + 4), top + place // 3 * (SMALL + 4)
            page.paste_image(x, y, liked, SMALL)
        wish = _lines(page, one.wish)
        for number, line in enumerate([*wish, *_lines(page, ", ".join(one.keywords))]):
            page.draw_text(wide, top + 9 + 15 * number, line, anchor="lm", fill=INK if number < len(wish) else FAINT)
        page.draw_text(wide, top + SIDE - 6, _lines(page, one.user)[0], anchor="lm", size=10, fill=FAINT)
        for number, arm in enumerate(arms):
            page.paste_image(left + number * (SIDE + GAP), top, one.images_by_arm[arm], SIDE)
    page.save(path)


def _explained(arms: Iterable[str]) -> str:
    return "; ".join(f"{arm}: {MEANING[arm]}" for arm in arms)


def _width(line: str) -> float:
    return Canvas(1, 1).measure_text(line, 11)  # a page to measure with: how wide the real one is depends on this


def _lines(page: Canvas, words: str) -> list[str]:
    return fit_captions([words], WORDS - GAP, lambda text: page.measure_text(text, 12))[0]


BAR, BAR_GAP, HEIGHT, GROUP = 26.0, 6.0, 240.0, 44.0


def plot_arms(
    arms: Mapping[str, Mapping[str, Any]], measures: Sequence[str], chance: Mapping[str, float], path: Path
) -> None:
    """Shares as bars from 0 to 1 with their intervals, a group for each measure; a line where guessing would be."""
    width = len(arms) * (BAR + BAR_GAP)
    left, top = 56.0, 92.0
    wide = max(left + len(measures) * (width + GROUP), left + _width(_explained(arms)) + MARGIN)
    page = Canvas(wide, top + HEIGHT + 74)
    page.draw_text(left, 22, "what is right, by what the generator was told", anchor="lm", size=16)
    page.draw_text(
        left, 44, "means over people and their 95 % intervals; thick lines: guessing", anchor="lm", fill=FAINT
    )
    page.draw_text(left, 62, _explained(arms), anchor="lm", size=11, fill=FAINT)

    def place(value: float) -> float:
        return top + HEIGHT * (1 - min(1.0, max(0.0, value)))

    for mark in (0.0, 0.25, 0.5, 0.75, 1.0):
        end = left + len(measures) * (width + GROUP)
        page.draw_line(left, place(mark), end, place(mark), fill=GRID)
        page.draw_text(left - 8, place(mark), f"{mark:g}", anchor="rm", size=11, fill=FAINT)
    for group, measure in enumerate(measures):
        start = left + GROUP / 2 + group * (width + GROUP)
        for number, (arm, values) in enumerate(arms.items()):
            x = start + number * (BAR + BAR_GAP)
            if measure in values:
                found, middle = values[measure], x + BAR / 2
                page.draw_box(x, place(found["mean"]), x + BAR, place(0), COLOURS[arm])
                page.draw_line(middle, place(found["low"]), middle, place(found["high"]), thick=1.5)
                for side in ("low", "high"):
                    page.draw_line(middle - 4, place(found[side]), middle + 4, place(found[side]), thick=1.5)
        if measure in chance:
            page.draw_line(start - 6, place(chance[measure]), start + width, place(chance[measure]), thick=2.5)
        page.draw_text(start + width / 2, top + HEIGHT + 16, measure.replace("_", " "), size=12)
    x = left
    for arm in arms:
        page.draw_box(x, top + HEIGHT + 44, x + 12, top + HEIGHT + 56, COLOURS[arm])
        page.draw_text(x + 17, top + HEIGHT + 50, arm, anchor="lm", size=11, fill=FAINT)
        x += 29 + page.measure_text(arm, 11)
    page.save(path)
