"""The task `classify` in JAX: losses, metrics and gradients are those of torch, and predictions and exports need no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import bottega
import small_texts
from bottega.metrics_log import read_metrics
from bottega.models.convnet.config import ConvNetShape
from bottega.models.spiking.config import SpikingNetShape
from bottega.models.text_classifier.config import EncoderShape, KimShape, NgramShape
from bottega.tasks import registry
from bottega.tasks.classify.task import Classification, round_up_length
from bottega.tasks.recipes import load_recipe
from jax_twins import (
    assert_close,
    assert_outputs_close,
    build_perturbed_twins,
    compute_in_jax,
    compute_in_torch,
)

KIM = KimShape(vocab_size=40, num_labels=3, embed_size=8, num_filters=6, filter_sizes=(2, 3), dropout=0.0)
ENCODER = EncoderShape(
    vocab_size=40, num_labels=3, hidden_size=16, num_layers=2, num_heads=2, max_positions=100, dropout=0.0
)
IMAGES = ConvNetShape(grid=(8, 8), channels=1, num_labels=3, hidden_size=8, dropout=0.0)
VIDEOS = ConvNetShape(grid=(4, 8, 8), channels=1, num_labels=3, hidden_size=4, dropout=0.0)
WEIGHTS = (0.5, 3.0, 1.25)

TASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smooth": {"label_smoothing": 0.1},
    "weights, focal, smooth": {"class_weights": WEIGHTS, "objective": "focal", "label_smoothing": 0.1},
    "word dropout": {"word_dropout": 0.3, "unknown": 1},
    "multi_label, smooth": {"multi_label": True, "label_smoothing": 0.1},
    "multi_label, weights, focal": {
        "multi_label": True,
        "class_weights": WEIGHTS,
        "objective": "focal",
        "gamma": 0.5,
    },
    "encoder, weights": {"shape": ENCODER, "class_weights": WEIGHTS},
    "images, focal": {"key": "image", "shape": IMAGES, "objective": "focal"},
    "videos": {"key": "video", "shape": VIDEOS},
}


def build_task(name: str = "plain", **changes: Any) -> Classification:
    return Classification(**{"key": "text", "shape": KIM, **TASKS[name], **changes})


def draw_batch(task: Classification, *, rows: int = 6, length: int = 9) -> dict[str, np.ndarray]:
    """Return a batch whose last row is padding."""
    rng = np.random.default_rng(0)
    batch = {
        "label": rng.integers(0, 3, rows).astype(np.int32),
        "labels": (rng.random((rows, 3)) < 0.5).astype(np.float32),
        "weight": np.array([1.0] * (rows - 1) + [0.0], np.float32),
    }
    if isinstance(task.shape, ConvNetShape):
        samples = rng.standard_normal((rows, *task.shape.grid, task.shape.channels), dtype=np.float32)
        return {**batch, task.key: samples}
    mask = np.arange(length) < rng.integers(1, length + 1, rows)[:, None]
    ids = np.where(mask, rng.integers(2, 40, (rows, length)), 0).astype(np.int32)
    return {**batch, "input_ids": ids, "attention_mask": mask.astype(np.int32)}


@pytest.mark.parametrize("name", TASKS)
def test_losses_metrics_and_gradients_are_those_of_torch(name: str) -> None:
    twins, batch = build_perturbed_twins(build_task(name)), draw_batch(build_task(name))
    expected = compute_in_torch(twins, batch, is_training=True)
    actual = compute_in_jax(twins, batch, is_training=True)
    assert all(np.abs(gradient).max() > 1e-4 for gradient in expected.gradients.values())
    assert_outputs_close(actual, expected)


@pytest.mark.parametrize(
    "name", ["plain", "weights, focal, smooth", "multi_label, weights, focal", "word dropout", "images, focal"]
)
def test_evaluations_are_those_of_torch(name: str) -> None:
    twins, batch = build_perturbed_twins(build_task(name)), draw_batch(build_task(name))
    expected = compute_in_torch(twins, batch, is_training=False)
    assert ("objective" in expected.metrics) == twins.task.has_modified_loss
    assert_outputs_close(compute_in_jax(twins, batch, is_training=False), expected)


@pytest.mark.parametrize("name", ["plain", "encoder, weights", "videos"])
def test_checkpointing_changes_no_gradient(name: str) -> None:
    twins, batch = build_perturbed_twins(build_task(name)), draw_batch(build_task(name))
    actual = compute_in_jax(twins, batch, is_training=True, checkpoints_blocks=True)
    assert_outputs_close(actual, compute_in_torch(twins, batch, is_training=True))


# Padding to few lengths


def test_lengths_are_rounded_to_few_and_never_by_more_than_half() -> None:
    lengths = np.arange(1, 1025)
    rounded = np.array([round_up_length(int(length)) for length in lengths])
    assert sorted(set(rounded)) == [32, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
    assert (rounded >= lengths).all()
    assert (rounded[64:] < 1.5 * lengths[64:]).all()


@pytest.mark.parametrize("name", ["word dropout", "encoder, weights"])
def test_padding_to_a_bucket_changes_no_loss_and_no_gradient(name: str) -> None:
    twins = build_perturbed_twins(build_task(name))
    batch = draw_batch(build_task(name), length=35)
    padded = twins.task.bucket(batch)
    assert padded["input_ids"].shape == padded["attention_mask"].shape == (6, 64)
    assert padded["input_ids"].dtype == batch["input_ids"].dtype
    assert padded["label"] is batch["label"]
    outputs = compute_in_jax(twins, padded, is_training=True)
    assert_outputs_close(outputs, compute_in_torch(twins, batch, is_training=True))


def test_buckets_end_at_the_longest_text_of_the_model_and_media_have_none() -> None:
    batch = draw_batch(build_task(), length=99)
    assert build_task(shape=ENCODER).bucket(batch)["input_ids"].shape == (6, 100)
    assert build_task().bucket(batch)["input_ids"].shape == (6, 128)
    images = draw_batch(build_task("images, focal"))
    assert build_task("images, focal").bucket(images) is images


# Predictions and exports


@pytest.mark.parametrize("name", ["plain", "encoder, weights", "multi_label, smooth", "images, focal"])
def test_predictions_are_those_of_torch(name: str) -> None:
    twins = build_perturbed_twins(build_task(name))
    task, batch = twins.task, draw_batch(build_task(name))
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "image") if key in batch}
    assert isinstance(task, Classification)
    twins.torch.eval()
    actual, expected = (
        task.predict_probabilities({"model": model}, inputs, device="cpu") for model in (twins.jax, twins.torch)
    )
    assert actual.dtype == np.float32
    assert_close(actual, expected, rtol=1e-5)
    if task.key == "image":
        outputs = [
            task.predict_with_features({"model": model}, batch["image"], device="cpu")
            for model in (twins.jax, twins.torch)
        ]
        for one, other in zip(*outputs, strict=True):
            assert_close(one, other, rtol=1e-5)


def test_a_text_workload_predicts_and_exports_what_torch_does(tmp_path: Path) -> None:
    recipe = load_recipe(["classify", small_texts.settings(tmp_path / "data")]).recipe
    workload: Any = registry.open_workload(recipe, progress=lambda *_: None)
    twins = build_perturbed_twins(workload.task)
    texts = [row["text"] for row in small_texts.make_rows(5, seed=3)]
    probabilities = {}
    for framework, model in (("torch", twins.torch.eval()), ("jax", twins.jax)):
        probabilities[framework] = workload.predict({"model": model}, texts, device="cpu", batch_size=3)
        workload.export({"model": model}, tmp_path / framework)
    assert_close(probabilities["jax"], probabilities["torch"], rtol=1e-5)
    files = {framework: sorted(path.name for path in (tmp_path / framework).iterdir()) for framework in probabilities}
    assert files["jax"] == files["torch"]
    actual, expected = (load_file(tmp_path / framework / "model.safetensors") for framework in ("jax", "torch"))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_a_run_has_the_metrics_and_predictions_of_torch(tmp_path: Path) -> None:
    values = small_texts.settings(tmp_path, "cnn", **{"model.dropout": 0.0, "model.word_dropout": 0.2, "device": "cpu"})
    runs = {engine: bottega.train("classify/cnn", {**values, "engine": engine}).path for engine in ("torch", "jax")}
    rows, expected_rows = (read_metrics(runs[engine] / "metrics.jsonl") for engine in ("jax", "torch"))
    assert len(rows) == len(expected_rows)
    for row, expected in zip(rows, expected_rows, strict=True):
        assert row.keys() == expected.keys()
        for name in {"loss", "accuracy", "grad_norm", "macro_f1", "ece", "auroc"} & row.keys():
            assert row[name] == pytest.approx(expected[name], rel=1e-4), name
    texts = [row["text"] for row in small_texts.make_rows(5, seed=3)]
    predictions, expected_predictions = (
        bottega.load(runs[engine], device="cpu").predict(texts) for engine in ("jax", "torch")
    )
    for prediction, expected in zip(predictions, expected_predictions, strict=True):
        assert prediction["probabilities"] == pytest.approx(expected["probabilities"], rel=1e-4)


WITHOUT_TORCH = """
import sys
from pathlib import Path

