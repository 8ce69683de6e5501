"""Check the devices: CPU, GPUs and their driver against torch's build, and matrix products on each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from bottega.analysis.doctor.check_result import CheckResult, Problem
from bottega.analysis.doctor.cpu import Cpu, read_cpu
from bottega.analysis.doctor.probes import ProbeResult, build_probe_command, run_probes
from bottega.analysis.doctor.requirements import read_version
from bottega.core.errors import EnvironmentProblem, UsageError
from bottega.measurements import format_bytes

PRODUCT_SECONDS = 120.0
MIN_FREE_SHARE = 0.1
INSTALL_TORCH = "https://pytorch.org/get-started/locally"


def run_torch_probe(*, products: bool, on_step: Callable[[str], None]) -> ProbeResult:
    """Describe driver, torch and devices in a child process, and with `products` multiply matrices there."""
    command = build_probe_command("torch_probe", {"products": products})
    return run_probes([command], seconds=PRODUCT_SECONDS, on_step=on_step)[0]


def normalize_device(device: str) -> str:
    """Return a device's name as torch writes it, without checking that it exists; raise UsageError for other words."""
    name = re.sub(r"^gpu(?=$|:)", "cuda", device)
    if not re.fullmatch(r"auto|cpu(:0)?|mps(:0)?|cuda(:\d{1,4})?", name, re.ASCII):
        raise UsageError(f"--device {device}: not a device; choose from auto, cpu, cuda, cuda:N, mps")
    return f"cuda:{int(name[5:])}" if name.startswith("cuda:") else name.partition(":")[0]


def select_device(device: str, probe: ProbeResult) -> str:
    """Return the device that training would use, such as cuda:0; raise EnvironmentProblem with the reason if it is absent.

    Without torch nothing is known about devices, and its absence is a problem of the report.
    """
    names = [str(row["device"]) for row in probe.select("device")]
    torch = next(iter(probe.select("torch")), None)
    if device == "auto":  # a GPU that torch counts is selected even if it does not answer
        return "cuda:0" if torch is not None and torch["has_cuda"] else "mps" if "mps" in names else "cpu"
    name = "cuda:0" if device == "cuda" else device
    if name in names or torch is None:
        return name
    reasons = [problem for problem in _find_driver_problems(probe, is_needed=True) if name.startswith("cuda")]
    if reasons:
        reason = f"{reasons[0].message}; {reasons[0].remedy}"
    elif probe.error is not None:
        reason = f"checking {probe.last_step} failed: {probe.error}"
    else:
        build = "" if torch["cuda"] or torch["hip"] or not name.startswith("cuda") else ", built without CUDA,"
        reason = f"torch {torch['version']}{build} finds only {', '.join(names)}"
    raise EnvironmentProblem(f"device: {device} is not available: {reason}")


def check_devices(probe: ProbeResult, selected: str, *, is_import_explained: bool = False) -> CheckResult:
    """Report CPU, torch, GPUs and driver; problems of the selected device stop training.

    `is_import_explained`: why torch cannot be imported is reported already.
    """
    cpu = read_cpu()
    torch = next(iter(probe.select("torch")), None)
    driver = next(iter(probe.select("driver")), {})
    devices = [row for row in probe.select("device") if row["device"] != "cpu"]
    lines = [("cpu", _describe_cpu(cpu, torch))]
    if torch is not None:
        lines.append(("torch", _describe_build(torch)))
    if driver.get("version") or driver.get("cuda"):
        lines.append(("driver", f"NVIDIA {driver.get('version') or ''}".strip() + _describe_driver_cuda(driver, torch)))
    lines += [(row["device"], _describe_gpu(row)) for row in devices]
    if torch is not None:
        lines.append(("selected", f"{selected}, the device that training would use"))
    import_problems = () if is_import_explained else _find_import_problems(probe)
    problems = [*import_problems, *_find_driver_problems(probe, is_needed=selected.startswith("cuda"))]
    for row in devices:
        if "error" in row:
            problems.append(
                Problem(
                    row["device"],
                    f"{row['device']} ({row['name']}) does not answer: {row['error']}",
                    "end other processes that use it (nvidia-smi lists them), or reset it; device=cpu trains without it",
                    stops_training=row["device"] == selected,
                )
            )
    values = {"cpu": asdict(cpu), "torch": torch, "driver": driver, "devices": probe.select("device")}
    return CheckResult("devices", tuple(lines), values, tuple(problems), tuple(_list_notes(cpu, torch, devices)))


