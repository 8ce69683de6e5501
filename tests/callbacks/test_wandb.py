"""Weights & Biases: one run with each step once, also after kills and rollbacks; no failure of wandb ends a run."""

from __future__ import annotations

import json
import struct
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bottega.callbacks import wandb as wandb_callback
from bottega.callbacks.jsonl import JsonLines
from bottega.callbacks.tracker_guard import TrackerGuard
from bottega.callbacks.wandb import WandB
from bottega.callbacks.wandb_runs import find_run_id, read_steps
from bottega.core.callback import Histogram, Progress
from bottega.core.errors import Diverged

HISTOGRAMS = {"weights/head": Histogram((0.0, 1.0), (3,)), "weights/bad": Histogram((0.0, float("nan")), (3,))}
FILES = ("00.png", "sheet.png", "sheet.gif", "00.mp4", "00.wav", "00.txt")


class FakeWandb:
    """A fake of the wandb package and of its run; media objects are (kind, file or value, options)."""

    def __init__(self, *, broken: str = "", offline: bool = True, starting_step: int = 0) -> None:
        self.broken, self.offline, self.starting_step, self.id = broken, offline, starting_step, "abc123"
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.options: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.exit_codes: list[int] = []

    def init(self, **options: Any) -> FakeWandb:
        if self.broken == "login":
            raise RuntimeError("No API key configured. Use `wandb login` to log in.")
        self.fail_if_broken("init")
        self.options = options
        return self

    def log(self, row: dict[str, Any], *, step: int) -> None:
        self.fail_if_broken("log")
        self.rows.append((step, row))

    def finish(self, *, exit_code: int) -> None:
        self.exit_codes.append(exit_code)
        self.fail_if_broken("finish")

    def fail_if_broken(self, name: str) -> None:
        if self.broken == name:
            raise ConnectionError("https://user:secret@host")

    def make_media(self, kind: str) -> Any:
        def make(data: Any = None, **options: Any) -> tuple[str, Any, dict[str, Any]]:
            self.fail_if_broken(kind)
            return kind, Path(data).name if isinstance(data, str) else data, options

        return make


def make_tracker(
    monkeypatch: pytest.MonkeyPatch, fake: FakeWandb, messages: list[str], folder: Path = Path("x")
) -> WandB:
    module = types.ModuleType("wandb")
    media = {kind: fake.make_media(kind) for kind in ("Image", "Video", "Audio", "Table", "Histogram")}
    vars(module).update({"init": fake.init, "Settings": dict, **media})
    monkeypatch.setitem(sys.modules, "wandb", module)
    return WandB(folder=folder, project="p", options={"offline": True}, config={"seed": 1}, warn=messages.append)


def write_samples(folder: Path) -> Path:
    folder.mkdir()
    for name in FILES:
        (folder / name).write_bytes(b"words")
    return folder


def send_events(callback: Any, samples: Path) -> None:
    """Send all events of a run of three steps."""
    callback.load_state_dict({})
    callback.start(Progress())
    for step in (1, 2, 3):
        callback.after_inspect(Progress(step=step), {"head": {"gradient_norm": 0.5}})
        callback.after_histograms(Progress(step=step), HISTOGRAMS)
        callback.after_step(Progress(step=step), {"loss": 1.0})
        callback.after_eval(Progress(step=step, best=0.5, best_step=2), {"loss": 2.0})
        callback.after_save(Progress(step=step), samples)
        callback.after_sample(Progress(step=step), samples)
    callback.state_dict()
    callback.rewind(Progress(step=2))
    callback.after_step(Progress(step=3), {"loss": 9.0})
    callback.after_step(Progress(step=4), {"loss": 4.0})
    callback.finish(Progress(step=4, best=0.5, best_step=2), None)


def test_wandb_gets_all_that_a_run_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, messages = FakeWandb(), []
    send_events(make_tracker(monkeypatch, fake, messages), write_samples(tmp_path / "samples"))
    first_row = {name: value for step, row in fake.rows if step == 1 for name, value in row.items()}
    counts, edges = first_row["weights/head"][2]["np_histogram"]
    assert (counts.tolist(), edges.tolist()) == ([3], [0.0, 1.0])
    assert {name: value for name, value in first_row.items() if name != "weights/head"} == {
        "modules/head/gradient_norm": 0.5,
        "train/loss": 1.0,
        "validation/loss": 2.0,
        "samples/sheet.png": ("Image", "sheet.png", {}),
        "samples/sheet.gif": ("Video", "sheet.gif", {"format": "gif"}),
        "samples/00.mp4": ("Video", "00.mp4", {"format": "mp4"}),
        "samples/00.wav": ("Audio", "00.wav", {}),
        "samples/00.txt": ("Table", [["words"]], {"columns": ["text"]}),
    }
    losses = [(step, row["train/loss"]) for step, row in fake.rows if "train/loss" in row]
    assert losses == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 4.0)], "a rolled back step is not logged again"
    assert fake.options["config"] == {"seed": 1}
    assert fake.summary == {"best/loss": 0.5, "best/step": 2}
    assert (fake.exit_codes, messages) == ([0], [])


