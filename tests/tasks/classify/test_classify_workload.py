"""Classification workloads of each medium: training, predictions, processor, other data, base models and export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bottega
from bottega.core.errors import DataError, UsageError
from bottega.data.loading.loader import iter_eval_batches
from bottega.models.build import build_models
from bottega.tasks import registry
from bottega.tasks.classify.media_workload import MediaClassifyWorkload
from bottega.tasks.recipes import load_recipe

RATE = 8000
SMALL: dict[str, Any] = {
    "task": "classify",
    "model.hidden_size": 8,
    "model.dropout": 0.0,
    "data.validation.split": 0.25,
    "training.max_steps": 30,
    "training.batch_size": 16,
    "training.learning_rate": 0.01,
    "evaluation.every": 30,
    "evaluation.metric": "accuracy",
    "evaluation.mode": "max",
    "checkpoint.every": 30,
    "logging.tensorboard": False,
    "logging.resources": False,
}


def write_fields(folder: Path, **fields: np.ndarray) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in fields.items():
        np.save(folder / f"{name}.npy", values)
    return folder


def write_images(folder: Path, names: tuple[str, ...] = ("top", "middle", "bottom"), count: int = 96) -> Path:
    """Write images with a bright stripe of two rows, labelled by its position."""
    rows = {"top": 0, "middle": 3, "bottom": 6}
    rng = np.random.default_rng(0)
    labels = np.array([names[i % len(names)] for i in range(count)])
    images = rng.integers(0, 80, (count, 8, 8)).astype(np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[rows[label] : rows[label] + 2] += 150
    return write_fields(folder, image=images, label=labels)


def write_audio(folder: Path, count: int = 48) -> Path:
    rng, time = np.random.default_rng(0), np.arange(2000) / RATE
    hertz = np.array([300, 600, 1200])[np.arange(count) % 3]
    audio = np.sin(2 * np.pi * hertz[:, None] * time + rng.random((count, 1)) * 6).astype(np.float32) / 2
    labels = np.array(["low", "middle", "high"])[np.arange(count) % 3]
    return write_fields(folder, audio=audio, label=labels, sample_rate=np.full(count, RATE, np.int32))


def write_video(folder: Path, count: int = 48) -> Path:
    video = np.zeros((count, 4, 8, 8), np.uint8)
    for i in range(count):
        for frame in range(4):
            video[i, frame, :, (frame if i % 2 else 3 - frame) + i % 5] = 255
    labels = np.array(["left", "right"])[np.arange(count) % 2]
    return write_fields(folder, video=video, label=labels, fps=np.full(count, 4, np.uint8))


MEDIA: dict[str, tuple[Any, dict[str, Any]]] = {
    "image": (write_images, {}),
    "audio": (write_audio, {"data.fft_size": 256, "data.hop_size": 64, "data.num_mels": 16}),
    "video": (write_video, {"data.num_frames": 4, "data.channels": 1}),
}


def settings(medium: str, folder: Path, **changes: Any) -> dict[str, Any]:
    write_data, options = MEDIA[medium]
    source = write_data(folder / medium)
    return {
        **SMALL,
        "data.input": medium,
        "data.train.path": str(source),
        "output_dir": str(folder),
        **options,
        **changes,
    }


def open_workload(medium: str, folder: Path, **changes: Any) -> MediaClassifyWorkload:
    workload = registry.open_workload(
        load_recipe([settings(medium, folder, **changes)]).recipe, progress=lambda *_: None
    )
    assert isinstance(workload, MediaClassifyWorkload)
    return workload


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bottega.train(settings("image", tmp_path_factory.mktemp("judge"), name="judge")).path


def test_a_run_learns_and_does_not_generate(trained: Path) -> None:
    run = bottega.load(trained, device="cpu")
    assert run.evaluate()["accuracy"] >= 0.9
    assert not (trained / "samples").exists() or not list((trained / "samples").iterdir())
    with pytest.raises(UsageError, match="a classifier does not generate"):
        run.generate()


def test_predict_with_features_does_not_change_the_model(trained: Path) -> None:
    run = bottega.load(trained, device="cpu")
    workload, source = run.workload, run.workload.data.validation()
    assert isinstance(workload, MediaClassifyWorkload)
    assert source is not None
    batch = next(iter(iter_eval_batches(source, 24)))
    run.model.train()
    probabilities, features = workload.predict_with_features(
        {"model": run.model}, batch["image"], device="cpu", batch_size=7
    )
    assert run.model.training
    assert probabilities.shape == (24, 3)
    assert features.shape == (24, workload.shape.num_features)
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-5)
    assert (probabilities.argmax(1) == batch["label"]).mean() >= 0.9
    single, _ = workload.predict_with_features({"model": run.model}, batch["image"][5:6], device="cpu")
    np.testing.assert_allclose(single[0], probabilities[5], atol=1e-5)
    assert workload.predict_with_features({"model": run.model}, batch["image"][:0], device="cpu")[0].shape == (0, 3)
    with pytest.raises(UsageError, match=r"expected image of shape \(n, 8, 8, 1\); got \(24, 8, 8\)"):
        workload.predict_with_features({"model": run.model}, batch["image"][..., 0], device="cpu")


def test_other_data_is_numbered_by_the_classes_of_the_run(trained: Path, tmp_path: Path) -> None:
    """bottom, middle, top are 0, 1, 2; data with top only must not number it 0."""
    run = bottega.load(trained, device="cpu")
    other = write_images(tmp_path / "top", names=("top",), count=20)
    assert run.evaluate(other)["accuracy"] >= 0.9
    np.save(other / "label.npy", np.array(["left"] * 20))
    with pytest.raises(DataError, match="label 'left' is not one of the 3 classes"):
        run.evaluate(other)


def test_an_export_is_complete_and_can_be_fine_tuned(trained: Path, tmp_path: Path) -> None:
    final = bottega.load(trained, device="cpu").export()
    config = json.loads((final / "config.json").read_text())
    assert config["classes"] == ["bottom", "middle", "top"]
    assert (config["input"], config["normalise"], config["mel"]) == ("image", "symmetric", None)
    workload = open_workload("image", tmp_path, **{"model.from": str(trained)})
    models = build_models(workload.task, 0)
    source = workload.data.validation()
    assert source is not None
    batch = source.rows(np.arange(24), np.zeros(24, int))
    assert (
        workload.predict_with_features(models, batch["image"], device="cpu")[0].argmax(1) == batch["label"]
    ).mean() >= 0.9
    with pytest.raises(UsageError, match=r"model\.from: .* has hidden_size 8, but this run needs 16"):
        open_workload("image", tmp_path, **{"model.from": str(trained), "model.hidden_size": 16})
    with pytest.raises(UsageError, match=r"model\.from: .* is not an exported classifier"):
        open_workload("image", tmp_path, **{"model.from": str(tmp_path)})


@pytest.mark.parametrize("medium", MEDIA)
def test_a_workload_reopens_from_its_processor(medium: str, tmp_path: Path) -> None:
    workload = open_workload(medium, tmp_path)
    assert workload.data.prepared.metadata["task"] == medium, (
        "the prepared data can be shared with a generator of the same medium"
    )
    workload.processor.save(tmp_path / "processor")
    workload.processor.save(tmp_path / "processor")
    again = registry.reopen_workload(workload.recipe, tmp_path / "processor", workload.data.fingerprint)
    assert isinstance(again, MediaClassifyWorkload)
    assert (again.shape, again.classes, again.mel, again.task) == (
        workload.shape,
        workload.classes,
        workload.mel,
        workload.task,
    )
    first, second = workload.data.validation(), again.data.validation()
    assert first is not None
    assert second is not None
    assert first.fingerprint == second.fingerprint
    row = second.rows(np.arange(2), np.zeros(2, int))
    assert row[workload.batch_key].shape[1:] == (*workload.shape.grid, workload.shape.channels)
    assert row["label"].dtype == np.int32
    wider = open_workload(medium, tmp_path, **{"model.hidden_size": 16})
    with pytest.raises(DataError, match="the sizes or the classes of the data differ from those of this run"):
        wider.processor.save(tmp_path / "processor")


@pytest.mark.parametrize("medium", ["audio", "video"])
def test_audio_and_video_are_learned_and_predicted(medium: str, tmp_path: Path) -> None:
    run = bottega.train(settings(medium, tmp_path, name="run"))
    assert run.metrics["accuracy"] >= 0.9
    saved = bottega.load(run.path, device="cpu")
    workload = saved.workload
    assert isinstance(workload, MediaClassifyWorkload)
    if medium == "audio":
        labels, samples = np.load(tmp_path / "audio" / "label.npy"), np.load(tmp_path / "audio" / "audio.npy")
    else:
        labels = np.load(tmp_path / "video" / "label.npy")
        samples = np.load(tmp_path / "video" / "video.npy")[..., None] / np.float32(127.5) - 1
    probabilities, _ = workload.predict_with_features({"model": saved.model}, samples, device="cpu")
    assert (np.array(workload.classes.names)[probabilities.argmax(1)] == labels).mean() >= 0.9


def test_validation_audio_is_cropped_to_the_training_length(tmp_path: Path) -> None:
    """Without data.seconds the longest training clip sets the length; longer validation clips are centre-cropped."""
    folder = write_audio(tmp_path / "other", count=12)
    audio = np.pad(np.load(folder / "audio.npy"), ((0, 0), (0, 1000)))
    np.save(folder / "audio.npy", audio)
    workload = open_workload("audio", tmp_path, **{"data.validation.path": str(folder), "data.validation.split": None})
    held_out = workload.data.validation()
    assert held_out is not None
    assert workload.mel is not None
    assert workload.mel.num_samples == 2000
    row = held_out.rows(np.zeros(1, int), np.zeros(1, int))
    np.testing.assert_array_equal(row["mel"], workload.mel.encode(audio[:1, 500:2500]))


def test_the_loss_follows_the_recipe(tmp_path: Path) -> None:
    few = write_images(tmp_path / "few", count=40)
    labels = np.load(few / "label.npy")
    labels[:20] = "top"
    np.save(few / "label.npy", labels)
    loss = {"loss.name": "focal", "loss.gamma": 1.5, "loss.class_weights": "balanced"}
    workload = open_workload("image", tmp_path, **{"data.train.path": str(few), **loss})
    counts = np.bincount(
        workload.data.training().rows(
            np.arange(len(workload.data.training())), np.zeros(len(workload.data.training()), int)
        )["label"]
    )
    np.testing.assert_allclose(workload.task.class_weights, counts.sum() / (3 * counts))
    assert (workload.task.objective, workload.task.gamma) == ("focal", 1.5)
    workload.processor.save(tmp_path / "processor")
    assert (
        registry.reopen_workload(workload.recipe, tmp_path / "processor", workload.data.fingerprint).task
        == workload.task
    )


def test_unusable_settings_and_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"data\.buckets: a classifier reads images of one size"):
        open_workload("image", tmp_path, **{"data.buckets": 3, "data.image_size": 8})
    single = write_images(tmp_path / "alone", names=("top",), count=16)
    with pytest.raises(DataError, match="only the class top; a classifier needs two"):
        open_workload("image", tmp_path, **{"data.train.path": str(single)})
