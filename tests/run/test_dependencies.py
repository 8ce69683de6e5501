"""Parts: which run is taken for one, who makes it, and what is refused before anybody waits for it."""

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
    "logging.resources": False,
}
JUDGE: dict[str, Any] = {
    "training.max_steps": 2,
    "training.batch_size": 8,
    "model.hidden_size": 8,
    "logging.tensorboard": False,
    "logging.resources": False,
}
IN_LATENTS: dict[str, Any] = {"model.vae": "needs.vae", "model.patch_size": 1, "training.max_steps": 2}
PART: dict[str, Any] = {"needs.vae": {"recipe": "image_vae/digits", "settings": TINY}, **IN_LATENTS}
LONGER_LATER = {"training.scheduler.name": "constant"}


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"task": "image", **small_media.image(folder), **PART, "name": "x", **changes}


def recipe(folder: Path, **changes: Any) -> Any:
    return load_recipe([settings(folder, **changes)]).recipe


def train(folder: Path, **changes: Any) -> Any:
    return bottega.train(settings(folder, **changes))


def written(folder: Path, **changes: Any) -> str:
    """For the command line."""
    file = folder / "written.yaml"
    file.write_text(to_yaml(recipe(folder, **changes)))
    return str(file)


def other_pictures(folder: Path) -> None:
    """The same file with one more picture in it."""
    path = folder / "pictures.npz"
    with np.load(path) as held:
        fields = {name: held[name] for name in held}
    np.savez(path, **{name: np.concatenate([value, value[:1]]) for name, value in fields.items()})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with a generator and the autoencoder it needs. Tests that change something copy it."""
    folder = tmp_path_factory.mktemp("made")
    train(folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy, where the pictures are the same but lie elsewhere."""
    copy = Path(shutil.copytree(made, tmp_path / "runs", symlinks=True))
    text = copy / "x" / "recipe.yaml"
    text.write_text(text.read_text().replace(str(made), str(copy)))
    part = Path(shutil.move(the_part(copy), needs.dependency_run(recipe(copy), "vae")))
    facts = copy / "x" / "processor" / "generator.json"
    facts.write_text(facts.read_text().replace(str(the_part(made)), str(part)))
    return copy


def the_part(folder: Path) -> Path:
    (found,) = (path.parent for path in (folder / "parts").glob("*/final"))
    return found


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As rank 0 of two that a launcher started."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


# Of which data


