"""The direction of motion in a video: the velocity at which later frames correlate with earlier ones.

F frames, H x W size of a frame, C channels, K largest distance of compared frames.
"""

from __future__ import annotations

import math

import numpy as np

DIRECTIONS = ("left", "right", "up", "down")

APART = 4
"""Largest distance of compared frames: enough for half a pixel a frame to show, and not so far that an object has left."""
STEP = 0.25
"""Pixels per frame between candidate velocities."""
FASTEST = 0.25
"""Largest velocity in sides of a frame per frame: faster objects are visible in too few frames."""
CLEAR = 0.05
"""Smallest score of motion, as a fraction of the video's energy; a blob in noise of a tenth of its brightness has 0.1."""
DEVIATIONS = 5
"""Smallest score in standard deviations of noise, of which the best of a thousand velocities reaches 3 to 4."""


def motion_direction(video: np.ndarray) -> str:
    """Return left, right, up or down for a video (F, H, W) or (F, H, W, C) by its dominant motion; none if it has none."""
    assert video.ndim in (3, 4), "a video is [frames, height, width] or [frames, height, width, channels]"
    if len(video) < 2 or not np.isfinite(video).all():
        return "none"
    moving = video.astype(np.float64).reshape(*video.shape[:3], -1)
    # Subtract the background colour, which would otherwise be an edge at the border of the padded frame.
    agreement = _agreement(moving - np.median(moving, axis=(0, 1, 2)))
    downs, rights = (_speeds(side) for side in video.shape[1:3])
    scores = np.zeros((len(downs), len(rights)))
    for apart, shifts in enumerate(agreement, 1):
        scores += _between(shifts, apart * downs, apart * rights) / len(agreement)
    noise = math.sqrt(2 / (video.size * len(agreement)))
    if scores.max() < max(CLEAR, DEVIATIONS * noise):
        return "none"
    i, j = np.unravel_index(scores.argmax(), scores.shape)
    if abs(rights[j]) >= abs(downs[i]):
        return "right" if rights[j] > 0 else "left"
    return "down" if downs[i] > 0 else "up"


def _agreement(video: np.ndarray) -> np.ndarray:
    """Return (K, 2 H, 2 W): correlation of frames 1 to K apart at each shift less that at its opposite, over the energy.

    What stands still correlates equally at both, so only motion remains. Frames are padded to twice their size, so that
    shifts do not wrap around.
    """
    size = (2 * video.shape[1], 2 * video.shape[2])
    spectra = np.fft.rfft2(video, size, axes=(1, 2))
    apart = range(1, min(APART, len(video) - 1) + 1)
    products = np.stack([(np.conj(spectra[:-k]) * spectra[k:]).sum(-1).mean(0) for k in apart])
    # The opposite shift is the conjugate of a spectrum, so twice the imaginary part is the difference.
    energy = (video**2).sum() / len(video)
    return np.fft.irfft2(2j * products.imag, size) / (energy if energy > 0 else 1)


def _speeds(side: int) -> np.ndarray:
    steps = max(1, math.floor(side * FASTEST / STEP))
    return STEP * np.arange(-steps, steps + 1)


def _between(shifts: np.ndarray, downs: np.ndarray, rights: np.ndarray) -> np.ndarray:
    """Return bilinear values at fractional shifts; 0 where frames do not overlap. Negative shifts are at the end."""
    rows, columns = shifts.shape
    top, left = np.floor(downs).astype(int), np.floor(rights).astype(int)
    part, along = (downs - top)[:, None], (rights - left)[None, :]
    meet = (np.abs(downs) < rows // 2)[:, None] & (np.abs(rights) < columns // 2)[None, :]

    def at(i: int, j: int) -> np.ndarray:
        return shifts[((top + i) % rows)[:, None], ((left + j) % columns)[None, :]]

    upper = (1 - along) * at(0, 0) + along * at(0, 1)
    lower = (1 - along) * at(1, 0) + along * at(1, 1)
    return meet * ((1 - part) * upper + part * lower)
