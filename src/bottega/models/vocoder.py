"""Vocoder from log-mel spectrograms to waveforms: a frozen, pretrained SpeechT5HifiGan of transformers.

A vocoder's config has its sample rate, mel bands and hop size, but not how its spectrograms were computed. We assume what
both published families share: magnitudes in Slaney-normalised mel bands, windows of 1,024 samples centred on each hop. With
`normalize_before` the vocoder belongs to the family of SpeechT5: decimal logarithms, 80 to 7,600 Hz. Without, it belongs to
the family of AudioLDM and the first HiFi-GANs: natural logarithms, 0 to 8,000 Hz.

B batch   T frames   M mel bands   N audio samples, T times the hop size
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, final

import torch
from safetensors.torch import save_file
from torch import Tensor

from bottega.core.errors import EnvironmentProblem, UsageError
from bottega.models.folders.resolve import find_component_folder
from bottega.models.folders.transformers_loader import load_pretrained
from bottega.models.folders.untrusted import require_safetensors
from bottega.models.pipeline.component import CONFIG, read_config, to_cpu

VOCODER_CLASS = "SpeechT5HifiGan"
COMPONENT = "vocoder"
"""The folder of a vocoder in a diffusers pipeline."""
SPEECH_BAND, WHOLE_BAND = (80.0, 7600.0), (0.0, 8000.0)
"""Frequencies in Hz of spectrograms with decimal and with natural logarithms."""


@final
class Vocoder:
    """Maps natural-log mel magnitudes (B, T, M) to waveforms (B, N) in -1..1."""

    def __init__(self, network: Any) -> None:
        config = network.config
        self.network = network
        self.sample_rate, self.num_mels = int(config.sampling_rate), int(config.model_in_dim)
        self.hop_size = math.prod(config.upsample_rates)
        self.uses_decimal_log = bool(config.normalize_before)
        low, high = SPEECH_BAND if self.uses_decimal_log else WHOLE_BAND
        self.low, self.high = low, min(high, self.sample_rate / 2)
        """Frequencies in Hz at which the lowest mel band begins and the highest ends."""

    @torch.no_grad()
    def __call__(self, log_mel: Tensor) -> Tensor:
        """Return the waveforms, on the device of the spectrograms; the network is moved there."""
        waveform: Tensor = self.network.to(log_mel.device)(log_mel / math.log(10) if self.uses_decimal_log else log_mel)
        return waveform

    def check_spectrogram(self, *, sample_rate: int, num_mels: int, hop_size: int) -> None:
        """Raise UsageError if the vocoder was trained on spectrograms with other settings."""
        settings = {"sample_rate": sample_rate, "num_mels": num_mels, "hop_size": hop_size}
        mismatches = [
            f"data.{key} is {value}, the vocoder has {getattr(self, key)}"
            for key, value in settings.items()
            if value != getattr(self, key)
        ]
        if mismatches:
            remedy = " ".join(f"data.{key}={getattr(self, key)}" for key in settings)
            raise UsageError(
                f"model.vocoder: it was trained on other spectrograms than the data's: {'; '.join(mismatches)}; set {remedy}"
            )

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors; the network's own `save_pretrained` would show a progress bar."""
        self.network.config.save_pretrained(folder)
        save_file(to_cpu(self.network.state_dict()), folder / "model.safetensors", metadata={"format": "pt"})


def load_vocoder(folder: Path | str) -> Vocoder:
    """Return the vocoder of a folder, or of a diffusers pipeline's `vocoder/`, in float32. Missing weights are an error."""
    root = Path(folder).expanduser()
    path = find_component_folder(root, COMPONENT)
    if not (path / CONFIG).is_file():
        raise UsageError(
            f"model.vocoder: no {CONFIG} in {root} or its {COMPONENT}/; give the folder of a {VOCODER_CLASS}"
        )
    architecture = (read_config(path).get("architectures") or ["another architecture"])[0]
    if architecture != VOCODER_CLASS:
        raise UsageError(f"model.vocoder: {path} contains {architecture}; only {VOCODER_CLASS} is supported")
    require_safetensors(path)
    return Vocoder(_load_network(path).eval().requires_grad_(False))


def _load_network(folder: Path) -> Any:
    try:
        from transformers import SpeechT5HifiGan
    except ImportError as error:
        raise EnvironmentProblem("model.vocoder: needs transformers; pip install 'bottega[hub]'") from error
    return load_pretrained(SpeechT5HifiGan, folder, description=f"a {VOCODER_CLASS}", dtype=torch.float32)
