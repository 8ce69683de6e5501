"""Read one value per sample of a source, through sources that wrap or join it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bottega.data.sources.combine import Concat
from bottega.data.sources.source import Source
from bottega.data.sources.take import Take


def read_per_sample(source: Source, read: Callable[[Source], np.ndarray | None]) -> np.ndarray | None:
    """Return `read(source)` (n,) for each innermost source, taken and joined like the samples; None if it is None for any of them.

    A source that presents another one in a different form, such as audio as spectrograms, has the values of the source it presents.
    """
    if isinstance(source, Take):
        inner = read_per_sample(source.source, read)
        return None if inner is None else inner[: len(source)]
    if isinstance(source, Concat):
        parts = [read_per_sample(part, read) for part in source.sources]
        tiled = [np.tile(part, repeat) for part, repeat in zip(parts, source.repeats, strict=True) if part is not None]
        return np.concatenate(tiled) if len(tiled) == len(parts) else None
    values, wrapped = read(source), getattr(source, "source", None)
    if values is None and isinstance(wrapped, Source) and len(wrapped) == len(source):
        return read_per_sample(wrapped, read)
    return values
