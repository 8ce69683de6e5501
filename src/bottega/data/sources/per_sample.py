"""Read one value per sample of a source, through sources that wrap or join it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bottega.data.sources.combine import Concat
from bottega.data.sources.source import Source
from bottega.data.sources.take import Take


def read_per_sample(source: Source, read: Callable[[Source], np.ndarray | None]) -> np.ndarray | None:
    """Return one value per sample of `source`, (n,): `read` is called on each innermost source, and Take and Concat are applied.

    The result is None if `read` returns None for any of them. A source that wraps another one, such as the spectrograms of
    audio, has the values of the source it wraps.
    """
    if isinstance(source, Take):
        inner = read_per_sample(source.source, read)
        return None if inner is None else inner[: len(source)]
    if isinstance(source, Concat):
        values_by_source = [read_per_sample(part, read) for part in source.sources]
        tiled = [
            np.tile(values, repeat)
            for values, repeat in zip(values_by_source, source.repeats, strict=True)
            if values is not None
        ]
        return np.concatenate(tiled) if len(tiled) == len(values_by_source) else None
    values, wrapped = read(source), getattr(source, "source", None)
    if values is None and isinstance(wrapped, Source) and len(wrapped) == len(source):
        return read_per_sample(wrapped, read)
    return values
