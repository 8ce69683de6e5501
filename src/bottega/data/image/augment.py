"""Changed copies of images, and pixels to the numbers a model sees.

What happens to a sample is f(seed, epoch, index), so it is the same in whatever batch the sample is.

F: pictures of one sample, all changed alike: 1 for an image, the frames of a video.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from bottega.core.noise import numpy_generator
from bottega.data.image.config import ImageAugmentation
from bottega.data.image.decode import import_pillow
from bottega.data.image.resize import resample_image

Normalisation = Literal["symmetric", "unit", "standard"]

# ITU-R BT.601, as Pillow turns colour into grey.
LUMA_WEIGHTS = np.array([0.299, 0.587, 0.114], dtype=np.float32)
# Of ImageNet's training images, as every library has them.
IMAGENET_MEAN = np.array([0.485, 0.456, 0.406], dtype=np.float32)
IMAGENET_STD = np.array([0.229, 0.224, 0.225], dtype=np.float32)


class ImageTransform(NamedTuple):
    """What is done to one sample."""

    crop_fraction: float
    """Share of each side that is cut away."""
    top: float
    left: float
    """Where the rest lies: 0 at the beginning, 1 at the end of what there is room for."""
    is_flipped: bool
    brightness: float
    contrast: float
    saturation: float


def sample_transform(options: ImageAugmentation, *, seed: int, epoch: int, index: int) -> ImageTransform:
    # All seven are drawn in any case: turning one option on leaves what the others do as it is.
    removed, top, left, mirror, *colours = numpy_generator(seed, "image augmentation", epoch, index).random(7).tolist()
    factors = (1 + options.colour_jitter * (2 * draw - 1) for draw in colours)
    return ImageTransform(options.crop * removed, top, left, options.flip and mirror < 0.5, *factors)


def augment_images(
    pixels: np.ndarray, options: ImageAugmentation, *, seed: int, epoch: np.ndarray, index: np.ndarray
) -> np.ndarray:
    """uint8 [n, ..., h, w, c], changed in place where that is possible; the samples `index` in the epochs `epoch`."""
    if not options.enabled or not (options.crop or options.flip or options.colour_jitter):
        return pixels
    for sample, at, number in zip(pixels, epoch.tolist(), index.tolist(), strict=True):
        change = sample_transform(options, seed=seed, epoch=at, index=number)
        apply_transform(sample.reshape(-1, *sample.shape[-3:]), change)
    return pixels


def apply_transform(pixels: np.ndarray, transform: ImageTransform) -> None:
    """Changes uint8 [F, h, w, c] in place."""
    height, width = pixels.shape[1:3]
    if transform.crop_fraction:
        tall, wide = max(1.0, height * (1 - transform.crop_fraction)), max(1.0, width * (1 - transform.crop_fraction))
        top, left = (height - tall) * transform.top, (width - wide) * transform.left
        box = (left, top, min(left + wide, width), min(top + tall, height))
        for picture in pixels:
            picture[...] = resample_image(picture, (height, width), box=box)
    if transform.is_flipped:
        pixels[...] = np.take(pixels, np.arange(width)[::-1], axis=2)  # twice as fast as a slice with a step of -1
    if (transform.brightness, transform.contrast, transform.saturation) != (1, 1, 1):
        pixels[...] = _coloured(pixels, transform)


def _coloured(pixels: np.ndarray, change: ImageTransform) -> np.ndarray:
    """Brightness, then contrast about the mean grey of the sample, then saturation about each pixel's own grey.

    All three together are one matrix and one offset, so pixels are rounded and cut to their range once, at the end.
    """
    height, width, channels = pixels.shape[1:]
    # Summed down the rows first: a last axis of three costs 25 times as much.
    sums = pixels.reshape(-1, width * channels).sum(axis=0, dtype=np.int64).reshape(width, channels).sum(axis=0)
    weights = LUMA_WEIGHTS if channels == 3 else np.ones(1, dtype=np.float32)
    mean = float(weights @ sums) / (len(pixels) * height * width)
    gain, offset = change.brightness * change.contrast, (1 - change.contrast) * change.brightness * mean
    if channels == 1:
        table = np.clip(np.rint(np.arange(256) * gain + offset), 0, 255).astype(np.uint8)
        return table[pixels]
    grey = [gain * (1 - change.saturation) * weight for weight in LUMA_WEIGHTS.tolist()]
    own = gain * change.saturation
    red = (grey[0] + own, grey[1], grey[2], offset)
    green = (grey[0], grey[1] + own, grey[2], offset)
    blue = (grey[0], grey[1], grey[2] + own, offset)
    page = import_pillow().fromarray(pixels.reshape(-1, width, 3))
    return np.asarray(page.convert("RGB", red + green + blue)).reshape(pixels.shape)


def normalise_pixels(pixels: np.ndarray, *, mode: Normalisation, out: np.ndarray | None = None) -> np.ndarray:
    """uint8 [..., c] to float32: (pixel / 255 - mean) / deviation, written straight into `out` where given."""
    scale, offset = _line(mode, pixels.shape[-1])
    out = np.empty(pixels.shape, dtype=np.float32) if out is None else out
    # Converting first and then working in place is 4.4 billion pixels a second on one core, multiplying while
    # converting 3.4, a table of 256 values 1.
    out[...] = pixels
    if mode == "standard" and pixels.shape[-1] > 1:
        # A last axis of three costs 12 times as much as one long row.
        _by_channel(out, scale, offset)
        return out
    np.multiply(out, scale[0], out=out)
    return np.subtract(out, offset[0], out=out)


def denormalise_pixels(values: np.ndarray, *, mode: Normalisation) -> np.ndarray:
    """Back to uint8; what lies outside the range of a pixel is cut."""
    scale, offset = _line(mode, values.shape[-1])
    return np.clip(np.rint((np.asarray(values, dtype=np.float32) + offset) / scale), 0, 255).astype(np.uint8)


def _by_channel(out: np.ndarray, scale: np.ndarray, offset: np.ndarray) -> None:
    width = out.shape[-2]
    rows = out.reshape(-1, width * out.shape[-1])
    np.multiply(rows, np.tile(scale, width), out=rows)
    np.subtract(rows, np.tile(offset, width), out=rows)


def _line(how: Normalisation, channels: int) -> tuple[np.ndarray, np.ndarray]:
    """Scale and offset of value = pixel * scale - offset, for each channel."""
    mean: Any
    deviation: Any
    if how == "standard":
        mean, deviation = IMAGENET_MEAN, IMAGENET_STD
        if channels == 1:  # grey has what its weights make of those of colour
            mean, deviation = mean @ LUMA_WEIGHTS, deviation @ LUMA_WEIGHTS
    else:
        mean, deviation = (np.float32(0.5), np.float32(0.5)) if how == "symmetric" else (np.float32(0), np.float32(1))
    scale, offset = 1 / (255 * deviation), mean / deviation
    return np.broadcast_to(scale, channels), np.broadcast_to(offset, channels)
