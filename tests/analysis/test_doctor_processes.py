"""Child processes of `bottega doctor`: communication of two ranks, crashes, hangs, and that none is left behind."""

from __future__ import annotations

import sys
from typing import Any

import psutil
import pytest

from bottega.analysis.doctor import communication, probes
from bottega.analysis.doctor.probes import ProbeResult, run_probes

KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
SLEEPING = "import time; time.sleep(600)"
READY = "from bottega.analysis.doctor.probes import emit; emit('start', step='a step'); "
"""Code that sends one event."""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def ignore_step(step: str) -> None:
    """Show nothing."""


@pytest.fixture(autouse=True)
def no_process_is_left() -> Any:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    left = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    assert left == []


def replace_ranks(monkeypatch: pytest.MonkeyPatch, commands: dict[int, list[str]]) -> None:
    """Run other commands in place of some ranks."""
    original = communication.build_rank_command
    monkeypatch.setattr(
        communication,
        "build_rank_command",
        lambda rank, options: commands.get(rank) or original(rank, options),
    )


def test_two_processes_sum_correctly() -> None:
    steps: list[str] = []
    result = communication.check_communication(0, on_step=steps.append)
    assert result.problems == ()
    (row,) = result.values["communication"]
    assert row["latency"] > 0
    assert row["bandwidth"] > 0
    assert "all-reduce between 2 processes by gloo" in steps


def test_a_killed_rank_is_named_and_training_is_not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_ranks(monkeypatch, {1: python(READY + KILLED)})
    result = communication.check_communication(0, on_step=ignore_step)
    (problem,) = result.problems
    assert problem.message.endswith("training with several processes fails: rank 1: ended by SIGKILL (a step)")
    assert not problem.stops_training
    assert "one process still trains" in problem.remedy
    assert result.values["communication"][0]["error"].startswith("rank 1")


def test_ranks_that_never_meet_run_into_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_ranks(monkeypatch, {rank: python(READY + SLEEPING) for rank in (0, 1)})
    monkeypatch.setattr(communication, "GRACE_SECONDS", 0.0)
    _, error = communication.measure_communication("gloo", on_step=ignore_step, seconds=0.5)
    assert error == "rank 0: no answer for 0.5 s (a step)"


def test_the_time_limit_is_that_between_events_once_all_have_started() -> None:
    (result,) = run_probes([python(READY + SLEEPING)], seconds=0.2, start_seconds=1e6)
    assert result.error == "no answer for 0.2 s"
    assert result.last_step == "a step"
    (result,) = run_probes([python(SLEEPING)], seconds=1e6, start_seconds=0.2)
    assert result == ProbeResult((), "no answer for 0.2 s")


def test_torch_reports_a_rank_that_does_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_ranks(monkeypatch, {1: python(READY + SLEEPING)})
    monkeypatch.setattr(
        communication, "GRACE_SECONDS", 120.0
    )  # torch's own limit comes first, however busy the machine is
    _, error = communication.measure_communication("gloo", on_step=ignore_step, seconds=2)
    assert error is not None
    assert error.startswith("rank 0: ")
    assert "time" in error.lower()


def test_a_wrong_sum_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys, torch, torch.distributed as dist\n"
        "from bottega.analysis.doctor import communication_probe, probes\n"
        "add = dist.all_reduce\n"
        "dist.all_reduce = lambda tensor: (add(tensor), tensor.add_(1))\n"
        "sys.exit(probes.run_probe_main(communication_probe.probe))"
    )

    def build_command(rank: int, options: dict[str, Any]) -> list[str]:
        words = probes.build_probe_command("communication_probe", {**options, "rank": rank})
        return [sys.executable, "-c", code, words[-1]]

    monkeypatch.setattr(communication, "build_rank_command", build_command)
    _, error = communication.measure_communication("gloo", on_step=ignore_step, seconds=30)
    assert error is not None
    assert "ArithmeticError: the sum over two processes is wrong" in error


def test_nccl_is_checked_with_two_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def measure(backend: str, **options: Any) -> tuple[dict[str, float], str | None]:
        calls.append(backend)
        return {"latency": 1e-4, "bandwidth": 1e9}, None

    monkeypatch.setattr(communication, "measure_communication", measure)
    communication.check_communication(1, on_step=ignore_step)
    assert calls == ["gloo"]
    result = communication.check_communication(2, on_step=ignore_step)
    assert calls == ["gloo", "gloo", "nccl"]
    assert dict(result.lines)["nccl"] == "two GPUs sum correctly; latency 100 µs, 1.00 GB/s"


def test_variables_of_a_launcher_do_not_reach_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    code = READY + "import os; emit('variables', names=sorted(os.environ))"
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "3")
    (result,) = run_probes([python(code)], seconds=60)
    (event,) = result.select("variables")
    assert not {"WORLD_SIZE", "RANK"} & set(event["names"])


def test_output_of_libraries_is_no_event_and_is_quoted_if_the_process_fails() -> None:
    code = READY + "print('x' * 200_000); print('the reason'); raise SystemExit(7)"
    (result,) = run_probes([python(code)], seconds=60)
    assert result == ProbeResult(({"event": "start", "step": "a step"},), "exit code 7: the reason")


@pytest.mark.parametrize("line", ["@bottega-doctor {", "@bottega-doctor [1]", "@bottega-doctor {}"])
def test_an_interrupted_event_is_output_of_a_library(line: str) -> None:
    (result,) = run_probes([python(READY + f"print({line!r}); raise SystemExit(7)")], seconds=60)
    assert result == ProbeResult(({"event": "start", "step": "a step"},), f"exit code 7: {line}")


def test_files_of_the_current_folder_are_not_imported(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('not torch')")
    monkeypatch.chdir(tmp_path)
    command = probes.build_probe_command("import_probe", {"modules": ["torch"]})
    (result,) = run_probes([command], seconds=120)
    assert result.select("imported") == [{"module": "torch", "error": None}]


def test_a_program_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(probes.subprocess, "Popen", fail)
    (result,) = run_probes([python("")], seconds=1)
    assert result.error == "no process can be started: [Errno 11] Resource temporarily unavailable"
