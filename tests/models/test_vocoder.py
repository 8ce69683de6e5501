"""Vocoders: which folders load, their input, and their use by a run."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import bottega
import small_media
from bottega.core.errors import CheckpointError, UsageError
from bottega.data.audio.spectrogram import MelSpectrogram
from bottega.models.vocoder import load_vocoder

pytest.importorskip("transformers")
RATE, BANDS, HOP = 8000, 8, 64


def save_vocoder(folder: Path, **changes: Any) -> Path:
    """Save a small vocoder with seeded weights."""
    from transformers import SpeechT5HifiGan, SpeechT5HifiGanConfig
    from transformers.utils import logging

    options = {
        "model_in_dim": BANDS,
        "sampling_rate": RATE,
        "upsample_initial_channel": 16,
        "upsample_rates": [8, 8],
        "upsample_kernel_sizes": [16, 16],
        "resblock_kernel_sizes": [3],
        "resblock_dilation_sizes": [[1, 3]],
    }
    network = SpeechT5HifiGan(SpeechT5HifiGanConfig(**{**options, **changes}))
    with torch.no_grad():
        for number, weight in enumerate(network.parameters()):
            weight.copy_(0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))
    logging.disable_progress_bar()
    try:
        network.save_pretrained(folder)
    finally:
        logging.enable_progress_bar()
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vocoder(tmp_path_factory.mktemp("vocoder"))


def draw_spectrograms(frames: int = 5) -> torch.Tensor:
    return torch.randn(2, frames, BANDS, generator=torch.Generator().manual_seed(0)) - 4


def test_each_frame_becomes_one_hop_of_audio(folder: Path) -> None:
    vocoder = load_vocoder(folder)
    assert (vocoder.sample_rate, vocoder.num_mels, vocoder.hop_size) == (RATE, BANDS, HOP)
    waveform = vocoder(draw_spectrograms())
    assert waveform.shape == (2, 5 * HOP)
    assert 0.01 < waveform.std() < 1
    assert not any(p.requires_grad for p in vocoder.network.parameters())
    assert not waveform.requires_grad


def test_input_uses_the_logarithm_base_of_the_network(folder: Path, tmp_path: Path) -> None:
    """SpeechT5 uses base 10; AudioLDM, whose config does not normalise, uses natural logarithms."""
    from transformers import SpeechT5HifiGan

    magnitudes = draw_spectrograms().exp()
    for vocoder, logarithm in (
        (load_vocoder(folder), magnitudes.log10()),
        (load_vocoder(save_vocoder(tmp_path / "natural", normalize_before=False)), magnitudes.log()),
    ):
        network = vocoder.network
        assert isinstance(network, SpeechT5HifiGan)
        with torch.no_grad():
            expected = network(logarithm)
        torch.testing.assert_close(vocoder(magnitudes.log()), expected, atol=1e-5, rtol=1e-5)


def test_mel_spectrogram_matches_the_speecht5_extractor(folder: Path) -> None:
    """SpeechT5's own extractor has its own filters, windows and base."""
    from transformers import SpeechT5FeatureExtractor

    rate = 16_000
    extractor = SpeechT5FeatureExtractor()
    rng = np.random.default_rng(0)
    waveform = (0.1 * rng.standard_normal(256 * 12)).astype(np.float32)
    theirs = extractor(audio_target=waveform, sampling_rate=rate)["input_values"][0]
    low, high = load_vocoder(folder).low, extractor.fmax
    assert low == extractor.fmin
    ours = MelSpectrogram(sample_rate=rate, fft_size=1024, hop_size=256, num_mels=80, low=low, high=high).encode(
        waveform
    )
    middle = slice(3, 9)  # the ends are padded differently
    np.testing.assert_allclose(ours[middle] / math.log(10), theirs[middle], atol=2e-3)


