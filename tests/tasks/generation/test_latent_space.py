"""Generators in the latents of a frozen autoencoder: training it as a dependency, reopening it, refusing a changed one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import bottega
import small_media
from bottega import cli
from bottega.cli import main
from bottega.core.errors import CheckpointError, UsageError
from bottega.core.noise import Noise
from bottega.models.autoencoder.config import AutoencoderShape
from bottega.models.autoencoder.layout import export_autoencoder
from bottega.models.autoencoder.torch import Autoencoder
from bottega.models.pipeline.component import WEIGHTS
from bottega.tasks.generation.export import open_exported_generator
from bottega.tasks.generation.torch_latents import decode_latents, encode_latents, encode_moments, reconstruct
from small_run import differing_tensors, read_tensors

TINY: dict[str, Any] = {
    "training.max_steps": 3,
    "training.batch_size": 8,
    "model.hidden_size": 8,
    "model.latent_channels": 2,
    "model.downsample": 2,
    "samples.every": None,
    "logging.tensorboard": False,
    "logging.resources": False,
}
IN_LATENTS: dict[str, Any] = {"model.vae": "needs.vae", "model.patch_size": 1}
WITH_VAE: dict[str, Any] = {"needs.vae": {"recipe": "image_vae/digits", "settings": TINY}, **IN_LATENTS}
FIVE_STEPS: dict[str, Any] = {"training.max_steps": 5, "evaluation.every": 5, "checkpoint.every": 5}


def train(folder: Path, **changes: Any) -> Any:
    """Train on images of three classes in latents of 4 x 4 x 2."""
    return bottega.train({"task": "image"}, {**small_media.image(folder), **FIVE_STEPS, **changes})


def losses(run: Any) -> list[float]:
    return [row["loss"] for row in run.history()]


def write_vae(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    nano = {"widths": (16, 32), "layers_per_block": 1, "latent_channels": 4, "norm_groups": 8}
    shape = AutoencoderShape(**{**nano, "channels": 1, "scaling_factor": 0.5, "shift_factor": 0.1, **changes})
    model = Autoencoder(shape)
    model.initialise(seed)
    return export_autoencoder(model.state_dict(), shape, folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train(tmp_path_factory.mktemp("runs"), name="pictures", **WITH_VAE)


def find_vae(run: Any) -> Path:
    (folder,) = (run.path.parent / "parts").glob("*/final")
    return folder


def test_the_autoencoder_is_trained_once(run: Any) -> None:
    before = (find_vae(run) / "README.md").stat().st_mtime_ns
    again = train(run.path.parent, name="again", **WITH_VAE, **{"training.max_steps": 1})
    assert (find_vae(again) / "README.md").stat().st_mtime_ns == before
    assert losses(again)[0] == losses(run)[0]


def test_latents_are_scaled_to_unit_variance(run: Any) -> None:
    saved, config = bottega.load(run.path), json.loads((find_vae(run) / "config.json").read_text())
    task, workload = saved.task, saved.workload
    assert task.shape.sample == (4, 4, 2)
    assert workload.metadata.sample == (8, 8, 1)
    assert (task.latents.scale, task.latents.shift) == (config["scaling_factor"], 0)
    assert task.latents.scale != 1
    assert not [name for name in saved.model.state_dict() if "encoder" in name or "decoder" in name]
    index = np.arange(len(workload.data.training()))
    x = torch.from_numpy(workload.data.training().rows(index, 0 * index)["image"])
    with saved.engine.sampling() as models:
        vae = models["vae"]
        latents = encode_latents(task.latents, vae, {"image": x}, "image", Noise(0, 0, torch.from_numpy(index), torch))
        mean = encode_moments(vae, x).chunk(2, dim=-1)[0]
        back = decode_latents(task.latents, vae, (mean - task.latents.shift) * task.latents.scale)
        torch.testing.assert_close(back, reconstruct(vae, x), rtol=0, atol=1e-4)
    assert float(latents.square().mean()) == pytest.approx(1, abs=0.2)


def test_a_latent_run_samples_evaluates_and_exports(run: Any, tmp_path: Path) -> None:
    saved = bottega.load(run.path)
    images = saved.generate(count=2, steps=2)
    assert (images.shape, images.dtype) == ((2, 8, 8, 1), np.uint8)
    result = bottega.evaluate(run.path, count=20)
    assert result["counts"]["generated"] == 20
    assert set(result["through_codec"]) == set(result["real"])
    assert result["through_codec"] != result["real"]
    assert result["metrics"]["loss"] == pytest.approx(losses(run)[-1], rel=1e-5)
    saved.export(tmp_path / "out")
    task, models = open_exported_generator(tmp_path / "out")
    assert task.latents is not None
    assert task.latents.folder == str(tmp_path / "out" / "vae")
    with saved.engine.sampling() as run_models:
        for name, value in run_models["vae"].state_dict().items():
            torch.testing.assert_close(models["vae"].state_dict()[name], value, rtol=0, atol=0)


def test_other_data_is_evaluated_in_the_same_latents(run: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "large.npz", image=np.full((6, 32, 32), 230, np.uint8), label=np.array(["bright"] * 6))
    assert np.isfinite(bottega.load(run.path).evaluate(tmp_path / "large.npz")["loss"])


def test_resume_is_bitwise_equal(run: Any, tmp_path: Path) -> None:
    options = {
        **WITH_VAE,
        "model.vae": str(find_vae(run)),
        "training.scheduler.name": "constant",
        "checkpoint.every": 2,
    }
    straight = train(tmp_path / "a", name="x", **options, **{"training.max_steps": 4})
    train(tmp_path / "b", name="x", **options, **{"training.max_steps": 2})
    resumed = train(tmp_path / "b", name="x", **options, **{"training.max_steps": 4})
    assert differing_tensors(read_tensors(straight.path), read_tensors(resumed.path)) == []
    assert "resumed" in (resumed.path / "log.txt").read_text()


def test_a_moved_run_finds_its_autoencoder(run: Any, tmp_path: Path) -> None:
    before = bottega.load(run.path).generate(count=1, steps=1)
    original, moved = tmp_path / "original", tmp_path / "moved"
    shutil.copytree(run.path.parent, original, symlinks=True)
    recipe = original / "pictures" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(run.path.parent), str(original)))
    metadata = original / "pictures" / "processor" / "generator.json"
    metadata.write_text(metadata.read_text().replace(str(run.path.parent), str(original)))
    original.rename(moved)
    loaded = bottega.load(moved / "pictures")
    assert loaded.task.latents.folder.startswith(str(moved))
    np.testing.assert_array_equal(loaded.generate(count=1, steps=1), before)
    shutil.rmtree(moved / "parts")
    with pytest.raises(CheckpointError, match="the autoencoder of this run no longer exists"):
        bottega.load(moved / "pictures")


def test_a_deleted_autoencoder_is_retrained_by_the_suggested_command(run: Any, tmp_path: Path) -> None:
    runs = Path(shutil.copytree(run.path.parent, tmp_path / "runs", symlinks=True))
    for file in (runs / "pictures" / "recipe.yaml", runs / "pictures" / "processor" / "generator.json"):
        file.write_text(file.read_text().replace(str(run.path.parent), str(runs)))
    before = bottega.load(runs / "pictures").generate(count=1, steps=1)
    shutil.rmtree(runs / "parts")
    with pytest.raises(
        CheckpointError, match=r"no longer exists: \S+; bottega (train \S+recipe\.yaml) trains it again"
    ) as caught:
        bottega.load(runs / "pictures")
    assert str(caught.value).count("no longer exists") == 1
    assert cli.main([*str(caught.value).partition("bottega ")[2].split()[:2], "--quiet"]) == 0
    np.testing.assert_array_equal(bottega.load(runs / "pictures").generate(count=1, steps=1), before)


def test_a_changed_autoencoder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_vae(tmp_path / "vae")
    options = {**IN_LATENTS, "model.vae": str(folder), "training.scheduler.name": "constant", "name": "x"}
    path = train(tmp_path, **options, **{"training.max_steps": 1}).path
    write_vae(folder, seed=1)
    assert main(["generate", str(path)]) == 4
    message = capsys.readouterr().err
    assert "is not the autoencoder that this run was trained with" in message
    assert message.count("\n") == 1
    with pytest.raises(CheckpointError, match="is not the autoencoder that this run started with") as caught:
        train(tmp_path, **options, **{"training.max_steps": 2})
    assert caught.value.code == 4
    write_vae(folder)
    assert train(tmp_path, **options, **{"training.max_steps": 2}).step == 2


def test_a_diffusers_autoencoder_is_used_unchanged(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    theirs = diffusers.AutoencoderKL(
        in_channels=1,
        out_channels=1,
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=3,
        norm_num_groups=4,
    )
    theirs.save_pretrained(tmp_path / "pipeline" / "vae")
    before = {file.name: file.read_bytes() for file in (tmp_path / "pipeline" / "vae").iterdir()}
    path = train(tmp_path, **{**IN_LATENTS, "model.vae": str(tmp_path / "pipeline"), "name": "x"}).path
    saved = bottega.load(path)
    assert saved.task.shape.sample == (4, 4, 3)
    assert saved.task.latents.scale == 0.18215
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "pipeline" / "vae").iterdir()}
    with saved.engine.sampling() as models:
        tensors = {name: value.numpy() for name, value in models["vae"].state_dict().items()}
    for name, value in load_file(tmp_path / "pipeline" / "vae" / WEIGHTS).items():
        np.testing.assert_array_equal(tensors[name], value)


@pytest.mark.parametrize("axes", [1, 2])
def test_audio_in_latents(tmp_path: Path, axes: int) -> None:
    settings = {**TINY, "data.input": "audio", "model.axes": axes, "data.num_mels": 8}
    needs = {"recipe": "image_vae/digits", "settings": settings}
    options = {**FIVE_STEPS, **IN_LATENTS, "needs.vae": needs, "model.axes": axes, "data.latents": axes == 1}
    path = bottega.train({"task": "audio"}, {**small_media.audio(tmp_path), **options, "training.max_steps": 2}).path
    saved = bottega.load(path)
    frames, bands, _ = saved.workload.mel.shape
    assert saved.task.shape.sample == ((frames // 2, 2) if axes == 1 else (frames // 2, bands // 2, 2))
    assert saved.generate(count=3, steps=1).shape == (3, 800)
    assert set(bottega.evaluate(path, count=4)["through_codec"]) >= {"nearest_ratio"}


def test_video_in_latents(tmp_path: Path) -> None:
    settings = {**TINY, "data.input": "video", "model.temporal_downsample": 2}
    needs = {"recipe": "image_vae/digits", "settings": settings}
    options = {
        **FIVE_STEPS,
        **IN_LATENTS,
        "needs.vae": needs,
        "data.num_frames": 3,
        "data.channels": 1,
        "training.max_steps": 2,
    }
    path = bottega.train(
        {"task": "video"}, {**small_media.video(tmp_path), **options, "model.temporal_patch_size": 1}
    ).path
    saved = bottega.load(path)
    assert saved.task.shape.sample == (2, 4, 4, 2)
    assert saved.generate(count=3, steps=1).shape == (3, 3, 8, 8, 1)
    assert "through_codec" in bottega.evaluate(path, count=4)


# Precomputed latents


def test_precomputed_latents_give_the_same_losses(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bottega.prepare({"task": "image"}, {**small_media.image(run.path.parent), **WITH_VAE, "data.latents": True})

    def fail(self: Any, x: Any) -> Any:
        raise AssertionError("the autoencoder must not run when latents are cached")

    with monkeypatch.context() as patched:
        patched.setattr(Autoencoder, "encode", fail)
        cached = train(run.path.parent, name="cached", **WITH_VAE, **{"data.latents": True})
    assert len(losses(cached)) == 6
    assert losses(cached) == pytest.approx(losses(run), abs=1e-5)


def test_prepare_writes_latents_of_both_splits(run: Any, capsys: pytest.CaptureFixture[str], own_cache: Path) -> None:
    data = f"data.train.path={small_media.write_images(run.path.parent)}"
    command = ["prepare", "image", "model.patch_size=1", "data.train.kind=auto", data, f"model.vae={find_vae(run)}"]
    before = len(list(own_cache.glob("bottega/*/latent.bin")))
    assert main([*command, "data.validation.split=0.5", "data.latents=true"]) == 0
    assert len(list(own_cache.glob("bottega/*/latent.bin"))) == before + 2, "one for training, one for validation"
    assert "validation" in capsys.readouterr().out


def test_precomputed_latents_can_be_enabled_on_resume(run: Any, tmp_path: Path) -> None:
    options = {**WITH_VAE, "model.vae": str(find_vae(run)), "name": "x", "training.scheduler.name": "constant"}
    train(tmp_path, **options, **{"training.max_steps": 1})
    resumed = train(tmp_path, **options, **{"training.max_steps": 2, "data.latents": True})
    assert [row["step"] for row in resumed.history() if row["kind"] == "train"] == [1, 2]


# Refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data.normalise": "unit"},
            r"data\.normalise: unit is not supported: an autoencoder reads values from -1 to 1",
        ),
        ({"data.channels": 3}, r"model\.vae: .* reads 1 channels, but the data has 3; set data\.channels=1"),
        ({"data.image_size": 9}, r"height 9 \(must be a multiple of 2"),
        ({"model.patch_size": 3}, r"model\.patch_size: patches of 3 do not divide a side of 4"),
        ({"model.vae": "nowhere"}, r"model\.vae: nowhere is not a folder"),
        ({"model.vae": "needs.other"}, r"needs\.other"),
        ({"model.vae": None, "data.latents": True}, r"data\.latents: needs model\.vae"),
        ({"data.latents": True, "data.augmentation.flip": True}, r"data\.augmentation.* changes samples"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_invalid_latent_settings_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_vae(tmp_path / "vae")
    with pytest.raises(UsageError, match=message):
        train(tmp_path, **{**IN_LATENTS, "model.vae": str(folder), **changes})


def test_autoencoders_of_other_media_and_unexported_runs_are_refused(run: Any, tmp_path: Path) -> None:
    video_vae = write_vae(tmp_path / "clips", dims=3)
    with pytest.raises(UsageError, match="is an autoencoder of video, but the task is image"):
        train(tmp_path, **{**IN_LATENTS, "model.vae": str(video_vae)})
    not_exported = tmp_path / "bare"
    not_exported.mkdir()
    (not_exported / "recipe.yaml").touch()
    with pytest.raises(UsageError, match="a run that was not exported; run bottega export"):
        train(tmp_path, **{**IN_LATENTS, "model.vae": str(not_exported)})
    with pytest.raises(UsageError, match="is an autoencoder of images, but the task is audio"):
        bottega.train({"task": "audio"}, {**small_media.audio(tmp_path), **IN_LATENTS, "model.vae": str(find_vae(run))})
    with pytest.raises(UsageError, match=r"needs\.vae is not trained yet"):
        bottega.prepare({"task": "image"}, {**small_media.image(tmp_path), **WITH_VAE, "data.latents": True})
