"""Pictures from training to files, through the command line; and what a person gets wrong on the way."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import bottega
import small_media
from bottega import cli
from bottega.core.errors import DataError, UsageError
from bottega.core.rundir import read_metrics
from bottega.tasks.generation.sampler import GenerationSampler
from small_media import NAMES

PNG = b"\x89PNG\r\n\x1a\n"


class Said:
    def __init__(self, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
        capsys.readouterr()
        self.code = cli.main(arguments)
        self.out, self.err = capsys.readouterr()

    def refused(self, *parts: str) -> None:
        assert self.code == 2, self.err
        assert self.out == ""
        assert self.err.startswith("bottega: ")
        assert self.err.count("\n") == 1, self.err
        for part in parts:
            assert part in self.err


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda *arguments: Said(capsys, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hundred steps on the pictures of three classes, with samples in the end."""
    options = {"training.max_steps": 100, "training.learning_rate": 1e-2, "training.ema": 0.9, "evaluation.every": 50}
    options |= {"checkpoint.every": 50, "samples.every": 100, "samples.count": 5}
    return Path(small_media.train(tmp_path_factory.mktemp("runs"), name="pictures", **options).path)


def started(folder: Path, **changes: Any) -> Path:
    """A run of two steps."""
    return Path(small_media.train(folder, name="two", **{"training.max_steps": 2, **changes}).path)


def pixels(file: Path) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(file.read_bytes())))


# What it does


def test_training_leaves_samples_of_every_class_in_turn(run: Path) -> None:
    made = sorted(path.name for path in (run / "samples" / "step-00000100").iterdir())
    assert [name for name in made if name[0].isdigit()] == [f"0{n}.png" for n in range(5)]
    assert "sheet.png" in made
    assert pixels(run / "samples" / "step-00000100" / "00.png").shape == (8, 8)


def test_the_same_seed_gives_the_same_bytes(say: Any, run: Path, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("sheet.png", "again.png", "other.png")]
    for file, seed in zip(files, (3, 3, 4), strict=True):
        said = say("generate", run, "--count", 2, "--seed", seed, "--steps", 3, "--out", file)
        assert said.code == 0, said.err
        assert said.out == f"{file}\n"
    first, again, other = (file.read_bytes() for file in files)
    assert first.startswith(PNG)
    assert first == again != other


def test_a_folder_gets_a_file_for_each_and_the_run_is_the_usual_place(say: Any, run: Path, tmp_path: Path) -> None:
    said = say("generate", run, "--class", "grey", "--count", 3, "--steps", 2, "--out", tmp_path / "made", "--json")
    result = json.loads(said.out)
    assert result["count"] == 3
    assert [Path(file).name for file in result["files"]][:3] == ["00.png", "01.png", "02.png"]
    copied = Path(shutil.copytree(run, tmp_path / "copied", symlinks=True))
    assert say("generate", copied, "--count", 3, "--steps", 1).code == 0
    assert len(list((copied / "generated").glob("0*.png"))) == 3


def test_a_class_has_a_name_and_a_number(run: Path) -> None:
    saved = bottega.load(run)
    names = saved.workload.metadata.classes
    assert set(names) == set(NAMES)
    by_name = saved.generate(**{"class": [names[2]]}, count=2, steps=2)
    for wanted in ("2", 2, ["2"]):
        np.testing.assert_array_equal(saved.generate(**{"class": wanted}, count=2, steps=2), by_name)
    assert not np.array_equal(saved.generate(**{"class": names[0]}, count=2, steps=2), by_name)


def test_a_picture_does_not_depend_on_how_many_are_drawn_at_once(run: Path) -> None:
    saved = bottega.load(run)
    with saved.engine.sampling() as models:
        rows = saved.workload.sampler.encode_request({}, 9)
        options: dict[str, Any] = {"device": "cpu", "seed": 0, "steps": 3, "guidance": 2.0}
        seen: list[tuple[int, int]] = []
        whole = saved.workload.sampler.draw(models, rows, **options)
        parts = saved.workload.sampler.draw(
            models, rows, **options, batch_size=2, say=lambda stage, done, total: seen.append((done, total))
        )
    np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-5)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (27, 27)