def test_vocoder_of_a_pipeline_loads(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "pipeline" / "vocoder")
    (tmp_path / "pipeline" / "model_index.json").write_text("{}")
    vocoder = load_vocoder(tmp_path / "pipeline")
    torch.testing.assert_close(vocoder(draw_spectrograms()), load_vocoder(folder)(draw_spectrograms()), atol=0, rtol=0)


def test_mismatched_spectrogram_names_both_values(folder: Path) -> None:
    vocoder = load_vocoder(folder)
    vocoder.check_spectrogram(sample_rate=RATE, num_mels=BANDS, hop_size=HOP)
    with pytest.raises(
        UsageError, match=r"data\.sample_rate is 22050, the vocoder has 8000; data\.hop_size is 128, the vocoder has 64"
    ):
        vocoder.check_spectrogram(sample_rate=22_050, num_mels=BANDS, hop_size=128)
    with pytest.raises(UsageError, match=r"data\.num_mels is 80, the vocoder has 8; set .*data\.num_mels=8"):
        vocoder.check_spectrogram(sample_rate=RATE, num_mels=80, hop_size=HOP)


def test_folder_that_is_not_a_vocoder_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"model\.vocoder: no config\.json in .*nowhere"):
        load_vocoder(tmp_path / "nowhere")
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "architectures": ["UnivNetModel"]}))
    with pytest.raises(UsageError, match="contains UnivNetModel; only SpeechT5HifiGan is supported"):
        load_vocoder(other)
    (other / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        load_vocoder(other)


def test_pickles_and_missing_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "own"))
    weights = copy / "model.safetensors"
    tensors = load_file(weights)
    tensors.pop("conv_post.weight")
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks conv_post\.weight"):
        load_vocoder(copy)
    weights.write_bytes(b"\0" * 100)
    with pytest.raises(CheckpointError, match="is damaged"):
        load_vocoder(copy)
    weights.rename(copy / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickles are never opened"):
        load_vocoder(copy)


def test_run_generates_through_the_vocoder_and_stores_a_copy(folder: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(folder, tmp_path / "source"))
    options = {**small_media.audio(tmp_path), "training.max_steps": 2, "model.vocoder": str(source)}
    judge = {"training.max_steps": 2, "training.batch_size": 8, "model.hidden_size": 8}
    options |= {f"needs.judge.settings.{key}": value for key, value in judge.items()}
    run = bottega.train("audio", {**options, "samples.every": 2, "samples.count": 2})
    shutil.rmtree(source)
    saved = bottega.load(run.path)
    workload = saved.workload
    mel = workload.mel.mel
    assert (mel.low, mel.high) == (80, 4000), "the mel bands are the vocoder's"
    x = np.random.default_rng(0).standard_normal((3, *workload.mel.shape)).astype(np.float32)
    waveforms = workload.medium.from_values(x)
    assert waveforms.shape == (3, workload.mel.num_samples)
    log_mel = torch.from_numpy(workload.mel.scale.undo(x[..., 0]))
    expected = load_vocoder(folder)(log_mel)[:, : workload.mel.num_samples].numpy()
    np.testing.assert_allclose(waveforms, expected, atol=1e-6)
    clips = np.random.default_rng(1).uniform(-0.5, 0.5, (2, 800)).astype(np.float32)
    round_trip = workload.round_trip({}, clips, "cpu")
    np.testing.assert_allclose(round_trip, workload.medium.from_values(workload.medium.to_values(clips)), atol=1e-6)
    metrics = bottega.evaluate(run.path, count=4)
    assert {"real", "through_codec"} <= metrics.keys()
    shutil.rmtree(run.path / "processor" / "vocoder")
    with pytest.raises(CheckpointError, match=r"the vocoder of this run: .*processor/vocoder"):
        bottega.load(run.path).generate(count=1)


def test_run_with_a_mismatched_spectrogram_is_refused(folder: Path, tmp_path: Path) -> None:
    options = {**small_media.audio(tmp_path), "model.vocoder": str(folder), "data.hop_size": 32}
    with pytest.raises(UsageError, match=r"data\.hop_size is 32, the vocoder has 64"):
        bottega.train("audio", options)
