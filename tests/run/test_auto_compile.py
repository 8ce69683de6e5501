"""`training.compile: auto` in a run: the choice at the start, refined by timed steps, kept in checkpoints, and what is said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import bottega
from bottega.callbacks.console import Console
from bottega.core.callback import Progress
from bottega.engines import compile_choice
from bottega.engines.compile_choice import CompileCost
from bottega.run.auto_compile import MIN_TIMED_STEPS, AutoCompile
from bottega.run.train import train_command
from bottega.tasks.recipes import load_recipe
from fake_compiler import FakeCompiler, use_compiler
from fake_engine import FakeEngine
from small_run import differing_tensors, read_tensors
from small_texts import settings
from toy_task import Toy

pytestmark = pytest.mark.filterwarnings("ignore")  # raised by the compiler itself

COST = CompileCost(compile_seconds=10.0, factor=0.5, step_seconds=0.001)
AT_ONCE = CompileCost(compile_seconds=0.0, factor=0.5, step_seconds=1.0)
"""Compiling takes no time, so it pays from the first step on."""
ONCE_TIMED = CompileCost(compile_seconds=0.0, factor=0.5, step_seconds=0.0)
"""By the table nothing is saved; by any measured time, something is."""
NEVER = CompileCost(compile_seconds=1e9, factor=0.5, step_seconds=1.0)


class Recorder(Console):
    """Records the notes and warnings of a run."""

    def __init__(self) -> None:
        super().__init__(unit="samples", quiet=True)
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def info(self, text: str, *, style: str = "") -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


class Timed(FakeEngine):
    """An engine that does nothing; `votes` of rank 0 are those of all ranks."""

    def __init__(self, *, rank: int = 0, vote: bool | None = None) -> None:
        self.task, self.device_type, self.rank, self.vote = Toy(), "cpu", rank, vote
        self.flags: list[bool] = []

    def any_rank(self, flag: bool) -> bool:
        self.flags.append(flag)
        return flag if self.vote is None else self.vote


@pytest.fixture
def cost(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CompileCost:
    """Give the CPU the costs of a GPU, so that `auto` has something to choose there."""
    value = getattr(request, "param", COST)
    monkeypatch.setattr(compile_choice, "COSTS", {"cpu": dict.fromkeys(compile_choice.COSTS["cuda"], value)})
    return value


def build(engine: Timed, **values: Any) -> tuple[AutoCompile, Recorder]:
    recorder = Recorder()
    return AutoCompile(load_recipe(["classify", values]).recipe, engine, recorder), recorder


def log(
    callback: AutoCompile, progress: Progress, *, seconds: float, steps: int = 10, wait: float = 0.0
) -> dict[str, float]:
    progress.step += steps
    metrics = {"step_seconds": seconds, "data_wait": wait}
    callback.after_step(progress, metrics)
    return metrics


@pytest.mark.usefixtures("cost")
def test_slow_steps_are_compiled_once_timed_and_fast_ones_are_not() -> None:
    for seconds, is_compiled in ((0.05, True), (0.02, False)):
        engine = Timed()
        callback, recorder = build(engine)
        progress = Progress(total=1000)
        callback.start(progress)
        assert not engine.is_compiled
        log(callback, progress, seconds=9.0)  # the first steps of a process are not counted
        assert not engine.is_compiled
        metrics = log(callback, progress, seconds=seconds)
        assert metrics["compiled"] == 0.0, "the steps that were logged were eager"
        assert engine.is_compiled == is_compiled
        assert callback.state_dict()["compiled"] == is_compiled
        assert len(recorder.notes) == 1 + is_compiled
    note = "training.compile: auto is off for 1,000 steps (compiling would take about 10 s and save about 0 s)"
    assert recorder.notes[0].startswith(note)


@pytest.mark.usefixtures("cost")
def test_the_switch_is_said_with_its_reason() -> None:
    callback, recorder = build(Timed())
    progress = Progress(total=1000)
    callback.start(progress)
    for _ in range(2):
        log(callback, progress, seconds=0.1)
    assert recorder.notes[1] == (
        "training.compile: auto is on from step 21 (980 steps of 0.1 s are left: compiling takes about 10 s and saves about 49 s)"
    )


@pytest.mark.usefixtures("cost")
def test_steps_are_not_compiled_that_only_wait_for_data() -> None:
    engine = Timed()
    callback, _ = build(engine)
    progress = Progress(total=1000)
    callback.start(progress)
    for _ in range(10):
        log(callback, progress, seconds=0.1, wait=0.9)
    assert not engine.is_compiled


@pytest.mark.usefixtures("cost")
def test_a_few_steps_are_timed_before_the_choice() -> None:
    engine = Timed()
    callback, _ = build(engine)
    progress = Progress(total=1000)
    callback.start(progress)
    for number in range(1 + MIN_TIMED_STEPS):
        assert not engine.is_compiled, number
        log(callback, progress, seconds=1.0, steps=1)
    assert engine.is_compiled


@pytest.mark.usefixtures("cost")
def test_compiled_steps_that_are_slower_are_given_up() -> None:
    for seconds, is_compiled in ((0.2, False), (0.05, True)):
        engine = Timed()
        callback, recorder = build(engine)
        progress = Progress(total=1000)
        callback.start(progress)
        for _ in range(2):
            log(callback, progress, seconds=0.1)
        assert engine.is_compiled
        log(callback, progress, seconds=5.0)  # compiles
        assert engine.is_compiled
        log(callback, progress, seconds=seconds)
        assert engine.is_compiled == is_compiled
        for _ in range(5):
            log(callback, progress, seconds=0.5)
        assert engine.is_compiled == is_compiled, "the choice is made once"
    assert len(recorder.notes) == 2


@pytest.mark.usefixtures("cost")
def test_measured_times_do_not_enter_with_deterministic() -> None:
    engine = Timed()
    callback, _ = build(engine, deterministic=True)
    progress = Progress(total=1000)
    callback.start(progress)
    for _ in range(10):
        log(callback, progress, seconds=100.0)
    assert not engine.is_compiled
    assert engine.flags == []


@pytest.mark.usefixtures("cost")
@pytest.mark.parametrize("step", [0, 29_000])
def test_deterministic_choice_does_not_depend_on_the_step_of_a_resume(step: int) -> None:
    engine = Timed()
    callback, _ = build(engine, deterministic=True)
    callback.start(Progress(total=31_000, step=step))
    assert engine.is_compiled, "15.5 s are saved, more than 1.5 times 10 s"


@pytest.mark.usefixtures("cost")
@pytest.mark.parametrize("vote", [False, True])
def test_all_ranks_follow_rank_0(vote: bool) -> None:
    engine = Timed(rank=1, vote=vote)
    callback, _ = build(engine)
    progress = Progress(total=1000)
    callback.start(progress)
    for _ in range(2):
        log(callback, progress, seconds=1.0)
    assert engine.flags == [False], "the clock of rank 1 has no say"
    assert engine.is_compiled == vote


@pytest.mark.usefixtures("cost")
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_resumed_run_continues_in_the_mode_of_its_checkpoint(is_compiled: bool, deterministic: bool) -> None:
    for total in (20, 10**6):
        engine = Timed()
        callback, recorder = build(engine, deterministic=deterministic)
        callback.load_state_dict({"compiled": is_compiled, "failed": False})
        callback.start(Progress(total=total, step=10))
        assert engine.is_compiled == is_compiled
        assert recorder.notes == [f"training.compile: auto is {'on' if is_compiled else 'off'}, as in the checkpoint"]
        assert callback.state_dict() == {"compiled": is_compiled, "failed": False}


@pytest.mark.usefixtures("cost")
@pytest.mark.parametrize("switch", ["auto", True])
def test_the_compiler_is_not_tried_again_after_a_resume(switch: Any) -> None:
    engine = Timed()
    engine.is_compiled = True
    callback, _ = build(engine, **{"training.compile": switch})
    callback.load_state_dict({"compiled": False, "failed": True})
    callback.start(Progress(total=10**6, step=10))
    assert not engine.is_compiled


@pytest.mark.usefixtures("cost")
def test_a_value_in_the_recipe_replaces_the_mode_of_the_checkpoint() -> None:
    engine = Timed()
    callback, recorder = build(engine, **{"training.compile": True})
    callback.load_state_dict({"compiled": False, "failed": False})
    callback.start(Progress(total=20, step=10))
    assert engine.is_compiled
    assert recorder.notes == ["training.compile: the first step compiles the model, which can take minutes"]


@pytest.mark.usefixtures("cost")
def test_a_failure_is_said_once_and_recorded() -> None:
    engine = Timed()
    callback, recorder = build(engine, **{"training.compile": True})
    progress = Progress(total=100)
    callback.start(progress)
    engine.is_compiled, engine.compile_error = False, "RuntimeError: Failed to find C compiler"
    for _ in range(3):
        metrics = log(callback, progress, seconds=1.0)
        assert (metrics["compiled"], metrics["compile_failed"]) == (0.0, 1.0)
    assert recorder.warnings == [
        "training.compile: RuntimeError: Failed to find C compiler; training continues without compiling"
    ]
    assert callback.state_dict() == {"compiled": False, "failed": True}


@pytest.mark.usefixtures("cost")
def test_a_rollback_returns_to_the_mode_of_its_checkpoint() -> None:
    engine = Timed()
    callback, _ = build(engine)
    progress = Progress(total=1000)
    callback.start(progress)
    state = callback.state_dict()
    for _ in range(2):
        log(callback, progress, seconds=0.1)
    assert engine.is_compiled
    progress.step = 10
    callback.load_state_dict(state)
    callback.rewind(progress)
    assert not engine.is_compiled


@pytest.mark.usefixtures("cost")
@pytest.mark.parametrize("switch", ["auto", True])
def test_a_rollback_does_not_try_a_failed_compiler_again(switch: Any) -> None:
    engine = Timed()
    callback, recorder = build(engine, **{"training.compile": switch})
    progress = Progress(total=10**6)
    callback.start(progress)
    state = callback.state_dict()
    engine.is_compiled, engine.compile_error = False, "RuntimeError: no compiler"
    log(callback, progress, seconds=1.0)
    callback.load_state_dict({**state, "compiled": True})
    callback.rewind(progress)
    assert not engine.is_compiled
    log(callback, progress, seconds=1.0)
    assert len([text for text in recorder.warnings if "RuntimeError: no compiler" in text]) == 1
    assert callback.state_dict()["failed"]


# Whole runs on a CPU


@pytest.fixture
def compiler() -> Iterator[FakeCompiler]:
    with use_compiler(FakeCompiler()) as compiler:
        yield compiler
    torch.use_deterministic_algorithms(False)


def train(folder: Path, name: str, *, until: int | None = None, **changes: Any) -> Path:
    values = {**settings(folder / "data", "cnn"), "output_dir": str(folder), "name": name, "logging.every": 1}
    values |= {"training.max_steps": 12, "checkpoint.every": 2, "evaluation.every": None, **changes}
    words = [f"{key}={'null' if value is None else value}" for key, value in values.items()]
    options: dict[str, Any] = {"fresh": False, "resume_from": None, "allow_data_change": False, "quiet": True}
    train_command(["classify", *words], until=until, **options)
    return folder / name


def read_modes(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["compiled"] for row in rows if row["kind"] == "train"]


MODES = {AT_ONCE: 0, ONCE_TIMED: 1 + MIN_TIMED_STEPS, NEVER: 12}
"""Cost -> number of eager steps before the first compiled one."""


@pytest.mark.parametrize("cost", MODES, indirect=True)
def test_modes_are_in_the_metrics_and_change_no_weight(
    cost: CompileCost, compiler: FakeCompiler, tmp_path: Path
) -> None:
    run, eager = train(tmp_path, "auto"), train(tmp_path, "eager", **{"training.compile": False})
    num_eager = MODES[cost]
    assert read_modes(run) == [0.0] * num_eager + [1.0] * (12 - num_eager)
    assert (compiler.num_calls > 0) == (num_eager < 12)
    assert not differing_tensors(read_tensors(run), read_tensors(eager))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("cost", [ONCE_TIMED, AT_ONCE], indirect=True)
@pytest.mark.parametrize("until", [4, 6, 8])
def test_a_run_resumed_around_a_switch_keeps_its_mode_and_its_weights(
    cost: CompileCost, compiler: FakeCompiler, deterministic: bool, until: int, tmp_path: Path
) -> None:
    whole = train(tmp_path, "whole", deterministic=deterministic)
    paused = train(tmp_path, "paused", until=until, deterministic=deterministic)
    before = read_modes(paused)
    saved = json.loads((paused / "checkpoints" / "last" / "progress.json").read_text())["notes"]["compile"]
    train(tmp_path, "paused", deterministic=deterministic)
    modes = read_modes(paused)
    assert modes[:until] == before
    assert modes[until] == float(saved["compiled"]), "the first resumed step rounds as it would have without the pause"
    if deterministic:
        assert modes == read_modes(whole)
    assert not differing_tensors(read_tensors(whole), read_tensors(paused))


@pytest.mark.parametrize("cost", [AT_ONCE], indirect=True)
def test_a_run_whose_compiler_fails_ends_as_an_eager_one(cost: CompileCost, tmp_path: Path) -> None:
    with use_compiler(FakeCompiler(failing_call=6)):
        run = train(tmp_path, "failing")
    eager = train(tmp_path, "eager", **{"training.compile": False})
    assert read_modes(run) == [1.0] * 5 + [0.0] * 7
    assert not differing_tensors(read_tensors(run), read_tensors(eager))
    log_text = (run / "log.txt").read_text()
    assert log_text.count("Triton Error [CUDA]: an illegal instruction; training continues without compiling") == 1


def test_a_run_on_a_cpu_has_nothing_to_choose(compiler: FakeCompiler, tmp_path: Path) -> None:
    run = train(tmp_path, "plain")
    assert "compiled" not in (run / "metrics.jsonl").read_text()
    assert "training.compile" not in (run / "log.txt").read_text()
    assert compiler.num_calls == 0
    compiled = train(tmp_path, "compiled", **{"training.compile": True})
    assert compiler.num_calls > 0
    assert (compiled / "log.txt").read_text().count("the first step compiles the model") == 1, "the wait is announced"


@pytest.mark.parametrize("cost", [AT_ONCE, NEVER], indirect=True)
def test_plan_says_the_choice(cost: CompileCost, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = bottega.plan("classify", settings(tmp_path, "cnn"))
    assert report["prediction"]["is_compiled"] == (cost is AT_ONCE)
    mode = "on" if cost is AT_ONCE else "off"
    assert [note for note in report["prediction"]["notes"] if f"training.compile: auto is {mode} for 8 steps" in note]