def test_guidance_and_samplers_reach_the_model(run: Path) -> None:
    saved = bottega.load(run)
    plain = saved.generate(count=3, steps=4)
    assert plain.dtype == np.uint8
    assert plain.shape == (3, 8, 8, 1)
    np.testing.assert_array_equal(saved.generate(count=3, steps=4, guidance=1.0, sampler="heun"), plain)
    for other in ({"guidance": 3.0}, {"sampler": "euler"}, {"sampler": "dpm"}, {"steps": 9}, {"seed": 1}):
        assert not np.array_equal(saved.generate(count=3, **{"steps": 4, **other}), plain), other
    nothing = saved.generate(count=3, steps=4, guidance=0)
    swapped = saved.generate(**{"class": ["2", "1", "0"]}, count=1, steps=4, guidance=0)
    np.testing.assert_array_equal(nothing, swapped)


def test_what_was_measured_is_measured_again(run: Path) -> None:
    last = [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "eval"][-1]
    saved = bottega.load(run, checkpoint="last")
    assert saved.evaluate()["loss"] == pytest.approx(last["loss"], rel=1e-6)


def test_other_data_is_measured_with_this_runs_classes(run: Path, tmp_path: Path) -> None:
    one = tmp_path / "one.npz"
    np.savez(one, image=np.full((6, 8, 8), 230, np.uint8), label=np.array(["bright"] * 6))
    wrong = tmp_path / "wrong.npz"
    np.savez(wrong, image=np.full((6, 8, 8), 230, np.uint8), label=np.array(["dark"] * 6))
    saved = bottega.load(run)
    assert saved.evaluate(one)["loss"] != saved.evaluate(wrong)["loss"], "the only class of a file is not its first"


def test_a_run_draws_where_its_data_are_gone(tmp_path: Path) -> None:
    path = started(tmp_path)
    before = bottega.load(path).generate(count=1, steps=2)
    (tmp_path / "pictures.npz").unlink()
    np.testing.assert_array_equal(bottega.load(path).generate(count=1, steps=2), before)


@pytest.mark.parametrize("objective", ["noise", "v"])
def test_other_objectives_train_and_draw(tmp_path: Path, objective: str) -> None:
    path = started(tmp_path, **{"model.objective": objective, "model.min_snr": 5.0})
    for sampler in ("euler", "heun", "dpm"):
        assert bottega.load(path).generate(count=3, steps=3, sampler=sampler, guidance=2.0).shape == (3, 8, 8, 1)


def with_vectors(folder: Path) -> Path:
    """A picture is as bright as the first of two numbers says."""
    vector = np.random.default_rng(0).random((32, 2)).astype(np.float32)
    image = np.rint(255 * vector[:, 0, None, None] * np.ones((1, 8, 8))).astype(np.uint8)
    np.savez(folder / "vectors.npz", image=image, condition=vector)
    return folder / "vectors.npz"


def test_vectors_are_a_condition_from_training_to_files(say: Any, tmp_path: Path) -> None:
    data = {"data.train.path": str(with_vectors(tmp_path)), "model.condition": "vector"}
    path = started(tmp_path, **data, **{"samples.every": 2, "samples.count": 3})
    assert len(list((path / "samples" / "step-00000002").glob("0*.png"))) == 3, "drawn for vectors of the data"
    saved = bottega.load(path)
    asked = saved.generate(vector=["0.5,1"], count=2, steps=2)
    assert asked.shape == (2, 8, 8, 1)
    for same in ("0.5,1", [[0.5, 1]], np.array([[0.5, 1]]), [0.5, 1.0], (0.5, 1), np.array([0.5, 1])):
        np.testing.assert_array_equal(saved.generate(vector=same, count=2, steps=2), asked)
    say("generate", path).refused("--vector", "2 numbers")
    say("generate", path, "--vector", "1").refused("--vector 1", "2 numbers separated by commas, got 1")
    say("generate", path, "--vector", "1,x").refused("--vector 1,x", "2 numbers separated by commas")
    say("generate", path, "--vector", "1,nan").refused("--vector 1,nan", "finite")
    say("generate", path, "--class", "0").refused("--class", "condition vector", "--vector")
    with pytest.raises(UsageError, match="condition vector"):
        saved.generate(**{"class": 0})
    for wrong in ([0.5], 0.5, [], [None, 1.0]):
        with pytest.raises(UsageError, match=r"^vector .*expected 2"):
            saved.generate(vector=wrong)
    vectors = np.zeros((4, 3), np.float32)
    np.savez(tmp_path / "wider.npz", image=np.zeros((4, 8, 8), np.uint8), condition=vectors)
    with pytest.raises(
        DataError, match=r"wider\.npz: has vectors of 3 numbers, but this run was trained on vectors of 2"
    ):
        saved.evaluate(tmp_path / "wider.npz")


