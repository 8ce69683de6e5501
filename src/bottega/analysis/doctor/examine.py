"""Run all checks of `bottega doctor` in their order; a check that fails itself becomes a problem of the report."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bottega import __version__
from bottega.analysis.doctor.check_result import CheckResult, MachineReport, Problem
from bottega.analysis.doctor.communication import check_communication
from bottega.analysis.doctor.devices import (
    check_devices,
    check_products,
    normalize_device,
    run_torch_probe,
    select_device,
)
from bottega.analysis.doctor.disk import check_disk, check_folder_argument
from bottega.analysis.doctor.limits import check_limits
from bottega.analysis.doctor.packages import check_packages, describe_missing_extras
from bottega.core.errors import first_line

COMMUNICATION = "communication of two processes"
TIMED_CHECKS = ("imports of packages other than torch", "matrix products", COMMUNICATION, "disk speed")
"""What --quick leaves out."""

OnStep = Callable[[str], None]


def examine_machine(*, device: str, folder: Path, is_quick: bool, on_step: OnStep = lambda step: None) -> MachineReport:
    """Run the checks; `on_step` is called with what is being checked.

    Raises UsageError if `device` or `folder` cannot be one, and EnvironmentProblem if this machine does not have the device.
    """
    requested = normalize_device(device)
    check_folder_argument(folder)
    on_step("devices")
    probe = run_torch_probe(products=not is_quick, on_step=on_step)
    selected = select_device(requested, probe)
    num_gpus = sum(row["device"].startswith("cuda") for row in probe.select("device"))
    torch_error = None if probe.select("torch") else probe.error
    checks: dict[str, Callable[[], CheckResult]] = {
        "packages": partial(check_packages, imports=not is_quick, torch_error=torch_error, on_step=on_step),
        "devices": lambda: check_devices(probe, selected, is_import_explained=_is_shadowed(results, torch_error)),
        "matrix products": partial(check_products, probe, selected),
        "communication": partial(check_communication, num_gpus, on_step=on_step),
        "disk": partial(check_disk, folder, is_timed=not is_quick),
        "memory and limits": partial(check_limits, num_gpus),
    }
    not_checked: tuple[str, ...] = TIMED_CHECKS if is_quick else ()
    if is_quick or torch_error is not None:
        del checks["communication"]
        not_checked = not_checked or (COMMUNICATION,)
    results: list[CheckResult] = []
    for title, check in checks.items():
        on_step(title)
        results.append(run_check(title, check))
        if title == "packages":
            results.append(describe_missing_extras(results[-1].values))
    header = {"bottega": __version__, "python": platform.python_version(), "platform": platform.platform()}
    return MachineReport(header, selected, tuple(results), not_checked)


def _is_shadowed(results: Sequence[CheckResult], torch_error: str | None) -> bool:
    """Return whether the check of the packages has found a file that is imported instead of one and makes torch fail."""
    packages = [row for result in results for row in result.values.get("packages", [])]
    return any(row["shadow"] is not None and row["error"] == torch_error for row in packages)


def run_check(title: str, check: Callable[[], CheckResult]) -> CheckResult:
    """Return the result of a check; an exception becomes a problem, so that the other checks are still reported."""
    try:
        return check()
    except Exception as error:
        message = f"{title} could not be checked: {type(error).__name__}: {first_line(error)}"
        remedy = "the other checks are not affected; please report this error"
        if isinstance(error, ModuleNotFoundError):
            remedy = f"pip install {error.name}"
        return CheckResult(title, problems=(Problem(title, message, remedy),))


@contextmanager
def show_steps(*, is_shown: bool) -> Iterator[OnStep]:
    """Yield a function that shows the current step in one line of a terminal, which is erased at the end."""
    try:
        from bottega.terminal import open_console

        console = open_console(quiet=not is_shown)
    except ImportError:  # without rich there is no line; its absence is reported
        yield lambda step: None
        return
    if not is_shown or not console.is_terminal:
        yield lambda step: None
        return
    with console.status("checking") as status:
        yield lambda step: status.update(f"checking: {step}")
