"""Probe of torch in a process of its own: driver, build, devices, and matrix products on each device."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from bottega.analysis.doctor.probes import emit, run_probe_main
from bottega.core.errors import first_line

DRIVER_FILE, DEVICE_FOLDER, PCI_FOLDER = Path("/proc/driver/nvidia/version"), Path("/dev"), Path("/sys/bus/pci/devices")
NVIDIA_VENDOR, DISPLAY_CLASS = "0x10de", "0x03"
PRODUCT_SIZE = 512
"""Rows of the square matrices whose product is compared; the rate is measured with larger ones."""
TOLERANCES = {"fp32": 1e-5, "bf16": 1.6e-2, "fp16": 2e-3}
"""Largest relative error of a product: four roundings of the result in half precision; in fp32, sums of 512 terms in any order."""
TF32_TOLERANCE = 5e-3
"""The same for fp32 where the environment makes the GPU round to TF32, ten bits."""


def probe(options: dict[str, Any]) -> None:
    """Emit `driver`, `torch`, `device` for each device and, with the option `products`, `product` for each precision."""
    emit("start", step="the GPU driver")
    emit("driver", **describe_driver())
    emit("start", step="import torch")
    import torch

    emit("torch", **describe_torch(torch))
    names = list_device_names(torch)
    for name in names:
        emit("start", step=f"device {name}")
        emit("device", **describe_device(torch, name))
    if not options["products"]:
        return
    for name in names:
        for precision in list_precisions(torch, name):
            emit("start", step=f"matrix products on {name} in {precision}")
            emit("product", device=name, precision=precision, **check_product(torch, name, precision))


def describe_driver() -> dict[str, Any]:
    """Return what is known of NVIDIA GPUs and their driver without torch."""
    cards = [path for path in _list_folder(PCI_FOLDER) if _is_nvidia_display(path)]
    devices = [path for path in _list_folder(DEVICE_FOLDER) if re.fullmatch(r"nvidia\d+", path.name)]
    return {
        "version": _read_driver_version(),
        "cuda": _read_driver_cuda(),
        "num_cards": len(cards),
        "num_devices": len(devices),
        **_read_nvml(),
    }


def _list_folder(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # not Linux, or hidden by a container
        return []


def _is_nvidia_display(path: Path) -> bool:
    try:
        is_nvidia = (path / "vendor").read_text().strip() == NVIDIA_VENDOR
        return is_nvidia and (path / "class").read_text().startswith(DISPLAY_CLASS)
    except OSError:
        return False


def _read_driver_version() -> str | None:
    with suppress(OSError):
        if match := re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", DRIVER_FILE.read_text().partition("\n")[0]):
            return match[0]
    return None


def _read_driver_cuda() -> str | None:
    """Return the newest CUDA version that the driver supports."""
    version = ctypes.c_int()
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        if library.cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value:
            return f"{version.value // 1000}.{version.value % 1000 // 10}"
    return None


def _read_nvml() -> dict[str, Any]:
    """Return the driver's version and the number of GPUs by NVML; `nvml_error` if it fails, nothing if it is not installed."""
    try:
        import pynvml
    except ImportError:
        return {}
    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        return {
            "version": version.decode() if isinstance(version, bytes) else str(version),
            "num_devices": int(pynvml.nvmlDeviceGetCount()),
        }
    except Exception as error:
        return {"nvml_error": first_line(error)}


def describe_torch(torch: Any) -> dict[str, Any]:
    """Return torch's version, build, threads, and why CUDA is not available where it was built for it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        has_cuda = bool(torch.cuda.is_available())
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "has_cuda": has_cuda,
        "cuda_error": None if has_cuda or not caught else first_line(Warning(caught[-1].message)),
        "num_threads": int(torch.get_num_threads()),
        "cpu_capability": str(torch.backends.cpu.get_cpu_capability()),
        "architectures": list(torch.cuda.get_arch_list()) if has_cuda else [],
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def list_device_names(torch: Any) -> list[str]:
    """Return the devices that torch can compute on, as a recipe's `device` names them."""
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return ["cpu", *gpus, *(["mps"] if torch.backends.mps.is_available() else [])]


def describe_device(torch: Any, name: str) -> dict[str, Any]:
    """Return name, memory and supported precisions of a device; `error` if it does not answer."""
    if not name.startswith("cuda"):
        return {"device": name, "name": "Apple GPU" if name == "mps" else "CPU"}
    index = int(name.partition(":")[2])
    try:
        properties = torch.cuda.get_device_properties(index)
        values = {
            "device": name,
            "name": str(properties.name),
            "memory": int(properties.total_memory),
            "capability": f"{properties.major}.{properties.minor}",
            "has_fp8": torch.version.hip is None and (properties.major, properties.minor) >= (8, 9),
            "has_bf16": "bf16" in list_precisions(torch, name),
        }
    except Exception as error:
        return {"device": name, "name": "GPU", "error": first_line(error)}
    try:
        return {**values, "free": int(torch.cuda.mem_get_info(index)[0])}
    except Exception as error:  # the first call that needs a context: a GPU in use exclusively, or full
        return {**values, "error": first_line(error)}


def list_precisions(torch: Any, name: str) -> list[str]:
    """Return the values of training.mixed_precision that the device supports."""
    return list(_iterate_precisions(torch, name))


def _iterate_precisions(torch: Any, name: str) -> Iterator[str]:
    yield "fp32"
    if name.startswith("cuda"):
        with torch.cuda.device(int(name.partition(":")[2])):
            has_bf16 = bool(torch.cuda.is_bf16_supported(including_emulation=False))
    else:
        has_bf16 = name == "cpu"
    if has_bf16:
        yield "bf16"
    if name != "cpu":
        yield "fp16"


def check_product(torch: Any, name: str, precision: str) -> dict[str, Any]:
    """Multiply matrices on a device and compare with float64 by numpy: `error`, or the relative error and the rate in FLOP/s.

    The rate is None if the engine cannot be imported, for which the packages are to blame, not the device.
    """
    try:
        relative_error = compute_relative_error(torch, name, precision)
        tolerance = TOLERANCES[precision]
        if precision == "fp32" and os.environ.get("NVIDIA_TF32_OVERRIDE") == "1":
            tolerance = TF32_TOLERANCE
        if not relative_error <= tolerance:  # also if it is NaN
            return {"error": f"wrong result: relative error {relative_error:.1e}, at most {tolerance:.1e} is expected"}
        rate = _measure_rate(name, precision)
    except Exception as error:
        return {"error": first_line(error)}
    return {"relative_error": relative_error, "flops_per_second": rate}


def _measure_rate(name: str, precision: str) -> float | None:
    try:
        from bottega.engines.backend import open_backend

        backend = open_backend("torch")
    except ImportError:
        return None
    return backend.measure_matmul_rate(name, precision)


def compute_relative_error(torch: Any, name: str, precision: str) -> float:
    """Return the relative error (Frobenius norm) of a product of two random matrices in `precision`."""
    import numpy as np

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    rng = np.random.default_rng(0)
    # Rounded first: the error of the product is measured, not that of its factors.
    a, b = (torch.from_numpy(rng.standard_normal((PRODUCT_SIZE, PRODUCT_SIZE))).to(dtype) for _ in range(2))
    product = (a.to(name) @ b.to(name)).cpu().double().numpy()
    expected = a.double().numpy() @ b.double().numpy()
    return float(np.linalg.norm(product - expected) / np.linalg.norm(expected))


if __name__ == "__main__":
    sys.exit(run_probe_main(probe))