def test_a_width_of_vectors_that_the_data_do_not_have(tmp_path: Path) -> None:
    data = {"data.train.path": str(with_vectors(tmp_path)), "model.condition": "vector"}
    assert (
        bottega.load(started(tmp_path, **data, **{"model.condition_size": 2})).workload.metadata.shape.condition.size
        == 2
    )
    with pytest.raises(DataError, match=r"model\.condition_size: 3 .* have 2 numbers"):
        started(tmp_path / "other", **data, **{"model.condition_size": 3})


def pictures_of(file: Path, height: int, width: int) -> Path:
    image = np.random.default_rng(0).integers(0, 256, (36, height, width), np.uint8)
    np.savez(file, image=image, label=np.array(NAMES)[np.arange(36) % 3])
    return file


def test_pictures_of_another_shape_are_resized_or_refused(say: Any, run: Path, tmp_path: Path) -> None:
    """16 x 8 has as many patches as 8 x 16, so the model alone would not notice."""
    files = {sides: pictures_of(tmp_path / f"{sides}.npz", *sides) for sides in ((8, 16), (16, 8), (16, 16))}
    assert np.isfinite(bottega.load(run).evaluate(files[16, 16])["loss"]), "one side says all of a square"
    path = started(tmp_path, **{"data.train.path": str(files[8, 16])})
    assert bottega.load(path).evaluate(files[8, 16])["loss"] > 0
    for sides in ((16, 8), (16, 16)):
        said = say("evaluate", path, "--data", files[sides], "--count", 0)
        assert said.code == 3
        assert said.err.count("\n") == 1
        here = " x ".join(map(str, (*sides, 1)))
        assert f"is of {here}, but this run was trained on 8 x 16 x 1" in said.err


def test_without_a_class_sixteen_are_drawn_in_turn(say: Any, run: Path, tmp_path: Path) -> None:
    """16 of each would be 640 where there are 40 classes."""
    saved = bottega.load(run)
    assert saved.generate(steps=1).shape == (16, 8, 8, 1)
    assert saved.workload.sampler.encode_request({}, None)["label"].tolist() == [n % 3 for n in range(16)]
    assert saved.workload.sampler.encoder.captions({}, None) == [
        saved.workload.metadata.classes[n % 3] for n in range(16)
    ]
    assert len(saved.workload.sampler.encode_request({"class": ["grey", "dark"]}, None)["label"]) == 32
    assert saved.workload.sampler.encode_request({}, 4)["label"].tolist() == [0, 1, 2, 0]
    assert len(saved.workload.sampler.encode_request({"class": ["grey", "dark"]}, 2)["label"]) == 4
    said = say("generate", run, "--steps", 1, "--out", tmp_path / "made", "--json")
    assert json.loads(said.out)["count"] == 16


def test_an_impossible_file_is_refused_before_anything_is_drawn(
    say: Any, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GenerationSampler, "draw", lambda *_, **__: pytest.fail("drawn for nothing"))
    say("generate", run, "--out", "x.bmp").refused("x.bmp", ".png")


