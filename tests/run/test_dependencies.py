"""Dependencies of a recipe: which run is used, which process trains it, and what is refused before it is trained."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bottega
import small_media
import tiny_clip
from bottega import cli
from bottega.config.load import to_yaml
from bottega.core import checkpoint
from bottega.core.errors import BottegaError, CheckpointError, DataError, DirectoryInUse, PeerLost, UsageError
from bottega.core.rundir import Lock, RunDirectory
from bottega.run import dependencies, export
from bottega.run import train as run
from bottega.tasks import dependencies as needs
from bottega.tasks.generation.code_tokenizer import resolve_tokenizer_folder
from bottega.tasks.recipes import load_recipe
from small_run import environment

TINY: dict[str, Any] = {
    "training.max_steps": 2,
    "training.batch_size": 8,
    "training.ema": None,
    "model.hidden_size": 8,
    "model.latent_channels": 2,
    "model.downsample": 2,
    "samples.every": None,
    "logging.tensorboard": False,
    "logging.report": False,
    "logging.resources": False,
}
JUDGE: dict[str, Any] = {
    "training.max_steps": 2,
    "training.batch_size": 8,
    "model.hidden_size": 8,
    "logging.tensorboard": False,
    "logging.report": False,
    "logging.resources": False,
}
IN_LATENTS: dict[str, Any] = {"model.vae": "needs.vae", "model.patch_size": 1, "training.max_steps": 2}
VAE_DEPENDENCY: dict[str, Any] = {"needs.vae": {"recipe": "image_vae/digits", "settings": TINY}, **IN_LATENTS}
CONSTANT_RATE = {"training.scheduler.name": "constant"}


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"task": "image", **small_media.image(folder), **VAE_DEPENDENCY, "name": "x", **changes}


def recipe(folder: Path, **changes: Any) -> Any:
    return load_recipe([settings(folder, **changes)]).recipe


def train(folder: Path, **changes: Any) -> Any:
    return bottega.train(settings(folder, **changes))


def write_recipe(folder: Path, **changes: Any) -> str:
    """Write the recipe to a file for the command line."""
    file = folder / "written.yaml"
    file.write_text(to_yaml(recipe(folder, **changes)))
    return str(file)


def append_image(folder: Path) -> None:
    """Append one image to the training data."""
    path = folder / "pictures.npz"
    with np.load(path) as arrays:
        fields = {name: arrays[name] for name in arrays}
    np.savez(path, **{name: np.concatenate([value, value[:1]]) for name, value in fields.items()})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def trained_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with a generator and its autoencoder; tests that change it use a copy."""
    folder = tmp_path_factory.mktemp("made")
    train(folder)
    return folder


@pytest.fixture
def folder(trained_folder: Path, tmp_path: Path) -> Path:
    """A copy of `trained_folder`, with the same images under another path."""
    copy = Path(shutil.copytree(trained_folder, tmp_path / "runs", symlinks=True))
    recipe_file = copy / "x" / "recipe.yaml"
    recipe_file.write_text(recipe_file.read_text().replace(str(trained_folder), str(copy)))
    dependency_run = Path(shutil.move(find_dependency(copy), needs.find_dependency_run(recipe(copy), "vae")))
    metadata = copy / "x" / "processor" / "generator.json"
    metadata.write_text(metadata.read_text().replace(str(find_dependency(trained_folder)), str(dependency_run)))
    return copy


def find_dependency(folder: Path) -> Path:
    """Return the only exported dependency among the runs of a folder."""
    (match,) = (path.parent for path in (folder / "parts").glob("*/final"))
    return match


@pytest.fixture
def rank_0_monkeypatch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A monkeypatch with the environment of rank 0 of two set."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


# Data


