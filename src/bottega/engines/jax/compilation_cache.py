"""The persistent cache of compiled programs: the second start of a run compiles nothing."""

from __future__ import annotations

import os

import jax

from bottega.storage.cache_folder import default_cache

MIN_COMPILE_SECONDS = 0.1
"""Programs that compile faster are not worth a file."""


def use_compilation_cache() -> None:
    """Keep compiled programs in the cache folder, unless JAX_COMPILATION_CACHE_DIR or JAX_ENABLE_COMPILATION_CACHE is set."""
    if os.environ.get("JAX_ENABLE_COMPILATION_CACHE", "").lower() in ("0", "false", "off", "no"):
        return
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        jax.config.update("jax_compilation_cache_dir", str(default_cache() / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
