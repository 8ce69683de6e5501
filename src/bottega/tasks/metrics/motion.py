"""The direction of motion in a video: the velocity at which later frames correlate with earlier ones.

F frames, H x W size of a frame, C channels, K the largest number of frames between two that are compared.
"""

from __future__ import annotations

import math

import numpy as np

DIRECTIONS = ("left", "right", "up", "down")

MAX_FRAME_DISTANCE = 4
"""Largest number of frames between two that are compared: enough for half a pixel a frame to show, and not so far that an object has left."""
VELOCITY_STEP = 0.25
"""Pixels per frame between candidate velocities."""
MAX_VELOCITY = 0.25
"""Largest velocity in sides of a frame per frame: faster objects are visible in too few frames."""
MIN_SCORE = 0.05
"""Smallest score of motion, as a fraction of the video's energy; a blob in noise with a tenth of its brightness scores 0.1."""
MIN_DEVIATIONS = 5
"""Smallest score in standard deviations of noise; among a thousand velocities, noise alone reaches 3 to 4."""


def detect_motion_direction(video: np.ndarray) -> str:
    """Return left, right, up or down for a video (F, H, W) or (F, H, W, C) by its dominant motion; none if it has none."""
    assert video.ndim in (3, 4), "a video is [frames, height, width] or [frames, height, width, channels]"
    if len(video) < 2 or not np.isfinite(video).all():
        return "none"
    frames = video.astype(np.float64).reshape(*video.shape[:3], -1)
    # Subtract the background colour, which would otherwise be an edge at the border of the padded frame.
    correlations = _correlate_frames(frames - np.median(frames, axis=(0, 1, 2)))
    vertical, horizontal = (_list_velocities(side) for side in video.shape[1:3])
    scores = np.zeros((len(vertical), len(horizontal)))
    for distance, shifts in enumerate(correlations, 1):
        scores += _interpolate_shifts(shifts, distance * vertical, distance * horizontal) / len(correlations)
    noise = math.sqrt(2 / (video.size * len(correlations)))
    if scores.max() < max(MIN_SCORE, MIN_DEVIATIONS * noise):
        return "none"
    i, j = np.unravel_index(scores.argmax(), scores.shape)
    if abs(horizontal[j]) >= abs(vertical[i]):
        return "right" if horizontal[j] > 0 else "left"
    return "down" if vertical[i] > 0 else "up"


def _correlate_frames(video: np.ndarray) -> np.ndarray:
    """Return (K, 2 H, 2 W): correlation of frames 1 to K apart at each shift, minus that at the opposite shift, divided by the energy.

    Still parts correlate equally at both shifts, so only motion remains. Frames are padded to twice their size, so that
    shifts do not wrap around.
    """
    size = (2 * video.shape[1], 2 * video.shape[2])
    spectra = np.fft.rfft2(video, size, axes=(1, 2))
    distances = range(1, min(MAX_FRAME_DISTANCE, len(video) - 1) + 1)
    products = np.stack([(np.conj(spectra[:-k]) * spectra[k:]).sum(-1).mean(0) for k in distances])
    # The opposite shift is the conjugate of a spectrum, so twice the imaginary part is the difference.
    energy = (video**2).sum() / len(video)
    return np.fft.irfft2(2j * products.imag, size) / (energy if energy > 0 else 1)


def _list_velocities(side: int) -> np.ndarray:
    num_steps = max(1, math.floor(side * MAX_VELOCITY / VELOCITY_STEP))
    return VELOCITY_STEP * np.arange(-num_steps, num_steps + 1)


def _interpolate_shifts(shifts: np.ndarray, vertical: np.ndarray, horizontal: np.ndarray) -> np.ndarray:
    """Return bilinear values at fractional shifts; 0 where frames do not overlap. Negative shifts are at the end."""
    rows, columns = shifts.shape
    top, left = np.floor(vertical).astype(int), np.floor(horizontal).astype(int)
    row_fraction, column_fraction = (vertical - top)[:, None], (horizontal - left)[None, :]
    overlaps = (np.abs(vertical) < rows // 2)[:, None] & (np.abs(horizontal) < columns // 2)[None, :]

    def at(i: int, j: int) -> np.ndarray:
        return shifts[((top + i) % rows)[:, None], ((left + j) % columns)[None, :]]

    upper = (1 - column_fraction) * at(0, 0) + column_fraction * at(0, 1)
    lower = (1 - column_fraction) * at(1, 0) + column_fraction * at(1, 1)
    return overlaps * ((1 - row_fraction) * upper + row_fraction * lower)
