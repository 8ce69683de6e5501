"""CPU, memory, GPU and disk use, added to the metrics of each log."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import psutil

from bottega.core.callback import Callback, Progress


class Resources(Callback):
    """Adds resource use to the metrics; must come before the callbacks that write them."""

    name = "resources"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process = psutil.Process()

    def start(self, progress: Progress) -> None:
        self._process.cpu_percent()  # the first call only starts the measurement

    def after_step(self, progress: Progress, metrics: dict[str, float]) -> None:
        metrics["cpu_percent"] = self._process.cpu_percent()
        metrics["ram_gib"] = self._process.memory_info().rss / 2**30
        metrics["disk_free_gib"] = shutil.disk_usage(self.folder).free / 2**30
        # On a GPU torch is loaded already; on a CPU there is nothing to measure.
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            metrics["gpu_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
            try:
                metrics["gpu_percent"] = float(torch.cuda.utilization())
            except Exception:  # without the extra bottega[gpu], or if the driver does not report it
                pass
