"""Resize images to a target shape with antialiasing: crop, pad or stretch.

Uses Pillow's bicubic filter, whose support grows with the reduction factor, so that no pixel is skipped (the filter of the
usual FID evaluations). A box filter is faster and preserves means exactly, but weights pixels unequally at non-integer
factors, which shows as blocks.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from bottega.data.image.decode import import_pillow

ResizeMode = Literal["crop", "pad", "stretch"]


def resize_image(pixels: np.ndarray, size: tuple[int, int], *, mode: ResizeMode) -> np.ndarray:
    """Resize uint8 `(height, width, channels)` to `size` (height, width); return the input if it has that size."""
    if pixels.shape[:2] == size:
        return pixels
    if mode == "stretch":
        return resample_image(pixels, size)
    height, width = pixels.shape[:2]
    if mode == "crop":
        # Crop first, so that removed pixels are never resampled.
        scale = max(size[0] / height, size[1] / width)
        crop_height, crop_width = min(size[0] / scale, height), min(size[1] / scale, width)
        left, top = (width - crop_width) / 2, (height - crop_height) / 2
        return resample_image(pixels, size, box=(left, top, left + crop_width, top + crop_height))
    scale = min(size[0] / height, size[1] / width)
    inner_size = (min(size[0], max(1, round(height * scale))), min(size[1], max(1, round(width * scale))))
    padded = np.zeros((*size, pixels.shape[2]), dtype=np.uint8)
    top, left = (size[0] - inner_size[0]) // 2, (size[1] - inner_size[1]) // 2
    inner = pixels if inner_size == (height, width) else resample_image(pixels, inner_size)
    padded[top : top + inner_size[0], left : left + inner_size[1]] = inner
    return padded


def resample_image(
    pixels: np.ndarray, size: tuple[int, int], *, box: tuple[float, float, float, float] | None = None
) -> np.ndarray:
    """Resample an image, or its part `box` (left, top, right, bottom, in pixels), to `size`."""
    Image = import_pillow()
    squeezed = pixels[..., 0] if pixels.shape[2] == 1 else pixels
    image = Image.fromarray(np.ascontiguousarray(squeezed))
    resized = np.asarray(image.resize((size[1], size[0]), Image.Resampling.BICUBIC, box=box))
    return resized[..., None] if pixels.shape[2] == 1 else resized