@pytest.mark.parametrize("broken", ["init", "login", "log", "summary", "finish", "Histogram"])
def test_training_continues_when_wandb_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    fake, messages = FakeWandb(broken=broken), []
    if broken == "summary":
        fake.summary = None  # type: ignore[assignment]
    tracker = make_tracker(monkeypatch, fake, messages)
    send_events(TrackerGuard(tracker, messages.append), write_samples(tmp_path / "samples"))
    (line,) = messages
    assert line.startswith("wandb logging failed: ")
    assert line.endswith("; training continues without it")
    assert "secret" not in line
    assert fake.exit_codes == ([] if broken in ("init", "login") else [0]), "the run is closed"
    if broken == "login":
        assert all(remedy in line for remedy in ("wandb login", "WANDB_API_KEY", "logging.wandb.offline=true"))


@pytest.mark.parametrize("kind", ["Image", "Video", "Audio", "Table"])
def test_media_that_fail_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    fake, messages = FakeWandb(broken=kind), []
    send_events(make_tracker(monkeypatch, fake, messages), write_samples(tmp_path / "samples"))
    assert len(messages) == 1
    assert "it is left out" in messages[0]
    kinds = {value[0] for _, row in fake.rows for value in row.values() if isinstance(value, tuple)}
    assert kinds == {"Image", "Video", "Audio", "Table", "Histogram"} - {kind}
    assert [row for step, row in fake.rows if step == 3 and "train/loss" in row] == [{"train/loss": 1.0}]


def test_finish_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    is_released = threading.Event()
    fake, messages = FakeWandb(), []
    monkeypatch.setattr(fake, "finish", lambda *, exit_code: is_released.wait())
    monkeypatch.setattr(wandb_callback, "FINISH_SECONDS", -29.99)
    guard = TrackerGuard(make_tracker(monkeypatch, fake, messages), messages.append)
    guard.start(Progress())
    guard.finish(Progress(), None)
    is_released.set()
    assert messages == ["wandb logging failed: TimeoutError; training continues without it"]


def test_missing_package_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    tracker = make_tracker(monkeypatch, FakeWandb(), messages)
    monkeypatch.setitem(sys.modules, "wandb", None)
    guard = TrackerGuard(tracker, messages.append)
    guard.start(Progress())
    guard.finish(Progress(), None)
    assert len(messages) == 1


def test_id_is_that_of_the_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    first = make_tracker(monkeypatch, fake, [], tmp_path / "first")
    first.load_state_dict({})
    first.start(Progress())
    assert (fake.options["id"], fake.options["resume"], fake.options["mode"]) == (None, None, "offline")
    second = make_tracker(monkeypatch, fake, [], tmp_path / "first")
    second.load_state_dict(first.state_dict())
    second.start(Progress(step=3))
    assert (fake.options["id"], fake.options["resume"]) == ("abc123", "allow")
    other = make_tracker(monkeypatch, fake, [], tmp_path / "other")  # starts from a checkpoint of the first run
    other.load_state_dict(first.state_dict())
    other.start(Progress(step=3))
    assert fake.options["id"] is None
    for name in ("offline-run-20260101_000000-older", "run-20260102_000000-new-id-1", "latest-run"):
        (tmp_path / "first" / "wandb" / name).mkdir(parents=True)
        run_id = "new-id" if "new" in name else "older"
        (tmp_path / "first" / "wandb" / name / f"run-{run_id}.wandb").touch()
    assert find_run_id(tmp_path / "first") == "new-id"
    assert find_run_id(tmp_path / "other") is None


