"""Use of the machine: rates between two logs, the GPU by its UUID, and counters that are missing."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import psutil
import pytest

from bottega.analysis.verify_resume import TIMING_METRICS
from bottega.callbacks.resources import MACHINE_METRICS, GpuSensors, Resources
from bottega.core.callback import Progress

GIB, MIB = 2**30, 2**20


class Counters:
    """Counters of a machine that transfers a fixed number of bytes in each reading."""

    def __init__(self, **steps: int) -> None:
        self.steps, self.readings = steps, 0

    def __call__(self, *, pernic: bool = False) -> Any:
        self.readings += 1
        counters = types.SimpleNamespace(**{name: 10**9 + step * self.readings for name, step in self.steps.items()})
        loopback = types.SimpleNamespace(bytes_recv=self.readings**9, bytes_sent=self.readings**9)
        return {"eth0": counters, "lo": loopback} if pernic else counters


def log(callback: Resources, **metrics: float) -> dict[str, float]:
    row = dict(metrics)
    callback.after_step(Progress(), row)
    return row


def test_rates_are_those_since_the_last_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "io_counters", Counters(read_bytes=3 * MIB, write_bytes=MIB), raising=False)
    monkeypatch.setattr(psutil, "net_io_counters", Counters(bytes_recv=10 * MIB, bytes_sent=0))
    seconds = iter([0.0, 100.0, 102.0, 106.0])
    callback = Resources(tmp_path, clock=lambda: next(seconds))
    callback.start(Progress())
    for interval in (2.0, 4.0):
        row = log(callback)
        assert {name: value for name, value in row.items() if name.endswith("per_second")} == {
            "disk_read_mib_per_second": 3 / interval,
            "disk_write_mib_per_second": 1 / interval,
            "network_received_mib_per_second": 10 / interval,
            "network_sent_mib_per_second": 0.0,
        }


def refuse(*arguments: Any, **named: Any) -> Any:
    raise PermissionError("hidden")


def test_hidden_counters_leave_their_fields_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "io_counters", refuse, raising=False)
    monkeypatch.setattr(psutil, "disk_io_counters", lambda: None)  # as in a container
    monkeypatch.setattr(psutil, "net_io_counters", refuse)
    monkeypatch.setattr(psutil, "cpu_percent", refuse)
    callback = Resources(tmp_path)
    callback.start(Progress())
    row = log(callback)
    assert set(row) == {"cpu_percent", "ram_gib", "ram_percent", "disk_free_gib"}


def test_disk_of_the_machine_stands_in_for_that_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "io_counters", refuse, raising=False)
    monkeypatch.setattr(psutil, "disk_io_counters", Counters(read_bytes=MIB, write_bytes=0))
    callback = Resources(tmp_path, clock=iter(range(9)).__next__)
    callback.start(Progress())
    assert log(callback)["disk_read_mib_per_second"] == 1.0


def test_a_counter_that_was_reset_leaves_its_rate_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_io_counters", Counters(bytes_recv=-1, bytes_sent=1))
    row = log(Resources(tmp_path))
    assert "network_received_mib_per_second" not in row
    assert row["network_sent_mib_per_second"] > 0


def test_all_fields_are_left_out_when_runs_are_compared(tmp_path: Path) -> None:
    compute = {"flops_per_sample": 1.0, "matmul_rate": 2.0}
    row = log(Resources(tmp_path, compute=compute), samples_per_second=3.0)
    assert set(row) <= set(TIMING_METRICS)
    assert set(MACHINE_METRICS) <= set(TIMING_METRICS)


def test_matmul_share_is_the_fraction_of_the_rate(tmp_path: Path) -> None:
    compute = {"flops_per_sample": 2e9, "matmul_rate": 1e12}
    assert log(Resources(tmp_path, compute=compute), samples_per_second=100.0)["matmul_share"] == pytest.approx(0.2)
    assert "matmul_share" not in log(Resources(tmp_path), samples_per_second=100.0)


class FakeNvml(types.ModuleType):
    """Two GPUs; the process sees only the second, which torch counts as the first."""

    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *, broken: tuple[str, ...] = ()) -> None:
        super().__init__("pynvml")
        self.broken, self.opened = broken, 0

    def nvmlInit(self) -> None:
        self.opened += 1
        if "init" in self.broken:
            raise RuntimeError("driver not loaded")

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> bytes | str:
        return "GPU-aaaa" if handle == 0 else b"GPU-BBBB"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return types.SimpleNamespace(gpu=10 + handle)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return types.SimpleNamespace(used=20 * GIB, total=80 * GIB)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if "power" in self.broken:
            raise RuntimeError("not supported")
        return 300_000 + handle

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 60 + handle


def fake_gpu(monkeypatch: pytest.MonkeyPatch, uuid: str, nvml: types.ModuleType | None) -> None:
    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        max_memory_allocated=lambda: 3 * GIB,
        current_device=lambda: 0,
        get_device_properties=lambda index: types.SimpleNamespace(uuid=uuid),
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]


def test_sensors_are_those_of_the_gpu_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    fake_gpu(monkeypatch, "bbbb", nvml)
    sensors = GpuSensors()
    for _ in range(2):
        assert sensors.read() == {
            "gpu_memory_gib": 3.0,
            "gpu_percent": 11.0,
            "gpu_memory_percent": 25.0,
            "gpu_power_watts": 300.001,
            "gpu_temperature_celsius": 61.0,
        }
    assert nvml.opened == 1


@pytest.mark.parametrize("nvml", [None, FakeNvml(broken=("init",))], ids=["missing", "no driver"])
def test_without_nvml_the_memory_is_still_logged(monkeypatch: pytest.MonkeyPatch, nvml: Any) -> None:
    fake_gpu(monkeypatch, "bbbb", nvml)
    sensors = GpuSensors()
    assert sensors.read() == sensors.read() == {"gpu_memory_gib": 3.0}


def test_a_missing_sensor_and_an_unknown_gpu_leave_fields_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, "bbbb", FakeNvml(broken=("power",)))
    values = GpuSensors().read()
    assert "gpu_power_watts" not in values
    assert values["gpu_percent"] == 11.0
    fake_gpu(monkeypatch, "cccc", FakeNvml())
    assert GpuSensors().read() == {"gpu_memory_gib": 3.0}