def test_a_part_of_other_data_is_trained_anew(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = the_part(folder)
    before = (part / "final" / "model.safetensors", part / "final" / "diffusion_pytorch_model.safetensors")
    weights = next(path.read_bytes() for path in before if path.is_file())
    assert run.ensure_dependency(recipe(folder), "vae") == part
    assert capsys.readouterr().err == "", "the same data: taken as it is"
    other_pictures(folder)
    assert run.ensure_dependency(recipe(folder), "vae") == part
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "needs.vae was trained on other data and is trained again" in said
    kept = part.with_name(f"{part.name}.1")
    assert str(kept) in said
    assert weights in [path.read_bytes() for path in (kept / "final").iterdir()], "nothing is lost"
    assert bottega.load(folder / "x").task.latents.folder == str(kept / "final"), "who needs the old one finds it"
    shutil.rmtree(part / "final")
    other_pictures(folder)
    run.ensure_dependency(recipe(folder), "vae")
    assert part.with_name(f"{part.name}.2").is_dir(), "one that was cut off as well"


def test_data_of_its_own_or_a_change_that_is_allowed_leave_a_part_alone(folder: Path) -> None:
    part = the_part(folder)
    other_pictures(folder)
    assert run.ensure_dependency(recipe(folder), "vae", allow_data_change=True) == part
    assert not part.with_name(f"{part.name}.1").exists()
    own = recipe(folder, **{"needs.vae.own_data": True})
    place = needs.dependency_run(own, "vae")
    part.rename(place)
    assert run.ensure_dependency(own, "vae") == place
    assert not place.with_name(f"{place.name}.1").exists()


def test_the_judge_has_not_seen_what_is_held_out_now(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"needs.judge": {"recipe": "classify/image", "settings": JUDGE}, "training.max_steps": 1}
    options |= {"model.vae": None, "model.patch_size": 2, "evaluation.every": None}
    path = train(tmp_path, **options).path
    bottega.evaluate(path, count=2)
    judge = needs.dependency_run(recipe(tmp_path, **options), "judge")
    other_pictures(tmp_path)
    again = train(tmp_path, **{**options, "name": "y"}).path
    capsys.readouterr()
    bottega.evaluate(again, count=2)
    assert "needs.judge was trained on other data" in capsys.readouterr().err
    assert judge.with_name(f"{judge.name}.1").is_dir()


# Under which name


@pytest.mark.parametrize("key", ["name", "output_dir"])
def test_a_part_has_no_name_of_its_own(tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    judge = {"recipe": "classify/image", "settings": {key: "mine"}}
    assert cli.main(["train", written(tmp_path, **{"needs.judge": judge})]) == 2
    said = capsys.readouterr().err
    assert f"needs.judge.settings: {key}" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "parts").exists()


def test_nor_has_one_whose_recipe_names_it(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: image_vae/digits\nname: always-the-same\n")
    changes = {"needs.vae": {"recipe": str(mine), "settings": TINY}}
    first = needs.dependency_run(recipe(tmp_path, **changes), "vae").name
    assert first.startswith("mine-")
    assert needs.dependency_run(recipe(tmp_path, **changes, **{"data.channels": 3}), "vae").name != first


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
def test_the_recipe_of_a_run_needs_the_same_parts(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    first = load_recipe([name, changes]).recipe
    (tmp_path / "recipe.yaml").write_text(to_yaml(first))
    again = load_recipe([tmp_path / "recipe.yaml"]).recipe
    assert first.needs
    for part in first.needs:
        assert needs.dependency_run(again, part) == needs.dependency_run(first, part)


def test_defaults_of_the_data_are_the_parents_too(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "extends: image_vae/digits\ndata: {normalise: unit, resize: pad, split: {by: hash}, limit: 9, image_size: 16,\n"
        "  augmentation: {flip: true}, validation: {limit: 3}, train: {limit: 5}}\n"
    )
    parent = recipe(tmp_path, **{"needs.vae": {"recipe": str(mine), "settings": TINY}})
    data: Any = needs.dependency_recipe(parent, "vae").data
    assert (data.normalise, data.resize) == ("symmetric", "crop")
    assert (data.split, data.limit, data.train, data.validation) == (
        None,
        None,
        parent.data.train,
        parent.data.validation,
    )
    assert data.augmentation.flip, "how it is changed is its own"
    assert data.image_size == 16, "what the parent leaves to the data, a part may say"


# What a run is built on


def test_a_checkpoint_knows_its_base(folder: Path, tmp_path: Path) -> None:
    (_, manifest), *_ = checkpoint.list_checkpoints(folder / "x" / "checkpoints")
    assert list(manifest.fingerprint["frozen"]) == ["autoencoder"]
    longer = {**LONGER_LATER, "training.max_steps": 3}
    base = train(tmp_path / "b", **LONGER_LATER).path
    vae = the_part(tmp_path / "b")
    shutil.rmtree(base / "processor")
    other = next((the_part(folder) / "final").glob("*.safetensors"))
    for file in (vae / "final").glob("*.safetensors"):
        held = file.read_bytes()
        changed = bytearray(other.read_bytes())
        changed[-1] ^= 1
        file.write_bytes(changed)
    with pytest.raises(
        CheckpointError, match=r"^model\.vae: is not the autoencoder that this run started with"
    ) as caught:
        bottega.train(settings(tmp_path / "b", **longer))
    assert (caught.value.code, str(caught.value).count("\n")) == (4, 0)
    for words in (["--allow-data-change"], ["--resume_from", str(base)]):
        name = "y" if "--resume_from" in words else "x"
        assert cli.main(["train", written(tmp_path / "b", **longer, name=name), "--quiet", *words]) == 4
    file.write_bytes(held)
    assert bottega.train(settings(tmp_path / "b", **longer)).step == 3


def test_a_base_in_words_is_known_too(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    clip = tmp_path / "encoder"
    tiny_clip.save(clip / "final")
    (clip / "recipe.yaml").write_text("task: language\n")
    options = {**LONGER_LATER, "model.vae": None, "model.patch_size": 2, "model.condition": "text"}
    options |= {"model.text.from": "needs.words", "needs.words": {"run": str(clip)}, "training.max_steps": 1}
    assert needs.referenced_dependencies(recipe(tmp_path, **options)) == ["words"]
    path = train(tmp_path, **options).path
    assert bottega.load(path).workload.text.metadata.encoder == str(clip / "final")
    shutil.rmtree(path / "processor")
    tiny_clip.save(clip / "final", seed=1)
    with pytest.raises(CheckpointError, match=r"model\.text\.from: is not the text encoder that"):
        train(tmp_path, **{**options, "training.max_steps": 2})
    with pytest.raises(UsageError, match=r"no run at .*nowhere"):
        train(tmp_path, **{**options, "needs.words": {"run": str(tmp_path / "nowhere")}})


# In a launched group


def fake_child(code: int, out: str = "exported") -> str:
    return f"import sys, os; print('{out}'); sys.exit({code} if 'WORLD_SIZE' not in os.environ else 99)"


@pytest.mark.parametrize(("code", "passed_on"), [(6, 6), (7, 7), (85, 85), (130, 130), (-9, 137)])
def test_a_part_that_fails_passes_its_code_on(
    tmp_path: Path, group: pytest.MonkeyPatch, code: int, passed_on: int
) -> None:
    group.setattr(dependencies, "_run_alone", lambda words, quiet: code)
    with pytest.raises(BottegaError, match=r"needs\.vae: bottega train of .* failed with exit code") as caught:
        run.ensure_dependency(recipe(tmp_path), "vae")
    assert caught.value.code == passed_on


def test_what_the_child_says_is_no_answer_of_ours(
    group: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    started: list[list[str]] = []
    begin = subprocess.Popen

    def instead(command: list[str], **options: Any) -> Any:
        started.append(command)
        return begin([sys.executable, "-c", fake_child(0)], **options)

    group.setattr(subprocess, "Popen", instead)
    for quiet in (True, False):
        dependencies.train_in_subprocess(
            recipe(tmp_path), tmp_path / "part", name="vae", quiet=quiet, allow_data_change=False
        )
        out, err = capfd.readouterr()
        assert out == ""
        assert ("exported" in err) is not quiet
    assert ["--quiet" in command for command in started] == [True, False, False, False]


@pytest.mark.slow
def test_a_real_part_in_a_group(tmp_path: Path, group: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for name, value in environment().items():
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            group.setenv(name, value)
    part = run.ensure_dependency(recipe(tmp_path), "vae", quiet=False)
    out, err = capfd.readouterr()
    assert out == ""
    assert "exported step-00000002" in err
    assert (part / "final" / "README.md").is_file()


class Clock:
    """In place of the module `time`: its hours pass at once, and something may happen in them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.on_sleep: Callable[[float], None] = lambda now: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep(self.now)


def test_the_other_ranks_say_what_they_wait_for_and_give_up(
    folder: Path, group: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    group.setenv("RANK", "1")
    clock = Clock()
    group.setattr(dependencies, "time", clock)
    part = the_part(folder)
    hidden = part / "hidden"
    (part / "final").rename(hidden)

    def work(now: float) -> None:
        """What rank 0 does: a file every quarter of the time that nobody waits for nothing, and then the part."""
        if now % (dependencies.STALLED / 4) == 0:
            log = part / f"log-{now}"
            log.write_text("")
            os.utime(log, (log.stat().st_mtime + now,) * 2)
        if now == 3 * dependencies.STALLED:
            hidden.rename(part / "final")

    clock.on_sleep = work
    assert run.ensure_dependency(recipe(folder), "vae", quiet=False) == part
    clock.on_sleep = lambda now: None
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"rank 1 waits for rank 0 to train needs.vae: {part}" in said
    (part / "final").rename(hidden)
    with pytest.raises(PeerLost, match=r"needs\.vae: nothing was written to") as caught:
        run.ensure_dependency(recipe(folder), "vae")
    assert caught.value.code == 8


# Two at once


def test_the_second_waits_for_the_first_and_takes_what_it_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, has_waited = Clock(), threading.Event()

    def wait(now: float) -> None:
        if now > 50:
            has_waited.set()
            clock.now = now - dependencies.POLL  # and there the clock stands still
            time.sleep(0.01)

    clock.on_sleep = wait
    monkeypatch.setattr(dependencies, "time", clock)
    part = the_part(folder)
    (part / "final").rename(part / "hidden")

    def never(*words: Any, **options: Any) -> None:
        raise AssertionError("it is made already")

    monkeypatch.setattr(run, "_train_dependency", never)
    found: list[Path] = []
    with dependencies.lock_dependency(part, quiet=True):
        second = threading.Thread(
            target=lambda: found.append(run.ensure_dependency(recipe(folder), "vae", quiet=False))
        )
        second.start()
        assert has_waited.wait(100)
        assert second.is_alive()
        (part / "hidden").rename(part / "final")
    second.join(100)
    assert found == [part]
    said = capsys.readouterr().err
    assert said.count(f"waiting for another process to train {part}") == 1, "once a minute"


def test_it_is_exported_whole_and_before_anybody_else_may_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = recipe(tmp_path)
    place, seen = needs.dependency_run(wanted, "vae"), []
    model_card = export.RunExporter.model_card

    def interrupt(self: Any, metadata: Any) -> str:
        with pytest.raises(DirectoryInUse), Lock(dependencies._work_folder(place)):
            pass
        seen.append((place / "final").exists())
        raise KeyboardInterrupt

    monkeypatch.setattr(export.RunExporter, "model_card", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.ensure_dependency(wanted, "vae")
    assert seen == [False], "written elsewhere"
    assert [path.name for path in place.glob(".tmp-*")] == []
    monkeypatch.setattr(export.RunExporter, "model_card", model_card)
    run.ensure_dependency(wanted, "vae")
    assert (place / "final" / "README.md").is_file()


def test_an_export_over_an_older_one_keeps_what_else_lies_there(folder: Path, tmp_path: Path) -> None:
    one = bottega.load(the_part(folder))
    one.export(tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    one.export(tmp_path / "out")
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "out" / "README.md").is_file()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        one.export(tmp_path / "file")


# Before a part is trained


def untouched(tmp_path: Path, error: type[BottegaError], match: str, **changes: Any) -> None:
    with pytest.raises(error, match=match):
        train(tmp_path, **changes)
    assert not list((tmp_path / "parts").glob("*/checkpoints"))


def test_what_is_wrong_without_the_parts_is_said_before_them(tmp_path: Path) -> None:
    untouched(
        tmp_path, UsageError, r"model\.hidden_size: 32 is not a multiple of num_heads 3", **{"model.num_heads": 3}
    )
    untouched(tmp_path, UsageError, r"fp16 needs a GPU", **{"training.mixed_precision": "fp16", "device": "cpu"})
    untouched(tmp_path, UsageError, r"needs\.vae: .*nowhere", **{"needs.vae": {"recipe": "nowhere.yaml"}})
    codes = {"model.backbone": "tokens", "model.vae": None, "model.tokenizer": "needs.vae", "model.num_heads": 32}
    untouched(tmp_path, UsageError, r"model\.hidden_size: 32 is not a multiple of twice num_heads 32", **codes)
    directory = RunDirectory(tmp_path / "x")
    directory.create()
    with Lock(directory):
        untouched(tmp_path, DirectoryInUse, "in use by")


def test_a_run_that_cannot_go_on_trains_no_parts(folder: Path) -> None:
    shutil.rmtree(folder / "parts")
    untouched(folder, UsageError, "started with another recipe", seed=1)
    other_pictures(folder)
    untouched(folder, DataError, "the data has changed since the checkpoint", **{"training.max_steps": 3})


def test_a_circle_is_one_line(tmp_path: Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    for path, other in ((one, two), (two, one)):
        path.write_text(f"extends: image\nmodel: {{vae: needs.next}}\nneeds: {{next: {{recipe: {other}}}}}\n")
    with pytest.raises(
        UsageError, match=r"needs\.next: .*form a cycle: \S+ -> two-\w+ -> one-\w+ -> two-\w+$"
    ) as caught:
        bottega.train(one, {**small_media.image(tmp_path), "name": "x"})
    assert "\n" not in str(caught.value)


def test_prepare_names_the_command_that_trains_a_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["prepare", written(tmp_path, origin="mine", **{"data.latents": True})]) == 2
    said = capsys.readouterr().err
    assert "needs.vae is not trained yet" in said
    assert "bottega train with the same recipe and settings" in said
    one = recipe(tmp_path, origin="mine")
    with pytest.raises(UsageError, match=r"needs\.vae is not trained yet .* bottega train with the same"):
        resolve_tokenizer_folder(one, "needs.vae")
    with pytest.raises(UsageError, match=r"not trained yet .* bottega train image, with the same settings"):
        resolve_tokenizer_folder(one.model_copy(update={"origin": "image"}), "needs.vae")
