"""Contact sheets: several images with captions as one PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bottega.data.image.caption import fit_captions
from bottega.data.image.decode import import_pillow

PAGE_COLOUR = (250, 250, 248)
TEXT_COLOUR = (60, 60, 60)
GAP = 8
LINE_HEIGHT = 14
# Smaller images are enlarged by whole factors, so that single pixels are visible and a caption fits.
MIN_SIDE = 96


def write_contact_sheet(
    images: Sequence[np.ndarray], path: Path, *, captions: Sequence[str] | None = None, columns: int | None = None
) -> None:
    """Write images, uint8 `(height, width, 1 or 3)`, as one PNG, row by row; about square unless `columns` is given."""
    from PIL import ImageDraw, ImageFont

    Image = import_pillow()
    assert images, "no images"
    columns = min(columns or math.ceil(math.sqrt(len(images))), len(images))
    rows = math.ceil(len(images) / columns)
    enlarged = [_enlarge(image) for image in images]
    cell_width = max(image.shape[1] for image in enlarged)
    cell_height = max(image.shape[0] for image in enlarged)
    font = ImageFont.load_default(size=11)
    lines = fit_captions(captions, cell_width, font.getlength) if captions is not None else []
    caption_height = LINE_HEIGHT * max(map(len, lines)) + 4 if lines else 0
    page = Image.new(
        "RGB", (GAP + columns * (cell_width + GAP), GAP + rows * (cell_height + caption_height + GAP)), PAGE_COLOUR
    )
    draw = ImageDraw.Draw(page)
    for number, image in enumerate(enlarged):
        row, column = divmod(number, columns)
        left, top = GAP + column * (cell_width + GAP), GAP + row * (cell_height + caption_height + GAP)
        # Align images of different shapes at the bottom, so that captions are on one line.
        position = (left + (cell_width - image.shape[1]) // 2, top + cell_height - image.shape[0])
        page.paste(Image.fromarray(image), position)
        for line, text in enumerate(lines[number] if lines else ()):
            line_position = (left + cell_width / 2, top + cell_height + 3 + LINE_HEIGHT * line)
            draw.text(line_position, text, fill=TEXT_COLOUR, font=font, anchor="ma")
    page.save(path, format="PNG")


def _enlarge(image: np.ndarray) -> np.ndarray:
    rgb = np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image
    factor = max(1, math.ceil(MIN_SIDE / max(rgb.shape[:2])))
    return np.ascontiguousarray(rgb.repeat(factor, axis=0).repeat(factor, axis=1))
