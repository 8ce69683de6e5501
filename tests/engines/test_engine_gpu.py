"""The torch engine on a GPU: compilation, half precision, fused noise, batches that do not fit in memory."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bottega
import small_media
import small_texts
from bottega.core.noise import Noise
from bottega.engines.torch.noise import FusedNoise
from small_run import settings, train, write_text

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]


def losses(run: Any) -> list[float]:
    return [row["loss"] for row in run.history() if row["kind"] == "train"]


RECIPES: dict[str, Any] = {
    "language/shakespeare": lambda folder: settings(folder, write_text(folder / "text.txt")),
    "image": small_media.image,
    "audio": small_media.audio,
    "video": small_media.video,
    "classify": small_texts.settings,
    "classify/cnn": lambda folder: small_texts.settings(folder, "cnn"),
}


EXACT = {"classify/cnn": {"model.dropout": 0.0, "model.word_dropout": 0.0}}
"""Overrides that turn dropout off: it draws different numbers in other precisions and in compiled models."""


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_losses_match_eager_ones(recipe: str, tmp_path: Path) -> None:
    values = {
        **RECIPES[recipe](tmp_path),
        "device": "cuda",
        "training.mixed_precision": "fp32",
        "evaluation.every": None,
    }
    values |= EXACT.get(recipe, {"model.dropout": 0.0})
    runs = [bottega.train(recipe, {**values, "training.compile": on, "name": f"compile-{on}"}) for on in (True, False)]
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_half_precision_stays_near_float32(recipe: str, precision: str, tmp_path: Path) -> None:
    values = {**RECIPES[recipe](tmp_path), "device": "cuda", "training.compile": False, "evaluation.every": None}
    values |= EXACT.get(recipe, {"model.dropout": 0.0})
    runs = [bottega.train(recipe, {**values, "training.mixed_precision": p, "name": p}) for p in (precision, "fp32")]
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=5e-2)


def test_the_loss_scale_is_halved_until_gradients_are_finite(tmp_path: Path) -> None:
    """Steps that overflow are skipped; the run continues with finite weights."""
    text = write_text(tmp_path / "text.txt")
    values = {"device": "cuda", "training.mixed_precision": "fp16", "training.compile": False, "evaluation.every": None}
    run = train(tmp_path, text, **values, **{"training.max_steps": 12, "training.learning_rate": 3e-3})
    assert np.isfinite(losses(run)).all()
    assert losses(run)[-1] < losses(run)[0]


def test_fused_noise_matches_numpy() -> None:
    positions = torch.arange(5, 12, device="cuda")
    for step in (0, 1, 7):
        fused, plain = FusedNoise(1, step, positions, torch), Noise(1, step, np.arange(5, 12), np)
        np.testing.assert_array_equal(fused.uniform("u", (3,)).cpu().numpy(), plain.uniform("u", (3,)))
        np.testing.assert_allclose(fused.normal("n", (3,)).cpu().numpy(), plain.normal("n", (3,)), rtol=0, atol=1e-6)


def test_a_batch_that_does_not_fit_is_split(tmp_path: Path) -> None:
    """The GPU memory of the process is limited; the global batch size is unchanged."""
    text = write_text(tmp_path / "text.txt", words=6000)
    sizes = {
        "model.hidden_size": 256,
        "model.intermediate_size": 4096,
        "model.context": 256,
        "data.sequence_length": 256,
    }
    values = {"device": "cuda", "training.batch_size": 64, "training.max_steps": 2, "training.compile": False, **sizes}
    values |= {"evaluation.every": None, "training.mixed_precision": "fp32", "checkpoint.every": 2}
    unsplit = train(tmp_path, text, name="unsplit", **values)
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (400 << 20)) / total)
    try:
        run = train(tmp_path, text, name="split", **values, **{"training.micro_batch_size": "auto"})
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    progress = json.loads((run.path / "checkpoints" / "last" / "progress.json").read_text())
    assert 1 <= progress["micro_batch_size"] < 64
    assert losses(run) == pytest.approx(losses(unsplit), rel=1e-4)
