"""The image source of benchmarks/data.py, in its own module so that worker processes can import it."""

from __future__ import annotations

from typing import Any

import numpy as np

from bottega.data.image.decode import decode_image
from bottega.data.sources.source import Source
from bottega.data.tables.shards import Table


class Crops(Source):
    """Center crops of 224 x 224 pixels from images of 256 x 256, as floats."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        images = np.empty((len(index), 224, 224, 3), np.float32)
        for position, number in enumerate(index.tolist()):
            stored = self.table.row("image", number)
            pixels = decode_image(stored, channels=3) if isinstance(stored, bytes) else stored
            # One image at a time, while it is in the CPU cache.
            np.subtract(pixels[16:240, 16:240], np.float32(127.5), out=images[position])
            images[position] /= np.float32(64)
        return {"image": images, "label": np.array([int(self.table.row("label", n)) for n in index.tolist()])}

    @property
    def fingerprint(self) -> str:
        return str(len(self))

    def describe(self, index: int, epoch: int) -> str:
        return str(index)
