"""TensorBoard's own readers get each step once, and everything that compares runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bottega.callbacks import tensorboard_events
from bottega.callbacks.tensorboard import TensorBoard
from bottega.callbacks.tensorboard_events import list_event_files
from bottega.callbacks.tensorboard_hparams import flatten_hyperparameters
from bottega.core.callback import Callback, Histogram, Progress
from bottega.core.errors import Diverged, Interrupted

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

HISTOGRAM = Histogram(edges=(-2.0, -1.0, 0.0, 1.0, 2.0), counts=(0, 3, 5, 0))


OPEN_BOARDS: list[TensorBoard] = []


@pytest.fixture(autouse=True)
def close_files() -> Iterator[None]:
    """Close the files of processes that are "killed": a board that is dropped without `finish`."""
    yield
    while OPEN_BOARDS:
        OPEN_BOARDS.pop().finish(Progress(), Interrupted("", 85))


def start_board(folder: Path, step: int = 0, warn: Callable[[str], None] = pytest.fail, **options: Any) -> TensorBoard:
    board = TensorBoard(folder, warn, **options)
    board.start(Progress(step=step, total=100))
    OPEN_BOARDS.append(board)
    return board


def run_steps(board: Callback, steps: Sequence[int], value: float = 0.0) -> None:
    for step in steps:
        board.after_step(Progress(step=step), {"loss": value + step})


def read_scalars(folder: Path, tag: str = "train/loss") -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def open_folder(folder: Path) -> tuple[Any, Any, Any]:
    """Return TensorBoard's context of a folder of runs, a request context, and the multiplexer."""
    from tensorboard import context
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.plugins.base_plugin import TBContext

    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(folder))
    return TBContext(data_provider=provider), context.RequestContext(), multiplexer


