"""The profiler of the torch engine: exactly the requested steps, times that count once, and no effect on training."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from bottega.core.noise import Noise
from bottega.engines.torch import profiling
from bottega.engines.torch.operation_costs import MAX_KERNELS_PER_CALL, rank_operations
from bottega.measurements import StepProfile
from toy_task import Toy, copy_state, engine, loader, train_steps, training


class Recorder:
    """Collects profiles and warnings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.profiles: list[StepProfile] = []
        self.warnings: list[str] = []

    def write(self, profile: StepProfile) -> None:
        self.profiles.append(profile)

    def events(self) -> list[dict[str, Any]]:
        (profile,) = self.profiles
        path = self.folder / "trace.json.gz"
        profile.write_trace(path)
        assert [file.name for file in self.folder.iterdir()] == [path.name]
        return list(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])

    def record(self, torch_engine: Any, first: int, last: int) -> None:
        torch_engine.profiler.record(first, last, write=self.write, warn=self.warnings.append)


def list_steps(events: list[dict[str, Any]]) -> list[str]:
    return [event["name"] for event in events if event["name"].startswith("step ") and event["ph"] == "X"]


def measure_covered_time(events: list[dict[str, Any]]) -> float:
    """Return the microseconds in which some operation runs, however deeply operations are nested."""
    total, end = 0.0, 0.0
    operations = [event for event in events if event.get("cat") == "cpu_op"]
    assert len({event["tid"] for event in operations}) == 1
    for event in sorted(operations, key=lambda event: event["ts"]):
        stop = event["ts"] + event["dur"]
        total += max(0.0, stop - max(end, event["ts"]))
        end = max(end, stop)
    return total


@pytest.mark.parametrize(("first", "last"), [(1, 1), (1, 3), (3, 5)])
def test_the_trace_has_the_requested_steps(first: int, last: int, tmp_path: Path) -> None:
    torch_engine, recorder = engine(micro=4), Recorder(tmp_path)
    recorder.record(torch_engine, first, last)
    train_steps(torch_engine, loader(of=torch_engine), 0, 6)
    (profile,) = recorder.profiles
    assert profile.steps == (first, last)
    events = recorder.events()
    assert list_steps(events) == [f"step {number}" for number in range(first, last + 1)]
    count = last - first + 1
    names = [event["name"] for event in events if event["ph"] == "X" and event["cat"] == "user_annotation"]
    assert names.count("forward") == names.count("backward") == 2 * count  # two micro-batches
    assert names.count("optimizer") == count
    assert names.count(profiling.BETWEEN_STEPS) == count - 1 + 1  # the last ends with the recording
    for event in events:
        assert isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["ts"] > 0


def test_operations_are_ranked_and_no_time_counts_twice(tmp_path: Path) -> None:
    torch_engine, recorder = engine(), Recorder(tmp_path)
    recorder.record(torch_engine, 1, 4)
    train_steps(torch_engine, loader(of=torch_engine), 0, 4)
    (profile,) = recorder.profiles
    assert len(profile.operations) == profiling.NUM_OPERATIONS
    shares = [operation.share for operation in profile.operations]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) <= 1 + 1e-9
    assert sum(operation.self_ms for operation in profile.operations) <= profile.total_ms <= profile.wall_ms
    assert profile.total_ms == pytest.approx(measure_covered_time(recorder.events()) / 1000, rel=1e-3)
    for operation in profile.operations:
        assert operation.share == pytest.approx(operation.self_ms / profile.total_ms)
        assert not operation.name.startswith(("step ", "ProfilerStep", "Optimizer."))
        assert operation.name not in ("forward", "backward", "optimizer", profiling.BETWEEN_STEPS)


def test_weights_are_the_same_with_and_without_a_profile(tmp_path: Path) -> None:
    plain, profiled = engine(), engine()
    Recorder(tmp_path).record(profiled, 2, 3)
    for torch_engine in (plain, profiled):
        train_steps(torch_engine, loader(of=torch_engine), 0, 5)
    a, b = copy_state(plain), copy_state(profiled)
    assert {name: array.tobytes() for name, array in a.items()} == {name: array.tobytes() for name, array in b.items()}


def test_a_recording_that_ends_early_is_written(tmp_path: Path) -> None:
    torch_engine, recorder = engine(), Recorder(tmp_path)
    recorder.record(torch_engine, 2, 9)
    train_steps(torch_engine, loader(of=torch_engine), 0, 3)
    torch_engine.profiler.finish()
    torch_engine.profiler.finish()
    assert recorder.profiles[0].steps == (2, 3)
    assert list_steps(recorder.events()) == ["step 2", "step 3"]
    train_steps(torch_engine, loader(of=torch_engine), 3, 5)
    assert len(recorder.profiles) == 1


class FailsAtStep2(Toy):
    """The third step raises."""

    def loss(self, models: Any, batch: Any, rng: Noise) -> Any:
        if rng.step == 2:
            raise ValueError("a bug")
        return super().loss(models, batch, rng)


