"""A canvas for plots: text, boxes, lines and images, saved as PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bottega.core.errors import EnvironmentProblem
from bottega.data.image.caption import to_printable
from bottega.data.image.decode import import_pillow

PAPER, INK, FAINT, GRID, BLUE, ORANGE = "#ffffff", "#1c1b29", "#6d6b7b", "#ececf1", "#2a5db0", "#d1602f"
SCALE = 2
"""Pixels per unit, for sharp text on high-resolution screens."""


class Canvas:
    """A white canvas of `width` x `height` units to draw on."""

    def __init__(self, width: float, height: float) -> None:
        try:
            from PIL import Image, ImageDraw, ImageFont
        except ImportError as error:
            raise EnvironmentProblem(f"plots need Pillow; pip install 'bottega[data]' ({error})") from error
        self._load_font = ImageFont.load_default
        self.image: Any = Image.new("RGB", (round(width * SCALE), round(height * SCALE)), PAPER)
        self.pen = ImageDraw.Draw(self.image)

    def draw_text(
        self, x: float, y: float, text: str, *, anchor: str = "mm", size: float = 12, fill: str = INK
    ) -> None:
        """Draw text; `anchor` is Pillow's text anchor."""
        font = self._load_font(size * SCALE)
        self.pen.text((x * SCALE, y * SCALE), to_printable(text), font=font, anchor=anchor, fill=fill)

    def draw_box(self, left: float, top: float, right: float, bottom: float, fill: str) -> None:
        """Fill a rectangle; an empty one draws nothing."""
        if right > left and bottom > top:
            self.pen.rectangle([round(value * SCALE) for value in (left, top, right, bottom)], fill=fill)

    def draw_line(self, *coordinates: float, fill: str = INK, width: float = 1) -> None:
        """Draw a line through points given as x, y, x, y, ..."""
        self.pen.line([round(value * SCALE) for value in coordinates], fill=fill, width=round(width * SCALE))

    def paste_image(self, x: float, y: float, pixels: np.ndarray, side: float) -> None:
        """Paste an image, uint8 `(height, width, 3)`, with a thin border, centred in the square of `side` units at `x`, `y`.

        Small images are enlarged by nearest neighbour, large ones reduced by Lanczos resampling.
        """
        Image, side_pixels = import_pillow(), round(side * SCALE)
        height, width = pixels.shape[:2]
        factor = side_pixels / max(height, width)
        size = (max(1, round(width * factor)), max(1, round(height * factor)))
        resampling = Image.Resampling.NEAREST if factor >= 1 else Image.Resampling.LANCZOS
        image = Image.fromarray(np.ascontiguousarray(pixels)).resize(size, resampling)
        corner = (round(x * SCALE) + (side_pixels - size[0]) // 2, round(y * SCALE) + (side_pixels - size[1]) // 2)
        self.image.paste(image, corner)
        self.pen.rectangle([corner[0] - 1, corner[1] - 1, corner[0] + size[0], corner[1] + size[1]], outline=GRID)

    def measure_text(self, text: str, size: float) -> float:
        """Return the width of a text in units."""
        return self.pen.textlength(to_printable(text), font=self._load_font(size * SCALE)) / SCALE

    def save(self, path: Path) -> None:
        """Write the canvas as an image file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.image.save(path, optimize=True)
