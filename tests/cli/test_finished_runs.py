"""Finished runs: output folders, unusual requests, and checkpoints that are damaged or deleted."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bottega
import small_media
from bottega import cli
from bottega.core import checkpoint
from bottega.core.errors import CheckpointError, Diverged, UsageError
from bottega.data.output_files import explain_write_errors, replace_previous_files
from bottega.run import saved

TINY: dict[str, Any] = {
    "model.hidden_size": 16,
    "model.num_layers": 1,
    "training.max_steps": 4,
    "evaluation.every": 2,
    "checkpoint.every": 2,
    "samples.steps": 2,
}


def train_run(output: Path, **changes: Any) -> Path:
    return Path(small_media.train(output, **{**TINY, "name": "x", **changes}).path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run(tmp_path_factory.mktemp("finished"))


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "runs" / "x", symlinks=True)


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    draw = np.random.default_rng(0)
    path = folder / "vectors.npz"
    np.savez(
        path,
        image=draw.integers(0, 256, (24, 8, 8), np.uint8),
        condition=draw.normal(size=(24, 2)).astype(np.float32),
    )
    return train_run(folder, **{"data.train.path": str(path), "model.condition": "vector", "needs.judge": None})


class CommandResult:
    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: Any) -> None:
        capsys.readouterr()
        self.code = cli.main([str(word) for word in arguments])
        self.out, self.err = capsys.readouterr()

    def assert_refused(self, code: int, *parts: Any) -> None:
        assert (self.code, self.err.count("\n")) == (code, 1), self.err
        for part in map(str, parts):
            assert part in self.err, f"{part!r} is not in {self.err!r}"


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda *words: CommandResult(capsys, *words)


# Output folders


def test_export_overwrites_only_an_export(run_cli: Any, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run_cli("export", run, "--out", out).code == 0
    assert run_cli("export", run, "--out", out).code == 0
    mine = tmp_path / "mine"
    mine.mkdir()
    assert run_cli("export", run, "--out", mine).code == 0, "an empty folder may be used"
    for content in ("# my notes", None):
        shutil.rmtree(mine)
        mine.mkdir()
        (mine / "config.json").write_text("mine")
        if content is not None:
            (mine / "README.md").write_text(content)
        run_cli("export", run, "--out", mine).assert_refused(
            2, mine, "not an export of Bottega", "choose another folder"
        )
        assert (mine / "config.json").read_text() == "mine"
    (tmp_path / "file").write_text("")
    run_cli("export", run, "--out", tmp_path / "file").assert_refused(2, "is a file")
    (run / "final").mkdir()
    (run / "final" / "config.json").write_text("{}")
    assert run_cli("export", run, "--out", run / "final").code == 0, "a partial export in the run may be replaced"


def test_stale_samples_are_removed(run_cli: Any, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for target, arguments in ((out, ("--out", out)), (run / "generated", ())):
        assert run_cli("generate", run, "--class", "dark", "--count", 5, *arguments).code == 0
        (target / "99.txt").write_text("mine")
        (target / "notes.png").write_text("mine")
        assert run_cli("generate", run, "--class", "dark", "--count", 2, *arguments).code == 0
        assert {path.name for path in target.iterdir()} == {"00.png", "01.png", "sheet.png", "99.txt", "notes.png"}


@pytest.mark.parametrize(
    "names", [["00.png", "01.png"], ["sheet.png", "0000.png", "0001.png"], ["sheet.png", "07.png"]]
)
def test_foreign_files_are_not_deleted(tmp_path: Path, names: list[str]) -> None:
    """Without a sheet in the same folder, or with other numbers."""
    for name in names:
        (tmp_path / name).write_text("mine")
    new = tmp_path / "00.wav"

    def write() -> list[Path]:
        new.write_text("ours")
        return [new]

    assert replace_previous_files(tmp_path, write) == [new]
    assert {path.name for path in tmp_path.iterdir()} == {*names, "00.wav"}


@pytest.fixture
def file_size_limit() -> Iterator[None]:
    """Restore the file size limit after a test that lowers it to simulate a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    "arguments", [("generate", "--count", "1", "--out"), ("export", "--out"), ("evaluate", "--count", "0", "--out")]
)
def test_full_disk_error_names_the_remedy(
    run_cli: Any, run: Path, tmp_path: Path, file_size_limit: None, arguments: tuple[str, ...]
) -> None:
    out = tmp_path / "out"
    if arguments[0] == "evaluate":
        assert run_cli("evaluate", run, "--count", 0).code == 0  # prepares its data
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, resource.RLIM_INFINITY))
    try:
        result = run_cli(arguments[0], run, *arguments[1:], out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    result.assert_refused(5, f"cannot write {out}", "size limit", "free some space, or choose another path")


def test_read_errors_are_not_reported_as_write_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), explain_write_errors(tmp_path / "out"):
        (tmp_path / "elsewhere" / "a").read_bytes()
    with pytest.raises(RuntimeError, match="other"), explain_write_errors(tmp_path / "out"):
        raise RuntimeError("another thing")


