"""Short films of a handwritten digit that crosses a black field: what is seen, and where it goes, are the class."""

from __future__ import annotations

import numpy as np

from bottega.core.noise import generator
from bottega.data.embedded.digits import digits

COUNT = 4000
NUM_FRAMES = 8
FPS = 8
SIDE, DIGIT = 16, 8
ROOM = SIDE - DIGIT
# Over a whole clip, in pixels. Less than half the room is hard to tell from a digit that stands.
TRAVELS = range(4, ROOM + 1)
# How (row, column) change.
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}


def fields() -> dict[str, np.ndarray]:
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
    digit take turns.

    So the classes are equally many, and no class has a picture twice: drawn at random, six clips came out alike, some
    of them on both sides of a split.
    """
    digit, turn, of_class = number % 10, number // 10 % len(DIRECTIONS), number // (10 * len(DIRECTIONS))
    direction = list(DIRECTIONS)[turn]
    speed, start, across = generator("moving digits", number).random(3)
    pixels, labels = digits()
    pictures = np.flatnonzero(labels == digit)
    chosen = int(pictures[(of_class + len(pictures) * turn // len(DIRECTIONS)) % len(pictures)])
    travel = TRAVELS[int(speed * len(TRAVELS))]
    # Whole pixels, the digit always in full view: at 8 x 8, what lies between two pixels is a blur.
    way = (np.arange(NUM_FRAMES) * travel * 2 + NUM_FRAMES - 1) // (2 * (NUM_FRAMES - 1))
    along = int(start * (ROOM - travel + 1)) + way
    down, right = DIRECTIONS[direction]
    if down + right < 0:
        along = ROOM - along
    video = np.zeros((NUM_FRAMES, SIDE, SIDE), np.uint8)
    for frame, place in zip(video, along.tolist(), strict=True):
        top, left = (place, int(across * (ROOM + 1))) if down else (int(across * (ROOM + 1)), place)
        frame[top : top + DIGIT, left : left + DIGIT] = pixels[chosen]
    return video, f"digit={digit} direction={direction}", chosen
