"""`bottega doctor` as a whole: order, exit codes, text, and that no failing check hides the others."""

from __future__ import annotations

import importlib.metadata
import json
import resource
import subprocess
import venv
from pathlib import Path
from typing import Any

import psutil
import pytest

import bottega
import small_run
from bottega import cli
from bottega.analysis.doctor import check_result, examine, packages, probes, report_text
from bottega.analysis.doctor.check_result import CheckResult, MachineReport, Problem
from bottega.analysis.doctor.requirements import EXTRA_PURPOSES, parse_requirement, read_requirements
from bottega.core.errors import EnvironmentProblem, UsageError

TORCH = {
    "event": "torch",
    "version": "2.13.0+cpu",
    "cuda": None,
    "hip": None,
    "has_cuda": False,
    "cuda_error": None,
    "num_threads": 1,
    "cpu_capability": "AVX2",
    "architectures": [],
    "visible_devices": None,
}
CPU_EVENTS = ({"event": "driver"}, TORCH, {"event": "device", "device": "cpu", "name": "CPU"})


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """No child process: torch is as on a machine without a GPU."""
    monkeypatch.setattr(examine, "run_torch_probe", lambda **options: probes.ProbeResult(CPU_EVENTS))


def test_a_working_machine_has_no_stopping_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything for real, once: child processes, matrix products, communication, disk."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    products = [row for row in report["products"] if row["device"] == "cpu" and row["flops_per_second"] > 0]
    assert [row["precision"] for row in products] == ["fp32", "bf16"]
    assert report["communication"][0]["backend"] == "gloo"
    assert report["communication"][0]["error"] is None
    assert report["disk"]["write"] > 0
    assert not [problem for problem in report["problems"] if problem["stops_training"]]
    assert list(tmp_path.iterdir()) == [], "doctor leaves nothing behind"


@pytest.mark.usefixtures("fast")
def test_quick_leaves_out_what_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "run_probes", lambda *args, **options: pytest.fail("imports packages"))
    monkeypatch.setattr(examine, "check_communication", lambda *args, **options: pytest.fail("starts processes"))
    report = examine.examine_machine(device="auto", folder=Path("runs"), is_quick=True)
    assert report.not_checked == examine.TIMED_CHECKS
    assert "write" not in report.to_plain_dict()["disk"]
    assert "not checked: imports of packages" in report_text.format_report(report)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("name", ["check_packages", "check_devices", "check_products", "check_disk", "check_limits"])
def test_a_check_that_raises_becomes_a_problem(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> CheckResult:
        raise ZeroDivisionError("of a check")

    monkeypatch.setattr(examine, name, fail)
    report = examine.examine_machine(device="auto", folder=Path("runs"), is_quick=True)
    messages = [problem.message for problem in report.problems]
    assert [m for m in messages if m.endswith("could not be checked: ZeroDivisionError: of a check")], messages
    text = report_text.format_report(report)
    assert "no problems found" not in text
    shown = {"check_limits": "disk", "check_disk": "memory and limits"}.get(name, "disk")
    assert f"\n{shown}\n" in text, "the other checks are reported"


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        (
            "cuda",
            EnvironmentProblem,
            "device: cuda is not available: torch 2.13.0+cpu, built without CUDA, finds only cpu",
        ),
        ("cuda:7", EnvironmentProblem, "device: cuda:7 is not available"),
        ("mps", EnvironmentProblem, "device: mps is not available: torch 2.13.0+cpu finds only cpu"),
        ("tpu", UsageError, "--device tpu: not a device; choose from"),
        ("cuda:x", UsageError, "--device cuda:x: not a device"),
        ("cuda:-1", UsageError, "--device cuda:-1: not a device"),
    ],
)
@pytest.mark.usefixtures("fast")
def test_an_absent_device_is_one_line(
    device: str, error: type[Exception], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(["doctor", "--quick", f"--device={device}"])
    assert code == error.code  # type: ignore[attr-defined]
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"bottega: {message}")
    assert output.err.count("\n") == 1


@pytest.mark.usefixtures("fast")
def test_the_library_names_arguments(tmp_path: Path) -> None:
    report = bottega.doctor(folder=tmp_path, quick=True)
    assert report["exit_code"] == 0
    assert report["disk"]["folder"] == str(tmp_path)
    with pytest.raises(UsageError, match=r"^device tpu: not a device"):
        bottega.doctor(device="tpu", quick=True)


@pytest.mark.usefixtures("fast")
def test_a_file_is_not_a_folder_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["doctor", "--quick", "--dir", str(tmp_path / "file" / "runs")]) == 2
    assert "file is not a folder" in capsys.readouterr().err


