"""Log-mel spectrograms to sound by a pretrained network, frozen: transformers' SpeechT5HifiGan, a folder of safetensors.

A vocoder's config says its sample rate, bands and hop, and not how its spectrograms were made. Assumed is what its two
families have in common: magnitudes in Slaney's bands of area 1, windows of 1,024 samples centred on each hop. A config with
`normalize_before` is of SpeechT5's: decimal logarithms, 80 to 7,600 Hz. One without is of AudioLDM's and the first
HiFi-GANs: natural logarithms, 0 to 8,000 Hz.

B sounds   T frames   M mel bands   N samples, T times the hop
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, final

import torch
from safetensors.torch import save_file
from torch import Tensor

from bottega.core.errors import CheckpointError, EnvironmentProblem, UsageError, first_line
from bottega.models.folders.resolve import find_component_folder
from bottega.models.pipeline.component import CONFIG, read_config, to_cpu

CLASS = "SpeechT5HifiGan"
PART = "vocoder"
"""Its folder in a pipeline of diffusers."""
SPEECH_BAND, WHOLE_BAND = (80.0, 7600.0), (0.0, 8000.0)


@final
class Vocoder:
    """[B, T, M], natural logarithms of magnitudes, to a sound [B, N] from -1 to 1."""

    def __init__(self, network: Any) -> None:
        config = network.config
        self.network = network
        self.sample_rate, self.num_mels = int(config.sampling_rate), int(config.model_in_dim)
        self.hop_size = math.prod(config.upsample_rates)
        self.is_decimal = bool(config.normalize_before)
        low, high = SPEECH_BAND if self.is_decimal else WHOLE_BAND
        self.low, self.high = low, min(high, self.sample_rate / 2)
        """Hertz where the lowest band begins and the highest ends."""

    @torch.no_grad()
    def __call__(self, log_mel: Tensor) -> Tensor:
        """Where the spectrograms are; the network follows them there."""
        heard: Tensor = self.network.to(log_mel.device)(log_mel / math.log(10) if self.is_decimal else log_mel)
        return heard

    def check_spectrogram(self, *, sample_rate: int, num_mels: int, hop_size: int) -> None:
        """A UsageError where spectrograms of this form are not the ones it reads."""
        asked = {"sample_rate": sample_rate, "num_mels": num_mels, "hop_size": hop_size}
        wrong = [
            f"data.{key} is {value} and it has {getattr(self, key)}"
            for key, value in asked.items()
            if value != getattr(self, key)
        ]
        if wrong:
            wanted = " ".join(f"data.{key}={getattr(self, key)}" for key in asked)
            raise UsageError(f"model.vocoder: reads other spectrograms: {'; '.join(wrong)}; set {wanted}")

    def save(self, folder: Path) -> None:
        """As it was loaded; not by `save_pretrained`, which shows a bar."""
        self.network.config.save_pretrained(folder)
        save_file(to_cpu(self.network.state_dict()), folder / "model.safetensors", metadata={"format": "pt"})


def load_vocoder(folder: Path | str) -> Vocoder:
    """From its own folder or a diffusers pipeline's, in float32. Neither pickles nor code of the folder are opened.

    A weight that is not there is an error, because transformers would draw it at random.
    """
    folder = Path(folder).expanduser()
    named, folder = folder, find_component_folder(folder, PART)
    if not (folder / CONFIG).is_file():
        raise UsageError(f"model.vocoder: there is no {CONFIG} in {named} or its {PART}/; give the folder of a {CLASS}")
    found = (read_config(folder).get("architectures") or ["something else"])[0]
    if found != CLASS:
        raise UsageError(f"model.vocoder: {folder} holds {found}; what can be used is a {CLASS}")
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{folder}: no *.safetensors in it, and pickles are never opened; convert the vocoder with transformers: "
            "model.save_pretrained(folder)"
        )
    return Vocoder(_network(folder).eval().requires_grad_(False))


def _network(folder: Path) -> Any:
    try:
        from transformers import SpeechT5HifiGan
        from transformers.utils import logging
    except ImportError as error:
        raise EnvironmentProblem("model.vocoder: needs transformers; pip install 'bottega[hub]'") from error
    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        loader: Any = SpeechT5HifiGan.from_pretrained
        network, seen = loader(
            folder, local_files_only=True, use_safetensors=True, dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:  # a damaged config or file reaches most of the library, which raises what happens there
        reason = first_line(error)
        raise CheckpointError(f"{folder}: cannot be loaded as a {CLASS}: {reason}") from error
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()
    if seen["missing_keys"]:
        raise CheckpointError(f"{folder}: lacks {sorted(seen['missing_keys'])[0]}; it is no complete {CLASS}")
    return network
