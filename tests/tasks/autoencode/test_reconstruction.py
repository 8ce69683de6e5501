"""The autoencoder tasks: sums and counts over micro-batches, padding, loss terms and overfitting."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bottega.core.errors import UsageError
from bottega.core.noise import Noise
from bottega.core.task import Task
from bottega.models.autoencoder.config import AutoencoderShape, CodesShape
from bottega.models.autoencoder.layout import export_autoencoder
from bottega.models.build import build_models
from bottega.tasks.autoencode.tokens_task import Codes, measure_code_usage
from bottega.tasks.autoencode.vae_task import Reconstruction

FIELDS: dict[str, Any] = {"channels": 3, "latent_channels": 4, "widths": (16, 32), "layers_per_block": 1}
SHAPE = AutoencoderShape(**FIELDS, norm_groups=8)
VAE = Reconstruction(key="image", shape=SHAPE)
TASKS: dict[str, Task] = {
    "kl": VAE,
    "levels": Codes(key="image", shape=CodesShape(autoencoder=SHAPE, levels=(8, 5, 5, 5))),
    "codebook": Codes(key="image", shape=CodesShape(autoencoder=SHAPE, codebook_size=64)),
}
TERMS = {"kl": {"loss", "kl"}, "levels": {"loss"}, "codebook": {"loss", "codebook", "commitment"}}
HostBatch = dict[str, np.ndarray]


def smooth_images(count: int = 8, side: int = 16) -> np.ndarray:
    """Return images with a wave of random direction, length and phase in each channel."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:side, :side] / side
    waves = rng.uniform(0.5, 2.0, (2, count, 1, 1, 3))
    phase = rng.uniform(0, 2 * math.pi, (count, 1, 1, 3))
    return (0.8 * np.sin(2 * math.pi * (waves[0] * x[..., None] + waves[1] * y[..., None]) + phase)).astype(np.float32)


def to_tensors(batch: HostBatch) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in batch.items()}


def compute_loss(task: Task, models: dict[str, Any], batch: HostBatch, *, first: int = 0, step: int = 0) -> Any:
    positions = torch.arange(first, first + len(batch["image"]))
    return task.loss(models, to_tensors(batch), Noise(0, step, positions, torch))


@pytest.mark.parametrize("name", TASKS)
def test_sums_and_counts_do_not_depend_on_the_micro_batches(name: str) -> None:
    task, batch = TASKS[name], {"image": smooth_images(4)}
    models = build_models(task, 0)
    total_output = compute_loss(task, models, batch)
    parts = [compute_loss(task, models, {"image": batch["image"][i : i + 1]}, first=i) for i in range(4)]
    assert task.counts(batch) == dict.fromkeys(TERMS[name], 4.0)
    assert set(total_output.terms) == TERMS[name]
    for term, (total, _) in total_output.terms.items():
        assert sum(part.terms[term][0].item() for part in parts) == pytest.approx(total.item(), rel=1e-6)
    for metric, (total, count) in total_output.metrics.items():
        assert sum(part.metrics[metric][0].item() for part in parts) == pytest.approx(total.item(), rel=1e-6)
        assert count.item() == 4
        assert not total.requires_grad


@pytest.mark.parametrize("name", TASKS)
def test_padding_rows_do_not_count(name: str) -> None:
    task, images = TASKS[name], smooth_images(3)
    models = build_models(task, 0)
    unpadded = {"image": images[:2]}
    padded = {"image": images, "weight": np.array([1, 1, 0], np.float32)}
    assert task.counts(padded) == task.counts(unpadded)
    with_padding, without_padding = compute_loss(task, models, padded), compute_loss(task, models, unpadded)
    for term in with_padding.terms:
        assert with_padding.terms[term][0].item() == pytest.approx(without_padding.terms[term][0].item(), rel=1e-6)
    for metric in with_padding.metrics:
        assert with_padding.metrics[metric][0].item() == pytest.approx(
            without_padding.metrics[metric][0].item(), rel=1e-6
        )
        assert with_padding.metrics[metric][1].item() == 2


