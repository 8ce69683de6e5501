"""A contact sheet: several images on one page, for people to look at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bottega.data.image.caption import fit_captions
from bottega.data.image.decode import import_pillow

PAGE = (250, 250, 248)
INK = (60, 60, 60)
GAP = 8
LINE = 14
# Smaller pictures are enlarged by whole factors, so that single pixels can be seen and a caption has room.
SMALLEST_SIDE = 96


def write_contact_sheet(
    images: Sequence[np.ndarray], path: Path, *, captions: Sequence[str] | None = None, columns: int | None = None
) -> None:
    """Writes uint8 pictures [h, w, c] (c of 1 or 3) as one PNG, row by row; nearly square unless `columns` is given."""
    from PIL import ImageDraw, ImageFont

    Image = import_pillow()
    assert images, "a sheet of no images"
    columns = min(columns or math.ceil(math.sqrt(len(images))), len(images))
    rows = math.ceil(len(images) / columns)
    pictures = [_shown(image) for image in images]
    wide = max(picture.shape[1] for picture in pictures)
    tall = max(picture.shape[0] for picture in pictures)
    font = ImageFont.load_default(size=11)
    words = fit_captions(captions, wide, font.getlength) if captions is not None else []
    below = LINE * max(map(len, words)) + 4 if words else 0
    page = Image.new("RGB", (GAP + columns * (wide + GAP), GAP + rows * (tall + below + GAP)), PAGE)
    draw = ImageDraw.Draw(page)
    for number, picture in enumerate(pictures):
        row, column = divmod(number, columns)
        left, top = GAP + column * (wide + GAP), GAP + row * (tall + below + GAP)
        # Pictures of other shapes stand on one line, so that captions do.
        at = (left + (wide - picture.shape[1]) // 2, top + tall - picture.shape[0])
        page.paste(Image.fromarray(picture), at)
        for line, text in enumerate(words[number] if words else ()):
            at_line = (left + wide / 2, top + tall + 3 + LINE * line)
            draw.text(at_line, text, fill=INK, font=font, anchor="ma")
    page.save(path, format="PNG")


def _shown(image: np.ndarray) -> np.ndarray:
    colour = np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image
    factor = max(1, math.ceil(SMALLEST_SIDE / max(colour.shape[:2])))
    return np.ascontiguousarray(colour.repeat(factor, axis=0).repeat(factor, axis=1))
