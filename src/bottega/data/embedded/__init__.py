"""Data that come with the program, so that every medium trains without a download: written once, then read like others'."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from bottega.data.cache import cached, default_cache

Medium = Literal["image", "audio", "video"]

# By the hash of what is written (a test compares), so that data of another release are never taken for these.
NAMES = {
    "image": "digits-4c8d689d662ed659",
    "audio": "tones-9103e7c7cba55082",
    "video": "moving-digits-72884b0b2c56ed14",
}


def materialise(medium: Medium) -> Path:
    """The folder of .npy files, one a field, that the numpy reader takes for a table with labels."""
    name = NAMES[medium].rpartition("-")[0]

    def build(folder: Path) -> None:
        (folder / name).mkdir(exist_ok=True)
        for field, values in _fields(medium).items():
            # Little-endian everywhere: the bytes of the files are the fingerprint of the data.
            np.save(folder / name / f"{field}.npy", values.astype(values.dtype.newbyteorder("<")), allow_pickle=False)

    return cached(default_cache() / "embedded", NAMES[medium], build) / name


def _fields(medium: Medium) -> dict[str, np.ndarray]:
    if medium == "image":
        from bottega.data.embedded import digits

        return digits.fields()
    if medium == "audio":
        from bottega.data.embedded import tones

        return tones.fields()
    from bottega.data.embedded import moving

    return moving.fields()
