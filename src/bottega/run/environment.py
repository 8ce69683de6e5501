"""Where a run happened: versions, hardware, git state and command, for environment.json and the fingerprint."""

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
from bottega.config.credentials import strip_credentials_in_text

PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "triton")


def describe_environment(device: str, world: int) -> dict[str, Any]:
    """No environment variables: that is where people keep their secrets."""
    return {
        "bottega": __version__,
        "python": platform.python_version(),
        "packages": package_versions(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "device": device,
        "world": world,
        "git": _git(),
        "command": [os.path.basename(sys.argv[0]), *map(strip_credentials_in_text, sys.argv[1:])],
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def build_fingerprint(
    device: str,
    world: int,
    *,
    data: str,
    frozen: Mapping[str, str],
    derived: str | None = None,
    held_out: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What must be equal for a resumed run to be equal bit for bit; and by `held_out`, what it is measured on."""
    found = {"packages": package_versions(), "device": device, "world": world, "data": data, "frozen": dict(frozen)}
    if held_out:
        found["held_out"] = dict(held_out)
    return found if derived is None else {**found, "derived": derived}


def package_versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git() -> dict[str, Any] | None:
    def ask(*words: str) -> str | None:
        try:
            answer = subprocess.run(
                ["git", "-c", "core.fsmonitor=false", *words], capture_output=True, text=True, timeout=5, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return answer.stdout.strip()

    commit = ask("rev-parse", "HEAD")
    return None if commit is None else {"commit": commit, "changed": bool(ask("status", "--porcelain", "-uno"))}