def test_the_trace_of_a_failing_step_is_written(tmp_path: Path) -> None:
    torch_engine, recorder = engine(task=FailsAtStep2()), Recorder(tmp_path)
    recorder.record(torch_engine, 2, 5)
    with pytest.raises(ValueError, match="a bug"):
        train_steps(torch_engine, loader(of=torch_engine), 0, 5)
    torch_engine.profiler.finish()
    assert list_steps(recorder.events()) == ["step 2", "step 3"]


@pytest.mark.parametrize("method", ["start", "stop", "events"])
def test_a_profiler_that_fails_is_a_warning(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(torch.profiler.profile, method)

    def fail(self: Any, *args: Any) -> None:
        if method == "stop":
            original(self)  # otherwise the next test could not start a profile
        raise RuntimeError("no permission\nto read counters")

    monkeypatch.setattr(torch.profiler.profile, method, fail)
    torch_engine, recorder = engine(), Recorder(tmp_path)
    recorder.record(torch_engine, 2, 3)
    reports = train_steps(torch_engine, loader(of=torch_engine), 0, 4)
    torch_engine.profiler.finish()
    assert len(reports) == 4
    assert not recorder.profiles
    assert recorder.warnings == [
        "profile.steps: the profiler failed (no permission); training continues without a profile"
    ]


def test_a_failure_while_recording_stops_the_profiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise RuntimeError("no region")

    torch_engine, recorder = engine(), Recorder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(profiling, "record_function", fail)
        recorder.record(torch_engine, 1, 3)
        train_steps(torch_engine, loader(of=torch_engine), 0, 2)
    assert len(recorder.warnings) == 1
    assert not torch.autograd._profiler_enabled()
    recorder.record(torch_engine, 3, 3)
    train_steps(torch_engine, loader(of=torch_engine), 2, 3)
    assert [profile.steps for profile in recorder.profiles] == [(3, 3)]


def test_outside_the_steps_there_are_no_regions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Regions cost time even without a profiler, so none is entered in a step that is not recorded."""
    entered: list[str] = []
    original = profiling.record_function

    def count(name: str) -> Any:
        entered.append(name)
        return original(name)

    monkeypatch.setattr(profiling, "record_function", count)
    torch_engine = engine(training())
    train_steps(torch_engine, loader(of=torch_engine), 0, 2)
    assert not entered
    Recorder(tmp_path).record(torch_engine, 4, 4)
    train_steps(torch_engine, loader(of=torch_engine), 2, 3)
    assert not entered
    train_steps(torch_engine, loader(of=torch_engine), 3, 5)
    assert entered == ["step 4", "forward", "backward", "optimizer", profiling.BETWEEN_STEPS]


def make_event(name: str, *, on_gpu: bool = False, **values: Any) -> Any:
    microseconds = values.pop("us", 0.0)
    return SimpleNamespace(
        name=name,
        device_type=DeviceType.CUDA if on_gpu else DeviceType.CPU,
        is_user_annotation=values.pop("region", False),
        self_cpu_time_total=microseconds,
        time_range=SimpleNamespace(elapsed_us=lambda: microseconds),
        kernels=[SimpleNamespace(name=kernel, duration=time) for kernel, time in values.pop("kernels", ())],
    )


def test_kernels_count_for_the_operation_that_launched_them() -> None:
    many = [("fused", 1.0)] * (MAX_KERNELS_PER_CALL + 1)
    events = [
        make_event("forward", region=True, us=1e6),
        make_event("forward", region=True, on_gpu=True, us=1e6),
        make_event("aten::linear", us=500.0),
        make_event("aten::mm", us=100.0, kernels=[("gemm", 30.0), ("split", 10.0)]),
        make_event("aten::mm", us=100.0, kernels=[("gemm", 30.0)]),
        make_event("cudaLaunchKernel", us=100.0, kernels=[("gemm", 30.0)]),  # torch 2.11 counts it twice
        make_event("replay", us=100.0, kernels=many),
        *(make_event(name, on_gpu=True, us=time) for name, time in [("gemm", 30.0), ("split", 10.0), ("gemm", 30.0)]),
        *(make_event(name, on_gpu=True, us=time) for name, time in many),
        make_event("Memcpy HtoD", on_gpu=True, us=5.0),
    ]
    costs, total = rank_operations(events, count=10)
    assert {cost.name: (cost.calls, cost.self_ms) for cost in costs} == {
        "aten::mm": (2, pytest.approx(0.07)),
        "fused": (MAX_KERNELS_PER_CALL + 1, pytest.approx(0.001 * len(many))),
        "Memcpy HtoD": (1, pytest.approx(0.005)),
    }
    assert total == pytest.approx(0.075 + 0.001 * len(many))
    assert sum(cost.share for cost in costs) == pytest.approx(1)
    assert {cost.device for cost in costs} == {"cuda"}