def read_sessions(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return what the HPARAMS tab gets: the experiment, and the session groups by name."""
    from tensorboard.plugins.hparams import api_pb2, backend_context, get_experiment, list_session_groups

    tb_context, request_context, _ = open_folder(folder)
    backend = backend_context.Context(tb_context)
    metrics_request = api_pb2.GetExperimentRequest(include_metrics=True)
    experiment = get_experiment.Handler(request_context, backend, "", metrics_request).run()
    statuses = [api_pb2.STATUS_UNKNOWN, api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE, api_pb2.STATUS_RUNNING]
    request = api_pb2.ListSessionGroupsRequest(allowed_statuses=statuses, start_index=0, slice_size=10)
    response = list_session_groups.Handler(request_context, backend, "", request).run()
    return experiment, {group.name: group for group in response.session_groups}


@pytest.mark.parametrize("num_cut_bytes", [1, 7, 30])
def test_event_file_that_is_cut_short_hides_nothing_of_the_next(tmp_path: Path, num_cut_bytes: int) -> None:
    """A kill in the middle of a record, and a resume from a checkpoint before it."""
    run_steps(start_board(tmp_path), (1, 2, 3, 4))
    [path] = list_event_files(tmp_path)
    path.write_bytes(path.read_bytes()[:-num_cut_bytes])
    run_steps(start_board(tmp_path, step=2), (3, 4, 5), value=10.0)
    assert read_scalars(tmp_path) == [(1, 1.0), (2, 2.0), (3, 13.0), (4, 14.0), (5, 15.0)]


def test_new_files_sort_last_even_if_the_clock_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, steps in ((2000, (1, 2, 3)), (1000, (2, 3)), (1000, (2, 3))):
        monkeypatch.setattr(tensorboard_events.time, "time", lambda seconds=seconds: float(seconds))
        board = start_board(tmp_path, step=steps[0] - 1)
        run_steps(board, steps, value=float(len(list_event_files(tmp_path))))
        board.finish(Progress(), Interrupted("", 85))
    assert read_scalars(tmp_path) == [(1, 2.0), (2, 5.0), (3, 6.0)]


@pytest.mark.parametrize("is_repeated", [True, False])
def test_evaluation_that_is_repeated_at_the_start_appears_once(tmp_path: Path, is_repeated: bool) -> None:
    """A process is killed after a pending evaluation, before the next checkpoint; or before it, having run the step earlier."""
    board = start_board(tmp_path)
    run_steps(board, (10, 20))
    if is_repeated:
        start_board(tmp_path, step=20).after_eval(Progress(step=20), {"loss": 0.5})
    else:
        board.after_eval(Progress(step=20), {"loss": 7.0})
        run_steps(start_board(tmp_path, step=10), (20,))  # discards the evaluation of step 20
    resumed = start_board(tmp_path, step=20)
    resumed.after_eval(Progress(step=20), {"loss": 0.5})
    resumed.after_eval(Progress(step=30), {"loss": 0.25})
    assert read_scalars(tmp_path, "validation/loss") == [(20, 0.5), (30, 0.25)]
    assert [step for step, _ in read_scalars(tmp_path)] == [10, 20]


def test_modules_and_histograms_are_read_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = start_board(tmp_path)
    board.after_inspect(Progress(step=5), {"blocks.0": {"gradient_norm": 0.5, "update_ratio": 0.25}})
    empty, infinite = Histogram((0.0, 1.0), (0,)), Histogram((0.0, float("inf")), (3,))
    histograms = {"weights/head": HISTOGRAM, "gradients/head": HISTOGRAM, "weights/a": empty, "weights/b": infinite}
    board.after_histograms(Progress(step=5), histograms)
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    assert [event.value for event in accumulator.Scalars("modules/blocks.0/update_ratio")] == [0.25]
    assert sorted(accumulator.Tags()["histograms"]) == ["gradients/head", "weights/head"]
    [event] = accumulator.Histograms("weights/head")
    assert (event.step, event.histogram_value.num, event.histogram_value.sum) == (5, 8, 1.0)
    _, _, multiplexer = open_folder(tmp_path)
    [tensor] = multiplexer.Tensors(".", "weights/head")
    from tensorboard.util.tensor_util import make_ndarray

    assert make_ndarray(tensor.tensor_proto).tolist() == [[-1.0, 0.0, 3.0], [0.0, 1.0, 5.0]], (
        "no bin grows into an empty one"
    )


def test_hparams_tab_compares_all_runs(tmp_path: Path) -> None:
    """Keys that only one run has are listed too; those that differ come first, and the best metric before other scalars."""
    for name, settings in (("a", {"lr": 0.1, "seed": 0}), ("b", {"lr": 0.2, "seed": 0, "lora.rank": 8, "bf16": True})):
        board = start_board(tmp_path / name, hyperparameters=settings, best_metric="accuracy")
        run_steps(board, (1,))
        board.after_eval(Progress(step=2, best=0.75, best_step=2), {"loss": 1.0, "accuracy": 0.75})
        board.finish(Progress(step=100, total=100), None)
    experiment, groups = read_sessions(tmp_path)
    assert {info.name: info.differs for info in experiment.hparam_infos} == {
        "lr": True,
        "bf16": False,
        "lora.rank": False,
        "seed": False,
    }
    assert experiment.hparam_infos[0].name == "lr"
    tags = [info.name.tag for info in experiment.metric_infos]
    assert tags == ["best/accuracy", "train/loss", "validation/accuracy", "validation/loss"]
    assert groups["b"].hparams["lora.rank"].number_value == 8
    assert groups["b"].hparams["bf16"].bool_value is True
    assert {value.name.tag: value.value for value in groups["a"].metric_values}["best/accuracy"] == 0.75


@pytest.mark.parametrize(
    ("error", "step", "status"),
    [
        (None, 100, "STATUS_SUCCESS"),
        (Diverged("x"), 40, "STATUS_FAILURE"),
        (Interrupted("x", 85), 40, "STATUS_RUNNING"),
        (None, 40, "STATUS_RUNNING"),  # paused by --until
    ],
)
def test_session_status(tmp_path: Path, error: BaseException | None, step: int, status: str) -> None:
    from tensorboard.plugins.hparams import api_pb2

    def get_status() -> str:
        _, groups = read_sessions(tmp_path)
        return str(api_pb2.Status.Name(groups["run"].sessions[0].status))

    board = start_board(tmp_path / "run", hyperparameters={"lr": 0.1})
    run_steps(board, (1, 2))
    board.finish(Progress(step=step, total=100), error)
    assert get_status() in (status, status.replace("RUNNING", "UNKNOWN"))
    # A later process completes the run: its status counts, not that of the first.
    board = start_board(tmp_path / "run", step=2, hyperparameters={"lr": 0.1})
    run_steps(board, (3,))
    board.finish(Progress(step=100, total=100), None)
    assert get_status() == "STATUS_SUCCESS"
    assert [step for step, _ in read_scalars(tmp_path / "run")] == [1, 2, 3]


def test_layout_is_there_once_after_resume_and_rollback(tmp_path: Path) -> None:
    from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin

    for name, metric in (("a", "accuracy"), ("b", "perplexity")):
        run_steps(start_board(tmp_path / name, metrics=("loss", metric)), (1, 2, 3))
        board = start_board(tmp_path / name, metrics=("loss", metric))
        board.rewind(Progress(step=0))
        run_steps(board, (1,))
        board.after_eval(Progress(step=1), {"loss": 1.0, metric: 0.5})
    tb_context, request_context, multiplexer = open_folder(tmp_path)
    assert len(multiplexer.Tensors("a", "custom_scalars__config__")) == 1
    assert len(multiplexer.Tensors("a", "_hparams_/session_start_info")) == 1
    layout = CustomScalarsPlugin(tb_context).layout_impl(request_context, "")
    charts = {chart["title"]: chart for category in json.loads(layout)["category"] for chart in category["chart"]}
    assert {"loss", "learning rate", "gradient norm", "samples per second", "memory in GiB"} <= set(charts)
    assert {"accuracy", "perplexity", "update ratio"} <= set(charts)
    import re

    [pattern] = charts["accuracy"]["multiline"]["tag"]
    assert [bool(re.match(pattern, tag)) for tag in ("validation/accuracy", "validation/accuracy_before")] == [
        True,
        False,
    ]
    assert charts["loss"]["multiline"]["tag"] == ["train/loss$", "validation/loss$"]


@pytest.mark.parametrize("name", ["00.txt", "00.png", "00.wav", "00.mp4"])
def test_media_that_vanish_are_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from bottega.callbacks import tensorboard

    if name.endswith("mp4"):
        pytest.importorskip("av")
        pytest.importorskip("PIL")
    folder = tmp_path / "samples"
    folder.mkdir()
    paths = [folder / "01.txt", folder / name]
    monkeypatch.setattr(tensorboard, "find_media", lambda _, suffix: [p for p in paths if p.suffix == suffix])
    paths[0].write_bytes(b"a \xff sample")
    messages: list[str] = []
    board = start_board(tmp_path / "run", warn=messages.append)
    for step in (1, 2):
        board.after_sample(Progress(step=step), folder)
    run_steps(board, (3,))
    assert len(messages) == 1
    assert name in messages[0]
    assert "No such file" in messages[0]
    assert read_scalars(tmp_path / "run") == [(3, 3.0)]
    _, _, multiplexer = open_folder(tmp_path / "run")
    assert [event.step for event in multiplexer.Tensors(".", "samples/01.txt/text_summary")] == [1, 2]


@pytest.mark.parametrize("has_animation", [True, False])
def test_video_without_animation_is_a_film_strip(tmp_path: Path, has_animation: bool) -> None:
    np = pytest.importorskip("numpy")
    pytest.importorskip("av")
    pytest.importorskip("PIL")
    from bottega.data.video.write import write_video

    folder = tmp_path / "samples"
    folder.mkdir()
    write_video(np.zeros((24, 32, 64, 3), np.uint8), 8.0, folder / "00.mp4")
    (folder / "01.mp4").write_bytes(b"not a video")
    if has_animation:
        write_video(np.zeros((24, 32, 64, 3), np.uint8), 8.0, folder / "sheet.gif")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    start_board(tmp_path / "run").after_sample(Progress(step=1), folder)
    accumulator = EventAccumulator(str(tmp_path / "run"))
    accumulator.Reload()
    assert accumulator.Tags()["images"] == ["samples/sheet.gif" if has_animation else "samples/00.mp4"]
    if not has_animation:
        [image] = accumulator.Images("samples/00.mp4")
        assert (image.width, image.height) == (8 * 256, 128)


def test_hyperparameters_are_flat() -> None:
    settings = {
        "lr": 0.1,
        "bf16": True,
        "name": "x",
        "rate": None,
        "sizes": [1, 2],
        "techniques": [{"name": "lora", "rank": 8}, {"name": "ewc", "weight": 1.0}],
        "groups": [{"pattern": "a"}, {"pattern": "b"}],
    }
    assert flatten_hyperparameters(settings) == {
        "lr": 0.1,
        "bf16": True,
        "name": "x",
        "sizes": "[1, 2]",
        "techniques.lora.name": "lora",
        "techniques.lora.rank": 8,
        "techniques.ewc.name": "ewc",
        "techniques.ewc.weight": 1.0,
        "groups.0.pattern": "a",
        "groups.1.pattern": "b",
    }


SCRIPT = """
import sys
from pathlib import Path
from bottega.callbacks.tensorboard import TensorBoard
from bottega.core.callback import Histogram, Progress
board = TensorBoard(Path(sys.argv[1]), print, hyperparameters={"lr": 0.1}, metrics=("loss", "accuracy"))
board.start(Progress())
board.after_step(Progress(step=1), {"loss": 1.0})
board.after_inspect(Progress(step=1), {"head": {"gradient_norm": 1.0}})
board.after_histograms(Progress(step=1), {"weights/head": Histogram((0.0, 1.0), (3,))})
board.after_eval(Progress(step=1, best=1.0), {"loss": 1.0})
board.after_sample(Progress(step=1), Path(sys.argv[2]))
board.finish(Progress(step=1, total=1), None)
print(sorted({"torch", "tensorflow"} & set(sys.modules)))
"""


def test_nothing_imports_torch_or_tensorflow(tmp_path: Path) -> None:
    (tmp_path / "00.txt").write_text("a sample")
    (tmp_path / "00.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(20))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"
    assert read_scalars(tmp_path / "run", "validation/loss") == [(1, 1.0)]
