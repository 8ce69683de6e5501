"""The embedded digits: 1,797 images of handwritten digits, 8 x 8 pixels, 10 classes.

digits.npz beside this file holds the test set of "Optical Recognition of Handwritten Digits" by E. Alpaydin and
C. Kaynak, UCI Machine Learning Repository, 1998 (https://doi.org/10.24432/C50P49), under CC BY 4.0
(https://creativecommons.org/licenses/by/4.0/): the values and their order are unchanged, only packed.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("digits.npz")
MAX_INK = 16
"""Largest value of a pixel, which counts the black pixels of a 4 x 4 block of the scan."""


def build_fields() -> dict[str, np.ndarray]:
    """Return the fields `image` and `label`."""
    pixels, labels = load_digits()
    return {"image": pixels, "label": labels}


@cache
def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the images, white on black, uint8 `(images, 8, 8)`, and their digits, uint8 `(images,)`."""
    with np.load(FILE, allow_pickle=False) as stored:
        counts, labels = stored["image"], stored["label"]
    pixels = np.rint(np.arange(MAX_INK + 1) * (255 / MAX_INK)).astype(np.uint8)[counts]
    pixels.flags.writeable = labels.flags.writeable = False
    return pixels, labels
