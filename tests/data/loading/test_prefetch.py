"""Prefetching by threads or processes yields the same stream, propagates errors and leaves nothing running."""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import psutil
import pytest

from bottega.core.errors import DataError, EnvironmentProblem, UsageError
from bottega.core.types import Batch
from bottega.data.loading.loader import Loader
from bottega.data.loading.prefetch import prefetch
from bottega.data.sources.source import ArraySource, Source
from bottega.signals import StopSignals, WaitInterrupted

# Larger than a socket's buffer, so that a killed worker is often in the middle of a message.
SOURCE = ArraySource({"x": np.arange(64), "y": np.ones((64, 50_000), np.float32)})


def build_loader(workers: int = 0, depth: int = 0) -> Loader:
    return Loader(SOURCE, 4, seed=3, workers=workers, prefetch=depth)


def list_workers() -> list[psutil.Process]:
    """Return the worker processes of loaders; earlier tests may have left other processes."""
    processes = psutil.Process().children(recursive=True)
    return [
        process for process in processes if any("bottega.data.loading.worker" in word for word in process.cmdline())
    ]


def kill_at_every_step(stream: Iterator[Batch]) -> None:
    for _ in stream:
        for child in list_workers():
            child.kill()


def wait_until(condition: Callable[[], Any], seconds: float = 100) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


class FailingSource(Source):
    """A source with one unreadable sample."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 10

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        if 3 in index:
            raise self.error
        return {"x": index}

    fingerprint = "failing"

    def describe(self, index: int, epoch: int) -> str:
        return ""


def count_threads() -> int:
    return sum(thread.name == "bottega-prefetch" for thread in threading.enumerate())


def build_slowly(step: int) -> Batch:
    time.sleep(0.01)
    return {"step": step}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("depth", [0, 2])
def test_errors_are_raised_unchanged_after_the_batches_before_them(workers: int, depth: int) -> None:
    source = FailingSource(DataError("row 3 is broken"))
    failing_step = next(step for step in range(10) if 3 in Loader(source, 1, seed=0).indices(step)[0])
    stream = Loader(source, 1, seed=0, workers=workers, prefetch=depth)(0)
    assert len(list(islice(stream, failing_step))) == failing_step
    with pytest.raises(DataError, match="row 3 is broken"):
        next(stream)
    assert not list_workers()
    assert count_threads() == 0


def test_the_thread_runs_ahead_by_no_more_than_its_depth() -> None:
    steps: list[int] = []
    stream = prefetch(lambda step: steps.append(step) or {"step": step}, 7, workers=0, depth=3)
    assert next(stream)["step"] == 7
    assert wait_until(lambda: len(steps) == 5)  # one returned, three ready, one waiting for space
    time.sleep(0.1)
    assert steps == [7, 8, 9, 10, 11]
    stream.close()
    assert count_threads() == 0


def test_dropped_stream_ends_its_thread() -> None:
    stream = prefetch(build_slowly, 0, workers=0, depth=2)
    assert [batch["step"] for batch in islice(stream, 5)] == [0, 1, 2, 3, 4]
    assert count_threads() == 1
    del stream
    gc.collect()
    assert wait_until(lambda: count_threads() == 0)


def test_dropped_stream_ends_its_processes() -> None:
    stream = build_loader(workers=2, depth=2)(0)
    next(stream)
    assert len(list_workers()) == 2
    del stream
    gc.collect()
    assert wait_until(lambda: not list_workers())
    assert count_threads() == 0


@pytest.mark.parametrize("depth", [0, 2])
def test_a_killed_worker_is_replaced_and_no_sample_lost_or_repeated(depth: int) -> None:
    expected = [batch["x"] for batch in islice(build_loader()(0), 40)]
    stream = build_loader(workers=2, depth=depth)(0)
    samples = []
    for step, batch in enumerate(islice(stream, 40)):
        samples.append(batch["x"])
        if step in (4, 11, 25):
            time.sleep(0.05)  # let it fill the socket, so that it dies in the middle of a message
            os.kill(list_workers()[step % 2].pid, signal.SIGKILL)
    assert len(list_workers()) == 2
    stream.close()
    assert not list_workers()
    assert np.array_equal(np.stack(samples), np.stack(expected))


def test_repeatedly_dying_workers_raise() -> None:
    stream = build_loader(workers=1)(0)
    with pytest.raises(EnvironmentProblem, match=r"died 6 times .* status -9 .* set data.workers=0"):
        kill_at_every_step(stream)
    assert not list_workers()


def test_workers_ignore_sigint_and_obey_sigterm() -> None:
    stream = build_loader(workers=1)(0)
    next(stream)
    (child,) = list_workers()
    child.send_signal(signal.SIGINT)
    next(stream)
    assert list_workers() == [child]
    child.terminate()
    assert child.wait(100) is not None or not child.is_running()
    stream.close()


def test_unpicklable_data_is_refused_with_the_remedy() -> None:
    with pytest.raises(UsageError, match=r"data\.workers=0"):
        next(prefetch(lambda step: {}, 0, workers=1, depth=0))
    assert not list_workers()


SCRIPT = """
    import sys, time
    import os
    import numpy as np
    from bottega.data.loading.loader import Loader
    from bottega.data.sources.source import Source

    class Slow(Source):
        seconds_per_batch = 0
        fingerprint = "slow"
        def __len__(self): return 100
        def describe(self, index, epoch): return ""
        def rows(self, index, epoch):
            assert "torch" not in sys.modules
            if self.seconds_per_batch:
                os.write(1, b"working\\n")  # atomic when two processes write at once
            time.sleep(self.seconds_per_batch)
            return {"x": index}
