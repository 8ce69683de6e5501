"""The folder of everything that can be built again: prepared data, keywords, compiled programs."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache() -> Path:
    """Return the cache folder: $XDG_CACHE_HOME/bottega, or ~/.cache/bottega."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bottega"
