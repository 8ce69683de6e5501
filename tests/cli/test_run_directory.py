"""The run directory: ownership, refused starts, and what a failed start or export leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import bottega
from bottega import cli
from bottega.core import checkpoint, rundir
from bottega.core.errors import BottegaError, CheckpointError, DirectoryInUse, EnvironmentProblem
from bottega.core.rundir import Lock, RunDirectory
from bottega.storage import durable
from fault_process import hash_files
from small_run import differing_tensors, read_tensors, train, train_arguments
from small_run import run_bottega as run_command


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run", symlinks=True))


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str]:
    capsys.readouterr()
    code = cli.main([str(argument) for argument in arguments])
    return code, capsys.readouterr().err


# Foreign folders and links


def list_files(folder: Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("is_fresh", [False, True])
def test_a_folder_that_is_not_a_run_is_refused(
    tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str], is_fresh: bool
) -> None:
    folder = tmp_path / "mine"
    (folder / "processor").mkdir(parents=True)
    (folder / "recipe.yaml").write_text("bread: flour\n")
    (folder / "processor" / "notes.txt").write_text("mine\n")
    before = list_files(folder)
    code, err = run_cli(capsys, *train_arguments(tmp_path, text_file, *(["--fresh"] if is_fresh else []), name="mine"))
    assert (code, err.count("\n")) == (2, 1), err
    assert f"{folder} exists and is not a run directory" in err
    assert "name=" in err
    assert list_files(folder) == before
    assert sorted(os.listdir(tmp_path)) == ["mine"]


def test_empty_folder_and_run_without_lock_file_are_accepted(tmp_path: Path, text_file: Path, run: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert train(tmp_path, text_file, name="empty").step == 8
    (run / "LOCK").unlink()
    RunDirectory(run).create()


@pytest.mark.parametrize(
    "name",
    ["LOCK", "log.txt", "metrics.jsonl", "samples", "final", "checkpoints", "processor", "recipe.yaml", "events"],
)
def test_a_link_in_a_run_is_refused_and_not_written_through(
    tmp_path: Path, text_file: Path, run: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    inside = run / name
    if inside.exists():
        shutil.move(inside, elsewhere)
    else:
        elsewhere.mkdir()
    inside.symlink_to(elsewhere)
    files = [elsewhere] if elsewhere.is_file() else [path for path in elsewhere.rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    arguments = train_arguments(tmp_path, text_file, name="run", **{"training.max_steps": 12})
    code, err = run_cli(capsys, *arguments)
    assert (code, err.count("\n")) == (2, 1), err
    assert f"{inside} is a link to {elsewhere}" in err
    if name == "final":
        code, err = run_cli(capsys, "export", run)
        assert code == 2
        assert "is a link" in err
    assert inside.is_symlink()
    assert {path: path.read_bytes() for path in files} == before
    assert not elsewhere.is_dir() or set(elsewhere.rglob("*")) >= set(files)


def test_a_link_that_appears_later_is_not_written_through(tmp_path: Path) -> None:
    """Not only the scan at the start: every file is opened for appending without following links."""
    from bottega.callbacks.jsonl import JsonLines
    from bottega.callbacks.log_file import LogFile
    from bottega.core.callback import Progress

    other = tmp_path / "other"
    other.write_text("mine")
    for name in ("LOCK", "log.txt", "metrics.jsonl"):
        (tmp_path / name).symlink_to(other)
    LogFile(tmp_path / "log.txt").write("hello")
    warnings: list[str] = []
    JsonLines(tmp_path / "metrics.jsonl", warnings.append).after_step(Progress(step=1), {"loss": 1.0})
    assert len(warnings) == 1
    with pytest.raises(EnvironmentProblem):
        Lock(RunDirectory(tmp_path)).__enter__()
    assert other.read_text() == "mine"


# Starts


@pytest.mark.parametrize(
    "change", [{"data.train.path": "not-there.txt"}, {"training.batch_size": 10**7}, {"evaluation.metric": "no"}]
)
def test_a_refused_start_leaves_nothing_behind(
    tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]
) -> None:
    code, _ = run_cli(capsys, *train_arguments(tmp_path / "new" / "runs", text_file, name="x", **change))
    assert code in (2, 3)
    assert os.listdir(tmp_path) == []


def test_a_refused_cross_validation_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"text {n}", "label": "ab"[n % 2]}) + "\n" for n in range(6)))
    code, err = run_cli(
        capsys, "crossval", "classify", "--data", rows, "--folds", 50, f"output_dir={tmp_path / 'runs'}"
    )
    assert code in (2, 3), err
    assert os.listdir(tmp_path) == ["rows.jsonl"]


def test_refused_start_leaves_an_older_run_unchanged(
    tmp_path: Path, text_file: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {name: digest for name, digest in hash_files(run).items() if name not in ("LOCK", "log.txt")}
    code, err = run_cli(capsys, *train_arguments(tmp_path, text_file, name="run", **{"model.hidden_size": 32}))
    assert code == 2
    assert {name: digest for name, digest in hash_files(run).items() if name not in ("LOCK", "log.txt")} == before
    line = (run / "log.txt").read_text().splitlines()[-1]
    assert " ERROR " in line, "the refusal is logged in the existing run"
    assert line.partition(" ERROR ")[2] in err


def test_the_log_has_levels_and_the_error_that_ended_the_run(
    tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bottega.engines.torch.engine import TorchEngine

    def fail(*_: Any) -> None:
        raise RuntimeError("the coffee\nis cold")

    monkeypatch.setattr(TorchEngine, "eval_step", fail)
    code, err = run_cli(capsys, *train_arguments(tmp_path, text_file, "--quiet", name="x"))
    assert code == 1
    lines = (tmp_path / "x" / "log.txt").read_text().splitlines()
    levels = [line.split()[2] for line in lines]
    assert set(levels) == {"INFO", "ERROR"}
    assert levels.count("ERROR") == 1
    assert lines[-1].partition(" ERROR ")[2] == err.strip().removeprefix("bottega: ")
    assert "RuntimeError: the coffee is cold" in lines[-1]


def test_fresh_during_a_concurrent_start_leaves_one_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first start has opened the lock file when --fresh moves the folder, so its lock is of the old folder."""
    from bottega.run.train import set_aside

    path = tmp_path / "run"
    RunDirectory(path).create()
    with Lock(RunDirectory(path)):
        pass
    has_opened, may_lock = threading.Event(), threading.Event()
    flock, results = rundir.fcntl.flock, []

    def delayed_flock(handle: int, flags: int) -> None:
        if threading.current_thread() is first:
            has_opened.set()
            assert may_lock.wait(30)
        flock(handle, flags)

    def start() -> None:
        try:
            with Lock(RunDirectory(path)):
                results.append("locked")
        except DirectoryInUse:
            results.append("refused")

    monkeypatch.setattr(rundir.fcntl, "flock", delayed_flock)
    first = threading.Thread(target=start)
    first.start()
    assert has_opened.wait(30)
    set_aside(path)
    RunDirectory(path).create()
    with Lock(RunDirectory(path)):
        may_lock.set()
        first.join(30)
        assert results == ["refused"], "the later start owns the folder of this name"
    assert (tmp_path / "run.1" / "LOCK").is_file()


