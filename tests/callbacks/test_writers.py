"""Callbacks that write: the console, metrics.jsonl, TensorBoard and resources."""

from __future__ import annotations

import io
import json
import math
import re
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from bottega.callbacks.console import Console, format_count, format_duration
from bottega.callbacks.jsonl import JsonLines, ModuleLines
from bottega.callbacks.log_file import LogFile
from bottega.callbacks.resources import Resources
from bottega.callbacks.tensorboard import TensorBoard
from bottega.callbacks.tracker_guard import TrackerGuard
from bottega.core.callback import Progress
from bottega.metrics_log import read_metrics

ROW = {
    "loss": 1.5,
    "learning_rate": 1e-3,
    "grad_norm": 0.25,
    "units_per_second": 123_456.0,
    "data_wait": 0.02,
    "step_seconds": 0.5,
}


def test_metrics_write_nan_as_null(tmp_path: Path) -> None:
    writer = JsonLines(tmp_path / "metrics.jsonl", pytest.fail)
    writer.after_step(Progress(step=1, samples=8), {"loss": math.nan, "grad_norm": math.inf, "lr": 0.5})
    writer.after_eval(Progress(step=1, samples=8), {"loss": 2.0})
    lines = [
        json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert lines == [
        {"step": 1, "kind": "train", "samples": 8, "loss": None, "grad_norm": None, "lr": 0.5},
        {"step": 1, "kind": "eval", "samples": 8, "loss": 2.0},
    ]


def test_unwritable_files_warn_once_and_training_continues(tmp_path: Path) -> None:
    messages: list[str] = []
    writer = JsonLines(tmp_path, messages.append)  # a folder cannot be written to
    for step in range(3):
        writer.after_step(Progress(step=step), {"loss": 1.0})
    assert len(messages) == 1
    assert str(tmp_path) in messages[0]
    console = Console(unit="tokens", log=tmp_path, quiet=True)
    console.after_step(Progress(total=5), ROW)
    console.info("still here")


def test_unwritten_lines_are_written_later(tmp_path: Path) -> None:
    """The disk is full in the middle of a line and later has free space."""
    messages: list[str] = []
    writer = JsonLines(tmp_path / "metrics.jsonl", messages.append)
    writer.after_step(Progress(step=1), {"loss": 1.0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (writer.path.stat().st_size + 20, hard))
    try:
        for step in (2, 3):
            writer.after_step(Progress(step=step), {"loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(messages) == 1
    writer.after_step(Progress(step=4), {"loss": 1.0})
    assert [row["step"] for row in map(json.loads, writer.path.read_text().splitlines())] == [1, 2, 3, 4]


def test_last_line_is_retried_at_the_end(tmp_path: Path) -> None:
    writer = JsonLines(tmp_path, lambda text: None)
    writer.after_step(Progress(step=1), {"loss": 1.0})
    writer.path = tmp_path / "metrics.jsonl"
    writer.finish(Progress(step=1), None)
    assert [row["step"] for row in read_metrics(writer.path)] == [1]


def test_modules_are_written_and_rewound_like_metrics(tmp_path: Path) -> None:
    messages: list[str] = []
    writer = ModuleLines(tmp_path / "modules.jsonl", messages.append)
    for step in (1, 2, 3):
        writer.after_inspect(
            Progress(step=step, samples=8 * step), {"head": {"gradient_norm": math.nan, "update_ratio": 0.5}}
        )
    writer.rewind(Progress(step=2, samples=16, evaluated_step=0))
    with full_disk():
        writer.after_inspect(Progress(step=3, samples=24), {"head": {}})
    assert len(messages) == 1
    writer.finish(Progress(step=3), None)
    first, second, third = (
        json.loads(line, parse_constant=pytest.fail) for line in writer.path.read_text().splitlines()
    )
    modules = {"head": {"gradient_norm": None, "update_ratio": 0.5}}
    assert first == {"step": 1, "kind": "modules", "samples": 8, "modules": modules}
    assert (second["step"], third) == (2, {"step": 3, "kind": "modules", "samples": 24, "modules": {"head": {}}})


def make_console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    console, out = Console(unit="tokens"), io.StringIO()
    console.rich = RichConsole(file=out, force_terminal=terminal, width=160)
    return console, out


@pytest.mark.parametrize("terminal", [True, False])
def test_console_shows_the_main_metrics(tmp_path: Path, terminal: bool) -> None:
    console, out = make_console(terminal=terminal)
    console.log_file = LogFile(tmp_path / "log.txt")
    progress = Progress(step=10, total=100, best_step=10)
    console.start(progress)
    console.after_step(progress, ROW)
    console.after_eval(progress, {"loss": 1.25})
    console.after_save(progress, tmp_path / "step-00000010")
    console.after_sample(progress, tmp_path / "samples")
    console.finish(progress, None)
    for text in (out.getvalue(), console.log_file.path.read_text()):
        for logged in ("10/100", "loss 1.5000", "lr 1.00e-03", "123.5k tokens/s", "wait 2%", "eta 0:45", "best so far"):
            assert logged in text, logged
    assert f"saved {tmp_path / 'step-00000010'}" in console.log_file.path.read_text()
    assert ("\x1b[?25h" in out.getvalue()) == terminal, "the cursor is restored"


def test_high_drop_rate_warns_once(tmp_path: Path) -> None:
    console, out = make_console(terminal=False)
    console._warning_console = console.rich
    progress = Progress(step=10, total=100)
    for drop_rate in (0.05, 0.1, 0.4, 0.6):
        console.after_step(progress, {**ROW, "routing/drop_rate": drop_rate})
    warnings = [line for line in out.getvalue().splitlines() if line.startswith("warning")]
    assert len(warnings) == 1
    assert "routing/drop_rate 0.40" in warnings[0]
    assert "model.expert_capacity" in warnings[0]
    assert "drop 60%" in out.getvalue()
    console.after_step(progress, ROW)
    assert "drop" not in out.getvalue().splitlines()[-1]


def test_headline_selects_console_metrics() -> None:
    console, _ = make_console(terminal=False)
    console.headline = ("loss", "accuracy")
    result = {"loss": 1.0, "ece": 0.1, "accuracy": 0.5, "online/accuracy": 0.4, "accuracy_before": 0.2, "load/0": 1.0}
    assert list(console.headline_metrics(result)) == ["loss", "accuracy", "online/accuracy", "accuracy_before"]
    console.headline = None
    assert console.headline_metrics(result) == result


def test_quiet_prints_nothing_and_writes_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(unit="tokens", log=tmp_path / "log.txt", quiet=True)
    console.start(Progress())
    console.info("hello")
    console.warn("careful")
    assert capsys.readouterr() == ("", "")
    log = (tmp_path / "log.txt").read_text()
    assert re.fullmatch(r"[-\d]+ [:\d]+ INFO hello\n[-\d]+ [:\d]+ WARNING careful\n", log), log


def test_format_count_and_duration() -> None:
    assert [format_count(n) for n in (0, 999, 1000, 12_345, 3.2e6, 4e9)] == [
        "0",
        "999",
        "1.0k",
        "12.3k",
        "3.2M",
        "4.0G",
    ]
    assert [format_duration(s) for s in (0, 59.6, 61, 3600, 90_061)] == ["0:00", "1:00", "1:01", "1:00:00", "25:01:01"]


def test_resources_are_added_to_the_row(tmp_path: Path) -> None:
    row = {"loss": 1.0}
    callback = Resources(tmp_path)
    callback.start(Progress())
    callback.after_step(Progress(), row)
    assert row["ram_gib"] > 0.01
    assert row["disk_free_gib"] > 0
    assert row["cpu_percent"] >= 0


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {
        tag: [(e.step, round(e.value, 4)) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_drops_events_of_a_killed_process(tmp_path: Path) -> None:
    for start, steps in ((0, (1, 2)), (0, (1, 2, 3, 4)), (2, (3, 4, 5))):
        board = TensorBoard(tmp_path, pytest.fail)
        board.start(Progress(step=start))
        for step in steps:
            board.after_step(Progress(step=step), {"loss": float(start + step)})
        board.after_eval(Progress(step=steps[-1]), {"loss": 0.5})
        board.finish(Progress(), None)
    scalars = read_events(tmp_path)
    assert scalars["train/loss"] == [(1, 1.0), (2, 2.0), (3, 5.0), (4, 6.0), (5, 7.0)]
    assert scalars["validation/loss"] == [(5, 0.5)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_drops_events_after_a_rollback(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, pytest.fail)
    board.start(Progress())
    for step in (1, 2, 3):
        board.after_step(Progress(step=step), {"loss": 1.0})
    board.rewind(Progress(step=1))
    board.after_step(Progress(step=2), {"loss": 2.0})
    board.finish(Progress(), None)
    assert read_events(tmp_path)["train/loss"] == [(1, 1.0), (2, 2.0)]


@pytest.mark.parametrize("event", ["start", "after_step", "after_sample"])
def test_training_continues_when_tensorboard_hits_a_full_disk(
    tmp_path: Path, event: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """One warning, no output, no thread that could fail later, and a file that ends with a complete event."""
    warnings: list[str] = []
    samples = tmp_path / "samples"
    samples.mkdir()
    (samples / "00.txt").write_text("a sample")
    board = TrackerGuard(TensorBoard(tmp_path / "events", warnings.append), warnings.append)
    threads = threading.active_count()
    with full_disk() if event == "start" else nullcontext():
        board.start(Progress())
    if event != "start":
        board.after_step(Progress(step=1), {"loss": 1.0})
    with full_disk():
        for step in (2, 3) if event == "after_step" else ():
            board.after_step(Progress(step=step), {"loss": 1.0, "other": 2.0})
        board.after_sample(Progress(step=2), samples)
    board.after_eval(Progress(step=2), {"loss": 1.0})
    board.finish(Progress(), None)
    assert len(warnings) == 1
    assert re.search("(No space left on device|File too large); training continues", warnings[0])
    assert threading.active_count() == threads
    assert capfd.readouterr() == ("", "")
    if event != "start":
        assert read_events(tmp_path / "events") == {"train/loss": [(1, 1.0)]}


@contextmanager
def full_disk() -> Iterator[None]:
    """Limit the file size to ten bytes; longer files stay unchanged."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
