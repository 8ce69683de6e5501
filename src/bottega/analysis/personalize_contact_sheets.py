"""Contact sheets and a bar chart of a personalised evaluation: each person's history, wish and images arm by arm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bottega.data.image.canvas import BLUE, FAINT, INK, ORANGE, Canvas
from bottega.data.image.caption import fit_captions
from bottega.data.output_files import build_numbered_paths, explain_write_errors
from bottega.plots.comparison import plot_condition_bars

PEOPLE_PER_PAGE = 8
IMAGE_SIDE, THUMB_SIDE, GAP, MARGIN, TOP_MARGIN = 84.0, 40.0, 10.0, 16.0, 84.0
TEXT_WIDTH = 150.0
"""Width of the column with the wish and the keywords."""
ARM_LABELS = {"none": "prompt only", "keywords": "with keywords", "soft": "with soft tokens", "both": "with both"}
ARM_LABELS |= {"picked": "best of several by CLIP", "shuffled": "another user's history", "target": "the image chosen"}
ARM_COLOURS = {"none": "#8d8b9b", "keywords": "#a8862a", "soft": "#2e8b6f", "both": BLUE, "picked": "#8a4fa3"}
ARM_COLOURS |= {"shuffled": ORANGE, "target": "#c9c8d3"}


@dataclass(frozen=True)
class PersonRow:
    """One person's row of a contact sheet."""

    user: str
    wish: str
    keywords: Sequence[str]
    history_images: Sequence[np.ndarray]
    """The images shown of the history, each uint8 (height, width, 3)."""
    images_by_arm: Mapping[str, np.ndarray]
    """Arm -> uint8 (height, width, 3)."""


def write_contact_sheets(people: Sequence[PersonRow], folder: Path) -> list[Path]:
    """Write numbered pages with the columns history, wish, and each arm; return their paths."""
    for old_page in folder.glob("[0-9]*.png"):  # pages of an earlier evaluation of more people
        if old_page.stem.isdecimal():
            old_page.unlink()
    pages = [people[first : first + PEOPLE_PER_PAGE] for first in range(0, len(people), PEOPLE_PER_PAGE)]
    files = build_numbered_paths(folder, len(pages), ".png")
    for page, path in zip(pages, files, strict=True):
        with explain_write_errors(path):
            _draw_page(page, path)
    return files


def _draw_page(people: Sequence[PersonRow], path: Path) -> None:
    arms = list(people[0].images_by_arm)
    num_columns = min(3, max((len(person.history_images) for person in people), default=0))
    text_left = MARGIN + max(1, num_columns) * (THUMB_SIDE + 4) + GAP
    left = text_left + TEXT_WIDTH
    width = max(left + len(arms) * (IMAGE_SIDE + GAP), MARGIN + _measure_text_width(_describe_arms(arms)))
    page = Canvas(width + MARGIN, TOP_MARGIN + len(people) * (IMAGE_SIDE + 2 * GAP))
    page.draw_text(MARGIN, 20, "history, wish and generated images of each user", anchor="lm", size=16)
    page.draw_text(MARGIN, 42, _describe_arms(arms), anchor="lm", size=11, fill=FAINT)
    page.draw_text(MARGIN, 68, "history", anchor="lm", fill=FAINT)
    page.draw_text(text_left, 68, "wish, keywords", anchor="lm", fill=FAINT)
    for number, arm in enumerate(arms):
        page.draw_text(left + number * (IMAGE_SIDE + GAP), 68, arm, anchor="lm", fill=INK)
    for row, person in enumerate(people):
        top = TOP_MARGIN + row * (IMAGE_SIDE + 2 * GAP)
        for position, image in enumerate(person.history_images):
            x, y = MARGIN + position % 3 * (THUMB_SIDE + 4), top + position // 3 * (THUMB_SIDE + 4)
            page.paste_image(x, y, image, THUMB_SIDE)
        wish_lines = _wrap_text(page, person.wish)
        for number, line in enumerate([*wish_lines, *_wrap_text(page, ", ".join(person.keywords))]):
            page.draw_text(
                text_left, top + 9 + 15 * number, line, anchor="lm", fill=INK if number < len(wish_lines) else FAINT
            )
        page.draw_text(
            text_left, top + IMAGE_SIDE - 6, _wrap_text(page, person.user)[0], anchor="lm", size=10, fill=FAINT
        )
        for number, arm in enumerate(arms):
            page.paste_image(left + number * (IMAGE_SIDE + GAP), top, person.images_by_arm[arm], IMAGE_SIDE)
    page.save(path)


def _describe_arms(arms: Iterable[str]) -> str:
    return "; ".join(f"{arm}: {ARM_LABELS[arm]}" for arm in arms)


def _measure_text_width(line: str) -> float:
    return Canvas(1, 1).measure_text(line, 11)  # on a canvas of its own: the width of the page depends on it


def _wrap_text(page: Canvas, words: str) -> list[str]:
    return fit_captions([words], TEXT_WIDTH - GAP, lambda text: page.measure_text(text, 12))[0]


def plot_arms(
    arms: Mapping[str, Mapping[str, Any]], measures: Sequence[str], chance: Mapping[str, float], path: Path
) -> None:
    """Plot the accuracies of each arm as bars with their intervals, grouped by measure."""
    plot_condition_bars(
        arms,
        measures,
        path,
        title="Accuracy by what the generator was given",
        subtitle="means over users with 95 % intervals",
        labels=ARM_LABELS,
        colours=ARM_COLOURS,
        chance=chance,
    )