def test_dependency_is_trained_again_after_a_data_change(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dependency_run = find_dependency(folder)
    candidates = [
        dependency_run / "final" / name for name in ("model.safetensors", "diffusion_pytorch_model.safetensors")
    ]
    weights = next(path.read_bytes() for path in candidates if path.is_file())
    assert run.ensure_dependency(recipe(folder), "vae") == dependency_run
    assert capsys.readouterr().err == "", "the same data: reused"
    append_image(folder)
    assert run.ensure_dependency(recipe(folder), "vae") == dependency_run
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "needs.vae was trained on other data and is trained again" in err
    old = dependency_run.with_name(f"{dependency_run.name}.1")
    assert str(old) in err
    assert weights in [path.read_bytes() for path in (old / "final").iterdir()], "nothing is lost"
    assert bottega.load(folder / "x").task.latents.folder == str(old / "final"), (
        "the old run still loads its autoencoder"
    )
    shutil.rmtree(dependency_run / "final")
    append_image(folder)
    run.ensure_dependency(recipe(folder), "vae")
    assert dependency_run.with_name(f"{dependency_run.name}.2").is_dir(), "an incomplete run is moved as well"


def test_own_data_or_allowed_change_keeps_the_dependency(folder: Path) -> None:
    dependency_run = find_dependency(folder)
    append_image(folder)
    assert run.ensure_dependency(recipe(folder), "vae", allow_data_change=True) == dependency_run
    assert not dependency_run.with_name(f"{dependency_run.name}.1").exists()
    own = recipe(folder, **{"needs.vae.own_data": True})
    path = needs.find_dependency_run(own, "vae")
    dependency_run.rename(path)
    assert run.ensure_dependency(own, "vae") == path
    assert not path.with_name(f"{path.name}.1").exists()


def test_judge_is_trained_again_after_a_data_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"needs.judge": {"recipe": "classify/image", "settings": JUDGE}, "training.max_steps": 1}
    options |= {"model.vae": None, "model.patch_size": 2, "evaluation.every": None}
    path = train(tmp_path, **options).path
    bottega.evaluate(path, count=2)
    judge = needs.find_dependency_run(recipe(tmp_path, **options), "judge")
    append_image(tmp_path)
    again = train(tmp_path, **{**options, "name": "y"}).path
    capsys.readouterr()
    bottega.evaluate(again, count=2)
    assert "needs.judge was trained on other data" in capsys.readouterr().err
    assert judge.with_name(f"{judge.name}.1").is_dir()


# Names


@pytest.mark.parametrize("key", ["name", "output_dir"])
def test_dependency_settings_may_not_set_name_or_output_dir(
    tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = {"recipe": "classify/image", "settings": {key: "mine"}}
    assert cli.main(["train", write_recipe(tmp_path, **{"needs.judge": judge})]) == 2
    err = capsys.readouterr().err
    assert f"needs.judge.settings: {key}" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "parts").exists()