import numpy as np
import small_media, small_texts
import bottega.tasks.classify.spec
from bottega.models import jax_build
from bottega.tasks import registry
from bottega.tasks.recipes import load_recipe

folder = Path(sys.argv[1])
options = {key: value for key, value in small_media.image(folder).items() if not key.startswith(("model.", "samples."))}
image = {**options, "data.input": "image", "model.hidden_size": 8}
for name, values in (("classify/transformer", small_texts.settings(folder)), ("classify/image", image)):
    workload = registry.open_workload(load_recipe([name, values]).recipe, progress=lambda *_: None)
    model = jax_build.build_model(workload.task.specs()["model"], 0)
    batch = workload.data.training().rows(np.arange(2), np.zeros(2, np.int64))
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "image") if key in batch}
    assert workload.task.predict_probabilities({"model": model}, inputs, device="cpu").shape == (2, len(workload.classes))
    workload.export({"model": model}, folder / name)
print(sorted({"torch", "transformers"} & {*sys.modules}))
"""


def test_workloads_predict_and_export_without_torch(tmp_path: Path) -> None:
    code = f"import sys\nsys.path[:0] = {[path for path in sys.path if path]!r}\n{WITHOUT_TORCH}"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "[]"


# What JAX has


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": NgramShape(num_buckets=8, num_labels=3)},
        {"shape": KIM.model_copy(update={"num_buckets": 8})},
        {"shape": ENCODER.model_copy(update={"num_buckets": 8})},
        {"key": "image", "shape": SpikingNetShape(grid=(8, 8), channels=1, num_labels=3)},
    ],
    ids=["ngrams", "wide cnn", "wide encoder", "spiking"],
)
def test_models_without_a_jax_form_are_those_of_torch_alone(changes: dict[str, Any]) -> None:
    spec = build_task(**changes).specs()["model"]
    assert spec.initial is not None
    assert "{framework}" not in f"{spec.architecture} {spec.initial.rule}"


def test_every_other_model_has_both() -> None:
    for name in TASKS:
        spec = build_task(name).specs()["model"]
        assert spec.initial is not None
        assert all("{framework}" in str(reference) for reference in (spec.architecture, spec.initial.rule))
