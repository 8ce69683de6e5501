"""Embedded datasets, so that every medium trains without a download: written to the cache once, then read as files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from bottega.config.data import Data, Source, SourceKind
from bottega.core.errors import UsageError
from bottega.data.tables.cache import get_or_build
from bottega.storage.cache_folder import default_cache

Medium = Literal["image", "audio", "video"]
D = TypeVar("D", bound=Data)

# Each name ends with a hash of the content, which a test checks, so that the data of another release is never used.
CACHE_NAMES = {
    "image": "digits-4c8d689d662ed659",
    "audio": "tones-9103e7c7cba55082",
    "video": "moving-digits-a063986ae2faca36",
    "stickers": "stickers-c8922accbfc40760",
    "stickers-all": "stickers-all-199c0b2449cbfe77",
}
STICKERS = ("stickers", "stickers-all")
"""Datasets selected by name, as {kind: embedded, path: stickers}; stickers-all includes the held-out pairs."""


def resolve_embedded_sources(data: D, kind: SourceKind, find_path: Callable[[str | None], Path]) -> D:
    """Replace embedded sources by files of a `kind`: `find_path` maps the name in the recipe to the path of the data."""

    def resolve(source: Source | None) -> Source | None:
        if source is None or source.kind != "embedded":
            return source
        return source.model_copy(update={"kind": kind, "path": str(find_path(source.path))})

    changes: dict[str, object] = {
        name: resolve(getattr(data, name)) for name in ("train", "validation", "test", "replay")
    }
    if data.sources is not None:
        changes["sources"] = tuple(map(resolve, data.sources))
    return data.model_copy(update=changes)


def check_embedded_name(name: str | None, *names: str) -> None:
    """Raise `UsageError` if `name` is not None and not one of the datasets `names`."""
    if name is not None and name not in names:
        remedy = f"choose from {', '.join(names)}" if names else "remove path"
        raise UsageError(f"data.train.path: this task has no embedded dataset {name!r}; {remedy}")


def materialise_embedded(medium: Medium, dataset: str | None = None) -> Path:
    """Write an embedded dataset to the cache and return its folder of .npy files, one per field."""
    check_embedded_name(dataset, *(STICKERS if medium == "image" else ()))
    cache_key = dataset or medium
    name = CACHE_NAMES[cache_key].rpartition("-")[0]

    def build(folder: Path) -> None:
        (folder / name).mkdir(exist_ok=True)
        for field, values in _build_fields(cache_key).items():
            # Little-endian everywhere: the bytes of the files are the fingerprint of the data.
            np.save(folder / name / f"{field}.npy", values.astype(values.dtype.newbyteorder("<")), allow_pickle=False)

    return get_or_build(default_cache() / "embedded", CACHE_NAMES[cache_key], build) / name


def _build_fields(dataset: str) -> dict[str, np.ndarray]:
    if dataset in STICKERS:
        from bottega.data.embedded import stickers

        return stickers.build_fields(stickers.TRAINING_PAIRS if dataset == "stickers" else stickers.PAIRS)
    if dataset == "image":
        from bottega.data.embedded import digits

        return digits.build_fields()
    if dataset == "audio":
        from bottega.data.embedded import tones

        return tones.build_fields()
    from bottega.data.embedded import moving_digits

    return moving_digits.build_fields()
