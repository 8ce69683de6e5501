"""The motion direction of an object is detected in noise, over a background, and when it leaves the frame."""

from __future__ import annotations

import numpy as np
import pytest

from bottega.core.noise import numpy_generator
from bottega.tasks.metrics.motion import DIRECTIONS, detect_motion_direction

SIDE = 16
STEPS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}


def render_blob(blob: np.ndarray, y: float, x: float) -> np.ndarray:
    """Return a frame with the 8 x 8 blob at (y, x), interpolated bilinearly and clipped at the border."""
    rows, columns = np.arange(SIDE) - y, np.arange(SIDE) - x
    weights = [np.maximum(0, 1 - np.abs(coordinates[:, None] - np.arange(8))) for coordinates in (rows, columns)]
    return weights[0] @ blob @ weights[1].T


def video(direction: str, speed: float, rng: np.random.Generator, *, frames: int = 8, noise: float = 0.1) -> np.ndarray:
    blob, (y, x) = rng.uniform(0, 1, (8, 8)), rng.uniform(2, 6, 2)
    down, right = STEPS[direction]
    clean = [render_blob(blob, y + down * speed * t, x + right * speed * t) for t in range(frames)]
    return np.stack(clean) + rng.normal(0, noise, (frames, SIDE, SIDE))


@pytest.mark.parametrize("frames", [4, 8, 16])
def test_the_direction_of_a_random_blob_in_noise(frames: int) -> None:
    """At 2 pixels a frame it has left the image after 7 frames at most."""
    rng = numpy_generator(0, "blobs", frames)
    expected = [DIRECTIONS[i % 4] for i in range(200)]
    directions = [
        detect_motion_direction(video(direction, rng.uniform(0.5, 2), rng, frames=frames)) for direction in expected
    ]
    assert np.mean([direction == answer for direction, answer in zip(expected, directions, strict=True)]) >= 0.99


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_level_scale_and_colours_do_not_matter(direction: str) -> None:
    plain = video(direction, 1, numpy_generator(1, direction))
    assert detect_motion_direction(plain) == direction
    assert detect_motion_direction(2 * plain - 1) == direction
    assert detect_motion_direction(np.clip(255 * plain, 0, 255).astype(np.uint8)) == direction
    assert detect_motion_direction(1 - plain) == direction
    # Two channels that cancel in the mean.
    assert detect_motion_direction(np.stack([plain, 1 - plain, 0 * plain], axis=-1)) == direction


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_static_background_is_ignored(direction: str) -> None:
    rng = numpy_generator(2, direction)
    still = rng.uniform(0, 0.6, (SIDE, SIDE))
    directions = [
        detect_motion_direction(np.maximum(still, video(direction, 1, rng, noise=0)) + rng.normal(0, 0.1, still.shape))
        for _ in "12345"
    ]
    assert directions == [direction] * 5


def test_a_reversed_video_has_the_opposite_direction() -> None:
    for direction, other in (("left", "right"), ("up", "down")):
        assert detect_motion_direction(video(direction, 1, numpy_generator(3, direction))[::-1]) == other


def test_static_and_random_videos_have_no_direction() -> None:
    rng = numpy_generator(4, "still")
    assert [detect_motion_direction(video("left", 0, rng, noise=noise)) for noise in (0, 0.05, 0.1, 0.3)] == [
        "none"
    ] * 4
    assert [detect_motion_direction(rng.normal(0, 1, (8, SIDE, SIDE))) for _ in range(20)] == ["none"] * 20
    assert detect_motion_direction(np.zeros((8, SIDE, SIDE))) == "none"
    assert detect_motion_direction(np.full((8, SIDE, SIDE), np.nan)) == "none"
    assert detect_motion_direction(rng.normal(0, 1, (1, SIDE, SIDE))) == "none"
