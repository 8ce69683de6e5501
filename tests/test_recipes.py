"""Every recipe that comes with the program is sound, says how to run it, and trains in a small form."""

from __future__ import annotations

import json
import re
import shlex
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import bottega
import small_collections
import small_personal
import small_texts
from bottega.schema import bundled
from bottega.schema.flags import parse_overrides
from bottega.schema.flat import PATHLESS
from bottega.schema.load import check_recipe, load_recipe, to_yaml
from bottega.schema.recipe import BUILT_TASKS

NAMES = bundled.names()
GENERATED = ("image", "audio", "video")

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
"""The settings that make any recipe of a task fit into a test; everything else stays as the recipe says."""

OWN: dict[str, dict[str, Any]] = {
    # What is asked for was said that long ago, so the first steps ask nothing.
    "recall/lasting": {"data.distance": 4},
    # The file of clothes says itself which part is for the test; what a test makes does not.
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
    "classify/sst2": {"data.train.columns": None},
    "image/text": {"model.text.hidden_size": 16, "model.text.num_layers": 1},
    # It has no attention and no feed-forward.
    "language/shakespeare-ssm": dict.fromkeys(
        ("model.num_heads", "model.num_kv_heads", "model.head_size", "model.intermediate_size"), None
    ),
}
"""What the data of a test ask of one recipe, or what it alone has."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipes") / "my.txt"
    path.write_text("".join(f"Line {n} of the book, written by apprentice {n % 7}.\n" for n in range(100)))
    return path


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory, text: Path) -> dict[str, Path]:
    """What a reader has at hand, for the recipes that ask for it: a text, pictures with captions, recordings."""
    folder = tmp_path_factory.mktemp("mine")
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
    films = draw.integers(0, 256, (20, 4, 12, 12, 3), np.uint8)
    np.savez(folder / "films.npz", video=films, fps=np.full(20, 8))
    photos, sounds = folder / "photos", folder / "recordings"
    return {
        "language": text,
        "classify": small_texts.texts(folder),
        "image": photos,
        "image_vae": photos,
        "audio": sounds,
        "video": folder / "films.npz",
        "personalize": small_personal.people(folder),
        "personalize/flickr": small_collections.flickr(folder / "flickr"),
        "personalize/pog": small_collections.pog(folder / "pog"),
        "personalize/ser": small_collections.ser(folder / "ser"),
    }


def header_of(name: str) -> str:
    """The comment lines a recipe file begins with."""
    lines = (bundled.FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(line.lstrip("#").strip() for line in lines[:end])


def test_there_are_recipes() -> None:
    assert {"language", "language/verse", "language/stanza", "language/epic", *GENERATED} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_resolves_and_round_trips(name: str, tmp_path: Path) -> None:
    recipe = check_recipe([name]).recipe
    assert recipe.task in BUILT_TASKS
    file = tmp_path / "again.yaml"
    file.write_text(to_yaml(recipe), encoding="utf-8")
    again = check_recipe([file]).recipe
    assert again == recipe
    assert again.run_name() == recipe.run_name()


@pytest.mark.parametrize("name", NAMES)
def test_the_header_has_the_command_and_says_what_it_trains(name: str, text: Path) -> None:
    header = header_of(name)
    assert header.splitlines()[0].endswith("."), "the first line is a sentence: `bottega recipes` prints it"
    assert "Trains:" in header
    command = re.search(r"^bottega train (.*)$", header, re.MULTILINE)
    assert command, "no line `bottega train ...`"
    sources, overrides = parse_overrides(shlex.split(command[1]))
    assert sources == [name]
    # The file of the example stands for the reader's own, which is the one thing that cannot come with the program.
    given = [(key, str(text) if key == "data" else value, origin) for key, value, origin in overrides]
    load_recipe(sources, given)


@pytest.mark.parametrize("name", NAMES)
def test_the_small_form_trains_three_steps(name: str, mine: dict[str, Path], tmp_path: Path) -> None:
    recipe = check_recipe([name]).recipe
    settings = {**SMALL[recipe.task], **OWN.get(name, {}), "output_dir": str(tmp_path)}
    if recipe.task == "classify" and recipe.data.input == "text":
        settings = {**small_texts.SMALL, **TRAINING, **OWN.get(name, {}), "output_dir": str(tmp_path)}
        if getattr(recipe.model, "kind", None) == "pretrained":
            settings["model.from"] = str(small_texts.encoder(tmp_path / "encoder"))
    if recipe.task != "multitask" and recipe.data.sources is None and recipe.data.train.kind not in PATHLESS:
        settings["data.train.path"] = str(mine.get(name, mine[recipe.task]))
    if recipe.task == "personalize":
        settings |= {f"model.{part}": str(folder) for part, folder in small_personal.models().items()}
        if recipe.data.train.kind == "embedded":  # fewer people than that have the same to say here
            settings |= {"data.train.kind": "auto", "data.train.path": str(mine[name])}
        captions = mine[name] / "captions.json"
        settings |= {"data.captions": str(captions)} if captions.is_file() else {}
    run = bottega.train(name, settings)
    rows = [row for row in run.history() if row["kind"] == "train"]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(0 <= row["loss"] < 20 for row in rows)
    assert rows[-1]["loss"] > 0
    assert (run.path / "checkpoints" / "last" / "model.safetensors").is_file()
    if recipe.task in GENERATED:
        assert len(list((run.path / "samples" / "step-00000003").iterdir())) >= 2, "and draws"