"""


def run_script(tmp_path: Any, body: str, *, in_module: bool) -> subprocess.Popen[str]:
    source = textwrap.dedent(SCRIPT)
    if in_module:
        (tmp_path / "own_source.py").write_text(source)
        source = "import sys\nfrom own_source import Slow\nfrom bottega.data.loading.loader import Loader\n"
    (tmp_path / "script.py").write_text(source + textwrap.dedent(body))
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, tmp_path / "script.py"], stdout=pipe, stderr=pipe, text=True)


def test_a_script_without_main_guard_works_and_workers_do_not_import_torch(tmp_path: Any) -> None:
    body = """
        sys.modules["torch"] = sys  # stands for a trainer that imported torch
        print("started")
        stream = Loader(Slow(), 4, seed=0, workers=1)(0)
        print(len(next(stream)["x"]))
        stream.close()
    """
    out, err = run_script(tmp_path, body, in_module=True).communicate(timeout=100)
    assert out.split() == ["started", "4"], err


def test_source_defined_in_the_script_is_refused_with_the_remedy(tmp_path: Any) -> None:
    process = run_script(tmp_path, "next(Loader(Slow(), 4, seed=0, workers=1)(0))", in_module=False)
    _, err = process.communicate(timeout=100)
    assert "UsageError" in err
    assert "define its classes in an importable module" in err


def test_workers_die_with_their_parent_even_in_the_middle_of_a_batch(tmp_path: Any) -> None:
    body = """
        import threading
        source = Slow()
        source.seconds_per_batch = 60
        stream = Loader(source, 4, seed=0, workers=2)(0)
        threading.Thread(target=next, args=(stream,), daemon=True).start()
        print("ready", flush=True)
        threading.Event().wait()
    """
    process = run_script(tmp_path, body, in_module=True)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "ready\n"
    parent = psutil.Process(process.pid)
    assert [process.stdout.readline() for _ in range(2)] == ["working\n"] * 2
    workers = parent.children()
    assert len(workers) == 2
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=100)
    assert not alive
    process.stdout.close()
    process.stderr.close()


@pytest.mark.parametrize("depth", [0, 2])
def test_stopped_worker_is_replaced_and_reported(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP neither ends the process nor closes its socket, so waiting for it would never return."""
    monkeypatch.setattr("bottega.data.loading.prefetch.STOPPED_SECONDS", 0.5)
    warnings: list[str] = []
    stream = dataclasses.replace(build_loader(workers=2, depth=depth), warn=warnings.append)(0)
    expected = build_loader()(0)
    np.testing.assert_equal(next(stream)["x"], next(expected)["x"])
    stopped = list_workers()[0]
    stopped.suspend()
    for _ in range(12):
        np.testing.assert_equal(next(stream)["x"], next(expected)["x"])
    assert [str(stopped.pid) in line and "SIGSTOP" in line for line in warnings] == [True]
    stream.close()
    assert wait_until(lambda: not stopped.is_running())


def test_slow_worker_is_reported_and_a_signal_interrupts_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bottega.data.loading.prefetch.FIRST_WARNING_SECONDS", 1.0)
    warnings: list[str] = []
    with StopSignals() as stop:
        stream = prefetch(
            sleep_forever, 0, workers=1, depth=1, warn=lambda text: warnings.append(text) or send_sigterm()
        )
        with pytest.raises(WaitInterrupted):
            next(stream)
        assert stop.received == signal.SIGTERM
    assert "has sent nothing for 1 s" in warnings[0]
    stream.close()


def sleep_forever(step: int) -> Batch:
    time.sleep(100)
    return {"step": step}


def send_sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