def test_server_decides_which_steps_are_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Online, the server has steps up to 30; the run resumes at step 20, or at 40 with rows that the server has never got."""
    for start, expected in ((20, [40, 50]), (40, [40, 50])):
        folder = tmp_path / str(start)
        folder.mkdir()
        rows = [
            {"step": step, "kind": "train", "samples": step, "loss": 1.0, "x": None}
            for step in range(10, start + 1, 10)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        fake = FakeWandb(offline=False, starting_step=31)
        tracker = make_tracker(monkeypatch, fake, [], folder)
        tracker.load_state_dict({"id": "abc123", "folder": folder.name})
        tracker.start(Progress(step=start))
        for step in range(start + 10, 51, 10):
            tracker.after_step(Progress(step=step), {"loss": 1.0})
        assert fake.rows == [(step, {"train/loss": 1.0}) for step in expected]


class Process:
    """A process that logs a run to metrics.jsonl and to the real wandb, offline."""

    def __init__(self, folder: Path, start: int, state: dict[str, Any] | None = None) -> None:
        self.metrics = JsonLines(folder / "metrics.jsonl", pytest.fail)
        self.tracker = WandB(
            folder=folder, project="p", options={"offline": True}, config={"seed": 1}, warn=pytest.fail
        )
        self.metrics.rewind(Progress(step=start, samples=start, evaluated_step=start))
        self.tracker.load_state_dict(state or {})
        self.tracker.start(Progress(step=start))

    def run(self, steps: Sequence[int]) -> None:
        for step in steps:
            for callback in (self.metrics, self.tracker):
                callback.after_step(Progress(step=step, samples=step), {"loss": float(step)})
                callback.after_eval(Progress(step=step, samples=step, best=0.5), {"loss": float(step)})

    def end(self) -> None:
        self.tracker.finish(Progress(), Diverged("x"))
        wait_for_files()
        wandb_callback.LAST_LOGGED_STEPS.clear()  # the next one is another process


def wait_for_files() -> None:
    """Wait, as at the end of a process, until wandb has written its files; `finish` returns earlier."""
    import wandb

    wandb.teardown()


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    pytest.importorskip("wandb")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    (tmp_path / "run").mkdir()
    yield tmp_path / "run"
    wait_for_files()


def list_segments(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))


def read_all_steps(folder: Path) -> list[int]:
    return sorted(step for path in list_segments(folder) for step in read_steps(path))


def test_no_step_is_logged_twice_after_a_kill(run_folder: Path) -> None:
    """The first process has logged 40 steps and is killed; the run resumes at step 20, then ends and resumes at its last step."""
    first = Process(run_folder, 0)
    first.run((10, 20, 30, 40))
    first.end()  # wandb has no way to write its file at once, so a kill after it was written is simulated by an end
    second = Process(run_folder, 20)
    assert second.tracker.state_dict()["id"] == first.tracker.state_dict()["id"], "also without a checkpoint"
    second.run((30, 40, 50))
    second.end()
    third = Process(run_folder, 50)
    third.tracker.after_eval(Progress(step=50), {"loss": 0.0})  # the second process was stopped before this evaluation
    third.run((60,))
    third.end()
    assert read_all_steps(run_folder) == [10, 20, 30, 40, 50, 51, 60]


@pytest.mark.parametrize("num_steps", [0, 4, 9])
def test_steps_that_a_kill_has_lost_are_logged_again(run_folder: Path, num_steps: int) -> None:
    """wandb writes its file every 15 seconds; the rest of the steps before the checkpoint is read from metrics.jsonl."""
    first = Process(run_folder, 0)
    first.run(tuple(range(10, 110, 10)))
    first.end()
    [segment] = list_segments(run_folder)
    data = segment.read_bytes()
    for size in range(0, len(data), 13):  # cut somewhere inside a record
        segment.write_bytes(data[:size])
        if len(read_steps(segment)) == num_steps:
            break
    assert len(read_steps(segment)) == num_steps
    second = Process(run_folder, 80)
    second.run((90, 100, 110))
    second.end()
    assert read_all_steps(run_folder) == list(range(10, 120, 10))


def test_one_process_continues_a_run_whose_files_are_not_written_yet(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_callback, "read_last_step", lambda folder, run_id: -1)
    for start, steps in ((0, (10, 20, 30)), (20, (30, 40)), (40, (50,))):
        process = Process(run_folder, start)
        process.run(steps)
        process.tracker.finish(Progress(), None)
    wait_for_files()
    assert read_all_steps(run_folder) == [10, 20, 30, 40, 50]


def test_a_record_that_is_cut_short_is_not_read(tmp_path: Path) -> None:
    """Also if its first half is a valid message."""
    internal: Any = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    record = internal.Record()
    record.history.item.add(nested_key=["_step"], value_json="7")
    data = record.SerializeToString()
    path = tmp_path / "run-a.wandb"
    for size, steps in ((len(data), [7]), (len(data) + 1, [])):
        path.write_bytes(b":W&B\0\0\0" + struct.pack("<IHB", 0, size, 1) + data)
        assert read_steps(path) == steps


def test_rolled_back_steps_are_not_logged_twice(run_folder: Path) -> None:
    process = Process(run_folder, 0)
    process.run((10, 20, 30))
    process.tracker.rewind(Progress(step=10))
    process.run((20, 30, 40))
    process.end()
    assert read_all_steps(run_folder) == [10, 20, 30, 40]


def test_real_wandb_takes_every_kind(run_folder: Path) -> None:
    np = pytest.importorskip("numpy")
    pytest.importorskip("PIL")
    from tests.callbacks.test_media_samples import encode_wav

    from bottega.data.video.write import write_video

    samples = run_folder.parent / "samples"
    samples.mkdir()
    (samples / "00.txt").write_text("words")
    (samples / "00.wav").write_bytes(encode_wav())
    write_video(np.zeros((3, 16, 16, 3), np.uint8), 8.0, samples / "sheet.gif")
    messages: list[str] = []
    guard = TrackerGuard(
        WandB(folder=run_folder, project="p", options={"offline": True}, config={"seed": 1}, warn=messages.append),
        messages.append,
    )
    send_events(guard, samples)
    wait_for_files()
    assert messages == []
    assert read_all_steps(run_folder) == [1, 2, 3, 4]
    media = {path.suffix for path in (run_folder / "wandb").rglob("files/media/**/*") if path.is_file()}
    assert {".gif", ".wav", ".json"} <= media