def test_metrics_json_holds_the_full_report(run_cli: Any, run: Path, tmp_path: Path) -> None:
    # On the training split there is no nearest distance to compare with.
    result = run_cli("evaluate", run, "--split", "train", "--count", 4, "--out", tmp_path / "out", "--json")
    assert result.code == 0, result.err
    written, shown = json.loads((tmp_path / "out" / "metrics.json").read_text()), json.loads(result.out)
    assert {name: written[name] for name in shown["metrics"]} == shown["metrics"]
    assert (written["real"], written["counts"], written["notes"]) == (shown["real"], shown["counts"], shown["notes"])
    assert written["nearest_ratio"] is None


# Requests


def test_count_without_a_class_is_the_total(run_cli: Any, run: Path) -> None:
    for count in (1, 4):
        assert json.loads(run_cli("generate", run, "--count", count, "--json").out)["count"] == count
    several = json.loads(run_cli("generate", run, "--class", 0, "--class", 1, "--count", 2, "--json").out)
    assert several["count"] == 4


def test_count_larger_than_memory_is_refused(run_cli: Any, run: Path) -> None:
    for verb in ("generate", "evaluate"):
        run_cli(verb, run, "--count", 10**11).assert_refused(2, "--count 100000000000", "GiB", "this machine has")
    run_cli("generate", run, "--class", 0, "--count", 10**11).assert_refused(2, "--count 100000000000")


def test_values_may_begin_with_a_dash(run_cli: Any, vectors: Path, tmp_path: Path) -> None:
    for arguments in (("--vector", "-0.5,1"), ("--vector=-0.5,1",)):
        assert run_cli("generate", vectors, *arguments, "--count", 1, "--out", tmp_path / "a.png").code == 0
    images = bottega.load(vectors).generate(vector=[-0.5, 1], count=1)
    assert images.shape == (1, 8, 8, 1)
    run_cli("generate", vectors, "--class", "-dash").assert_refused(2, "--class", "condition vector")
    run_cli("generate", vectors, "--vector", "--count", 1).assert_refused(2, "--vector", "expected one argument")


def test_invalid_vectors_are_refused(run_cli: Any, vectors: Path) -> None:
    run_cli("generate", vectors, "--vector", "nan,1").assert_refused(2, "--vector nan,1: expected finite numbers")
    run_cli("generate", vectors, "--vector", "1").assert_refused(2, "expected 2 numbers", "got 1")


