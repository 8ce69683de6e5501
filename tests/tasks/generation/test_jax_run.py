"""Runs of generation with `engine: jax`: trained, sampled and exported as with torch, and refused by name where JAX has no form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bottega
import small_media
from bottega.core.errors import UsageError
from bottega.models.autoencoder.config import AutoencoderShape
from bottega.models.autoencoder.layout import export_autoencoder
from bottega.models.autoencoder.torch import Autoencoder
from bottega.tasks.generation.export import open_exported_generator
from bottega.tasks.generation.torch import draw_rows

SHAPE = AutoencoderShape(
    channels=1, latent_channels=2, widths=(8, 8), layers_per_block=1, norm_groups=4, scaling_factor=0.5
)
OPTIONS: dict[str, Any] = {
    "model.num_layers": 1,
    "model.patch_size": 1,
    "data.latents": True,
    "training.max_steps": 3,
    "evaluation.every": 3,
    "checkpoint.every": 3,
    "samples.every": 3,
    "samples.count": 3,
    "samples.steps": 2,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def vae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = Autoencoder(SHAPE)
    model.initialise(0)
    return export_autoencoder(model.state_dict(), SHAPE, tmp_path_factory.mktemp("vae"))


@pytest.fixture(scope="module")
def run(vae: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return small_media.train(
        tmp_path_factory.mktemp("runs"), name="jax", engine="jax", **{**OPTIONS, "model.vae": str(vae)}
    )


def test_losses_are_those_of_torch(run: Any, vae: Path, tmp_path: Path) -> None:
    other = small_media.train(tmp_path, name="torch", **{**OPTIONS, "model.vae": str(vae)})
    losses = [[row["loss"] for row in trained.history()] for trained in (run, other)]
    assert len(losses[0]) >= 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert list(run.path.glob("samples/**/*.png")), "the samples of step 3"


def test_an_export_draws_the_samples_of_the_run_in_torch(run: Any, tmp_path: Path) -> None:
    saved = bottega.load(run.path)
    options = {"steps": 3, "guidance": 2.0}
    pixels = saved.generate(**{"class": ["dark", "bright"]}, count=1, seed=5, **options)
    saved.export(tmp_path)
    task, models = open_exported_generator(tmp_path)
    rows = {"label": np.array([1, 0]), "number": np.arange(2)}
    names = list(saved.workload.metadata.classes)
    rows["label"] = np.array([names.index("dark"), names.index("bright")])
    with torch.no_grad():
        values = draw_rows(
            task,
            models,
            rows,
            seed=5,
            device="cpu",
            precision="fp32",
            method="heun",
            progress=lambda done, total: None,
            **options,
        )
    expected = saved.workload.medium.from_values(values).astype(int)
    assert pixels.shape == (2, 8, 8, 1)
    assert np.abs(pixels.astype(int) - expected).max() <= 1


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        ("image", {"model.backbone": "unet"}, r"model\.backbone: engine: jax has no unet"),
        ("image", {"model.backbone": "tokens", "model.tokenizer": "x"}, r"engine: jax has no tokens"),
        ("audio", {"model.vocoder": "folder"}, r"model\.vocoder: engine: jax has no folder"),
        ("image", {"model.condition": "text", "model.text.from": "folder"}, r"transformers has no form in JAX"),
    ],
)
def test_models_without_a_form_in_jax_are_refused_by_name(
    task: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    settings = getattr(small_media, task)(tmp_path)
    with pytest.raises(UsageError, match=message):
        bottega.train(task, {**settings, **changes, "name": "refused", "engine": "jax"})
