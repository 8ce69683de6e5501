"""Environment of a run: versions, hardware, git state and command, for environment.json and the fingerprint."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from bottega import __version__
from bottega.redaction import redact_values

PACKAGES = {
    "torch": ("torch", "numpy", "safetensors", "tokenizers", "triton"),
    "jax": ("jax", "jaxlib", "flax", "optax", "numpy", "safetensors", "tokenizers"),
}
"""Engine -> packages whose versions may change results."""


def describe_environment(engine: str, device: str, world_size: int) -> dict[str, Any]:
    """Return the contents of environment.json, without environment variables, which may contain secrets."""
    return {
        "bottega": __version__,
        "python": platform.python_version(),
        "packages": read_package_versions(engine),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "device": device,
        "world": world_size,
        "git": _read_git_state(),
        "command": redact_values([os.path.basename(sys.argv[0]), *sys.argv[1:]]),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def build_fingerprint(
    engine: str,
    device: str,
    world_size: int,
    *,
    data: str,
    frozen: Mapping[str, str],
    derived: str | None = None,
    held_out: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the values that must not change for a resumed run to be equal bit for bit, and the hashes of the held-out data."""
    fields: dict[str, Any] = {
        "packages": read_package_versions(engine),
        "device": device,
        "world": world_size,
        "data": data,
        "frozen": dict(frozen),
    }
    if held_out:
        fields["held_out"] = dict(held_out)
    return fields if derived is None else {**fields, "derived": derived}


def read_package_versions(engine: str) -> dict[str, str]:
    """Return the versions of the installed packages that an engine computes with."""
    installed = {}
    for name in PACKAGES[engine]:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def _read_git_state() -> dict[str, Any] | None:
    def run_git(*words: str) -> str | None:
        try:
            process = subprocess.run(
                ["git", "-c", "core.fsmonitor=false", *words], capture_output=True, text=True, timeout=5, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return process.stdout.strip()

    commit = run_git("rev-parse", "HEAD")
    return None if commit is None else {"commit": commit, "changed": bool(run_git("status", "--porcelain", "-uno"))}
