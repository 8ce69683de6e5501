"""Use of CPU, memory, disk, network and GPU, and the share of the device's matmul rate, added to the metrics of each log."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from bottega.core.callback import Callback, Progress

MACHINE_METRICS = (
    "cpu_percent",
    "system_cpu_percent",
    "ram_gib",
    "ram_percent",
    "disk_free_gib",
    "disk_read_mib_per_second",
    "disk_write_mib_per_second",
    "network_received_mib_per_second",
    "network_sent_mib_per_second",
    "gpu_memory_gib",
    "gpu_memory_percent",
    "gpu_percent",
    "gpu_power_watts",
    "gpu_temperature_celsius",
)
"""Metrics of the machine; one that this machine or its driver does not report is left out."""


class Resources(Callback):
    """Adds resource use to the metrics; must come before the callbacks that write them."""

    name = "resources"

    def __init__(
        self,
        folder: Path,
        *,
        compute: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`compute` has the measured `flops_per_sample` and `matmul_rate`, if they could be measured."""
        self.folder, self.clock = folder, clock
        self._compute = dict(compute or {})
        self._process = psutil.Process()
        self._gpu = GpuSensors()
        self._read_at, self._transferred = clock(), read_transferred_bytes(self._process)

    def start(self, progress: Progress) -> None:
        self._process.cpu_percent()  # the first calls only start the measurement
        with suppress(Exception):
            psutil.cpu_percent()
        self._read_at, self._transferred = self.clock(), read_transferred_bytes(self._process)

    def after_step(self, progress: Progress, metrics: dict[str, float]) -> None:
        readings: dict[str, Callable[[], float]] = {
            "cpu_percent": self._process.cpu_percent,
            "system_cpu_percent": psutil.cpu_percent,
            "ram_gib": lambda: self._process.memory_info().rss / 2**30,
            "ram_percent": lambda: psutil.virtual_memory().percent,
            "disk_free_gib": lambda: shutil.disk_usage(self.folder).free / 2**30,
        }
        for name, read in readings.items():
            with suppress(Exception):  # a container may hide any of them, and training does not need it
                metrics[name] = read()
        metrics.update(self._measure_rates())
        metrics.update(self._gpu.read())
        if self._compute and "samples_per_second" in metrics:
            flops_per_second = self._compute["flops_per_sample"] * metrics["samples_per_second"]
            metrics["matmul_share"] = flops_per_second / self._compute["matmul_rate"]

    def _measure_rates(self) -> dict[str, float]:
        """Return the transfer rates in MiB/s since the last log."""
        now, transferred = self.clock(), read_transferred_bytes(self._process)
        seconds, before = max(now - self._read_at, 1e-9), self._transferred
        self._read_at, self._transferred = now, transferred
        # A counter that wrapped or was reset says nothing about this interval.
        return {
            f"{name}_mib_per_second": (count - before[name]) / 2**20 / seconds
            for name, count in transferred.items()
            if name in before and count >= before[name]
        }


def read_transferred_bytes(process: psutil.Process) -> dict[str, int]:
    """Return the bytes read from and written to disk, by this process if the kernel counts that, and those of the network."""
    transferred: dict[str, int] = {}
    # Some systems hide the counters of a process, and containers those of the machine.
    readings: tuple[Callable[[], Any], ...] = (psutil.disk_io_counters, lambda: process.io_counters())
    for read in readings:
        with suppress(Exception):
            disk = read()
            transferred |= {"disk_read": disk.read_bytes, "disk_write": disk.write_bytes}
    with suppress(Exception):
        # Ranks of one machine talk over the loopback interface, which is not the network.
        network = [n for name, n in psutil.net_io_counters(pernic=True).items() if not name.startswith("lo")]
        transferred["network_received"] = sum(interface.bytes_recv for interface in network)
        transferred["network_sent"] = sum(interface.bytes_sent for interface in network)
    return transferred


class GpuSensors:
    """Sensors of the GPU that this process uses, by NVML (the extra `gpu`); without it, the memory that torch reports."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        self._has_opened = False

    def read(self) -> dict[str, float]:
        """Return what the GPU reports; nothing on a machine without one."""
        # On a GPU torch is loaded already; on a CPU there is nothing to measure.
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
            return {}
        values = {"gpu_memory_gib": torch.cuda.max_memory_allocated() / 2**30}
        if not self._has_opened:
            self._has_opened = True
            with suppress(Exception):
                self._open(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))
        if self._handle is None:
            return values
        nvml, handle = self._nvml, self._handle

        def read_memory_percent() -> float:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            return 100.0 * memory.used / memory.total

        readings: dict[str, Callable[[], float]] = {
            "gpu_percent": lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            "gpu_memory_percent": read_memory_percent,
            "gpu_power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "gpu_temperature_celsius": lambda: float(
                nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            ),
        }
        for name, read in readings.items():
            with suppress(Exception):  # some GPUs and virtual machines lack a sensor
                values[name] = read()
        return values

    def _open(self, uuid: str) -> None:
        """Open the GPU by its UUID: NVML counts all GPUs of the machine, torch only those of CUDA_VISIBLE_DEVICES."""
        import pynvml

        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name = pynvml.nvmlDeviceGetUUID(handle)
            name = name.decode() if isinstance(name, bytes) else name
            if name.removeprefix("GPU-").lower() == uuid.removeprefix("GPU-").lower():
                self._nvml, self._handle = pynvml, handle
                return
