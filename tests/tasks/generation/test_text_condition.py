"""Text conditions for images, audio and video: captions in the data, prompts, and frozen text encoders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

import bottega
import tiny_clip
from bottega.cli import main
from bottega.core.errors import CheckpointError, DataError, UsageError

PROMPTS = ("a bright square", "a dark square")

SMALL: dict[str, Any] = {
    "task": "image",
    "name": "small",
    "model.condition": "text",
    "model.hidden_size": 32,
    "model.num_layers": 2,
    "model.num_heads": 2,
    "model.patch_size": 4,
    "model.text.hidden_size": 32,
    "model.text.num_layers": 1,
    "model.text.max_tokens": 8,
    "data.workers": 0,
    "data.validation.split": 0.1,
    "training.max_steps": 150,
    "training.batch_size": 16,
    "training.learning_rate": 3e-3,
    "training.scheduler.warmup_steps": 10,
    "samples.every": None,
    "samples.steps": 4,
    "evaluation.every": None,
    "checkpoint.every": None,
    "logging.tensorboard": False,
    "logging.resources": False,
}


def train(output: Path, data: Path, **changes: Any) -> Any:
    return bottega.train({}, {**SMALL, "output_dir": str(output), "data.train.path": str(data), **changes})


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Squares of 8 x 8 pixels around 200 and around 55, with a caption each."""
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    rows = []
    for number in range(64):
        pixels = rng.normal((200, 55)[number % 2], 10, (8, 8)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:02d}.png")
        rows.append(json.dumps({"file_name": f"{number:02d}.png", "text": PROMPTS[number % 2]}))
    (folder / "metadata.jsonl").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture(scope="module")