def test_samples_that_are_not_finite_are_not_written(run_cli: Any, vectors: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_cli("generate", vectors, "--vector", "1e38,1e38", "--count", 2, "--out", out).assert_refused(
        6, "2 of 2", "not finite"
    )
    assert not out.exists()


def test_errors_list_the_accepted_options(run_cli: Any, run: Path, vectors: Path) -> None:
    run_cli("generate", run, "--max_tokens", 3).assert_refused(
        2, "--max_tokens", "it takes --class, --count, --seed, --steps"
    )
    run_cli("generate", vectors, "--max_tokens", 3).assert_refused(2, "it takes --vector, --count")
    loaded = bottega.load(vectors)
    with pytest.raises(UsageError, match=r"^vector nan,1: expected finite"):
        loaded.generate(vector="nan,1")
    with pytest.raises(UsageError, match=r"^max_tokens: this run .* it takes vector, count"):
        loaded.generate(max_tokens=3)
    with pytest.raises(UsageError, match=r"^count -1: "):
        bottega.evaluate(run, count=-1)


# Checkpoints


def test_checkpoint_deleted_while_opening_is_resolved_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verify, first = checkpoint.verify, []

    def verify_after_rotation(path: Path, **options: Any) -> Any:
        if not first:
            first.append(path)
            shutil.rmtree(path)
            for name in ("best", "last"):
                checkpoint.write_link(run / "checkpoints", name, run / "checkpoints" / checkpoint.step_folder_name(2))
        return verify(path, **options)

    checkpoint.write_link(run / "checkpoints", "best", run / "checkpoints" / checkpoint.step_folder_name(4))
    monkeypatch.setattr(checkpoint, "verify", verify_after_rotation)
    assert saved.open_run(run).checkpoint.name == checkpoint.step_folder_name(2)


@pytest.mark.parametrize("verb", ["generate", "evaluate", "export"])
@pytest.mark.parametrize("which", ["last", 4])
def test_damaged_checkpoint_error_lists_the_other_steps(run_cli: Any, run: Path, verb: str, which: Any) -> None:
    (run / "checkpoints" / checkpoint.step_folder_name(4) / "model.safetensors").write_bytes(b"")
    run_cli(verb, run, "--checkpoint", which).assert_refused(
        4, f"{run}: checkpoint step-00000004", "choose from the steps 2"
    )
    shutil.rmtree(run / "checkpoints" / checkpoint.step_folder_name(2))
    with pytest.raises(CheckpointError, match="there is no other checkpoint"):
        bottega.load(run, checkpoint=which)


@pytest.mark.parametrize("verb", ["generate", "evaluate", "export"])
@pytest.mark.parametrize("which", ["best", "last"])
def test_damaged_optimizer_state_matters_only_for_training(run_cli: Any, run: Path, verb: str, which: str) -> None:
    """The weights are intact, and using them needs nothing else."""
    (run / "checkpoints" / which / "optimizer.safetensors").write_bytes(b"")
    answer = run_cli(verb, run, "--checkpoint", which, *(["--count", 0] if verb == "evaluate" else []))
    assert answer.code == 0, answer.err
    assert "instead of the best" not in answer.err
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors"):
        checkpoint.verify(run / "checkpoints" / which)


# A recipe that changes


def test_recipe_may_change_before_the_first_checkpoint(tmp_path: Path) -> None:
    path = train_run(tmp_path, **{"training.max_steps": 4})
    with pytest.raises(UsageError, match=r"model.hidden_size: 16 -> 32"):
        train_run(tmp_path, **{"model.hidden_size": 32})
    shutil.rmtree(path / "checkpoints")
    again = small_media.train(tmp_path, **{**TINY, "name": "x", "training.max_steps": 2, "model.condition": "none"})
    assert again.step == 2
    assert [row["step"] for row in again.history() if row["kind"] == "train"] == [1, 2]


def test_training_continues_after_a_nonfinite_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bottega.tasks.generation.sampler import GenerationSampler

    def raise_diverged(*_: Any, **__: Any) -> None:
        raise Diverged("1 of 16 samples are not finite: ...")

    monkeypatch.setattr(GenerationSampler, "draw", raise_diverged)
    path = train_run(tmp_path, **{"samples.every": 2})
    assert "1 of 16 samples are not finite; training continues" in (path / "log.txt").read_text()


def test_run_may_be_shortened_and_extended(tmp_path: Path) -> None:
    path = train_run(tmp_path, **{"training.max_steps": 4})
    shorter = small_media.train(tmp_path, **{**TINY, "name": "x", "training.max_steps": 2})
    assert shorter.step == 4, "the run is past the new end"
    text = (path / "log.txt").read_text()
    assert "training.max_steps: 4 -> 2; the run ends at the new length, or now if it is already past it" in text
    # A run of 90 steps that was stopped at step 4.
    recipe = path / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("max_steps: 2", "max_steps: 90"))
    assert small_media.train(tmp_path, **{**TINY, "name": "x", "training.max_steps": 6}).step == 6
    assert small_media.train(tmp_path, **{**TINY, "name": "x", "training.max_steps": 7}).step == 7


def test_ledger_marks_steps_beyond_the_run(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ledger", str(finished_run), "--step", "500"]) == 0
    assert "the run has trained for 8 steps; step 500 would use these samples" in capsys.readouterr().out
    assert cli.main(["ledger", str(finished_run), "--step", "8"]) == 0
    assert "would use" not in capsys.readouterr().out