@pytest.mark.parametrize("distance", ["l1", "l2"])
def test_loss_terms_match_their_definitions(distance: Any) -> None:
    task, images = Reconstruction(key="image", shape=SHAPE, distance=distance, kl_weight=0.5), smooth_images(2)
    mean, log_variance = np.full((2, 8, 8, 4), 0.5, np.float32), np.full((2, 8, 8, 4), -1.0, np.float32)
    reconstruction = torch.from_numpy(images) + 0.25
    model = lambda x, noise: (reconstruction, torch.from_numpy(mean), torch.from_numpy(log_variance))  # noqa: E731
    output = compute_loss(task, {"model": model}, {"image": images})
    assert output.terms["loss"][0].item() / 2 == pytest.approx(0.25 if distance == "l1" else 0.0625, rel=1e-5)
    assert output.metrics["mse"][0].item() / 2 == pytest.approx(0.0625, rel=1e-5)
    # The divergence of N(0.5, 1/e) from N(0, 1) is ln(1/sigma) + (sigma^2 + mu^2 - 1) / 2; 256 latents for 768 values.
    nats = 0.5 + (math.exp(-1) + 0.25 - 1) / 2
    assert output.terms["kl"][0].item() / 2 == pytest.approx(nats * 256 / 768, rel=1e-5)
    assert output.terms["kl"][1] == 0.5


def test_latent_noise_depends_on_position_and_step() -> None:
    models, batch = build_models(VAE, 0), {"image": np.repeat(smooth_images(1), 2, axis=0)}
    total = compute_loss(VAE, models, batch).terms["loss"][0].item()
    twice = 2 * compute_loss(VAE, models, {"image": batch["image"][:1]}).terms["loss"][0].item()
    assert total != pytest.approx(twice, rel=1e-6)
    assert total != compute_loss(VAE, models, batch, step=1).terms["loss"][0].item()


def test_summary_adds_psnr() -> None:
    # A mean squared error of 0.04 on values from -1 to 1: 10 log10(4 / 0.04).
    assert VAE.summary({"mse": 0.04})["psnr"] == pytest.approx(20.0)
    assert VAE.summary({"mse": 0.0})["psnr"] == math.inf
    assert VAE.summary({"loss": 1.0}) == {"loss": 1.0}
    unit = Reconstruction(key="image", shape=SHAPE, value_range=1.0)
    assert unit.summary({"mse": 0.01})["psnr"] == pytest.approx(20.0)


def test_fraction_of_codes_used_and_perplexity() -> None:
    assert measure_code_usage(np.arange(8).reshape(2, 2, 2), 8) == {
        "codes_used": 1.0,
        "code_perplexity": pytest.approx(8.0),
    }
    assert measure_code_usage(np.zeros((2, 4), np.int64), 8) == {"codes_used": 1 / 8, "code_perplexity": 1.0}


def test_build_is_a_function_of_the_seed() -> None:
    first, again, other = (build_models(VAE, seed)["model"].state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["encoder.conv_in.weight"], other["encoder.conv_in.weight"])


def test_build_can_start_from_a_folder(tmp_path: Path) -> None:
    source = build_models(VAE, 5)["model"]
    export_autoencoder(source.state_dict(), SHAPE, tmp_path, sample_size=16)
    started = build_models(Reconstruction(key="image", shape=SHAPE, pretrained=str(tmp_path)), 0)["model"].state_dict()
    assert all(torch.equal(tensor, source.state_dict()[name]) for name, tensor in started.items())
    wider = AutoencoderShape(**{**FIELDS, "latent_channels": 8}, norm_groups=8)
    with pytest.raises(UsageError, match="has latent_channels 4, but the recipe has 8"):
        build_models(Reconstruction(key="image", shape=wider, pretrained=str(tmp_path)), 0)


@pytest.mark.parametrize("name", TASKS)
def test_eight_images_are_overfitted(name: str) -> None:
    task, batch = TASKS[name], {"image": smooth_images(8, side=8)}
    models, counts = build_models(task, 0), task.counts(batch)
    optimizer = torch.optim.AdamW(models["model"].parameters(), lr=2e-3)
    history = []
    for step in range(60):
        output = compute_loss(task, models, batch, step=step)
        optimizer.zero_grad()
        sum(weight * total / counts[term] for term, (total, weight) in output.terms.items()).backward()
        optimizer.step()
        history.append(output.terms["loss"][0].item() / counts["loss"])
    assert history[-1] < history[0] / 5