# What a person gets wrong


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--class", "3"], ["--class 3", "3 classes", *NAMES]),
        (["--class", "-1"], ["--class -1", "3 classes"]),
        (["--class", "purple"], ["--class purple", "3 classes"]),
        (["--class", "²"], ["--class ²", "3 classes"]),
        (["--prompt", "a grey square"], ["--prompt", "condition class", "--class"]),
        (["--vector", "1,2"], ["--vector", "condition class", "--class"]),
        (["--max_tokens", "5"], ["--max_tokens", "it takes", "--class", "--steps"]),
        (["--temperature", "0.5"], ["--temperature", "it takes"]),
        (["--count", "0"], ["--count 0", "expected 1 or more"]),
        (["--steps", "0"], ["--steps 0", "expected 1 or more"]),
        (["--sampler", "ddim"], ["--sampler ddim", "euler, heun or dpm"]),
        (["--guidance", "-1"], ["--guidance -1", "expected 0 or more"]),
        (["--guidance", "nan"], ["--guidance nan", "expected 0 or more"]),
        (["--steps", "1", "--count", "1", "--out", "x.bmp"], ["x.bmp", ".png"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_what_cannot_be_drawn(say: Any, run: Path, words: list[str], parts: list[str]) -> None:
    say("generate", run, *words).refused(*parts)
    assert not Path("x.bmp").exists()


def test_guidance_needs_a_model_that_learnt_to_go_without(say: Any, tmp_path: Path) -> None:
    path = started(tmp_path, **{"model.condition_dropout": 0.0})
    say("generate", path, "--guidance", 2).refused("--guidance 2", "condition_dropout is 0", "use 1")
    assert say("generate", path, "--guidance", 1, "--count", 1, "--steps", 1).code == 0


def test_a_run_without_condition(say: Any, tmp_path: Path) -> None:
    path = started(tmp_path, **{"model.condition": "none"})
    say("generate", path, "--class", "dark").refused("--class", "condition none", "it takes nothing")
    say("generate", path, "--guidance", 2).refused("--guidance 2", "no condition")
    assert bottega.load(path).generate(count=3, steps=1).shape == (3, 8, 8, 1)


def test_steps_that_the_path_does_not_have(say: Any, tmp_path: Path) -> None:
    path = started(tmp_path, **{"model.objective": "v"})
    say("generate", path, "--steps", 1001).refused("--steps 1001", "1000 steps")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model.patch_size": 3}, ["model.patch_size", "3 do not divide a side of 8", "1, 2, 4, 8 do"]),
        ({"model.num_heads": 3}, ["model.hidden_size", "not a multiple of num_heads 3"]),
        ({"data.buckets": 3, "data.image_size": 8}, ["data.buckets", "one shape"]),
        ({"model.condition": "none", "samples.guidance": 2}, ["samples.guidance 2", "no condition"]),
        ({"model.condition_dropout": 0, "samples.guidance": 2}, ["samples.guidance 2", "condition_dropout"]),
        ({"model.objective": "noise", "samples.steps": 5000}, ["samples.steps 5000"]),
        ({"samples.steps": 0}, ["samples.steps"]),
        ({"samples.sampler": "ddim"}, ["samples.sampler", "ddim"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_trained(say: Any, tmp_path: Path, changes: dict[str, Any], parts: list[str]) -> None:
    """Told before the first step, and not when the first sample is due."""
    say(*small_media.words(tmp_path, "--quiet", name="x", **changes)).refused(*parts)
    assert not (tmp_path / "x" / "metrics.jsonl").exists()


def test_data_without_classes_are_refused_by_name(say: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "plain.npz", image=np.zeros((20, 8, 8), np.uint8))
    plain = {"data.train.path": str(tmp_path / "plain.npz"), "name": "x"}
    said = say(*small_media.words(tmp_path, "--quiet", **plain))
    assert said.code in (2, 3)
    assert said.err.count("\n") == 1
    assert "label" in said.err
    assert say(*small_media.words(tmp_path, "--quiet", **plain, **{"model.condition": "none"})).code == 0


def test_the_library_says_the_same(run: Path) -> None:
    with pytest.raises(UsageError, match=r"^max_tokens"):
        bottega.load(run).generate(max_tokens=4)
    with pytest.raises(UsageError, match=r"^prompt"):
        bottega.load(run).generate("a dark square")
