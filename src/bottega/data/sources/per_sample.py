"""What is known of all samples of a source at once, also through what wraps it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bottega.data.sources.combine import Concat
from bottega.data.sources.source import Source
from bottega.data.sources.take import Take


def read_per_sample(source: Source, read: Callable[[Source], np.ndarray | None]) -> np.ndarray | None:
    """`read` [n] of a source that is no beginning and no joining of others, or else of what it shows in another way, such
    as sounds as spectrograms; None where it says nothing of some."""
    if isinstance(source, Take):
        inner = read_per_sample(source.source, read)
        return None if inner is None else inner[: len(source)]
    if isinstance(source, Concat):
        parts = [read_per_sample(one, read) for one in source.sources]
        whole = [np.tile(p, n) for p, n in zip(parts, source.repeats, strict=True) if p is not None]
        return np.concatenate(whole) if len(whole) == len(parts) else None
    found, behind = read(source), getattr(source, "source", None)
    if found is None and isinstance(behind, Source) and len(behind) == len(source):
        return read_per_sample(behind, read)
    return found
