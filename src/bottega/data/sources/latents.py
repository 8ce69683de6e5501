"""Latents that were computed beforehand: kept in the cache as a table, and served in place of what they were made from.

The numbers are those of a frozen autoencoder, which stands outside the data layer: it is handed in as a function.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import numpy as np

from bottega.core.errors import UsageError
from bottega.data.audio.mel import find_deterministic_samples
from bottega.data.audio.source import AudioRows
from bottega.data.image.source import ImageRows
from bottega.data.sources.source import Source
from bottega.data.tables.cache import default_cache, get_or_build
from bottega.data.tables.shards import Column, ShardWriter, Table
from bottega.data.video.source import VideoRows

FIELD = "latent"
# Raised when the same inputs would give other files, so that old entries are left alone.
FORMAT = 1
CHUNK = 64

MediaRows = ImageRows | AudioRows | VideoRows
EncodeFunction = Callable[[np.ndarray], np.ndarray]
"""Samples [n, ...] to mean and log variance, one after the other, float32 [n, *grid, 2 z]."""


@final
class LatentRows(Source):
    """latent float32 [b, *grid, 2 z], and what each sample is: condition [b, d], and label [b] where there are classes.

    `source` are the samples as they were, `latents` the table that was made of them.
    """

    def __init__(self, source: MediaRows, latents: Table) -> None:
        assert len(source) == len(latents), "latents of other samples"
        self.source, self.latents = source, latents

    @property
    def table(self) -> Table:
        """Of the samples, with all that is said of them."""
        return self.source.table

    def __len__(self) -> int:
        return len(self.latents)

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        conditions = self.source.conditions
        return {FIELD: self.latents.gather(FIELD, index), **(conditions.rows(index) if conditions is not None else {})}

    @property
    def fingerprint(self) -> str:
        # A table of latents lies under the hash of all it was made from.
        return hashlib.sha256(f"{self.source.fingerprint} {self.latents.folder.name}".encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        sides = " x ".join(map(str, self.latents.columns[FIELD].shape[:-1]))
        return f"{self.source.describe(index, epoch)}\nseen as latents of {sides}, computed beforehand"


def compute_latents(
    samples: Source,
    key: str,
    *,
    content: str,
    shape: tuple[int, ...],
    encode: EncodeFunction,
    progress: Callable[[str, int, int], None],
    cache: Path | None = None,
) -> Table:
    """The latents of all samples, made once; `content` is the hash of the autoencoder, `shape` that of its latents."""
    stated = ("latents", FORMAT, samples.fingerprint, key, content, shape)
    name = hashlib.sha256(repr(stated).encode()).hexdigest()[:32]
    column = Column("<f4", (*shape[:-1], 2 * shape[-1]))

    def build(folder: Path) -> None:
        with ShardWriter(folder, {FIELD: column}) as writer:
            for start in range(0, len(samples), CHUNK):
                index = np.arange(start, min(start + CHUNK, len(samples)))
                for row in encode(samples.rows(index, np.zeros_like(index))[key]):
                    writer.add({FIELD: row})
                progress("latents", int(index[-1]) + 1, len(samples))

    return Table(get_or_build(cache or default_cache(), name, build))


def check_deterministic(rows: MediaRows) -> None:
    """What is computed once must be the same each time it is seen."""
    if rows.augmentation is not None:
        raise UsageError("data.augmentation: changes samples each time, and data.latents computes them once; keep one")
    if isinstance(rows, AudioRows) and not find_deterministic_samples(rows).all():
        raise UsageError(
            "data.crop: random hears another part of long sounds each time, and data.latents computes one; set "
            "data.crop=centre"
        )
    if isinstance(rows, VideoRows) and rows.clip == "random":
        longest = int(rows.table.lengths("video").max(initial=0))
        if longest > (rows.num_frames - 1) * rows.stride + 1:
            raise UsageError(
                "data.clip: random sees other frames of long videos each time, and data.latents computes one clip; set "
                "data.clip=centre"
            )
