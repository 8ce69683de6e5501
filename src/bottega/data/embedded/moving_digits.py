"""The embedded moving digits: clips of a handwritten digit that crosses a black field; digit and direction are the class."""

from __future__ import annotations

import numpy as np

from bottega.data.embedded.digits import load_digits

COUNT = 4000
FPS = 5
SIDE, DIGIT = 12, 8
# A pixel a frame, from one side to the other, on the middle line. With several lines and speeds, on a field of 16 pixels,
# a model that a CPU can train in ten minutes learnt where things go and not what they are: of its digits 0.15 could be
# read.
NUM_FRAMES = SIDE - DIGIT + 1
MIDDLE = (SIDE - DIGIT) // 2
# How (row, column) change.
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}


def build_fields() -> dict[str, np.ndarray]:
    """Video uint8 [n, frames, height, width], label, fps, and the number of the picture that moves.

    A picture goes several ways, so a split that is to hold out what was never seen is by `picture`: with shares of the
    clips, 363 of 400 that were held out showed a picture that training had seen going elsewhere.
    """
    made = [_clip(number) for number in range(COUNT)]
    return {
        "video": np.stack([video for video, _, _ in made]),
        "label": np.array([label for _, label, _ in made]),
        "fps": np.full(COUNT, FPS, np.uint8),
        "picture": np.array([picture for _, _, picture in made], np.uint16),
    }


def _clip(number: int) -> tuple[np.ndarray, str, int]:
    """Clip i is f(i): what is seen, its class, and the number of its picture. Digits, directions and the pictures of a
    digit take turns, so the classes are equally many, and no class has a picture twice."""
    digit, turn, of_class = number % 10, number // 10 % len(DIRECTIONS), number // (10 * len(DIRECTIONS))
    direction = list(DIRECTIONS)[turn]
    pixels, labels = load_digits()
    pictures = np.flatnonzero(labels == digit)
    chosen = int(pictures[(of_class + len(pictures) * turn // len(DIRECTIONS)) % len(pictures)])
    down, right = DIRECTIONS[direction]
    along = range(NUM_FRAMES) if down + right > 0 else range(NUM_FRAMES - 1, -1, -1)
    video = np.zeros((NUM_FRAMES, SIDE, SIDE), np.uint8)
    for frame, place in zip(video, along, strict=True):
        top, left = (place, MIDDLE) if down else (MIDDLE, place)
        frame[top : top + DIGIT, left : left + DIGIT] = pixels[chosen]
    return video, f"digit={digit} direction={direction}", chosen
