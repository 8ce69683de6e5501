"""`bottega doctor` on devices: GPUs, drivers and builds of torch, by events of the probe and a fake of torch; one test on a real GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bottega.analysis.doctor import cpu, devices, probes, torch_probe
from bottega.analysis.doctor.cpu import Cpu, read_cpu
from bottega.analysis.doctor.devices import check_devices, check_products, normalize_device, select_device
from bottega.analysis.doctor.probes import ProbeResult
from bottega.core.errors import EnvironmentProblem

GPU = {
    "event": "device",
    "device": "cuda:0",
    "name": "NVIDIA H200",
    "memory": 140 << 30,
    "free": 139 << 30,
    "capability": "9.0",
    "has_bf16": True,
    "has_fp8": True,
}


def build_probe(
    *more: dict[str, Any], driver: dict[str, Any] | None = None, error: str | None = None, **changes: Any
) -> ProbeResult:
    """Events of a machine: the driver, torch with `changes`, the CPU, and `more`."""
    build = {
        "event": "torch",
        "version": "2.13.0+cu130",
        "cuda": "13.0",
        "hip": None,
        "has_cuda": any(event.get("device", "").startswith("cuda") for event in more),
        "cuda_error": None,
        "num_threads": 1,
        "cpu_capability": "AVX2",
        "architectures": [],
        "visible_devices": None,
        **changes,
    }
    events = ({"event": "driver", **(driver or {})}, build, {"event": "device", "device": "cpu", "name": "CPU"}, *more)
    return ProbeResult(events, error)


DRIVER = {"version": "580.159.03", "cuda": "13.0", "num_cards": 1, "num_devices": 1}
BROKEN_DRIVERS = {
    "torch 2.13.0+cpu was built without CUDA, but this machine has an NVIDIA GPU": build_probe(
        driver=DRIVER, version="2.13.0+cpu", cuda=None
    ),
    "torch is built for CUDA 13.0, but the driver supports CUDA 12.4 at most": build_probe(
        driver={**DRIVER, "cuda": "12.4"}
    ),
    "CUDA_VISIBLE_DEVICES='' hides the GPUs": build_probe(driver=DRIVER, visible_devices=""),
    "CUDA_VISIBLE_DEVICES='-1' hides the GPUs": build_probe(driver=DRIVER, visible_devices="-1"),
    "CUDA_VISIBLE_DEVICES='1' hides the GPUs": build_probe(driver=DRIVER, visible_devices="1"),
    "torch is built for CUDA 13.0, but the driver supports CUDA 11.4": build_probe(
        driver={**DRIVER, "cuda": "11.4"}, visible_devices="0"
    ),
    "torch cannot use the NVIDIA GPU of this machine: out of order": build_probe(
        driver=DRIVER, visible_devices="0", cuda_error="out of order"
    ),
    "torch cannot use the NVIDIA GPU of this machine: CUDA unknown error": build_probe(
        driver=DRIVER, cuda_error="CUDA unknown error"
    ),
    "this machine has an NVIDIA GPU (1 on the PCI bus), but its driver is not loaded": build_probe(
        driver={"num_cards": 1, "num_devices": 0}
    ),
    "the NVIDIA driver does not answer (NVML: Driver/library version mismatch)": build_probe(
        driver={"nvml_error": "Driver/library version mismatch", "version": "580.159.03"}
    ),
}


@pytest.mark.parametrize("message", BROKEN_DRIVERS)
def test_why_torch_does_not_use_a_gpu(message: str) -> None:
    """A problem that does not stop training on the CPU; the one line of exit code 5 if the GPU was asked for."""
    probe = BROKEN_DRIVERS[message]
    assert select_device("auto", probe) == "cpu"
    (problem,) = check_devices(probe, "cpu").problems
    assert problem.message.startswith(message)
    assert problem.remedy
    assert not problem.stops_training
    with pytest.raises(EnvironmentProblem) as caught:
        select_device("cuda", probe)
    assert str(caught.value) == f"device: cuda is not available: {problem.message}; {problem.remedy}"


def test_nvml_without_a_gpu_is_not_a_problem() -> None:
    probe = build_probe(driver={"nvml_error": "NVML Shared Library Not Found", "num_cards": 0, "num_devices": 0})
    assert check_devices(probe, "cpu").problems == ()


def test_a_working_gpu_is_described() -> None:
    probe = build_probe(GPU, driver=DRIVER)
    assert [select_device(name, probe) for name in ("auto", "cuda", "cuda:0", "cpu")] == [*["cuda:0"] * 3, "cpu"]
    result = check_devices(probe, "cuda:0")
    lines = dict(result.lines)
    assert lines["cuda:0"] == "NVIDIA H200, 140.0 GiB (139.0 GiB free), capability 9.0, bf16, fp8"
    assert lines["driver"] == "NVIDIA 580.159.03, supports CUDA up to 13.0; torch was built for 13.0"
    assert result.problems == ()
    assert result.notes == ()


def test_a_gpu_that_does_not_answer_stops_training_only_if_it_is_selected() -> None:
    broken = {"event": "device", "device": "cuda:0", "name": "GPU", "error": "CUDA error: device busy"}
    probe = build_probe(broken, driver=DRIVER)
    for selected, stops in (("cuda:0", True), ("cpu", False)):
        (problem,) = check_devices(probe, selected).problems
        assert problem.message == "cuda:0 (GPU) does not answer: CUDA error: device busy"
        assert problem.stops_training is stops


def test_a_gpu_in_use_by_others_is_noted() -> None:
    (note,) = check_devices(build_probe({**GPU, "free": 1 << 30}, driver=DRIVER), "cuda:0").notes
    assert note.startswith("only 1.00 GiB of 140.0 GiB are free on cuda:0")


def test_a_gpu_that_hangs_loses_nothing_before_it() -> None:
    start = {"event": "start", "step": "device cuda:0"}
    probe = build_probe(start, driver=DRIVER, has_cuda=True, error="no answer for 120 s")
    assert select_device("auto", probe) == "cuda:0", "training would use it"
    assert dict(check_devices(probe, "cuda:0").lines)["driver"]
    (problem,) = check_products(probe, "cuda:0").problems
    assert problem.message == "checking device cuda:0 failed: no answer for 120 s"
    assert problem.stops_training
    with pytest.raises(EnvironmentProblem, match="checking device cuda:0 failed: no answer"):
        select_device("cuda", probe)


def test_a_gpu_that_hangs_does_not_stop_training_on_one_whose_name_it_begins_with() -> None:
    start = {"event": "start", "step": "matrix products on cuda:10 in fp32"}
    (problem,) = check_products(build_probe(start, driver=DRIVER, has_cuda=True, error="no answer"), "cuda:1").problems
    assert not problem.stops_training


def test_products_are_reported_by_device_and_precision() -> None:
    rows = [
        {"event": "product", "device": "cpu", "precision": "fp32", "relative_error": 1e-6, "flops_per_second": 1.1e11},
        {
            "event": "product",
            "device": "cuda:0",
            "precision": "fp32",
            "error": "CUDA error: no kernel image is available",
        },
        {"event": "product", "device": "cuda:0", "precision": "bf16", "relative_error": 1e-3, "flops_per_second": 7e14},
    ]
    result = check_products(build_probe(GPU, *rows), "cuda:0")
    assert dict(result.lines) == {"cpu": "fp32 0.11 TFLOP/s", "cuda:0": "fp32 failed, bf16 700 TFLOP/s"}
    (problem,) = result.problems
    assert problem.message == "cuda:0: a matrix product in fp32 fails: CUDA error: no kernel image is available"
    assert problem.remedy.startswith("this torch has no code for the GPU")
    assert problem.stops_training


def test_torch_that_crashes_on_import_is_reported() -> None:
    probe = ProbeResult(({"event": "driver"}, {"event": "start", "step": "import torch"}), "ended by SIGILL")
    result = check_devices(probe, select_device("auto", probe))
    (problem,) = result.problems
    assert problem.message == "torch cannot be imported: ended by SIGILL"
    assert problem.stops_training
    assert dict(result.lines)["cpu"], "the CPU is described without torch"
    assert [select_device(name, probe) for name in ("cpu", "cuda", "cuda:2")] == ["cpu", "cuda:0", "cuda:2"]


def test_more_threads_than_usable_cores_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "read_cpu", lambda: Cpu("model", 64, 64, 2.0))
    result = check_devices(build_probe(num_threads=64), "cpu")
    assert dict(result.lines)["cpu"] == "model, 64 cores of which this process may use 2, 64 threads, AVX2"
    assert result.notes[0].endswith("set OMP_NUM_THREADS=2")


@pytest.mark.parametrize("version", [1, 2])
def test_the_quota_of_a_container_is_read(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / ("pod/job" if version == 2 else "cpu/pod/job")
    group.mkdir(parents=True)
    if version == 2:
        (group / "cpu.max").write_text("max 100000\n")
        (group.parent / "cpu.max").write_text("150000 100000\n")
    else:
        for name, number in {"quota": -1, "period": 100000}.items():
            (group / f"cpu.cfs_{name}_us").write_text(f"{number}\n")
        for name, number in {"quota": 150000, "period": 100000}.items():
            (group.parent / f"cpu.cfs_{name}_us").write_text(f"{number}\n")
    line = "0::/pod/job\n" if version == 2 else "3:cpu,cpuacct:/pod/job\n"
    (tmp_path / "cgroup").write_text(line)
    monkeypatch.setattr(cpu, "CGROUP_FILE", tmp_path / "cgroup")
    monkeypatch.setattr(cpu, "CGROUP_ROOT", tmp_path)
    assert read_cpu().quota == 1.5


def test_a_system_without_proc_has_a_cpu_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CPU_FILE", "CGROUP_FILE", "CGROUP_ROOT"):
        monkeypatch.setattr(cpu, name, tmp_path / "absent")
    monkeypatch.delattr("os.sched_getaffinity")
    assert read_cpu().num_effective >= 1
    assert read_cpu().model


@pytest.mark.parametrize(
    ("name", "normal"), [("gpu", "cuda"), ("gpu:1", "cuda:1"), ("cuda:01", "cuda:1"), ("mps", "mps")]
)
def test_names_of_devices(name: str, normal: str) -> None:
    assert normalize_device(name) == normal


class FakeCuda:
    """torch.cuda with two GPUs: an A100, and a V100 without memory to answer."""

    def __init__(self) -> None:
        self.current = 0

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        self.current = index
        yield

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return including_emulation or self.current == 0

    def get_device_properties(self, index: int) -> Any:
        name, major = (("NVIDIA A100", 8), ("NVIDIA V100", 7))[index]
        return SimpleNamespace(name=name, major=major, minor=0, total_memory=80 << 30)

    def mem_get_info(self, index: int) -> tuple[int, int]:
        if index == 1:
            raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")
        return 70 << 30, 80 << 30


def test_gpus_of_torch_are_described() -> None:
    mps = SimpleNamespace(is_available=lambda: False)
    fake = SimpleNamespace(cuda=FakeCuda(), version=SimpleNamespace(hip=None), backends=SimpleNamespace(mps=mps))
    assert torch_probe.list_device_names(fake) == ["cpu", "cuda:0", "cuda:1"]
    assert torch_probe.list_precisions(fake, "cuda:0") == ["fp32", "bf16", "fp16"]
    assert torch_probe.list_precisions(fake, "cuda:1") == ["fp32", "fp16"]
    first, second = (torch_probe.describe_device(fake, name) for name in ("cuda:0", "cuda:1"))
    assert (first["free"], first["has_bf16"], first["has_fp8"], first["capability"]) == (70 << 30, True, False, "8.0")
    assert second["error"] == "CUDA error: out of memory"
    assert second["name"] == "NVIDIA V100"


def test_the_driver_is_read_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build\nGCC version: 13.3.0\n"
    (tmp_path / "version").write_text(text)
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    for name, vendor, kind in (
        ("gpu", "0x10de", "0x030200"),
        ("sound", "0x10de", "0x040300"),
        ("amd", "0x1002", "0x030000"),
    ):
        (tmp_path / "pci" / name).mkdir(parents=True)
        (tmp_path / "pci" / name / "vendor").write_text(vendor + "\n")
        (tmp_path / "pci" / name / "class").write_text(kind + "\n")
    monkeypatch.setattr(torch_probe, "DRIVER_FILE", tmp_path / "version")
    monkeypatch.setattr(torch_probe, "DEVICE_FOLDER", tmp_path / "dev")
    monkeypatch.setattr(torch_probe, "PCI_FOLDER", tmp_path / "pci")
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    driver = torch_probe.describe_driver()
    assert (driver["version"], driver["num_devices"], driver["num_cards"]) == ("580.159.03", 2, 1)


def test_nvml_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("Driver/library version mismatch")

    monkeypatch.setitem(__import__("sys").modules, "pynvml", SimpleNamespace(nvmlInit=fail))
    assert torch_probe.describe_driver()["nvml_error"] == "Driver/library version mismatch"


def test_products_agree_with_float64() -> None:
    for precision in ("fp32", "bf16"):
        error = torch_probe.compute_relative_error(torch, "cpu", precision)
        assert 0 < error < torch_probe.TOLERANCES[precision] / 2


def test_a_device_is_not_blamed_for_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bottega.engines.backend", None)
    row = torch_probe.check_product(torch, "cpu", "fp32")
    assert row["flops_per_second"] is None
    result = check_products(build_probe({"event": "product", "device": "cpu", "precision": "fp32", **row}), "cpu")
    assert (result.lines, result.problems) == ((("cpu", "fp32 correct"),), ())


@pytest.mark.parametrize("wrong", [0.9, float("nan")])
def test_a_wrong_product_is_an_error(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: torch.mm(a, b) * wrong)
    assert torch_probe.check_product(torch, "cpu", "fp32")["error"].startswith("wrong result: relative error")


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_a_gpu_multiplies_correctly() -> None:
    probe = devices.run_torch_probe(products=True, on_step=lambda step: None)
    assert probe.error is None
    assert select_device("auto", probe) == "cuda:0"
    result = check_products(probe, "cuda:0")
    assert result.problems == ()
    rows = [row for row in result.values["products"] if row["device"] == "cuda:0"]
    assert {"fp32", "fp16"} <= {row["precision"] for row in rows}
    assert all(row["flops_per_second"] > 0 for row in rows)
    assert check_devices(probe, "cuda:0").values["driver"]["num_devices"] >= 1
    assert np.isfinite([row["relative_error"] for row in rows]).all()
    assert not any(problem.stops_training for problem in check_devices(probe, "cuda:0").problems)
    assert probes.ProbeResult(probe.events).last_step is not None
