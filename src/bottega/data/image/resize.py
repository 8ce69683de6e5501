"""Images to a wanted shape, antialiased: cut what is over, fill what is missing, or distort.

Bicubic as Pillow does it: going down, the filter grows with the factor, so no pixel is left out and nothing flickers
(the filter of the usual FID evaluations). Box is faster and keeps means exactly, but at factors that are no whole
numbers its pixels have unequal weights, which shows as blocks.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from bottega.data.image.decode import import_pillow

ResizeMode = Literal["crop", "pad", "stretch"]


def resize_image(pixels: np.ndarray, size: tuple[int, int], *, mode: ResizeMode) -> np.ndarray:
    """uint8 [h, w, c] to [*size, c]; the same array where the shape is right already."""
    if pixels.shape[:2] == size:
        return pixels
    if mode == "stretch":
        return resample_image(pixels, size)
    height, width = pixels.shape[:2]
    if mode == "crop":
        # The part that is kept is cut first, so that what is thrown away is never resampled.
        scale = max(size[0] / height, size[1] / width)
        tall, wide = min(size[0] / scale, height), min(size[1] / scale, width)
        left, top = (width - wide) / 2, (height - tall) / 2
        return resample_image(pixels, size, box=(left, top, left + wide, top + tall))
    scale = min(size[0] / height, size[1] / width)
    inside = (min(size[0], max(1, round(height * scale))), min(size[1], max(1, round(width * scale))))
    # Black, as around a film on a screen of another shape.
    padded = np.zeros((*size, pixels.shape[2]), dtype=np.uint8)
    top, left = (size[0] - inside[0]) // 2, (size[1] - inside[1]) // 2
    fitted = pixels if inside == (height, width) else resample_image(pixels, inside)
    padded[top : top + inside[0], left : left + inside[1]] = fitted
    return padded


def resample_image(
    pixels: np.ndarray, size: tuple[int, int], *, box: tuple[float, float, float, float] | None = None
) -> np.ndarray:
    """The part `box` (left, top, right, bottom, in pixels) at another size."""
    Image = import_pillow()
    flat = pixels[..., 0] if pixels.shape[2] == 1 else pixels
    image = Image.fromarray(np.ascontiguousarray(flat))
    done = np.asarray(image.resize((size[1], size[0]), Image.Resampling.BICUBIC, box=box))
    return done[..., None] if pixels.shape[2] == 1 else done
