"""Runs as they are used after training: what is asked for in odd ways, beside what, and when something has gone since."""

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


def trained(output: Path, **changes: Any) -> Path:
    return Path(small_media.train(output, **{**TINY, "name": "x", **changes}).path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("finished"))


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
    return trained(folder, **{"data.train.path": str(path), "model.condition": "vector", "needs.judge": None})


class Said:
    def __init__(self, capsys: pytest.CaptureFixture[str], *words: Any) -> None:
        capsys.readouterr()
        self.code = cli.main([str(word) for word in words])
        self.out, self.err = capsys.readouterr()

    def refused(self, code: int, *parts: Any) -> None:
        assert (self.code, self.err.count("\n")) == (code, 1), self.err
        for part in map(str, parts):
            assert part in self.err, f"{part!r} is not in {self.err!r}"


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda *words: Said(capsys, *words)


# Places to write to


def test_an_export_replaces_an_export_and_nothing_else(say: Any, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert say("export", run, "--out", out).code == 0
    assert say("export", run, "--out", out).code == 0
    mine = tmp_path / "mine"
    mine.mkdir()
    assert say("export", run, "--out", mine).code == 0, "an empty folder is nobody's"
    for content in ("# my notes", None):
        shutil.rmtree(mine)
        mine.mkdir()
        (mine / "config.json").write_text("mine")
        if content is not None:
            (mine / "README.md").write_text(content)
        say("export", run, "--out", mine).refused(2, mine, "not an export of Bottega", "choose another folder")
        assert (mine / "config.json").read_text() == "mine"
    (tmp_path / "file").write_text("")
    say("export", run, "--out", tmp_path / "file").refused(2, "is a file")
    (run / "final").mkdir()
    (run / "final" / "config.json").write_text("{}")
    assert say("export", run, "--out", run / "final").code == 0, "one that was killed is still the run's own"


def test_fewer_samples_leave_none_of_more(say: Any, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for place, words in ((out, ("--out", out)), (run / "generated", ())):
        assert say("generate", run, "--class", "dark", "--count", 5, *words).code == 0
        (place / "99.txt").write_text("mine")
        (place / "notes.png").write_text("mine")
        assert say("generate", run, "--class", "dark", "--count", 2, *words).code == 0
        assert {path.name for path in place.iterdir()} == {"00.png", "01.png", "sheet.png", "99.txt", "notes.png"}


@pytest.mark.parametrize(
    "names", [["00.png", "01.png"], ["sheet.png", "0000.png", "0001.png"], ["sheet.png", "07.png"]]
)
def test_files_of_somebody_else_stay(tmp_path: Path, names: list[str]) -> None:
    """No sheet beside them, or other numbers than ours."""
    for name in names:
        (tmp_path / name).write_text("mine")
    new = tmp_path / "00.wav"

    def write() -> list[Path]:
        new.write_text("ours")
        return [new]

    assert replace_previous_files(tmp_path, write) == [new]
    assert {path.name for path in tmp_path.iterdir()} == {*names, "00.wav"}


@pytest.fixture
def narrow() -> Iterator[None]:
    """No file may be larger than a few bytes, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    "words", [("generate", "--count", "1", "--out"), ("export", "--out"), ("evaluate", "--count", "0", "--out")]
)
def test_a_full_disk_is_named_with_the_way_out(
    say: Any, run: Path, tmp_path: Path, narrow: None, words: tuple[str, ...]
) -> None:
    out = tmp_path / "out"
    if words[0] == "evaluate":
        assert say("evaluate", run, "--count", 0).code == 0  # its data is prepared by now
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, resource.RLIM_INFINITY))
    try:
        said = say(words[0], run, *words[1:], out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    said.refused(5, f"cannot write {out}", "size limit", "free some space, or choose another path")


def test_what_cannot_be_read_is_not_blamed_on_where_one_writes(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), explain_write_errors(tmp_path / "out"):
        (tmp_path / "elsewhere" / "a").read_bytes()
    with pytest.raises(RuntimeError, match="other"), explain_write_errors(tmp_path / "out"):
        raise RuntimeError("another thing")


def test_what_is_written_down_is_the_whole_table(say: Any, run: Path, tmp_path: Path) -> None:
    # What it has learnt from, so that there is no distance to compare with.
    said = say("evaluate", run, "--split", "train", "--count", 4, "--out", tmp_path / "out", "--json")
    assert said.code == 0, said.err
    written, shown = json.loads((tmp_path / "out" / "metrics.json").read_text()), json.loads(said.out)
    assert {name: written[name] for name in shown["metrics"]} == shown["metrics"]
    assert (written["real"], written["counts"], written["notes"]) == (shown["real"], shown["counts"], shown["notes"])
    assert written["nearest_ratio"] is None


# What is asked for


def test_without_a_class_the_count_is_of_all(say: Any, run: Path) -> None:
    for count in (1, 4):
        assert json.loads(say("generate", run, "--count", count, "--json").out)["count"] == count
    several = json.loads(say("generate", run, "--class", 0, "--class", 1, "--count", 2, "--json").out)
    assert several["count"] == 4


def test_more_than_memory_holds_is_refused_by_its_flag(say: Any, run: Path) -> None:
    for verb in ("generate", "evaluate"):
        say(verb, run, "--count", 10**11).refused(2, "--count 100000000000", "GiB", "this machine has")
    say("generate", run, "--class", 0, "--count", 10**11).refused(2, "--count 100000000000")


def test_values_may_begin_with_a_dash(say: Any, vectors: Path, tmp_path: Path) -> None:
    for words in (("--vector", "-0.5,1"), ("--vector=-0.5,1",)):
        assert say("generate", vectors, *words, "--count", 1, "--out", tmp_path / "a.png").code == 0
    images = bottega.load(vectors).generate(vector=[-0.5, 1], count=1)
    assert images.shape == (1, 8, 8, 1)
    say("generate", vectors, "--class", "-dash").refused(2, "--class", "condition vector")
    say("generate", vectors, "--vector", "--count", 1).refused(2, "--vector", "expected one argument")


def test_vectors_that_are_none(say: Any, vectors: Path) -> None:
    say("generate", vectors, "--vector", "nan,1").refused(2, "--vector nan,1: expected finite numbers")
    say("generate", vectors, "--vector", "1").refused(2, "expected 2 numbers", "got 1")


def test_samples_that_are_not_finite_are_no_pictures(say: Any, vectors: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    say("generate", vectors, "--vector", "1e38,1e38", "--count", 2, "--out", out).refused(6, "2 of 2", "not finite")
    assert not out.exists()


def test_messages_name_what_the_run_takes(say: Any, run: Path, vectors: Path) -> None:
    say("generate", run, "--max_tokens", 3).refused(2, "--max_tokens", "it takes --class, --count, --seed, --steps")
    say("generate", vectors, "--max_tokens", 3).refused(2, "it takes --vector, --count")
    loaded = bottega.load(vectors)
    with pytest.raises(UsageError, match=r"^vector nan,1: expected finite"):
        loaded.generate(vector="nan,1")
    with pytest.raises(UsageError, match=r"^max_tokens: this run .* it takes vector, count"):
        loaded.generate(max_tokens=3)
    with pytest.raises(UsageError, match=r"^count -1: "):
        bottega.evaluate(run, count=-1)


# Checkpoints


def test_a_checkpoint_that_is_deleted_meanwhile_is_looked_for_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verify, first = checkpoint.verify, []

    def rotated(path: Path, **options: Any) -> Any:
        if not first:
            first.append(path)
            shutil.rmtree(path)
            for name in ("best", "last"):
                checkpoint.write_link(run / "checkpoints", name, run / "checkpoints" / checkpoint.step_folder_name(2))
        return verify(path, **options)

    checkpoint.write_link(run / "checkpoints", "best", run / "checkpoints" / checkpoint.step_folder_name(4))
    monkeypatch.setattr(checkpoint, "verify", rotated)
    assert saved.open_run(run).checkpoint.name == checkpoint.step_folder_name(2)


@pytest.mark.parametrize("verb", ["generate", "evaluate", "export"])
@pytest.mark.parametrize("which", ["last", 4])
def test_a_damaged_checkpoint_is_named_with_its_run_and_the_others(say: Any, run: Path, verb: str, which: Any) -> None:
    (run / "checkpoints" / checkpoint.step_folder_name(4) / "model.safetensors").write_bytes(b"")
    say(verb, run, "--checkpoint", which).refused(4, f"{run}: checkpoint step-00000004", "choose from the steps 2")
    shutil.rmtree(run / "checkpoints" / checkpoint.step_folder_name(2))
    with pytest.raises(CheckpointError, match="there is no other checkpoint"):
        bottega.load(run, checkpoint=which)


@pytest.mark.parametrize("verb", ["generate", "evaluate", "export"])
@pytest.mark.parametrize("which", ["best", "last"])
def test_a_damaged_state_of_the_optimizer_concerns_only_training(say: Any, run: Path, verb: str, which: str) -> None:
    """The weights are whole, and nothing else is needed to use them."""
    (run / "checkpoints" / which / "optimizer.safetensors").write_bytes(b"")
    answer = say(verb, run, "--checkpoint", which, *(["--count", 0] if verb == "evaluate" else []))
    assert answer.code == 0, answer.err
    assert "instead of the best" not in answer.err
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors"):
        checkpoint.verify(run / "checkpoints" / which)


# A recipe that changes


def test_nothing_is_protected_before_the_first_checkpoint(tmp_path: Path) -> None:
    path = trained(tmp_path, **{"training.max_steps": 4})
    with pytest.raises(UsageError, match=r"model.hidden_size: 16 -> 32"):
        trained(tmp_path, **{"model.hidden_size": 32})
    shutil.rmtree(path / "checkpoints")
    again = small_media.train(tmp_path, **{**TINY, "name": "x", "training.max_steps": 2, "model.condition": "none"})
    assert again.step == 2
    assert [row["step"] for row in again.history() if row["kind"] == "train"] == [1, 2]


def test_training_goes_on_where_a_sample_is_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bottega.tasks.generation.sampler import GenerationSampler

    def nothing(*_: Any, **__: Any) -> None:
        raise Diverged("1 of 16 samples are not finite: ...")

    monkeypatch.setattr(GenerationSampler, "draw", nothing)
    path = trained(tmp_path, **{"samples.every": 2})
    assert "1 of 16 samples are not finite; training continues" in (path / "log.txt").read_text()


def test_a_run_may_be_made_shorter_and_longer_again(tmp_path: Path) -> None:
    path = trained(tmp_path, **{"training.max_steps": 4})
    shorter = small_media.train(tmp_path, **{**TINY, "name": "x", "training.max_steps": 2})
    assert shorter.step == 4, "it is past the new end"
    said = (path / "log.txt").read_text()
    assert "training.max_steps: 4 -> 2; the run ends there, or now if it is already past it" in said
    # A run of 90 steps that was stopped at step 4.
    recipe = path / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("max_steps: 2", "max_steps: 90"))
    assert small_media.train(tmp_path, **{**TINY, "name": "x", "training.max_steps": 6}).step == 6
    assert small_media.train(tmp_path, **{**TINY, "name": "x", "training.max_steps": 7}).step == 7


def test_the_ledger_says_that_a_step_was_never_taken(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ledger", str(finished_run), "--step", "500"]) == 0
    assert "the run has trained for 8 steps; step 500 would use these samples" in capsys.readouterr().out
    assert cli.main(["ledger", str(finished_run), "--step", "8"]) == 0
    assert "would use" not in capsys.readouterr().out
