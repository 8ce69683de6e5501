"""`bottega doctor`: versions, devices, memory and disk of this machine, and which extras are missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from typing import Any

import psutil

PACKAGE_EXTRAS = {
    "torch": "",
    "numpy": "",
    "scipy": "",
    "safetensors": "",
    "tokenizers": "",
    "tensorboard": "",
    "pillow": "data",
    "pyarrow": "data",
    "fsspec": "data",
    "zstandard": "data",
    "gigatoken": "data",
    "transformers": "hub",
    "datasets": "hub",
    "peft": "hub",
    "diffusers": "hub",
    "matplotlib": "plots",
    "wandb": "wandb",
    "nvidia-ml-py": "gpu",
    "soundfile": "audio",
    "soxr": "audio",
    "av": "video",
    "jax": "jax",
    "optuna": "tune",
}
"""Package -> the extra that installs it; "" marks a required package, which every installation has."""


def examine_environment() -> dict[str, Any]:
    """Return versions, devices, memory and disk of this machine, and one line for each problem."""
    versions = {name: _find_version(name) for name in PACKAGE_EXTRAS}
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "ram_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "disk_free_gib": round(shutil.disk_usage(".").free / 2**30, 1),
        "packages": versions,
        "devices": _list_devices() if versions["torch"] else [],
        "problems": [],
        "notes": [],
        "exit_code": 0,
    }
    problems = report["problems"]
    problems += [
        f"{name} is missing; pip install bottega"
        for name, extra in PACKAGE_EXTRAS.items()
        if not extra and not versions[name]
    ]
    if report["disk_free_gib"] < 2:
        problems.append(
            f"only {report['disk_free_gib']} GiB of disk are free here, so checkpoints may not fit; free some space"
        )
    if any(device.startswith("cuda") for device in report["devices"]) and not versions["nvidia-ml-py"]:
        report["notes"].append("GPU utilisation is only logged with nvidia-ml-py; pip install 'bottega[gpu]'")
    if problems:
        report["exit_code"] = 5
    return report


def format_report(report: dict[str, Any]) -> str:
    """Format a report for the terminal."""
    lines = [
        f"python       {report['python']} on {report['platform']}",
        f"machine      {report['cores']} cores, {report['ram_gib']} GiB of memory, {report['disk_free_gib']} GiB of disk free",
    ]
    lines += [f"device       {device}" for device in report["devices"]]
    for name, version in report["packages"].items():
        extra = PACKAGE_EXTRAS[name]
        requirement = f"optional: bottega[{extra}]" if extra else "required"
        lines.append(f"{name:<13}{version or f'not installed ({requirement})'}")
    lines += [f"note         {note}" for note in report["notes"]]
    lines += [f"problem      {problem}" for problem in report["problems"]] or ["no problems found"]
    return "\n".join(lines)


def _find_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _list_devices() -> list[str]:
    import torch

    devices = [f"cpu ({torch.get_num_threads()} threads)"]
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        bf16 = "bf16" if torch.cuda.is_bf16_supported() else "no bf16"
        devices.append(f"cuda:{i} {properties.name}, {properties.total_memory / 2**30:.0f} GiB, {bf16}")
    if torch.backends.mps.is_available():
        devices.append("mps (Apple GPU)")
    return devices
