"""Which frames of a video are seen: a few in a row, at a stride, from its start, its centre or anywhere.

A video that is too short ends on a still: its last frame is repeated. Starting over would put a jump into the motion
that no real video has.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from bottega.core.noise import numpy_generator

ClipPosition = Literal["random", "start", "centre"]


def sample_frame_indices(
    length: int, *, num_frames: int, stride: int, position: ClipPosition, seed: int = 0, epoch: int = 0, index: int = 0
) -> np.ndarray:
    """The numbers [num_frames] of the frames seen of a video of `length`; a random place is f(seed, epoch, index)."""
    room = max(0, length - ((num_frames - 1) * stride + 1))
    if position == "random":
        start = int(numpy_generator(seed, "video clip", epoch, index).integers(room + 1))
    else:
        start = room // 2 if position == "centre" else 0
    return np.minimum(start + stride * np.arange(num_frames), length - 1)