def test_only_a_problem_that_stops_training_gives_exit_code_5() -> None:
    def build(*problems: Problem) -> MachineReport:
        header = {"bottega": "1", "python": "3", "platform": "x"}
        return MachineReport(header, "cpu", (CheckResult("disk", problems=problems),))

    limiting = Problem("disk", "slow", "wait")
    stopping = Problem("disk", "full", "delete files", stops_training=True)
    assert [build().exit_code, build(limiting).exit_code, build(limiting, stopping).exit_code] == [0, 0, 5]
    assert report_text.format_report(build(stopping, limiting)).splitlines()[1:] == [
        "",
        "problems that do not stop training",
        "  - slow",
        "    remedy: wait",
        "",
        "problems that stop training",
        "  - full",
        "    remedy: delete files",
    ]


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.usefixtures("fast")
def test_lines_fit_the_terminal_and_commands_stay_whole(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "read_version", lambda name: "1.0" if name == "numpy" else None)
    report = examine.examine_machine(device="auto", folder=Path("runs"), is_quick=True)
    lines = report_text.format_report(report, width=width).splitlines()
    assert max(map(len, lines)) <= width
    extras = next(result for result in report.results if result.title == "missing extras")
    for extra, _ in extras.lines:
        assert any(f"pip install 'bottega[{extra}]'" in line for line in lines)
    assert check_result.NO_BREAK not in "".join(lines)


def test_few_open_files_are_reported_by_a_process_that_has_them(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))

    done = small_run.run_bottega(["doctor", "--quick"], cold=True, cwd=tmp_path, preexec_fn=limit)
    assert done.returncode == 5, done.stderr
    assert "this process may open only 48 files" in done.stdout
    assert "remedy: raise the limit: ulimit -n 4096" in done.stdout


@pytest.fixture(scope="module")
def python_without_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has all packages of this one but torch."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    packages_folder = next(folder.glob("lib/python*/site-packages"))
    for path in Path(psutil.__file__).parents[1].iterdir():
        if path.name.partition("-")[0] not in ("torch", "functorch", "torchgen", "__pycache__"):
            (packages_folder / path.name).symlink_to(path)
    return folder / "bin" / "python"


def test_without_torch_the_rest_is_reported(python_without_torch: Path, tmp_path: Path) -> None:
    command = [python_without_torch, "-m", "bottega", "doctor"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 5, done.stderr
    assert "  - torch is not installed\n    remedy: pip install 'torch>=" in done.stdout
    assert done.stdout.count("torch is not installed") == 1
    assert "not checked: communication of two processes" in done.stdout
    assert "\nmemory and limits\n" in done.stdout


def test_an_installation_without_any_requirement_is_reported(tmp_path: Path) -> None:
    """As after pip install --no-deps: the metadata of Bottega is there, and no other package."""
    venv.create(tmp_path / "environment", symlinks=True)
    packages_folder = next(tmp_path.glob("environment/lib/python*/site-packages"))
    (packages_folder / "bottega").symlink_to(Path(bottega.__file__).parent)
    metadata = "Metadata-Version: 2.1\nName: bottega\nVersion: 0.1\n"
    lines = [f"Requires-Dist: {line}\n" for line in importlib.metadata.requires("bottega") or []]
    (packages_folder / "bottega-0.1.dist-info").mkdir()
    (packages_folder / "bottega-0.1.dist-info" / "METADATA").write_text(metadata + "".join(lines))
    command = [tmp_path / "environment" / "bin" / "python", "-m", "bottega", "doctor"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 5, done.stderr
    for requirement in read_requirements():
        if not requirement.extra:
            assert f"  - {requirement.name} is not installed\n" in done.stdout
    for extra in EXTRA_PURPOSES:
        assert f"pip install 'bottega[{extra}]'" in done.stdout
    assert "disk could not be checked: ModuleNotFoundError: No module named 'psutil'" in done.stdout


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_torch_that_crashes_is_one_problem_of_a_whole_report(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Packages that import torch crash with it, and are not reported."""
    (tmp_path / "path" / "torch").mkdir(parents=True)
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    (tmp_path / "path" / "torch" / "__init__.py").write_text(crash)
    (tmp_path / "path" / "peft.py").write_text("import torch")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    requirements = [parse_requirement(line) for line in ("torch>=2", 'peft>=0.1; extra == "hub"')]
    monkeypatch.setattr(packages, "read_requirements", lambda: requirements)
    monkeypatch.setattr(packages, "read_version", {"torch": "2.13.0", "peft": "0.21"}.get)
    assert cli.main(["doctor", "--device", device, "--dir", str(tmp_path), "--json"]) == 5
    report = json.loads(capsys.readouterr().out)
    assert [problem["message"] for problem in report["problems"]] == ["torch cannot be imported: ended by SIGILL"]
    assert report["disk"]["free"] > 0