def check_products(probe: ProbeResult, selected: str) -> CheckResult:
    """Report whether matrix products are correct and how fast they are, for each device and precision."""
    lines, problems = [], []
    products = probe.select("product")
    for device in dict.fromkeys(row["device"] for row in products):
        rows = [row for row in products if row["device"] == device]
        rates = [f"{row['precision']} {_describe_rate(row)}" for row in rows]
        lines.append((device, ", ".join(rates)))
        problems += [
            Problem(
                device,
                f"{device}: a matrix product in {row['precision']} fails: {row['error']}",
                _choose_product_remedy(row["error"]),
                # fp32 is what every training needs; the other precisions can be switched off.
                stops_training=device == selected and row["precision"] == "fp32",
            )
            for row in rows
            if "error" in row
        ]
    if probe.error is not None and probe.select("torch"):
        step = probe.last_step or "the devices"
        problems.append(
            Problem(
                "devices",
                f"checking {step} failed: {probe.error}",
                "if it happens again, restart the machine, or train on another device (device=cpu)",
                stops_training=selected in step.split(),
            )
        )
    return CheckResult("matrix products", tuple(lines), {"products": products}, tuple(problems))


def _find_import_problems(probe: ProbeResult) -> Iterator[Problem]:
    # If it is not installed at all, that is among the problems of packages.
    is_reported = read_version("torch") is None and read_version("bottega") is not None
    if not probe.select("torch") and not is_reported:
        remedy = f"pip install --force-reinstall torch, or see {INSTALL_TORCH}"
        yield Problem("torch", f"torch cannot be imported: {probe.error}", remedy, stops_training=True)


def _find_driver_problems(probe: ProbeResult, *, is_needed: bool) -> Iterator[Problem]:
    """Yield why torch cannot use an NVIDIA GPU that this machine has; they stop training only if a GPU was asked for."""
    driver = next(iter(probe.select("driver")), {})
    torch = next(iter(probe.select("torch")), None)
    has_gpu = driver.get("num_cards") or driver.get("num_devices") or driver.get("version")
    if (error := driver.get("nvml_error")) and has_gpu:  # the package may be installed on a machine without a GPU
        yield Problem(
            "driver",
            f"the NVIDIA driver does not answer (NVML: {error})",
            "restart the machine after an update of the driver; in a container, start it with GPUs (docker run --gpus all)",
            stops_training=is_needed and not (torch and torch["has_cuda"]),
        )
    num_devices, num_cards = driver.get("num_devices", 0), driver.get("num_cards", 0)
    if num_cards and not num_devices and not driver.get("version"):
        yield Problem(
            "driver",
            f"this machine has an NVIDIA GPU ({num_cards} on the PCI bus), but its driver is not loaded",
            "install the NVIDIA driver, or start the container with GPUs (docker run --gpus all)",
            stops_training=is_needed,
        )
    if torch is None or torch["has_cuda"] or not num_devices:
        return
    if torch["cuda"] is None and torch["hip"] is None:
        newest = f"CUDA {driver['cuda']} or older" if driver.get("cuda") else "CUDA"
        message = f"torch {torch['version']} was built without CUDA, but this machine has an NVIDIA GPU"
        remedy = f"install a torch built for {newest}: {INSTALL_TORCH}"
    elif torch["cuda"] and driver.get("cuda") and _major(torch["cuda"]) > _major(driver["cuda"]):
        message = f"torch is built for CUDA {torch['cuda']}, but the driver supports CUDA {driver['cuda']} at most"
        remedy = f"update the driver, or install a torch built for CUDA {driver['cuda']} or older: {INSTALL_TORCH}"
    elif torch["visible_devices"] is not None and not _names_existing_gpu(torch["visible_devices"], num_devices):
        message = f"CUDA_VISIBLE_DEVICES={torch['visible_devices']!r} hides the GPUs of this machine"
        remedy = "unset it, or name existing GPUs, such as CUDA_VISIBLE_DEVICES=0"
    else:
        message = f"torch cannot use the NVIDIA GPU of this machine: {torch['cuda_error'] or 'it gives no reason'}"
        remedy = "check that nvidia-smi works, and that /dev/nvidia* can be read"
    yield Problem("driver", message, remedy, stops_training=is_needed)