def test_temporary_files_of_killed_processes_are_removed(tmp_path: Path, text_file: Path, run: Path) -> None:
    for name in (".tmp-final-0123abcd", ".tmp-codec-4711", ".trash-codec-0123abcd"):
        (run / name).mkdir()
        (run / name / "half.json").write_text("{")
    for name in (".tmp-recipe.yaml-0123abcd", ".probe-0123abcd"):
        (run / name).write_text("half")
    shutil.copytree(run / "processor", run / ".old-final-0123abcd")  # killed without an atomic exchange of names
    with durable.writing_folder(run / "export"):  # another process is still writing
        train(tmp_path, text_file, name="run")
        assert [name for name in os.listdir(run) if name.startswith(".tmp-export-")]
    assert not [name for name in os.listdir(run) if name.startswith(".")]
    assert (run / "final").is_dir()


@pytest.mark.parametrize("content", ["", "  \n", "task: [", "bread: flour\n", "- 1\n", "\x00"])
def test_broken_recipe_error_names_the_remedy(
    tmp_path: Path, text_file: Path, run: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (run / "recipe.yaml").write_text(content)
    straight = read_tensors(run)
    arguments = train_arguments(tmp_path, text_file, "--quiet", name="run")
    for verb in (arguments, ["generate", run], ["export", run]):
        code, err = run_cli(capsys, *verb)
        assert (code, err.count("\n")) == (2, 1), err
        assert f"{run / 'recipe.yaml'} is not a complete recipe" in err
        assert "delete it" in err
    (run / "recipe.yaml").unlink()  # as the message says
    assert run_cli(capsys, *arguments)[0] == 0
    assert differing_tensors(straight, read_tensors(run)) == []
    assert run_cli(capsys, "export", run)[0] == 0


# Reading


def make_unreadable(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Make reading the file or listing the folder fail, as on a broken disk (root ignores permissions)."""
    listdir = os.listdir
    file_digest = checkpoint.hashlib.file_digest

    def list_folder(folder: Any = ".") -> list[str]:
        if Path(folder) == path:
            raise PermissionError(13, "Permission denied", str(folder))
        return listdir(folder)

    def digest(file: Any, name: str) -> Any:
        if Path(file.name) == path:
            raise OSError(5, "Input/output error")
        return file_digest(file, name)

    monkeypatch.setattr(os, "listdir", list_folder)
    monkeypatch.setattr(checkpoint.hashlib, "file_digest", digest)


def test_a_read_error_in_the_newest_checkpoint_falls_back_to_an_older_one(
    tmp_path: Path, text_file: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    straight = read_tensors(run)
    make_unreadable(monkeypatch, run / "checkpoints" / "step-00000008" / "optimizer.safetensors")
    code, err = run_cli(capsys, *train_arguments(tmp_path, text_file, name="run"))
    monkeypatch.undo()
    assert code == 0, err
    assert "cannot read checkpoint step-00000008: optimizer.safetensors: Input/output error; trying an older one" in err
    assert "at step 4 of 8" in err
    assert differing_tensors(straight, read_tensors(run)) == []


def test_a_checkpoints_folder_that_cannot_be_listed_is_not_an_empty_one(
    tmp_path: Path, text_file: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = hash_files(run)
    make_unreadable(monkeypatch, run / "checkpoints")
    for verb in (train_arguments(tmp_path, text_file, name="run"), ["generate", run], ["export", run]):
        code, err = run_cli(capsys, *verb)
        assert (code, err.count("\n")) == (5, 1), err
        assert f"cannot read {run / 'checkpoints'}, the folder of the run's checkpoints: Permission denied" in err
    monkeypatch.undo()
    after = hash_files(run)
    assert {name for name in after if after[name] != before.get(name)} <= {"LOCK", "log.txt"}


# Best, last and their fallbacks


def test_links_are_repaired_at_every_start(tmp_path: Path, text_file: Path, run: Path) -> None:
    folder = run / "checkpoints"
    expected = [checkpoint.read_link(folder, name) for name in ("last", "best")]
    checkpoint.write_link(folder, "last", folder / "step-00000004")
    (folder / "best").unlink()
    assert bottega.load(run).checkpoint == expected[1], "links are not trusted for reading"
    assert bottega.load(run, checkpoint="last").checkpoint == expected[0]
    train(tmp_path, text_file, name="run")
    assert [checkpoint.read_link(folder, name) for name in ("last", "best")] == expected


@pytest.fixture
def run_with_two_checkpoints(tmp_path: Path, text_file: Path) -> Path:
    """A run whose best checkpoint, step 4, is not its last one, step 8."""
    run: Path = train(tmp_path, text_file, name="two", **{"evaluation.every": 4}).path
    for step in (4, 8):
        rewrite_checkpoint(
            run / "checkpoints" / checkpoint.step_folder_name(step), lambda progress: progress.update(best_step=4)
        )
    assert bottega.load(run).checkpoint.name == "step-00000004"
    return run


def rewrite_checkpoint(folder: Path, change: Callable[[dict[str, Any]], Any] | None = None, **files: Any) -> None:
    """Write the checkpoint again with changed progress or tensors and a valid manifest."""
    manifest, progress = checkpoint.verify(folder), checkpoint.read_progress(folder)
    if change is not None:
        change(progress)
    tables = {name: load_file(folder / name) for name in manifest.files if name.endswith(".safetensors")}
    tables.update(files)
    checkpoint.write(
        folder.parent, step=manifest.step, files=tables, progress=progress, fingerprint=manifest.fingerprint
    )


@pytest.mark.parametrize("is_gone", [True, False], ids=["gone", "damaged"])
def test_newest_valid_checkpoint_replaces_a_missing_best(
    run_with_two_checkpoints: Path, capsys: pytest.CaptureFixture[str], is_gone: bool
) -> None:
    best = run_with_two_checkpoints / "checkpoints" / "step-00000004"
    if is_gone:
        shutil.rmtree(best)
    else:
        (best / "model.safetensors").write_bytes(b"")
    for verb in (["generate", run_with_two_checkpoints, "--max_tokens", 2], ["evaluate", run_with_two_checkpoints]):
        code, err = run_cli(capsys, *verb)
        assert code == 0, err
        assert err.count("\n") == 1
        assert "step-00000008" in err
        assert ("step 4, no longer exists" if is_gone else "step-00000004 is damaged") in err
    code, err = run_cli(capsys, "export", run_with_two_checkpoints)
    assert code == 4, "an export never falls back to another checkpoint"
    assert run_cli(capsys, "export", run_with_two_checkpoints, "--checkpoint", 8)[0] == 0


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_weights_that_are_not_finite_are_refused(run: Path, capsys: pytest.CaptureFixture[str], value: float) -> None:
    best = checkpoint.read_link(run / "checkpoints", "best")
    assert best is not None
    weights = load_file(best / "model.safetensors")
    name = sorted(weights)[0]
    weights[name].flat[-1] = value
    rewrite_checkpoint(best, **{"model.safetensors": weights})
    for verb in (["generate", run], ["evaluate", run], ["inspect", run], ["export", run]):
        code, err = run_cli(capsys, *verb)
        assert (code, err.count("\n")) == (4, 1), err
        assert f"{name} contains values that are not finite" in err
    with pytest.raises(CheckpointError, match="not finite"):
        bottega.load(run)
    assert not (run / "final").exists()


# A second export


def test_export_is_replaced_atomically(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before or after any operation, the folder holds the old export or the new one, never a mixture."""
    old, new = bottega.load(run, checkpoint=4), bottega.load(run, checkpoint=8)
    final = old.export()
    before = hash_files(final)
    expected = hash_files(new.export(run.parent / "other"))
    assert before["model.safetensors"] != expected["model.safetensors"]

    for when in ("before", "after"):
        number = 0
        while True:
            number += 1
            death = DeathAt(number, when)
            with pytest.MonkeyPatch.context() as patch:
                for name in ("rename", "mkdir", "unlink", "rmdir", "fsync"):
                    patch.setattr(os, name, death.watch(getattr(os, name)))
                patch.setattr(durable, "_exchange", death.watch(durable._exchange))
                try:
                    new.export()
                except Death:
                    pass
            assert hash_files(final) in (before, expected), f"{when} operation {number}"
            new.export()
            assert hash_files(final) == expected
            assert not [name for name in os.listdir(run) if name.startswith(".")]
            old.export()
            if death.count < number:
                break
        assert number > 10, "the operations were intercepted"


class Death(BaseException):
    """Simulated death of the process, without cleanup."""


class DeathAt:
    """Raises `Death` before or after the `number`-th watched operation."""

    def __init__(self, number: int, when: str) -> None:
        self.number, self.when, self.count = number, when, 0

    def watch(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            self.count += 1
            if self.count > self.number or (self.count == self.number and self.when == "before"):
                raise Death
            result = call(*args, **options)
            if self.count == self.number:
                raise Death
            return result

        return watched


def test_other_files_next_to_an_export_stay(run: Path, tmp_path: Path) -> None:
    """Only temporary files of this folder are removed; hidden files of the user stay."""
    others = [".tmp-notes", ".old-out-backup", ".tmp-other-0123abcd", "out.old-20260101"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / ".tmp-out-0123abcd").mkdir()
    bottega.load(run).export(tmp_path / "out")
    (tmp_path / "out" / "notes").mkdir()
    (tmp_path / "out" / "notes" / "link").symlink_to("nowhere")
    bottega.load(run).export(tmp_path / "out")
    assert os.readlink(tmp_path / "out" / "notes" / "link") == "nowhere", "other files stay"
    assert sorted(set(os.listdir(tmp_path)) - {"run"}) == sorted([*others, "out"])


def test_export_that_fails_verification_replaces_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = bottega.load(run)
    before = hash_files(saved.export())
    make_readable = bottega.run.export._make_readable

    def truncate_weights(folder: Path) -> None:
        make_readable(folder)
        os.truncate(folder / "model.safetensors", 1000)

    monkeypatch.setattr(bottega.run.export, "_make_readable", truncate_weights)
    with pytest.raises(BottegaError, match=r"model\.safetensors"):
        saved.export()
    assert hash_files(run / "final") == before
    assert not [name for name in os.listdir(run) if name.startswith(".")]


def test_export_command_reports_its_folder(run: Path) -> None:
    done = run_command(["export", str(run), "--json"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["folder"] == str(run / "final")
