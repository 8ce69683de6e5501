"""Spiking classifiers from data to export: input codings, firing metrics and the raster plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import bottega
from bottega.core.errors import UsageError
from bottega.core.noise import Noise
from bottega.models.build import build_models
from bottega.models.convnet.config import ConvNetShape
from bottega.models.spiking.config import SpikingNetShape
from bottega.models.spiking.network import SpikingNet
from bottega.tasks import registry
from bottega.tasks.classify.media_workload import MediaClassifyWorkload
from bottega.tasks.classify.spike_sampler import RASTER_FILE
from bottega.tasks.classify.task import Classification
from bottega.tasks.recipes import load_recipe

SMALL: dict[str, Any] = {
    "model.hidden_size": 32,
    "model.firing_rate": 0.2,
    "data.train.kind": "auto",
    "data.validation.split": 0.25,
    "training.max_steps": 40,
    "training.batch_size": 16,
    "training.learning_rate": 0.01,
    "evaluation.every": 40,
    "checkpoint.every": 40,
    "samples.every": 40,
    "logging.tensorboard": False,
    "logging.resources": False,
}


def write_stripes(folder: Path, count: int = 96) -> Path:
    """Write images with a bright stripe of two rows, labelled by its position."""
    rng, positions = np.random.default_rng(0), np.arange(count) % 3
    images = rng.integers(0, 80, (count, 8, 8)).astype(np.uint8)
    for image, position in zip(images, positions, strict=True):
        image[3 * position : 3 * position + 2] += 150
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "image.npy", images)
    np.save(folder / "label.npy", np.array(["top", "middle", "bottom"])[positions])
    return folder


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {**SMALL, "output_dir": str(folder), "data.train.path": str(write_stripes(folder / "stripes")), **changes}


def open_workload(folder: Path, **changes: Any) -> MediaClassifyWorkload:
    recipe = load_recipe(["classify/spiking", settings(folder, **changes)]).recipe
    workload = registry.open_workload(recipe, progress=lambda *_: None)
    assert isinstance(workload, MediaClassifyWorkload)
    return workload


def read_validation(workload: MediaClassifyWorkload) -> dict[str, torch.Tensor]:
    source = workload.data.validation()
    assert source is not None
    rows = source.rows(np.arange(len(source)), np.zeros(len(source), int))
    return {name: torch.from_numpy(np.asarray(rows[name])) for name in ("image", "label")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bottega.train("classify/spiking", settings(tmp_path_factory.mktemp("spiking"), name="run")).path


@pytest.mark.parametrize("coding", ["rate", "latency"])
def test_each_coding_can_be_trained(coding: str, tmp_path: Path) -> None:
    changes = {"model.coding": coding, "samples.every": None, "data.normalise": "unit"}
    run = bottega.train("classify/spiking", settings(tmp_path, **changes))
    assert run.metrics["accuracy"] >= 0.9
    assert 0 < run.metrics["firing_rate"] < 1


def test_evaluation_counts_units_over_all_samples(trained: Path) -> None:
    run = bottega.load(trained, device="cpu")
    metrics = run.evaluate()
    workload = run.workload
    assert isinstance(workload, MediaClassifyWorkload)
    assert metrics["accuracy"] >= 0.9
    assert set(metrics) == set(workload.metrics)
    batch = read_validation(workload)
    with torch.no_grad():
        logits, spikes = run.model(batch["image"])
    trains = torch.cat(spikes, dim=2)
    assert metrics["firing_rate"] == pytest.approx(trains.mean().item(), rel=1e-6)
    assert metrics["dead"] == pytest.approx((trains.amax((0, 1)) == 0).float().mean().item())
    assert metrics["saturated"] == pytest.approx((trains.amin((0, 1)) == 1).float().mean().item())
    probabilities, features = workload.predict_with_features(
        {"model": run.model}, batch["image"].numpy(), device="cpu", batch_size=7
    )
    np.testing.assert_allclose(probabilities, logits.softmax(1).numpy(), atol=1e-5)
    np.testing.assert_allclose(features, spikes[-1].mean(0).numpy(), atol=1e-6)


def test_a_raster_plot_is_written_with_the_samples(trained: Path) -> None:
    with Image.open(trained / "samples" / "step-00000040" / RASTER_FILE) as image:
        assert min(image.size) > 300


def test_rate_coding_is_random_in_training_only(tmp_path: Path) -> None:
    workload = open_workload(tmp_path, **{"model.coding": "rate"})
    models, batch = build_models(workload.task, 0), read_validation(workload)
    first, second = (Noise(0, step, torch.arange(len(batch["label"])), torch) for step in (0, 1))

    def compute_loss(noise: Noise) -> float:
        return workload.task.loss(models, batch, noise).terms["loss"][0].item()

    models["model"].train()
    assert compute_loss(first) == compute_loss(first) != compute_loss(second)
    models["model"].eval()
    assert compute_loss(first) == compute_loss(second)
    probabilities = workload.predict_with_features(models, batch["image"].numpy(), device="cpu")[0]
    rows = workload.task.loss(models, batch, first).rows["probability"]
    np.testing.assert_allclose(rows.detach().numpy(), probabilities, atol=1e-6)


def test_padding_rows_do_not_count(tmp_path: Path) -> None:
    workload = open_workload(tmp_path)
    models, batch = build_models(workload.task, 0), read_validation(workload)
    half = {name: values[:10] for name, values in batch.items()}
    filled = {**batch, "weight": (torch.arange(len(batch["label"])) < 10).float()}
    noise = Noise(0, 0, torch.arange(len(batch["label"])), torch)
    a, b = workload.task.loss(models, half, noise), workload.task.loss(models, filled, noise)
    for name, (total, _) in a.terms.items():
        torch.testing.assert_close(b.terms[name][0], total)
    torch.testing.assert_close(b.metrics["firing_rate"], a.metrics["firing_rate"])
    host = {name: values.numpy() for name, values in filled.items()}
    assert workload.task.counts(host) == {"loss": 10.0, "firing": 10.0}


def test_firing_rate_loss_moves_the_rate_towards_its_target(tmp_path: Path) -> None:
    rates = []
    for weight in (0.0, 20.0):
        changes = {"model.firing_rate": 0.05, "model.firing_rate_weight": weight, "samples.every": None}
        run = bottega.train("classify/spiking", settings(tmp_path, **changes))
        rates.append(run.metrics["firing_rate"])
        assert ("firing" in run.metrics) == (weight > 0)
    assert abs(rates[1] - 0.05) < 0.5 * abs(rates[0] - 0.05)


def test_an_export_is_complete_and_can_be_fine_tuned(trained: Path, tmp_path: Path) -> None:
    run = bottega.load(trained, device="cpu")
    final = run.export()
    config = json.loads((final / "config.json").read_text())
    assert config["model_type"] == "bottega-spiking"
    task = Classification(key="image", shape=config["shape"], pretrained=str(final))
    assert isinstance(task.shape, SpikingNetShape)
    workload = open_workload(tmp_path, **{"model.from": str(trained)})
    batch = read_validation(workload)
    for models in (build_models(task, 0), build_models(workload.task, 0)):
        assert isinstance(models["model"], SpikingNet)
        with torch.no_grad():
            assert torch.equal(models["model"].eval()(batch["image"]).logits, run.model(batch["image"]).logits)
    other = {"model.kind": "convnet", "model.from": str(trained), "data.input": "image"}
    plain = {key: value for key, value in settings(tmp_path, **other).items() if "firing" not in key}
    with pytest.raises(UsageError, match=r"has a spiking network; set model\.kind=spiking"):
        registry.open_workload(load_recipe(["classify/image", plain]).recipe, progress=lambda *_: None)


@pytest.mark.parametrize("kind", ["spiking", "convnet"])
def test_a_workload_reopens_from_its_processor_with_the_same_kind(kind: str, tmp_path: Path) -> None:
    units = {"leak": 0.5, "spike_threshold": 0.7, "refractory": 2, "coding": "latency", "adaptation": 0.1}
    changes = {f"model.{key}": value for key, value in units.items()} if kind == "spiking" else {}
    base = ["classify/spiking" if kind == "spiking" else "classify/image", {**settings(tmp_path), **changes}]
    if kind == "convnet":
        base[1].pop("model.firing_rate")  # type: ignore[union-attr,call-arg]
    workload = registry.open_workload(load_recipe(base).recipe, progress=lambda *_: None)
    workload.processor.save(tmp_path / "processor")
    again: Any = registry.reopen_workload(load_recipe(base).recipe, tmp_path / "processor", workload.data.fingerprint)
    assert again.shape == workload.shape  # type: ignore[attr-defined]
    assert again.task == workload.task
    assert type(again.shape) is (SpikingNetShape if kind == "spiking" else ConvNetShape)
    if kind == "spiking":
        neuron = again.shape.neuron
        assert (neuron.leak, neuron.threshold, neuron.refractory, neuron.adaptation) == (0.5, 0.7, 2, 0.1)
        assert again.shape.coding == "latency"


@pytest.mark.slow
def test_the_recipe_classifies_digits(tmp_path: Path) -> None:
    run = bottega.train("classify/spiking", {"output_dir": str(tmp_path)})
    assert run.metrics["accuracy"] >= 0.97
    assert run.metrics["firing_rate"] < 0.2
    assert run.metrics["dead"] < 0.2
