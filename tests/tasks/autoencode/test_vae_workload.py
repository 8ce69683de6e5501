"""Autoencoders of images, audio and video: training, samples, export to diffusers, fine-tuning and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bottega
import small_media
from bottega.cli import main
from bottega.core.errors import UsageError
from bottega.models.autoencoder.torch import load_autoencoder
from bottega.tasks.autoencode.vae_workload import VaeWorkload

SMALL: dict[str, Any] = {
    **{key: value for key, value in small_media.COMMON.items() if not key.startswith(("model.", "samples."))},
    "task": "image_vae",
    "model.hidden_size": 8,
    "model.latent_channels": 2,
    "model.downsample": 2,
    "model.layers_per_block": 1,
    "samples.every": None,
}
SPECTRUM = {"data.num_mels": 8, "data.fft_size": 256, "data.hop_size": 64}
AUDIO = {"data.input": "audio", **SPECTRUM}


def settings(folder: Path, data: Path, **changes: Any) -> dict[str, Any]:
    return {**SMALL, "output_dir": str(folder), "data.train.path": str(data), **changes}


def train(folder: Path, data: Path, **changes: Any) -> Any:
    return bottega.train({}, settings(folder, data, **changes))


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Forty steps on the bundled digits, with samples of reconstructions."""
    small = {"model.hidden_size": 16, "training.max_steps": 40, "training.batch_size": 16, "evaluation.every": 20}
    schedule = {"samples.every": 40, "samples.count": 3, "training.learning_rate": 3e-3, "name": "digits"}
    quiet = {"logging.tensorboard": False, "logging.resources": False, "training.scheduler.warmup_steps": 5}
    out = {"output_dir": str(tmp_path_factory.mktemp("runs")), "logging.every": 1}
    return bottega.train("image_vae/digits", {**small, **schedule, **quiet, **out})


@pytest.fixture(scope="module")
def exported(digits: Any) -> Path:
    return bottega.load(digits.path).export()


def test_training_lowers_the_reconstruction_error(digits: Any) -> None:
    losses = [row["loss"] for row in digits.history() if row["kind"] == "train"]
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])
    first, last = (row for row in digits.history() if row["kind"] == "eval")
    assert last["psnr"] > first["psnr"] > 0
    assert last["psnr"] == pytest.approx(10 * np.log10(4 / last["mse"]))
    assert last["kl"] > 0


def test_samples_are_originals_and_reconstructions(digits: Any) -> None:
    names = sorted(path.name for path in (digits.path / "samples" / "step-00000040").iterdir())
    assert names == [*(f"0{number}.png" for number in range(6)), "sheet.png"]


def test_evaluate_repeats_the_logged_metrics(digits: Any) -> None:
    last = [row for row in digits.history() if row["kind"] == "eval"][-1]
    again = bottega.load(digits.path, checkpoint="last").evaluate()
    assert again == pytest.approx({name: last[name] for name in VaeWorkload.metrics}, rel=1e-5)


def test_generate_is_refused(digits: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(digits.path)]) == 2
    message = capsys.readouterr().err
    assert "an autoencoder does not generate" in message
    assert message.count("\n") == 1
    assert bottega.load(digits.path).workload.sampler.example_flags() is None


def test_exported_latents_have_unit_variance(digits: Any, exported: Path) -> None:
    workload, vae = bottega.load(digits.path).workload, load_autoencoder(exported)
    index = np.arange(len(workload.data.training()))
    x = torch.from_numpy(workload.data.training().rows(index, 0 * index)["image"])
    with torch.no_grad():
        mean, log_variance = vae.encode(x)
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(0))
    assert vae.shape.shift_factor == 0, "stock pipelines support a scale only"
    latents = (mean + (log_variance / 2).exp() * noise) * vae.shape.scaling_factor
    assert float(latents.square().mean()) == pytest.approx(1, abs=0.05)


def test_export_is_deterministic(digits: Any, exported: Path, tmp_path: Path) -> None:
    again = bottega.load(digits.path).export(tmp_path / "again")
    for file in ("config.json", "diffusion_pytorch_model.safetensors"):
        assert (again / file).read_bytes() == (exported / file).read_bytes()