def run(image_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(train(tmp_path_factory.mktemp("run"), image_folder).path)


def brightness(samples: np.ndarray, num_prompts: int = 2) -> np.ndarray:
    return samples.reshape(num_prompts, -1).mean(1)


def test_a_prompt_determines_the_image(run: Path) -> None:
    saved = bottega.load(run)
    for guidance in (1.0, 3.0):
        bright, dark = brightness(saved.generate(list(PROMPTS), count=4, steps=8, guidance=guidance))
        assert bright > 150
        assert dark < 100
    first, second = (saved.generate(prompt, count=2, steps=2, guidance=0) for prompt in PROMPTS)
    np.testing.assert_array_equal(first, second, "guidance 0 ignores the prompt")
    empty = saved.generate("", count=2, steps=2, guidance=1)
    np.testing.assert_array_equal(first, empty, "no condition is the empty caption")


def test_a_sample_depends_on_its_own_prompt_only(run: Path) -> None:
    saved = bottega.load(run)
    both = saved.generate(list(PROMPTS), count=1, steps=2)
    np.testing.assert_array_equal(saved.generate(PROMPTS[0], count=1, steps=2)[0], both[0])


def test_without_a_prompt_the_captions_of_the_data_are_used(run: Path, tmp_path: Path) -> None:
    saved = bottega.load(run)
    assert len(set(saved.workload.sampler.encoder.list_captions({}, 4) or ())) == 2, "the two captions alternate"
    samples = saved.generate(count=3, steps=2)
    written = saved.workload.sampler.present(samples, tmp_path / "out", run=run, count=3)
    assert written["count"] == 3
    with saved.engine.sampling() as models:
        saved.workload.sampler.sample(models, tmp_path / "sheet", device="cpu")
    assert any((tmp_path / "sheet").iterdir())


def test_generate_takes_a_prompt_and_refuses_a_class(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", str(run), "--count", "2", "--guidance", "3", "--steps", "2", "--out", str(tmp_path / "out")]
    assert main([*command, "--prompt", "a bright square"]) == 0
    assert list((tmp_path / "out").glob("*.png"))
    assert main([*command, "--class", "0"]) == 2
    assert "condition text; it takes --prompt" in capsys.readouterr().err


def test_the_processor_tokenizer_opens_in_transformers(run: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(run / "processor" / "text", local_files_only=True)
    expected = theirs(list(PROMPTS), padding="max_length", max_length=8, truncation=True)
    ours = bottega.load(run).workload.text.encode(list(PROMPTS))
    np.testing.assert_array_equal(ours["input_ids"], expected.input_ids)


def test_evaluate_accepts_own_and_other_captions(run: Path, image_folder: Path) -> None:
    saved = bottega.load(run)
    assert 0 < saved.evaluate()["loss"] < 2
    assert 0 < saved.evaluate(image_folder)["loss"] < 2


def test_images_without_captions_are_refused_by_name(image_folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(image_folder, bare)
    lines = (bare / "metadata.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rows[5]["text"] = ""
    (bare / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    with pytest.raises(DataError, match=r"05\.png: has neither caption nor label") as caught:
        train(tmp_path / "runs", bare, **{"data.validation.split": None, "training.max_steps": 1})
    assert caught.value.code == 3


def test_condition_field_is_refused_for_captions(image_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"data\.condition_field does not apply to a text condition; .*data\.train\.label"
    ):
        train(tmp_path, image_folder, **{"data.condition_field": "text"})


@pytest.mark.parametrize("task", ["audio", "video"])
def test_class_names_are_prompts_of_audio_and_video(task: str, tmp_path: Path) -> None:
    data, rng = tmp_path / "data", np.random.default_rng(0)
    arrays = {
        "audio": {"audio": rng.normal(0, 0.1, (16, 1024)).astype(np.float32), "sample_rate": np.full(16, 8000)},
        "video": {"video": rng.integers(0, 256, (16, 2, 8, 8), np.uint8), "fps": np.full(16, 8)},
    }
    data.mkdir()
    for name, values in {**arrays[task], "label": np.array(["low", "high"] * 8)}.items():
        np.save(data / f"{name}.npy", values)
    medium_settings = {
        "audio": {"data.fft_size": 256, "data.hop_size": 128, "data.num_mels": 16},
        "video": {"data.num_frames": 2},
    }
    small = {"training.max_steps": 1, "model.num_layers": 1, "training.batch_size": 4, "data.train.kind": "numpy"}
    saved = bottega.load(train(tmp_path, data, **{"task": task, **small, **medium_settings[task]}).path)
    samples = saved.generate(["low", "high"], count=1, steps=1)
    assert len(samples) == 2
    assert np.isfinite(samples.astype(np.float64)).all()
    assert set(saved.workload.text.prompts) == {"low", "high"}


# A frozen encoder


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return tiny_clip.save_clip(tmp_path_factory.mktemp("clip"))


def frozen_settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"model.text.from": str(folder), "model.text.max_tokens": None, "name": "frozen", **changes}


@pytest.fixture(scope="module")
def frozen_run(image_folder: Path, clip: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    before = {file.name: file.read_bytes() for file in clip.iterdir()}
    result = train(tmp_path_factory.mktemp("frozen"), image_folder, **frozen_settings(clip))
    assert before == {file.name: file.read_bytes() for file in clip.iterdir()}
    return Path(result.path)


def test_a_frozen_encoder_conditions_samples_and_is_not_changed(frozen_run: Path, clip: Path) -> None:
    saved = bottega.load(frozen_run)
    assert saved.workload.task.text.is_masked is False, "CLIP attends to padding tokens too"
    bright, dark = brightness(saved.generate(list(PROMPTS), count=4, steps=8))
    assert bright > 150
    assert dark < 100
    with saved.engine.sampling() as models:
        tensors = {name: value.numpy() for name, value in models["text_encoder"].state_dict().items()}
    for name, value in load_file(clip / "model.safetensors").items():
        np.testing.assert_array_equal(tensors[name], value)


def test_a_frozen_encoder_is_not_in_the_checkpoint(frozen_run: Path) -> None:
    for file in (frozen_run / "checkpoints").rglob("*.safetensors"):
        names = list(load_file(file))
        assert names
        assert not [name for name in names if "condition" in name or "encoder" in name]


def test_the_empty_caption_is_tokenized_as_clip_does(frozen_run: Path) -> None:
    expected = tiny_clip.tokenizer()("", padding="max_length", max_length=tiny_clip.LENGTH)
    assert list(bottega.load(frozen_run).workload.task.empty_text) == expected.input_ids


def test_a_changed_text_encoder_is_refused(frozen_run: Path, image_folder: Path, clip: Path, tmp_path: Path) -> None:
    runs, base = tmp_path / "runs", tmp_path / "base"
    shutil.copytree(clip, base)
    changes = frozen_settings(base, **{"training.max_steps": 2, "checkpoint.every": 1})
    result = train(runs, image_folder, **changes)
    tiny_clip.save_clip(base, seed=1)
    with pytest.raises(CheckpointError, match="is not the text encoder that this run was trained with") as caught:
        bottega.load(result.path)
    assert caught.value.code == 4
    with pytest.raises(CheckpointError, match="is not the text encoder that this run started with"):
        train(runs, image_folder, **{**changes, "training.max_steps": 3})
    shutil.rmtree(base)
    with pytest.raises(CheckpointError, match="no longer exists"):
        bottega.load(result.path)


def test_encoder_and_tokenizer_are_found_in_a_diffusers_pipeline(clip: Path, tmp_path: Path) -> None:
    from bottega.tasks.generation.text_condition import resolve_encoder_folders

    for name, files in (("text_encoder", ("config.json", "model.safetensors")), ("tokenizer", ("tokenizer.json",))):
        (tmp_path / name).mkdir()
        for file in files:
            shutil.copy(clip / file, tmp_path / name)
    both = (tmp_path / "text_encoder", tmp_path / "tokenizer")
    assert resolve_encoder_folders(str(tmp_path)) == both
    assert resolve_encoder_folders(str(tmp_path / "text_encoder")) == both
    assert resolve_encoder_folders(str(clip)) == (clip, clip)


def test_legacy_tokenizer_files_give_the_same_tokens(image_folder: Path, clip: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(clip, old)
    model = json.loads((old / "tokenizer.json").read_text())["model"]
    (old / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"])
    (old / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    (old / "tokenizer.json").unlink()
    result = train(tmp_path / "runs", image_folder, **frozen_settings(old, **{"training.max_steps": 1}))
    expected = tiny_clip.tokenizer()(list(PROMPTS), padding="max_length", max_length=tiny_clip.LENGTH)
    tokens = bottega.load(result.path).workload.text.encode(list(PROMPTS))
    np.testing.assert_array_equal(tokens["input_ids"], expected.input_ids)


def test_more_tokens_than_an_encoder_reads_are_refused(image_folder: Path, clip: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"model\.text\.max_tokens: 99 is more than the 12"):
        train(tmp_path, image_folder, **frozen_settings(clip, **{"model.text.max_tokens": 99}))