def test_name_in_a_dependency_recipe_is_ignored(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: image_vae/digits\nname: always-the-same\n")
    changes = {"needs.vae": {"recipe": str(mine), "settings": TINY}}
    first = needs.find_dependency_run(recipe(tmp_path, **changes), "vae").name
    assert first.startswith("mine-")
    assert needs.find_dependency_run(recipe(tmp_path, **changes, **{"data.channels": 3}), "vae").name != first


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("image", {}),
        ("image/tokens", {}),
        ("image/photos", {"data.train.path": "pictures"}),
        ("audio", {"data.normalise": "peak"}),
        ("video", {}),
        ("image", {"data.sources": [{"path": "a"}, {"path": "b", "weight": 2.0}], "data.split": {"by": "hash"}}),
    ],
)
def test_saved_recipe_has_the_same_dependencies(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    first = load_recipe([name, changes]).recipe
    (tmp_path / "recipe.yaml").write_text(to_yaml(first))
    again = load_recipe([tmp_path / "recipe.yaml"]).recipe
    assert first.needs
    for dependency in first.needs:
        assert needs.find_dependency_run(again, dependency) == needs.find_dependency_run(first, dependency)


def test_dependency_inherits_the_data_of_its_parent(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "extends: image_vae/digits\ndata: {normalise: unit, resize: pad, split: {by: hash}, limit: 9, image_size: 16,\n"
        "  augmentation: {flip: true}, validation: {limit: 3}, train: {limit: 5}}\n"
    )
    parent = recipe(tmp_path, **{"needs.vae": {"recipe": str(mine), "settings": TINY}})
    data: Any = needs.build_dependency_recipe(parent, "vae").data
    assert (data.normalise, data.resize) == ("symmetric", "crop")
    assert (data.split, data.limit, data.train, data.validation) == (
        None,
        None,
        parent.data.train,
        parent.data.validation,
    )
    assert data.augmentation.flip, "augmentation is the dependency's own"
    assert data.image_size == 16, "a dependency may set what the parent leaves open"


# Base models


def test_changed_autoencoder_is_refused_on_resume(folder: Path, tmp_path: Path) -> None:
    (_, manifest), *_ = checkpoint.list_checkpoints(folder / "x" / "checkpoints")
    assert list(manifest.fingerprint["frozen"]) == ["autoencoder"]
    longer = {**CONSTANT_RATE, "training.max_steps": 3}
    base = train(tmp_path / "b", **CONSTANT_RATE).path
    vae = find_dependency(tmp_path / "b")
    shutil.rmtree(base / "processor")
    other = next((find_dependency(folder) / "final").glob("*.safetensors"))
    for file in (vae / "final").glob("*.safetensors"):
        original = file.read_bytes()
        changed = bytearray(other.read_bytes())
        changed[-1] ^= 1
        file.write_bytes(changed)
    with pytest.raises(
        CheckpointError, match=r"^model\.vae is not the autoencoder that this run started with"
    ) as caught:
        bottega.train(settings(tmp_path / "b", **longer))
    assert (caught.value.code, str(caught.value).count("\n")) == (4, 0)
    for arguments in (["--allow-data-change"], ["--resume_from", str(base)]):
        name = "y" if "--resume_from" in arguments else "x"
        assert cli.main(["train", write_recipe(tmp_path / "b", **longer, name=name), "--quiet", *arguments]) == 4
    file.write_bytes(original)
    assert bottega.train(settings(tmp_path / "b", **longer)).step == 3


def test_changed_text_encoder_is_refused_on_resume(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    clip = tmp_path / "encoder"
    tiny_clip.save_clip(clip / "final")
    (clip / "recipe.yaml").write_text("task: language\n")
    options = {**CONSTANT_RATE, "model.vae": None, "model.patch_size": 2, "model.condition": "text"}
    options |= {"model.text.from": "needs.words", "needs.words": {"run": str(clip)}, "training.max_steps": 1}
    assert needs.find_referenced_dependencies(recipe(tmp_path, **options)) == ["words"]
    path = train(tmp_path, **options).path
    assert bottega.load(path).workload.text.metadata.encoder == str(clip / "final")
    shutil.rmtree(path / "processor")
    tiny_clip.save_clip(clip / "final", seed=1)
    with pytest.raises(CheckpointError, match=r"model\.text\.from is not the text encoder that"):
        train(tmp_path, **{**options, "training.max_steps": 2})
    with pytest.raises(UsageError, match=r"no run at .*nowhere"):
        train(tmp_path, **{**options, "needs.words": {"run": str(tmp_path / "nowhere")}})


# In a launched group


def fake_child(code: int, out: str = "exported") -> str:
    return f"import sys, os; print('{out}'); sys.exit({code} if 'WORLD_SIZE' not in os.environ else 99)"


@pytest.mark.parametrize(("code", "passed_on"), [(6, 6), (7, 7), (85, 85), (130, 130), (-9, 137)])
def test_exit_code_of_a_failed_dependency_is_passed_on(
    tmp_path: Path, rank_0_monkeypatch: pytest.MonkeyPatch, code: int, passed_on: int
) -> None:
    rank_0_monkeypatch.setattr(dependencies, "_run_outside_group", lambda words, quiet: code)
    with pytest.raises(BottegaError, match=r"needs\.vae: bottega train of .* failed with exit code") as caught:
        run.ensure_dependency(recipe(tmp_path), "vae")
    assert caught.value.code == passed_on


def test_output_of_a_dependency_goes_to_standard_error(
    rank_0_monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    started: list[list[str]] = []
    popen = subprocess.Popen

    def start_fake_child(command: list[str], **options: Any) -> Any:
        started.append(command)
        return popen([sys.executable, "-c", fake_child(0)], **options)

    rank_0_monkeypatch.setattr(subprocess, "Popen", start_fake_child)
    for quiet in (True, False):
        dependencies.train_in_subprocess(
            recipe(tmp_path), tmp_path / "vae", name="vae", quiet=quiet, allow_data_change=False
        )
        out, err = capfd.readouterr()
        assert out == ""
        assert ("exported" in err) is not quiet
    assert ["--quiet" in command for command in started] == [True, False, False, False]


@pytest.mark.slow
def test_dependency_is_trained_in_a_subprocess_by_rank_0(
    tmp_path: Path, rank_0_monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment().items():
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            rank_0_monkeypatch.setenv(name, value)
    dependency_run = run.ensure_dependency(recipe(tmp_path), "vae", quiet=False)
    out, err = capfd.readouterr()
    assert out == ""
    assert "exported step-00000002" in err
    assert (dependency_run / "final" / "README.md").is_file()


class Clock:
    """A fake `time` module whose sleep returns at once and calls `on_sleep`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.on_sleep: Callable[[float], None] = lambda now: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep(self.now)


def test_other_ranks_report_that_they_wait_and_time_out(
    folder: Path, rank_0_monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rank_0_monkeypatch.setenv("RANK", "1")
    clock = Clock()
    rank_0_monkeypatch.setattr(dependencies, "time", clock)
    dependency_run = find_dependency(folder)
    hidden = dependency_run / "hidden"
    (dependency_run / "final").rename(hidden)

    def write_files(now: float) -> None:
        """Write a file every quarter of the stall timeout, as rank 0 would, and finally the dependency."""
        if now % (dependencies.STALL_SECONDS / 4) == 0:
            log = dependency_run / f"log-{now}"
            log.write_text("")
            os.utime(log, (log.stat().st_mtime + now,) * 2)
        if now == 3 * dependencies.STALL_SECONDS:
            hidden.rename(dependency_run / "final")

    clock.on_sleep = write_files
    assert run.ensure_dependency(recipe(folder), "vae", quiet=False) == dependency_run
    clock.on_sleep = lambda now: None
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"rank 1 waits for rank 0 to train needs.vae: {dependency_run}" in err
    (dependency_run / "final").rename(hidden)
    with pytest.raises(PeerLost, match=r"needs\.vae: nothing was written to") as caught:
        run.ensure_dependency(recipe(folder), "vae")
    assert caught.value.code == 8


# Concurrent processes


def test_second_process_waits_and_reuses_the_dependency(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, has_waited = Clock(), threading.Event()

    def wait(now: float) -> None:
        if now > 50:
            has_waited.set()
            clock.now = now - dependencies.POLL_SECONDS  # stops the clock
            time.sleep(0.01)

    clock.on_sleep = wait
    monkeypatch.setattr(dependencies, "time", clock)
    dependency_run = find_dependency(folder)
    (dependency_run / "final").rename(dependency_run / "hidden")

    def refuse_to_train(*arguments: Any, **options: Any) -> None:
        raise AssertionError("it is already trained")

    monkeypatch.setattr(run, "_train_dependency", refuse_to_train)
    paths: list[Path] = []
    with dependencies.lock_dependency(dependency_run, quiet=True):
        second = threading.Thread(
            target=lambda: paths.append(run.ensure_dependency(recipe(folder), "vae", quiet=False))
        )
        second.start()
        assert has_waited.wait(100)
        assert second.is_alive()
        (dependency_run / "hidden").rename(dependency_run / "final")
    second.join(100)
    assert paths == [dependency_run]
    err = capsys.readouterr().err
    assert err.count(f"waiting for another process to train {dependency_run}") == 1, "once a minute"


def test_dependency_is_exported_atomically_under_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = recipe(tmp_path)
    path, is_visible = needs.find_dependency_run(parent, "vae"), []
    model_card = export.RunExporter.build_model_card

    def interrupt(self: Any, metadata: Any) -> str:
        with pytest.raises(DirectoryInUse), Lock(dependencies._get_work_folder(path)):
            pass
        is_visible.append((path / "final").exists())
        raise KeyboardInterrupt

    monkeypatch.setattr(export.RunExporter, "build_model_card", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.ensure_dependency(parent, "vae")
    assert is_visible == [False], "written to a temporary folder"
    assert list(path.glob(".tmp-*")) == []
    monkeypatch.setattr(export.RunExporter, "build_model_card", model_card)
    run.ensure_dependency(parent, "vae")
    assert (path / "final" / "README.md").is_file()


def test_export_over_an_older_one_keeps_other_files(folder: Path, tmp_path: Path) -> None:
    saved = bottega.load(find_dependency(folder))
    saved.export(tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    saved.export(tmp_path / "out")
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "out" / "README.md").is_file()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        saved.export(tmp_path / "file")


# Checks before a dependency is trained


def assert_refused_before_training(tmp_path: Path, error: type[BottegaError], match: str, **changes: Any) -> None:
    with pytest.raises(error, match=match):
        train(tmp_path, **changes)
    assert not list((tmp_path / "parts").glob("*/checkpoints"))


def test_recipe_errors_are_reported_before_dependencies_are_trained(tmp_path: Path) -> None:
    assert_refused_before_training(
        tmp_path, UsageError, r"model\.hidden_size: 32 is not a multiple of num_heads 3", **{"model.num_heads": 3}
    )
    assert_refused_before_training(
        tmp_path, UsageError, r"fp16 needs a GPU", **{"training.mixed_precision": "fp16", "device": "cpu"}
    )
    assert_refused_before_training(
        tmp_path, UsageError, r"needs\.vae: .*nowhere", **{"needs.vae": {"recipe": "nowhere.yaml"}}
    )
    codes = {"model.backbone": "tokens", "model.vae": None, "model.tokenizer": "needs.vae", "model.num_heads": 32}
    assert_refused_before_training(
        tmp_path, UsageError, r"model\.hidden_size: 32 is not a multiple of twice num_heads 32", **codes
    )
    directory = RunDirectory(tmp_path / "x")
    directory.create()
    with Lock(directory):
        assert_refused_before_training(tmp_path, DirectoryInUse, "in use by")


def test_run_that_cannot_resume_trains_no_dependency(folder: Path) -> None:
    shutil.rmtree(folder / "parts")
    assert_refused_before_training(folder, UsageError, "started with another recipe", seed=1)
    append_image(folder)
    assert_refused_before_training(
        folder, DataError, "the data has changed since the checkpoint", **{"training.max_steps": 3}
    )


def test_dependency_cycle_is_refused_in_one_line(tmp_path: Path) -> None:
    first, second = tmp_path / "one.yaml", tmp_path / "two.yaml"
    for path, other in ((first, second), (second, first)):
        path.write_text(f"extends: image\nmodel: {{vae: needs.next}}\nneeds: {{next: {{recipe: {other}}}}}\n")
    with pytest.raises(
        UsageError, match=r"needs\.next: .*form a cycle: \S+ -> two-\w+ -> one-\w+ -> two-\w+$"
    ) as caught:
        bottega.train(first, {**small_media.image(tmp_path), "name": "x"})
    assert "\n" not in str(caught.value)


def test_prepare_names_the_command_that_trains_a_dependency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["prepare", write_recipe(tmp_path, origin="mine", **{"data.latents": True})]) == 2
    err = capsys.readouterr().err
    assert "needs.vae is not trained yet" in err
    assert "bottega train with the same recipe and settings" in err
    parent = recipe(tmp_path, origin="mine")
    with pytest.raises(UsageError, match=r"needs\.vae is not trained yet .* bottega train with the same"):
        resolve_tokenizer_folder(parent, "needs.vae")
    with pytest.raises(UsageError, match=r"not trained yet .* bottega train image, with the same settings"):
        resolve_tokenizer_folder(parent.model_copy(update={"origin": "image"}), "needs.vae")
