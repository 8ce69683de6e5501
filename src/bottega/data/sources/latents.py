"""Precomputed latents of a frozen autoencoder: a table in the cache, and a source that serves them in place of the media.

The autoencoder is outside the data layer, so it is passed in as a function.
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
from bottega.data.tables.cache import get_or_build
from bottega.data.tables.shards import Column, ShardWriter, Table
from bottega.data.video.source import VideoRows
from bottega.storage.cache_folder import default_cache

LATENT_FIELD = "latent"
# Part of the cache key: raised when the same inputs would give other files.
FORMAT_VERSION = 1
BATCH_SIZE = 64

MediaRows = ImageRows | AudioRows | VideoRows
EncodeFunction = Callable[[np.ndarray], np.ndarray]
"""Samples (n, ...) to concatenated mean and log variance, float32 (n, *grid, 2 * z)."""


@final
class LatentRows(Source):
    """A source of "latent", float32 (batch, *grid, 2 * z), with "condition" (batch, d), and "label" (batch,) if there are classes.

    `source` has the original samples, `latents` is the table computed from them.
    """

    def __init__(self, source: MediaRows, latents: Table) -> None:
        assert len(source) == len(latents), "the latents are not of these samples"
        self.source, self.latents = source, latents

    @property
    def table(self) -> Table:
        """Table of the original samples, with labels and captions."""
        return self.source.table

    def __len__(self) -> int:
        return len(self.latents)

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        conditions = self.source.conditions
        return {
            LATENT_FIELD: self.latents.gather(LATENT_FIELD, index),
            **(conditions.rows(index) if conditions is not None else {}),
        }

    @property
    def fingerprint(self) -> str:
        # The folder of the latents is named by the hash of all their inputs.
        return hashlib.sha256(f"{self.source.fingerprint} {self.latents.folder.name}".encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        sides = " x ".join(map(str, self.latents.columns[LATENT_FIELD].shape[:-1]))
        return f"{self.source.describe(index, epoch)}\nas precomputed latents of {sides}"


def compute_latents(
    samples: Source,
    field: str,
    *,
    model_hash: str,
    shape: tuple[int, ...],
    encode: EncodeFunction,
    progress: Callable[[str, int, int], None],
    cache: Path | None = None,
) -> Table:
    """Return the latents of all samples, computed once; `model_hash` is the hash of the autoencoder, `shape` the shape of a latent.

    `field` is the field of the samples that is encoded.
    """
    inputs = ("latents", FORMAT_VERSION, samples.fingerprint, field, model_hash, shape)
    name = hashlib.sha256(repr(inputs).encode()).hexdigest()[:32]
    column = Column("<f4", (*shape[:-1], 2 * shape[-1]))

    def build(folder: Path) -> None:
        with ShardWriter(folder, {LATENT_FIELD: column}) as writer:
            for start in range(0, len(samples), BATCH_SIZE):
                index = np.arange(start, min(start + BATCH_SIZE, len(samples)))
                for row in encode(samples.rows(index, np.zeros_like(index))[field]):
                    writer.add({LATENT_FIELD: row})
                progress("latents", int(index[-1]) + 1, len(samples))

    return Table(get_or_build(cache or default_cache(), name, build))


def check_deterministic(rows: MediaRows) -> None:
    """Raise UsageError for samples that differ between epochs: their latents cannot be precomputed."""
    if rows.augmentation is not None:
        raise UsageError(
            "data.augmentation changes samples in each epoch, but data.latents computes them once; remove one"
        )
    if isinstance(rows, AudioRows) and not find_deterministic_samples(rows).all():
        raise UsageError(
            "data.crop=random takes another part of long audio in each epoch, but data.latents computes one; set "
            "data.crop=centre"
        )
    if isinstance(rows, VideoRows) and rows.clip == "random":
        max_frames = int(rows.table.lengths("video").max(initial=0))
        if max_frames > (rows.num_frames - 1) * rows.stride + 1:
            raise UsageError(
                "data.clip=random takes other frames of long videos in each epoch, but data.latents computes one clip; set "
                "data.clip=centre"
            )
