"""Image generation through the command line: training, sampling, evaluation, and the requests and settings it refuses."""

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
from bottega.metrics_log import read_metrics
from bottega.tasks.generation.sampler import GenerationSampler
from small_media import NAMES

PNG = b"\x89PNG\r\n\x1a\n"


class CommandResult:
    def __init__(self, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
        capsys.readouterr()
        self.code = cli.main(arguments)
        self.out, self.err = capsys.readouterr()

    def assert_refused(self, *parts: str) -> None:
        assert self.code == 2, self.err
        assert self.out == ""
        assert self.err.startswith("bottega: ")
        assert self.err.count("\n") == 1, self.err
        for part in parts:
            assert part in self.err


@pytest.fixture
def run_command(capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda *arguments: CommandResult(capsys, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hundred steps on images of three classes, with samples at the end."""
    options = {"training.max_steps": 100, "training.learning_rate": 1e-2, "training.ema": 0.9, "evaluation.every": 50}
    options |= {"checkpoint.every": 50, "samples.every": 100, "samples.count": 5}
    return Path(small_media.train(tmp_path_factory.mktemp("runs"), name="pictures", **options).path)


def train_two_steps(folder: Path, **changes: Any) -> Path:
    """Train for two steps and return the run directory."""
    return Path(small_media.train(folder, name="two", **{"training.max_steps": 2, **changes}).path)


def read_pixels(file: Path) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(file.read_bytes())))


# Training, sampling and evaluation


def test_training_writes_samples(run: Path) -> None:
    names = sorted(path.name for path in (run / "samples" / "step-00000100").iterdir())
    assert [name for name in names if name[0].isdigit()] == [f"0{n}.png" for n in range(5)]
    assert "sheet.png" in names
    assert read_pixels(run / "samples" / "step-00000100" / "00.png").shape == (8, 8)


def test_the_same_seed_gives_the_same_bytes(run_command: Any, run: Path, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("sheet.png", "again.png", "other.png")]
    for file, seed in zip(files, (3, 3, 4), strict=True):
        result = run_command("generate", run, "--count", 2, "--seed", seed, "--steps", 3, "--out", file)
        assert result.code == 0, result.err
        assert result.out == f"{file}\n"
    first, again, other = (file.read_bytes() for file in files)
    assert first.startswith(PNG)
    assert first == again != other


def test_generate_writes_one_file_per_image_and_by_default_under_the_run(
    run_command: Any, run: Path, tmp_path: Path
) -> None:
    command = run_command(
        "generate", run, "--class", "grey", "--count", 3, "--steps", 2, "--out", tmp_path / "made", "--json"
    )
    result = json.loads(command.out)
    assert result["count"] == 3
    assert [Path(file).name for file in result["files"]][:3] == ["00.png", "01.png", "02.png"]
    copied = Path(shutil.copytree(run, tmp_path / "copied", symlinks=True))
    assert run_command("generate", copied, "--count", 3, "--steps", 1).code == 0
    assert len(list((copied / "generated").glob("0*.png"))) == 3


def test_a_class_is_requested_by_name_or_index(run: Path) -> None:
    saved = bottega.load(run)
    names = saved.workload.metadata.classes
    assert set(names) == set(NAMES)
    by_name = saved.generate(**{"class": [names[2]]}, count=2, steps=2)
    for label in ("2", 2, ["2"]):
        np.testing.assert_array_equal(saved.generate(**{"class": label}, count=2, steps=2), by_name)
    assert not np.array_equal(saved.generate(**{"class": names[0]}, count=2, steps=2), by_name)


def test_an_image_does_not_depend_on_the_sampling_batch_size(run: Path) -> None:
    saved = bottega.load(run)
    with saved.engine.sampling() as models:
        rows = saved.workload.sampler.encode_request({}, 9)
        options: dict[str, Any] = {"device": "cpu", "seed": 0, "steps": 3, "guidance": 2.0}
        progress: list[tuple[int, int]] = []
        at_once = saved.workload.sampler.draw(models, rows, **options)
        in_batches = saved.workload.sampler.draw(
            models, rows, **options, batch_size=2, progress=lambda stage, done, total: progress.append((done, total))
        )
    np.testing.assert_allclose(in_batches, at_once, rtol=0, atol=1e-5)
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    assert progress[-1] == (27, 27)


def test_guidance_sampler_steps_and_seed_change_the_images(run: Path) -> None:
    saved = bottega.load(run)
    plain = saved.generate(count=3, steps=4)
    assert plain.dtype == np.uint8
    assert plain.shape == (3, 8, 8, 1)
    np.testing.assert_array_equal(saved.generate(count=3, steps=4, guidance=1.0, sampler="heun"), plain)
    for change in ({"guidance": 3.0}, {"sampler": "euler"}, {"sampler": "dpm"}, {"steps": 9}, {"seed": 1}):
        assert not np.array_equal(saved.generate(count=3, **{"steps": 4, **change}), plain), change
    unconditional = saved.generate(count=3, steps=4, guidance=0)
    swapped = saved.generate(**{"class": ["2", "1", "0"]}, count=1, steps=4, guidance=0)
    np.testing.assert_array_equal(unconditional, swapped)


def test_evaluate_repeats_the_logged_loss(run: Path) -> None:
    last = [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "eval"][-1]
    saved = bottega.load(run, checkpoint="last")
    assert saved.evaluate()["loss"] == pytest.approx(last["loss"], rel=1e-6)


def test_other_data_is_evaluated_with_the_class_names_of_the_run(run: Path, tmp_path: Path) -> None:
    right = tmp_path / "one.npz"
    np.savez(right, image=np.full((6, 8, 8), 230, np.uint8), label=np.array(["bright"] * 6))
    wrong = tmp_path / "wrong.npz"
    np.savez(wrong, image=np.full((6, 8, 8), 230, np.uint8), label=np.array(["dark"] * 6))
    saved = bottega.load(run)
    assert saved.evaluate(right)["loss"] != saved.evaluate(wrong)["loss"], (
        "labels are matched by name, not by position in the file"
    )


def test_a_run_samples_without_its_data(tmp_path: Path) -> None:
    path = train_two_steps(tmp_path)
    before = bottega.load(path).generate(count=1, steps=2)
    (tmp_path / "pictures.npz").unlink()
    np.testing.assert_array_equal(bottega.load(path).generate(count=1, steps=2), before)


@pytest.mark.parametrize("objective", ["noise", "v"])
def test_noise_and_v_objectives_train_and_sample(tmp_path: Path, objective: str) -> None:
    path = train_two_steps(tmp_path, **{"model.objective": objective, "model.min_snr": 5.0})
    for sampler in ("euler", "heun", "dpm"):
        assert bottega.load(path).generate(count=3, steps=3, sampler=sampler, guidance=2.0).shape == (3, 8, 8, 1)


def write_vectors(folder: Path) -> Path:
    """Write images whose brightness is the first of two condition values."""
    vector = np.random.default_rng(0).random((32, 2)).astype(np.float32)
    image = np.rint(255 * vector[:, 0, None, None] * np.ones((1, 8, 8))).astype(np.uint8)
    np.savez(folder / "vectors.npz", image=image, condition=vector)
    return folder / "vectors.npz"


def test_vectors_are_a_condition_from_training_to_files(run_command: Any, tmp_path: Path) -> None:
    data = {"data.train.path": str(write_vectors(tmp_path)), "model.condition": "vector"}
    path = train_two_steps(tmp_path, **data, **{"samples.every": 2, "samples.count": 3})
    assert len(list((path / "samples" / "step-00000002").glob("0*.png"))) == 3, "sampled for vectors of the data"
    saved = bottega.load(path)
    expected = saved.generate(vector=["0.5,1"], count=2, steps=2)
    assert expected.shape == (2, 8, 8, 1)
    for vector in ("0.5,1", [[0.5, 1]], np.array([[0.5, 1]]), [0.5, 1.0], (0.5, 1), np.array([0.5, 1])):
        np.testing.assert_array_equal(saved.generate(vector=vector, count=2, steps=2), expected)
    run_command("generate", path).assert_refused("--vector", "2 numbers")
    run_command("generate", path, "--vector", "1").assert_refused("--vector 1", "2 numbers separated by commas, got 1")
    run_command("generate", path, "--vector", "1,x").assert_refused("--vector 1,x", "2 numbers separated by commas")
    run_command("generate", path, "--vector", "1,nan").assert_refused("--vector 1,nan", "finite")
    run_command("generate", path, "--class", "0").assert_refused("--class", "condition vector", "--vector")
    with pytest.raises(UsageError, match="condition vector"):
        saved.generate(**{"class": 0})
    for wrong in ([0.5], 0.5, [], [None, 1.0]):
        with pytest.raises(UsageError, match=r"^vector .*expected 2"):
            saved.generate(vector=wrong)
    vectors = np.zeros((4, 3), np.float32)
    np.savez(tmp_path / "wider.npz", image=np.zeros((4, 8, 8), np.uint8), condition=vectors)
    with pytest.raises(
        DataError, match=r"wider\.npz has vectors of 3 numbers, but this run was trained on vectors of 2"
    ):
        saved.evaluate(tmp_path / "wider.npz")


def test_condition_size_must_match_the_data(tmp_path: Path) -> None:
    data = {"data.train.path": str(write_vectors(tmp_path)), "model.condition": "vector"}
    assert (
        bottega.load(
            train_two_steps(tmp_path, **data, **{"model.condition_size": 2})
        ).workload.metadata.shape.condition.size
        == 2
    )
    with pytest.raises(DataError, match=r"model\.condition_size: 3, .* have 2 numbers"):
        train_two_steps(tmp_path / "other", **data, **{"model.condition_size": 3})


def write_images(file: Path, height: int, width: int) -> Path:
    image = np.random.default_rng(0).integers(0, 256, (36, height, width), np.uint8)
    np.savez(file, image=image, label=np.array(NAMES)[np.arange(36) % 3])
    return file


def test_square_images_are_resized_and_other_shapes_refused(run_command: Any, run: Path, tmp_path: Path) -> None:
    """16 x 8 has as many patches as 8 x 16, so the model itself accepts it."""
    files = {sides: write_images(tmp_path / f"{sides}.npz", *sides) for sides in ((8, 16), (16, 8), (16, 16))}
    assert np.isfinite(bottega.load(run).evaluate(files[16, 16])["loss"]), "square images are resized"
    path = train_two_steps(tmp_path, **{"data.train.path": str(files[8, 16])})
    assert bottega.load(path).evaluate(files[8, 16])["loss"] > 0
    for sides in ((16, 8), (16, 16)):
        result = run_command("evaluate", path, "--data", files[sides], "--count", 0)
        assert result.code == 3
        assert result.err.count("\n") == 1
        shape = " x ".join(map(str, (*sides, 1)))
        assert f"has samples of {shape}, but this run was trained on 8 x 16 x 1" in result.err


def test_by_default_sixteen_images_cycle_through_the_classes(run_command: Any, run: Path, tmp_path: Path) -> None:
    """16 for each class would be 640 images where there are 40 classes."""
    saved = bottega.load(run)
    assert saved.generate(steps=1).shape == (16, 8, 8, 1)
    assert saved.workload.sampler.encode_request({}, None)["label"].tolist() == [n % 3 for n in range(16)]
    assert saved.workload.sampler.encoder.list_captions({}, None) == [
        saved.workload.metadata.classes[n % 3] for n in range(16)
    ]
    assert len(saved.workload.sampler.encode_request({"class": ["grey", "dark"]}, None)["label"]) == 32
    assert saved.workload.sampler.encode_request({}, 4)["label"].tolist() == [0, 1, 2, 0]
    assert len(saved.workload.sampler.encode_request({"class": ["grey", "dark"]}, 2)["label"]) == 4
    result = run_command("generate", run, "--steps", 1, "--out", tmp_path / "made", "--json")
    assert json.loads(result.out)["count"] == 16


def test_an_unknown_file_type_is_refused_before_sampling(
    run_command: Any, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        GenerationSampler, "draw", lambda *_, **__: pytest.fail("sampled before the output was checked")
    )
    run_command("generate", run, "--out", "x.bmp").assert_refused("x.bmp", ".png")


# Refusals


@pytest.mark.parametrize(
    ("arguments", "parts"),
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
def test_invalid_requests_are_refused(run_command: Any, run: Path, arguments: list[str], parts: list[str]) -> None:
    run_command("generate", run, *arguments).assert_refused(*parts)
    assert not Path("x.bmp").exists()


def test_guidance_needs_condition_dropout_in_training(run_command: Any, tmp_path: Path) -> None:
    path = train_two_steps(tmp_path, **{"model.condition_dropout": 0.0})
    run_command("generate", path, "--guidance", 2).assert_refused("--guidance 2", "condition_dropout is 0", "use 1")
    assert run_command("generate", path, "--guidance", 1, "--count", 1, "--steps", 1).code == 0


def test_an_unconditional_run_refuses_class_and_guidance(run_command: Any, tmp_path: Path) -> None:
    path = train_two_steps(tmp_path, **{"model.condition": "none"})
    run_command("generate", path, "--class", "dark").assert_refused("--class", "condition none", "it takes nothing")
    run_command("generate", path, "--guidance", 2).assert_refused("--guidance 2", "no condition")
    assert bottega.load(path).generate(count=3, steps=1).shape == (3, 8, 8, 1)


def test_more_steps_than_the_schedule_has_are_refused(run_command: Any, tmp_path: Path) -> None:
    path = train_two_steps(tmp_path, **{"model.objective": "v"})
    run_command("generate", path, "--steps", 1001).assert_refused("--steps 1001", "at most 1000")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model.patch_size": 3}, ["model.patch_size", "3 do not divide a side of 8", "use one of 1, 2, 4, 8"]),
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
def test_invalid_settings_are_refused_before_training(
    run_command: Any, tmp_path: Path, changes: dict[str, Any], parts: list[str]
) -> None:
    """Refused before the first step, not when the first sample is due."""
    run_command(*small_media.train_arguments(tmp_path, "--quiet", name="x", **changes)).assert_refused(*parts)
    assert not (tmp_path / "x" / "metrics.jsonl").exists()


def test_data_without_classes_are_refused_by_name(run_command: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "plain.npz", image=np.zeros((20, 8, 8), np.uint8))
    plain = {"data.train.path": str(tmp_path / "plain.npz"), "name": "x"}
    result = run_command(*small_media.train_arguments(tmp_path, "--quiet", **plain))
    assert result.code in (2, 3)
    assert result.err.count("\n") == 1
    assert "label" in result.err
    assert (
        run_command(*small_media.train_arguments(tmp_path, "--quiet", **plain, **{"model.condition": "none"})).code == 0
    )


def test_python_api_refuses_the_same_requests(run: Path) -> None:
    with pytest.raises(UsageError, match=r"^max_tokens"):
        bottega.load(run).generate(max_tokens=4)
    with pytest.raises(UsageError, match=r"^prompt"):
        bottega.load(run).generate("a dark square")
