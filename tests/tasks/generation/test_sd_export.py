"""Our own autoencoder, CLIP and UNet, exported as one folder for diffusers' Stable Diffusion pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bottega
from bottega.data.text.captions import CaptionTokenizer
from bottega.tasks import dependencies
from bottega.tasks.generation.export import open_exported_generator
from bottega.tasks.recipes import check_recipe, load_recipe

diffusers = pytest.importorskip("diffusers")
diffusers.utils.logging.disable_progress_bar()

PROMPTS = ("a red striped star", "blue, plain, moon")
TRAINING: dict[str, Any] = {
    "training.max_steps": 2,
    "training.batch_size": 4,
    "evaluation.every": None,
    "evaluation.max_batches": 1,
    "samples.every": None,
    "data.limit": 32,
}
VAE: dict[str, Any] = {**TRAINING, "model.hidden_size": 8}
CLIP: dict[str, Any] = {
    **TRAINING,
    **dict.fromkeys(("model.hidden_size", "model.text_hidden_size", "model.projection_size"), 16),
    **dict.fromkeys(("model.num_layers", "model.text_num_layers"), 1),
    "model.num_heads": 2,
    "model.negatives": 3,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {
        **TRAINING,
        "model.hidden_size": 16,
        "model.num_heads": 2,
        # Large enough for two steps to have an effect: a UNet predicts zero at first.
        "training.learning_rate": 0.05,
        "training.scheduler.warmup_steps": 0,
        "training.ema": None,
        "data.latents": False,
        "output_dir": str(tmp_path_factory.mktemp("runs")),
        "needs.vae": {"recipe": "image_vae/stickers", "own_data": True, "settings": VAE},
        "needs.clip": {"recipe": "align", "own_data": True, "settings": CLIP},
    }
    run = bottega.train("image/stickers", settings)
    return bottega.load(run.path, device="cpu").export()


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Any:
    loaded = diffusers.StableDiffusionPipeline.from_pretrained(folder, local_files_only=True)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def test_the_pipeline_tokenizes_as_we_do(folder: Path, pipeline: Any) -> None:
    length = load_recipe(["image/stickers"]).recipe.model.text.max_tokens
    ids = pipeline.tokenizer(list(PROMPTS), padding="max_length", truncation=True, return_tensors="np").input_ids
    assert ids.shape == (2, length)
    np.testing.assert_array_equal(ids, CaptionTokenizer(folder / "tokenizer", length).encode(PROMPTS)["input_ids"])


def test_the_pipeline_matches_our_samples(folder: Path, pipeline: Any) -> None:
    task, models = open_exported_generator(folder)
    start = torch.randn(2, 8, 8, 4, generator=torch.Generator().manual_seed(3))
    images = pipeline(
        list(PROMPTS),
        height=32,
        width=32,
        guidance_scale=3.0,
        num_inference_steps=1,
        latents=start.movedim(-1, 1),
        output_type="np",
    ).images

    class FixedNoise:
        framework = "torch"

        def normal(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
            return start

    tokens = CaptionTokenizer(folder / "tokenizer", len(task.empty_text)).encode(PROMPTS)
    batch = {name: torch.from_numpy(rows) for name, rows in tokens.items()}
    rng: Any = FixedNoise()
    swapped = {name: rows.flip(0) for name, rows in batch.items()}
    with torch.no_grad():
        expected, other = (
            task.draw(models, prompt_rows, rng, steps=1, method="euler", guidance=3.0)
            for prompt_rows in (batch, swapped)
        )
    assert images.shape == (2, 32, 32, 3)
    assert images.std() > 0.02
    assert (other - expected).abs().max() > 1e-3
    np.testing.assert_allclose(images, (expected / 2 + 0.5).clamp(0, 1).numpy(), rtol=0, atol=1e-4)


def test_concatenated_texts_are_a_condition_in_any_order(pipeline: Any) -> None:
    """A user's keywords before the wish: cross-attention has no order, so only the tokens themselves matter."""
    ids = pipeline.tokenizer(["red, striped", "star"], padding="max_length", return_tensors="pt").input_ids
    with torch.no_grad():
        first, second = pipeline.text_encoder(ids).last_hidden_state[:, None]
        x = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
        both, swapped, single = (
            pipeline.unet(x, 500, encoder_hidden_states=torch.cat(parts, 1)).sample
            for parts in ((first, second), (second, first), (second,))
        )
    torch.testing.assert_close(both, swapped, rtol=0, atol=1e-5)
    assert (both - single).abs().max() > 1e-4


def test_generator_and_personalize_share_one_clip_run() -> None:
    recipe = check_recipe(["personalize"]).recipe
    generator = dependencies.build_dependency_recipe(recipe, "diffusion")
    assert generator.run_name() == load_recipe(["image/stickers"]).recipe.run_name()
    assert dependencies.find_dependency_run(generator, "clip") == dependencies.find_dependency_run(recipe, "clip")
    assert (
        dependencies.find_dependency_run(generator, "vae").parent
        == dependencies.find_dependency_run(recipe, "clip").parent
    )
