"""Settings and data with which every bundled recipe trains in seconds."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np

import small_collections
import small_personal
import small_texts

TRAINING: dict[str, Any] = {
    "data.workers": 0,
    "training.max_steps": 3,
    "training.batch_size": 4,
    "evaluation.max_batches": 1,
    "distributed.strategy": "auto",
    "logging.every": 1,
}
GENERATOR: dict[str, Any] = {
    **TRAINING,
    "model.hidden_size": 16,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "samples.count": 2,
    "samples.steps": 2,
    "samples.every": 3,
}
AUTOENCODER: dict[str, Any] = {
    **TRAINING,
    "model.hidden_size": 8,
    "model.layers_per_block": 1,
    "samples.count": 2,
    "samples.every": 3,
}
ALIGN: dict[str, Any] = {
    **TRAINING,
    **dict.fromkeys(("model.hidden_size", "model.text_hidden_size", "model.projection_size"), 16),
    **dict.fromkeys(("model.num_layers", "model.text_num_layers"), 1),
    "model.num_heads": 2,
    "model.negatives": 3,
}
SMALL: dict[str, Any] = {
    "language": {
        **TRAINING,
        "model.num_layers": 1,
        "model.hidden_size": 16,
        "model.num_heads": 2,
        "model.num_kv_heads": 1,
        "model.head_size": 8,
        "model.intermediate_size": 32,
        "model.context": 16,
        "data.sequence_length": 16,
        "samples.max_new_tokens": 4,
    },
    "classify": {**TRAINING, "model.hidden_size": 8, "model.num_layers": 1},
    "image": GENERATOR,
    "audio": GENERATOR,
    "video": GENERATOR,
    "image_vae": AUTOENCODER,
    "image_tokens": AUTOENCODER,
    "align": ALIGN,
    "personalize": {
        **TRAINING,
        "training.num_epochs": None,
        "training.gradient_accumulation_steps": None,
        "data.image_size": 32,
        "data.history_length": 3,
        "samples.count": 2,
        "samples.steps": 2,
        "samples.every": 3,
        "needs": {},
    },
    "routing": {**TRAINING, "model.hidden_size": 16, "model.expert_size": 8, "data.num_samples": 128},
    "recall": {**TRAINING, "model.hidden_size": 16, "data.num_samples": 64},
    "multitask": {**TRAINING, "model.hidden_size": 16, "model.num_heads": 2},
}
"""Task -> settings that make its recipes small enough for a test; all other settings are those of the recipe."""

RECIPE_SETTINGS: dict[str, dict[str, Any]] = {
    # Questions refer to facts `distance` steps back, so the first steps have none.
    "recall/lasting": {"data.distance": 4},
    # Fashion-MNIST comes with a test split; the data of this module does not.
    "image/fashion": {"data.test": None},
    "image/photos": {
        "data.image_size": 16,
        "needs.vae": {"recipe": "image_vae/photos", "settings": AUTOENCODER},
    },
    "image_vae/photos": {"data.image_size": 16},
    "image/tokens": {"needs.tokens": {"recipe": "image_tokens/digits", "settings": AUTOENCODER}},
    "image/stickers": {
        "data.limit": 64,
        "data.latents": False,
        "needs.vae": {"recipe": "image_vae/stickers", "own_data": True, "settings": {**AUTOENCODER, "data.limit": 64}},
        "needs.clip": {"recipe": "align", "own_data": True, "settings": {**ALIGN, "data.limit": 64}},
    },
    "image_vae/stickers": {"data.limit": 64},
    "align": {"data.limit": 64},
    "classify": {"model.num_buckets": 512},
    "classify/wide": {"model.num_buckets": 512},
    "classify/sst2": {"data.train.columns": None},
    "image/text": {"model.text.hidden_size": 16, "model.text.num_layers": 1},
    # Without attention and feed-forward layers.
    "language/shakespeare-ssm": dict.fromkeys(
        ("model.num_heads", "model.num_kv_heads", "model.head_size", "model.intermediate_size"), None
    ),
}
"""Recipe -> settings that it needs besides those of its task."""

TASKS = {"routing/mind": "multitask"}
"""Tasks of recipes that are not named after their task."""
TEXT_CLASSIFIERS = tuple(f"classify{name}" for name in ("", "/cnn", "/pretrained", "/sst2", "/sst2-transformer"))
RECIPES_WITH_PATH = (
    *("audio/speech", "audio/spoken-digits", "classify/pretrained", "classify/sst2", "classify/sst2-transformer"),
    *("image/fashion", "image/photos", "image/text", "image_vae/photos", "language/epic", "language/shakespeare"),
    *(f"language/shakespeare-{kind}" for kind in ("gpu", "hybrid", "moe", "ssm")),
    *("language/speedrun", "language/stanza", "language/verse", "video/clips"),
    *(f"personalize{name}" for name in ("", "/flickr", "/pog", "/ser")),
)
"""Recipes that train on files of the user, or here on files of `write_data` because bundled data is larger."""


def get_task(name: str) -> str:
    return TASKS.get(name, name.partition("/")[0])


def write_data(folder: Path) -> dict[str, Path]:
    """Write a text, captioned images, recordings and so on; return task or recipe -> path."""
    from PIL import Image

    text = folder / "my.txt"
    text.write_text("".join(f"Line {n} of the book, written by apprentice {n % 7}.\n" for n in range(100)))
    draw = np.random.default_rng(0)
    rows = []
    (folder / "photos").mkdir()
    for number in range(60):
        name = f"{number:02d}.png"
        Image.fromarray(draw.integers(0, 256, (12, 12), np.uint8)).save(folder / "photos" / name)
        rows.append(json.dumps({"file_name": name, "text": f"a picture of {number % 3}", "label": number % 3}))
    (folder / "photos" / "metadata.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "recordings").mkdir()
    for number in range(60):
        with wave.open(str(folder / "recordings" / f"{number % 3}_anna_{number}.wav"), "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes(draw.integers(-9000, 9000, 3000).astype("<i2").tobytes())
    videos = draw.integers(0, 256, (20, 4, 12, 12, 3), np.uint8)
    np.savez(folder / "films.npz", video=videos, fps=np.full(20, 8))
    photos, recordings = folder / "photos", folder / "recordings"
    return {
        "language": text,
        "classify": small_texts.write_texts(folder),
        "image": photos,
        "image_vae": photos,
        "audio": recordings,
        "video": folder / "films.npz",
        "personalize": small_personal.write_records(folder),
        "personalize/flickr": small_collections.write_flickr(folder / "flickr"),
        "personalize/pog": small_collections.write_pog(folder / "pog"),
        "personalize/ser": small_collections.write_ser(folder / "ser"),
    }


def settings(name: str, data: dict[str, Path], output: Path) -> dict[str, Any]:
    """Return the settings for `bottega.train` with this recipe; `data` is the result of `write_data`."""
    task = get_task(name)
    values = {**SMALL[task], **RECIPE_SETTINGS.get(name, {}), "output_dir": str(output)}
    if name in TEXT_CLASSIFIERS:
        values = {**small_texts.SMALL, **TRAINING, **RECIPE_SETTINGS.get(name, {}), "output_dir": str(output)}
    if name == "classify/pretrained":
        values["model.from"] = str(small_texts.write_encoder(output / "encoder"))
    if name in RECIPES_WITH_PATH:
        values["data.train.path"] = str(data.get(name, data[task]))
    if task == "personalize":
        values |= {f"model.{part}": str(folder) for part, folder in small_personal.models().items()}
        if name == "personalize":  # fewer users than the embedded data has
            values["data.train.kind"] = "auto"
        captions = data[name] / "captions.json"
        values |= {"data.captions": str(captions)} if captions.is_file() else {}
    return values