def _names_existing_gpu(variable: str, num_devices: int) -> bool:
    """Return whether the first entry of CUDA_VISIBLE_DEVICES is a GPU that exists; a UUID is taken for one."""
    first = variable.split(",")[0].strip()
    return first.startswith(("GPU-", "MIG-")) or (first.isdecimal() and int(first) < num_devices)


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _list_notes(cpu: Cpu, torch: Mapping[str, Any] | None, devices: list[dict[str, Any]]) -> Iterator[str]:
    if torch is not None and torch["num_threads"] > cpu.num_effective:
        yield (
            f"torch would use {torch['num_threads']} threads on {cpu.num_effective:g} usable cores, which is slow; set "
            f"OMP_NUM_THREADS={max(1, int(cpu.num_effective))}"
        )
    for row in devices:
        if "free" in row and row["free"] < MIN_FREE_SHARE * row["memory"]:
            free, total = format_bytes(row["free"]), format_bytes(row["memory"])
            yield f"only {free} of {total} are free on {row['device']}; nvidia-smi lists the processes that use it"


def _describe_cpu(cpu: Cpu, torch: Mapping[str, Any] | None) -> str:
    text = f"{cpu.model}, {cpu.num_cores} core{'s' if cpu.num_cores != 1 else ''}"
    if cpu.num_effective < cpu.num_cores:
        text += f" of which this process may use {cpu.num_effective:g}"
    if torch is None:
        return text
    num_threads = torch["num_threads"]
    return f"{text}, {num_threads} thread{'s' if num_threads != 1 else ''}, {torch['cpu_capability']}"


def _describe_build(torch: Mapping[str, Any]) -> str:
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}" if torch["hip"] else None
    return f"{torch['version']}, built {f'for {build}' if build else 'without CUDA'}"


def _describe_driver_cuda(driver: Mapping[str, Any], torch: Mapping[str, Any] | None) -> str:
    if not driver.get("cuda"):
        return ""
    needed = f"; torch was built for {torch['cuda']}" if torch is not None and torch["cuda"] else ""
    return f", supports CUDA up to {driver['cuda']}{needed}"


def _describe_gpu(row: Mapping[str, Any]) -> str:
    if "memory" not in row:
        return str(row["name"])
    free = f" ({format_bytes(row['free'])} free)" if "free" in row else ""
    bf16, fp8 = ("bf16" if row["has_bf16"] else "no bf16"), ("fp8" if row["has_fp8"] else "no fp8")
    return f"{row['name']}, {format_bytes(row['memory'])}{free}, capability {row['capability']}, {bf16}, {fp8}"


def _describe_rate(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return "failed"
    if row["flops_per_second"] is None:
        return "correct"
    rate = row["flops_per_second"] / 1e12
    return f"{rate:,.0f} TFLOP/s" if rate >= 100 else f"{rate:.3g} TFLOP/s"


def _choose_product_remedy(error: str) -> str:
    if "No module named" in error:
        return "install the missing package"
    if "no kernel image" in error or "not compatible" in error:
        return f"this torch has no code for the GPU; install one built for it: {INSTALL_TORCH}"
    if "out of memory" in error:
        return "end other processes that use the GPU (nvidia-smi lists them)"
    return "reset the GPU (nvidia-smi --gpu-reset) or restart the machine; device=cpu trains without it"
