"""CLIP from a folder of images and captions: training, export to transformers, and use by a generator."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import bottega
from bottega.cli import main
from bottega.core.errors import CheckpointError, DataError, UsageError
from bottega.models.clip.torch import load_clip
from bottega.tasks.align.clip_folder import load_clip_tokenizer, resolve_clip_folder

transformers = pytest.importorskip("transformers")

COLOURS = {"red": (220, 30, 30), "blue": (30, 30, 220), "green": (30, 180, 30)}
SHAPES = ("bar", "pole")

SMALL: dict[str, Any] = {
    "task": "align",
    "name": "small",
    "model.hidden_size": 32,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.patch_size": 4,
    "model.text_hidden_size": 32,
    "model.text_num_layers": 1,
    "model.vocab_size": 600,
    "model.max_tokens": 8,
    "model.projection_size": 16,
    "model.negatives": 5,
    "model.hard_negatives": 0.4,
    "data.workers": 0,
    "data.validation.split": 0.2,
    "training.max_steps": 120,
    "training.batch_size": 16,
    "training.learning_rate": 1e-2,
    "training.optimizer.name": "muon",
    "training.scheduler.warmup_steps": 10,
    "samples.count": 4,
    "samples.every": None,
    "evaluation.every": None,
    "checkpoint.every": None,
    "logging.tensorboard": False,
    "logging.resources": False,
}


def train(output: Path, data: Path, **changes: Any) -> Path:
    values = {**SMALL, "output_dir": str(output), "data.train.path": str(data), **changes}
    return Path(bottega.train({}, values).path)


def draw_shape(colour: str, shape: str, rng: np.random.Generator) -> np.ndarray:
    pixels = rng.integers(200, 256, (8, 8, 3)).astype(np.uint8)
    start = int(rng.integers(1, 5))
    region = (slice(start, start + 3), slice(None)) if shape == "bar" else (slice(None), slice(start, start + 3))
    pixels[region] = COLOURS[colour]
    return pixels


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """96 images of 8 x 8 pixels: a bar or a pole in one of three colours, with a caption."""
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    rows = []
    for number in range(96):
        colour, shape = list(COLOURS)[number % 3], SHAPES[number % 2]
        Image.fromarray(draw_shape(colour, shape, rng)).save(folder / f"{number:02d}.png")
        rows.append(json.dumps({"file_name": f"{number:02d}.png", "text": f"a {colour} {shape}"}))
    (folder / "metadata.jsonl").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture(scope="module")
def run(image_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = train(tmp_path_factory.mktemp("run"), image_folder)
    bottega.load(path).export()
    return path


def test_training_aligns_images_and_captions(run: Path) -> None:
    metrics = bottega.load(run).evaluate()
    assert metrics.keys() == {"loss", "accuracy", "caption_recall"}
    assert metrics["accuracy"] > 0.9
    assert metrics["caption_recall"] > 0.9


def test_the_export_classifies_new_images(run: Path) -> None:
    folder = resolve_clip_folder(run)
    clip, tokenizer = load_clip(folder), load_clip_tokenizer(folder)
    rng = np.random.default_rng(1)
    labels = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    images = np.stack([draw_shape(*pair, rng) for pair in labels])
    ids = torch.from_numpy(tokenizer.encode([f"a {colour} {shape}" for colour, shape in labels])["input_ids"])
    with torch.no_grad():
        best = (clip.encode_images(torch.from_numpy(images / 127.5 - 1)) @ clip.encode_texts(ids).T).argmax(1)
    assert (best.numpy() == np.arange(6)).mean() > 0.8


def test_the_export_opens_in_transformers(run: Path) -> None:
    final = run / "final"
    theirs = transformers.CLIPModel.from_pretrained(final).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(final)
    assert type(tokenizer).__name__.startswith("CLIPTokenizer")
    assert tokenizer.model_max_length == 8
    expected = tokenizer(["a red bar", "a very green pole indeed, is it not"], padding="max_length", truncation=True)
    ours = load_clip_tokenizer(final).encode(["a red bar", "a very green pole indeed, is it not"])
    np.testing.assert_array_equal(ours["input_ids"], expected.input_ids)
    text = transformers.CLIPTextModel.from_pretrained(final).eval()
    config = text.config
    assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    ids = torch.tensor(expected.input_ids)
    with torch.no_grad():
        pooled = theirs.get_text_features(input_ids=ids).pooler_output
        features = load_clip(final).encode_texts(ids)
    torch.testing.assert_close(features, torch.nn.functional.normalize(pooled, dim=-1), atol=1e-6, rtol=0)


def test_a_generator_uses_the_text_encoder(run: Path, image_folder: Path, tmp_path: Path) -> None:
    """As `bottega train image model.text.from=RUN`: text tower, tokenizer and sequence length come from the run."""
    values: dict[str, Any] = {
        "task": "image",
        "name": "drawn",
        "output_dir": str(tmp_path),
        "data.train.path": str(image_folder),
        "data.workers": 0,
        "model.condition": "text",
        "model.text.from": str(run),
        "model.hidden_size": 16,
        "model.num_layers": 1,
        "model.num_heads": 2,
        "model.patch_size": 4,
        "training.max_steps": 2,
        "training.batch_size": 8,
        "samples.every": None,
        "evaluation.every": None,
        "logging.tensorboard": False,
        "logging.resources": False,
    }
    saved = bottega.load(bottega.train({}, values).path)
    text = saved.workload.text  # type: ignore[attr-defined]
    assert (text.metadata.max_tokens, text.metadata.is_masked) == (8, False)
    aligned = bottega.load(run).workload.caption_tokenizer.encode(["a red bar", ""])  # type: ignore[attr-defined]
    encoded = text.caption_tokenizer.encode(["a red bar", ""])
    np.testing.assert_array_equal(encoded["input_ids"], aligned["input_ids"])
    assert saved.generate("a red bar", count=1, steps=2).shape == (1, 8, 8, 3)


def test_generate_is_refused_and_evaluate_is_not(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(run)]) == 2
    assert "a CLIP does not generate" in capsys.readouterr().err
    assert main(["generate", str(run), "--prompt", "a bar"]) == 2
    assert main(["evaluate", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["accuracy"] > 0.9


def test_samples_show_images_with_their_best_caption(run: Path, tmp_path: Path) -> None:
    saved = bottega.load(run)
    with saved.engine.sampling() as models:
        saved.workload.sampler.sample(models, tmp_path / "sheet", device="cpu")
    assert len(list((tmp_path / "sheet").glob("*.png"))) == 5


def test_other_data_is_evaluated_with_the_tokenizer_of_the_run(run: Path, image_folder: Path) -> None:
    assert bottega.load(run).evaluate(image_folder)["accuracy"] > 0.9


def test_fine_tuning_starts_from_the_weights_of_a_run_and_a_damaged_processor_is_refused(
    run: Path, image_folder: Path, tmp_path: Path
) -> None:
    before = load_clip(run / "final")
    fine_tuned = train(
        tmp_path, image_folder, **{"model.from": str(run), "training.max_steps": 1, "training.learning_rate": 1e-9}
    )
    after = bottega.load(fine_tuned).model
    for (name, expected), tensor in zip(before.state_dict().items(), after.state_dict().values(), strict=True):
        torch.testing.assert_close(expected, tensor, atol=1e-6, rtol=0, msg=name)
    copied = shutil.copytree(run, tmp_path / "copied", symlinks=True)
    (copied / "processor" / "align.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot read"):
        bottega.load(copied)


def test_greyscale_images_are_accepted(image_folder: Path, tmp_path: Path) -> None:
    path = train(tmp_path, image_folder, **{"data.channels": 1, "training.max_steps": 2})
    assert bottega.load(path).workload.tables.frame == (8, 8, 1)


def test_invalid_data_and_settings_are_refused_before_training(image_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"data\.condition_field does not apply to captions; remove it"):
        train(tmp_path, image_folder, **{"data.condition_field": "mood"})
    with pytest.raises(UsageError, match="a CLIP normalises pixels itself"):
        train(tmp_path, image_folder, **{"data.normalise": "unit"})
    with pytest.raises(UsageError, match="patches of 3 do not divide a side of 8"):
        train(tmp_path, image_folder, **{"model.patch_size": 3, "data.image_size": 8})
    with pytest.raises(UsageError, match="3 does not divide the side of the images, 8"):
        train(tmp_path, image_folder, **{"model.patch_size": 3})
    with pytest.raises(UsageError, match=r"32 is not a multiple of model\.num_heads 5"):
        train(tmp_path, image_folder, **{"model.num_heads": 5})
    plain = tmp_path / "plain"
    plain.mkdir()
    for number in range(8):
        Image.fromarray(np.full((8, 8), 10 * number, np.uint8)).save(plain / f"{number}.png")
    with pytest.raises(DataError, match="there are no captions"):
        train(tmp_path, plain)
    (plain / "metadata.jsonl").write_text("".join(f'{{"file_name": "{n}.png", "text": "a"}}\n' for n in range(8)))
    with pytest.raises(DataError, match="all captions are equal"):
        train(tmp_path, plain)
    rows = [json.dumps({"file_name": f"{n}.png", "text": f"number {n}"}) for n in range(7)]
    (plain / "metadata.jsonl").write_text("\n".join(rows) + "\n")
    with pytest.raises(DataError, match=r"has neither caption nor label \(1 of"):
        train(tmp_path, plain, **{"data.validation": None})
    wide = tmp_path / "wide"
    wide.mkdir()
    for number, name in enumerate(("one", "two")):
        (wide / name).mkdir()
        Image.fromarray(np.full((8, 16), 10 * number, np.uint8)).save(wide / name / "0.png")
    with pytest.raises(DataError, match="images are 8 x 16, but a CLIP needs squares"):
        train(tmp_path, wide, **{"data.validation": None})


def test_unusable_clip_folders_are_refused(run: Path, tmp_path: Path) -> None:
    not_exported = shutil.copytree(run, tmp_path / "empty", symlinks=True)
    shutil.rmtree(not_exported / "final")
    with pytest.raises(UsageError, match="was not exported"):
        resolve_clip_folder(not_exported)
    without_tokenizer = shutil.copytree(run / "final", tmp_path / "bare")
    (without_tokenizer / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"has no tokenizer\.json"):
        load_clip_tokenizer(without_tokenizer)