def test_diffusers_opens_an_autoencoder_of_images(digits: Any, exported: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    theirs = diffusers.AutoencoderKL.from_pretrained(exported, local_files_only=True).eval()
    x = torch.from_numpy(
        bottega.load(digits.path).workload.data.training().rows(np.arange(4), np.zeros(4, int))["image"]
    )
    with torch.no_grad():
        mean = theirs.encode(x.movedim(-1, 1)).latent_dist.mean.movedim(1, -1)
        ours = load_autoencoder(exported).encode(x)[0]
    np.testing.assert_allclose(mean, ours, rtol=0, atol=1e-5)
    assert theirs.config.scaling_factor == json.loads((exported / "config.json").read_text())["scaling_factor"]


def test_training_starts_from_an_exported_run(digits: Any, exported: Path, tmp_path: Path) -> None:
    same = {
        "model.hidden_size": 16,
        "model.latent_channels": 4,
        "training.max_steps": 1,
        "training.learning_rate": 1e-9,
    }
    data = small_media.write_images(tmp_path)
    path = train(tmp_path, data, **same, **{"model.from": str(digits.path), "name": "more"}).path
    after, before = bottega.load(path).model.state_dict(), load_autoencoder(exported).state_dict()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=1e-6)
    with pytest.raises(UsageError, match=r"model\.from: .* has widths"):
        train(tmp_path, data, **{**same, "model.hidden_size": 8, "model.from": str(digits.path), "name": "other"})


@pytest.mark.parametrize("axes", [1, 2])
def test_audio_of_one_and_two_axes(tmp_path: Path, axes: int) -> None:
    options = {**AUDIO, "model.axes": axes, "training.max_steps": 3, "samples.every": 3, "samples.count": 2}
    run = train(tmp_path, small_media.write_audio(tmp_path), **options)
    assert (run.path / "samples" / "step-00000003" / "03.wav").is_file()
    saved = bottega.load(run.path)
    assert saved.workload.task.shape.dims == axes
    assert np.isfinite(list(saved.evaluate().values())).all()
    folder = saved.export()
    assert (folder / "mel.json").is_file()
    vae, mel = load_autoencoder(folder), saved.workload.mel
    grid = mel.shape[:axes]
    assert vae.shape.channels == (8 if axes == 1 else 1)
    assert vae.latent_shape(grid) == (*(side // 2 for side in grid), 2)


def test_video_is_causal(tmp_path: Path) -> None:
    options = {"data.input": "video", "data.num_frames": 3, "data.channels": 1, "model.temporal_downsample": 2}
    run = train(
        tmp_path,
        small_media.write_videos(tmp_path),
        **options,
        **{"training.max_steps": 3, "samples.every": 3, "samples.count": 2},
    )
    assert (run.path / "samples" / "step-00000003" / "sheet.gif").is_file()
    vae = load_autoencoder(bottega.load(run.path).export())
    assert vae.shape.causal_time
    assert vae.latent_shape((3, 8, 8)) == (2, 4, 4, 2)
    x = torch.linspace(-1, 1, 3 * 64).reshape(1, 3, 8, 8, 1)
    with torch.no_grad():
        first, other = vae.encode(x)[0], vae.encode(torch.cat([x[:, :1], -x[:, 1:]], dim=1))[0]
    torch.testing.assert_close(first[:, 0], other[:, 0])
    assert not torch.equal(first[:, 1], other[:, 1])


@pytest.mark.parametrize(
    ("write_data", "changes", "message"),
    [
        (
            small_media.write_images,
            {"model.dropout": 0.1},
            r"model\.dropout: 0\.1 has no effect: an autoencoder has no dropout",
        ),
        (small_media.write_images, {"data.normalise": "unit"}, r"data\.normalise: unit"),
        (small_media.write_images, {"data.buckets": 2, "data.image_size": 8}, r"data\.buckets"),
        (small_media.write_images, {"data.image_size": 9}, r"height 9 \(must be a multiple of 2, such as 10\)"),
        (small_media.write_images, {"data.latents": True}, r"data\.latents: needs model\.vae"),
        (small_media.write_images, {"data.input": "text"}, r"data\.input"),
        (small_media.write_images, {"model.from": "nowhere"}, r"model\.from: nowhere is not a folder"),
        (
            small_media.write_audio,
            {**AUDIO, "data.num_mels": 9},
            r"data\.num_mels: 9 is not a multiple of model\.downsample 2",
        ),
        (
            small_media.write_videos,
            {"data.input": "video", "data.num_frames": 4, "model.temporal_downsample": 2},
            r"frames 4 \(must be 1 more than a multiple of 2, such as 5\)",
        ),
        (
            small_media.write_videos,
            {"data.input": "video", "data.num_frames": 4, "model.temporal_downsample": 8},
            r"^model\.temporal_downsample 8 must be a power of two up to 2",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_invalid_settings_are_refused(tmp_path: Path, write_data: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        train(tmp_path, write_data(tmp_path), **changes)
