"""Generate, evaluate, predict and export on a GPU; equal to a CPU where the result is exact."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import bottega
import small_media
import small_texts
from small_run import settings, write_text

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

GENERATORS: dict[str, Any] = {
    "language/shakespeare": lambda folder: settings(folder, write_text(folder / "text.txt")),
    "image": small_media.image,
    "audio": small_media.audio,
    "video": small_media.video,
}


@pytest.mark.parametrize("recipe", GENERATORS)
def test_a_run_is_trained_sampled_and_evaluated(recipe: str, tmp_path: Path) -> None:
    values = {**GENERATORS[recipe](tmp_path), "device": "cuda", "samples.every": 8, "samples.count": 2, "name": "run"}
    run = bottega.train(recipe, values)
    assert any((run.path / "samples" / "step-00000008").iterdir())
    on_gpu, on_cpu = (bottega.load(run.path, device=device) for device in ("cuda", "cpu"))
    loss = [saved.evaluate()["loss"] for saved in (on_gpu, on_cpu)]
    assert math.isfinite(loss[0])
    assert loss[0] == pytest.approx(loss[1], rel=2e-2), "bf16 against float32"
    assert on_gpu.generate(count=2, seed=3) is not None
    assert (on_gpu.export(tmp_path / "out") / "README.md").is_file()


def test_greedy_text_does_not_depend_on_the_device(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    values = {
        **settings(tmp_path, text),
        "device": "cuda",
        "training.mixed_precision": "fp32",
        "training.max_steps": 60,
    }
    run = bottega.train("language/shakespeare", {**values, "training.learning_rate": 1e-2, "evaluation.every": None})
    request = {"prompt": "alpha", "max_tokens": 12, "temperature": 0}
    on_gpu, on_cpu = (bottega.load(run.path, device=device).generate(**request) for device in ("cuda", "cpu"))
    assert on_gpu == on_cpu


def test_predictions_do_not_depend_on_the_device(tmp_path: Path) -> None:
    run = bottega.train("classify", {**small_texts.settings(tmp_path), "device": "cuda", "training.max_steps": 30})
    texts = ["stir the soup", "hoist the sail", "sing a song"]
    on_gpu, on_cpu = (bottega.predict(run.path, texts, device=device) for device in ("cuda", "cpu"))
    assert [row["predicted"] for row in on_gpu] == [row["predicted"] for row in on_cpu]
