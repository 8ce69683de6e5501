"""A page to draw diagrams on: text, boxes and lines in plain units, saved as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bottega.core.errors import EnvironmentProblem
from bottega.data.image.caption import to_printable
from bottega.data.image.decode import import_pillow

PAPER, INK, FAINT, GRID, BLUE, ORANGE = "#ffffff", "#1c1b29", "#6d6b7b", "#ececf1", "#2a5db0", "#d1602f"
SCALE = 2
"""Drawn twice as large, for screens of many pixels."""


class Canvas:
    """A page to draw on in plain units; `save` writes it."""

    def __init__(self, width: float, height: float) -> None:
        try:
            from PIL import Image, ImageDraw, ImageFont
        except ImportError as error:
            raise EnvironmentProblem(f"pictures need Pillow: pip install 'bottega[data]' ({error})") from error
        self._font = ImageFont.load_default
        self.image: Any = Image.new("RGB", (round(width * SCALE), round(height * SCALE)), PAPER)
        self.pen = ImageDraw.Draw(self.image)

    def draw_text(
        self, x: float, y: float, words: str, *, anchor: str = "mm", size: float = 12, fill: str = INK
    ) -> None:
        font = self._font(size * SCALE)
        self.pen.text((x * SCALE, y * SCALE), to_printable(words), font=font, anchor=anchor, fill=fill)

    def draw_box(self, left: float, top: float, right: float, bottom: float, fill: str) -> None:
        if right > left and bottom > top:
            self.pen.rectangle([round(v * SCALE) for v in (left, top, right, bottom)], fill=fill)

    def draw_line(self, *ends: float, fill: str = INK, thick: float = 1) -> None:
        self.pen.line([round(value * SCALE) for value in ends], fill=fill, width=round(thick * SCALE))

    def paste_image(self, x: float, y: float, pixels: np.ndarray, side: float) -> None:
        """uint8 [h, w, 3] in the middle of a square, with a hair line around it. Small pictures are enlarged so that each
        pixel stays a square; large ones are made smaller smoothly."""
        Image, target = import_pillow(), round(side * SCALE)
        height, width = pixels.shape[:2]
        factor = target / max(height, width)
        size = (max(1, round(width * factor)), max(1, round(height * factor)))
        how = Image.Resampling.NEAREST if factor >= 1 else Image.Resampling.LANCZOS
        shown = Image.fromarray(np.ascontiguousarray(pixels)).resize(size, how)
        at = (round(x * SCALE) + (target - size[0]) // 2, round(y * SCALE) + (target - size[1]) // 2)
        self.image.paste(shown, at)
        self.pen.rectangle([at[0] - 1, at[1] - 1, at[0] + size[0], at[1] + size[1]], outline=GRID)

    def measure_text(self, words: str, size: float) -> float:
        return self.pen.textlength(to_printable(words), font=self._font(size * SCALE)) / SCALE

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.image.save(path, optimize=True)
