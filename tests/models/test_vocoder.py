"""Which folders are opened as a vocoder, what it is handed, and what a run does with it."""

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


def saved(folder: Path, **changes: Any) -> Path:
    """A small one with weights that are a function of their names."""
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
    return saved(tmp_path_factory.mktemp("vocoder"))


def spectrograms(frames: int = 5) -> torch.Tensor:
    return torch.randn(2, frames, BANDS, generator=torch.Generator().manual_seed(0)) - 4


def test_a_frame_becomes_a_hop_of_sound(folder: Path) -> None:
    vocoder = load_vocoder(folder)
    assert (vocoder.sample_rate, vocoder.num_mels, vocoder.hop_size) == (RATE, BANDS, HOP)
    heard = vocoder(spectrograms())
    assert heard.shape == (2, 5 * HOP)
    assert 0.01 < heard.std() < 1
    assert not any(p.requires_grad for p in vocoder.network.parameters())
    assert not heard.requires_grad


def test_the_network_sees_logarithms_of_its_own_base(folder: Path, tmp_path: Path) -> None:
    """SpeechT5's are decimal; AudioLDM's, whose config normalises nothing, are natural."""
    from transformers import SpeechT5HifiGan

    magnitudes = spectrograms().exp()
    for vocoder, logarithm in (
        (load_vocoder(folder), magnitudes.log10()),
        (load_vocoder(saved(tmp_path / "natural", normalize_before=False)), magnitudes.log()),
    ):
        network = vocoder.network
        assert isinstance(network, SpeechT5HifiGan)
        with torch.no_grad():
            expected = network(logarithm)
        torch.testing.assert_close(vocoder(magnitudes.log()), expected, atol=1e-5, rtol=1e-5)


def test_our_spectrogram_in_its_bands_is_the_one_it_was_trained_on(folder: Path) -> None:
    """Against the extractor of SpeechT5 itself, which has its own filters, windows and base."""
    from transformers import SpeechT5FeatureExtractor

    rate = 16_000
    extractor = SpeechT5FeatureExtractor()
    rng = np.random.default_rng(0)
    sound = (0.1 * rng.standard_normal(256 * 12)).astype(np.float32)
    theirs = extractor(audio_target=sound, sampling_rate=rate)["input_values"][0]
    low, high = load_vocoder(folder).low, extractor.fmax
    assert low == extractor.fmin
    ours = MelSpectrogram(sample_rate=rate, fft_size=1024, hop_size=256, num_mels=80, low=low, high=high).encode(sound)
    middle = slice(3, 9)  # the ends are mirrored here and there in other ways
    np.testing.assert_allclose(ours[middle] / math.log(10), theirs[middle], atol=2e-3)


def test_the_part_of_a_pipeline_is_found(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "pipeline" / "vocoder")
    (tmp_path / "pipeline" / "model_index.json").write_text("{}")
    found = load_vocoder(tmp_path / "pipeline")
    torch.testing.assert_close(found(spectrograms()), load_vocoder(folder)(spectrograms()), atol=0, rtol=0)


def test_what_does_not_fit_is_named_on_both_sides(folder: Path) -> None:
    vocoder = load_vocoder(folder)
    vocoder.check_spectrogram(sample_rate=RATE, num_mels=BANDS, hop_size=HOP)
    with pytest.raises(
        UsageError, match=r"data\.sample_rate is 22050, the vocoder has 8000; data\.hop_size is 128, the vocoder has 64"
    ):
        vocoder.check_spectrogram(sample_rate=22_050, num_mels=BANDS, hop_size=128)
    with pytest.raises(UsageError, match=r"data\.num_mels is 80, the vocoder has 8; set .*data\.num_mels=8"):
        vocoder.check_spectrogram(sample_rate=RATE, num_mels=80, hop_size=HOP)


def test_folders_that_are_no_vocoder(folder: Path, tmp_path: Path) -> None:
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


def test_pickles_are_refused_and_a_missing_weight_is_never_drawn(folder: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(folder, tmp_path / "own"))
    weights = own / "model.safetensors"
    tensors = load_file(weights)
    tensors.pop("conv_post.weight")
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks conv_post\.weight"):
        load_vocoder(own)
    weights.write_bytes(b"\0" * 100)
    with pytest.raises(CheckpointError, match="is damaged"):
        load_vocoder(own)
    weights.rename(own / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickles are never opened"):
        load_vocoder(own)


def test_a_run_is_heard_through_it_and_keeps_it(folder: Path, tmp_path: Path) -> None:
    given = Path(shutil.copytree(folder, tmp_path / "given"))
    options = {**small_media.audio(tmp_path), "training.max_steps": 2, "model.vocoder": str(given)}
    judge = {"training.max_steps": 2, "training.batch_size": 8, "model.hidden_size": 8}
    options |= {f"needs.judge.settings.{key}": value for key, value in judge.items()}
    run = bottega.train("audio", {**options, "samples.every": 2, "samples.count": 2})
    shutil.rmtree(given)
    saved = bottega.load(run.path)
    workload = saved.workload
    mel = workload.mel.mel
    assert (mel.low, mel.high) == (80, 4000), "the bands are the vocoder's"
    x = np.random.default_rng(0).standard_normal((3, *workload.mel.shape)).astype(np.float32)
    heard = workload.medium.from_values(x)
    assert heard.shape == (3, workload.mel.num_samples)
    log_mel = torch.from_numpy(workload.mel.scale.undo(x[..., 0]))
    expected = load_vocoder(folder)(log_mel)[:, : workload.mel.num_samples].numpy()
    np.testing.assert_allclose(heard, expected, atol=1e-6)
    sounds = np.random.default_rng(1).uniform(-0.5, 0.5, (2, 800)).astype(np.float32)
    through = workload.round_trip({}, sounds, "cpu")
    np.testing.assert_allclose(through, workload.medium.from_values(workload.medium.to_values(sounds)), atol=1e-6)
    scored = bottega.evaluate(run.path, count=4)
    assert {"real", "through_codec"} <= scored.keys()
    shutil.rmtree(run.path / "processor" / "vocoder")
    with pytest.raises(CheckpointError, match=r"the vocoder of this run: .*processor/vocoder"):
        bottega.load(run.path).generate(count=1)


def test_a_run_of_another_form_is_refused_before_it_begins(folder: Path, tmp_path: Path) -> None:
    options = {**small_media.audio(tmp_path), "model.vocoder": str(folder), "data.hop_size": 32}
    with pytest.raises(UsageError, match=r"data\.hop_size is 32, the vocoder has 64"):
        bottega.train("audio", options)
