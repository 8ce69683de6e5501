"""Audio as a medium of generation: mel spectrograms, and back to a waveform by Griffin-Lim or a vocoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

from bottega.core.errors import BottegaError, CheckpointError
from bottega.data.audio.mel import MelProcessor
from bottega.data.audio.write import WRITABLE_SUFFIXES, write_audio_files
from bottega.data.prepare.prepared import PreparedData
from bottega.data.sources.samples import fit_mel_processor
from bottega.tasks.generation.code_tokenizer import CodeTokenizer
from bottega.tasks.generation.config import AudioRecipe
from bottega.tasks.generation.latent_space import LatentSpace, load_mel_processor
from bottega.tasks.generation.media import Medium

if TYPE_CHECKING:
    from bottega.models.vocoder import Vocoder

VOCODER_FOLDER = "vocoder"
# Audio samples that are computed at once: 48 s at 22 kHz. With hops of a quarter window, each of Griffin-Lim's arrays has
# two complex numbers per audio sample, and there are about six arrays.
MAX_SAMPLES_AT_ONCE = 1 << 20


@final
class AudioMedium(Medium):
    """Audio: float32 (clips, samples), generated as mel spectrograms."""

    name, key, unit = "audio", "mel", "clips"
    suffixes = WRITABLE_SUFFIXES

    def __init__(self, recipe: AudioRecipe, mel: MelProcessor, load: Callable[[], Vocoder | None]) -> None:
        """`load` returns the vocoder or None for Griffin-Lim, and is called when the vocoder is first used."""
        self.recipe, self.mel, self._load_vocoder = recipe, mel, load

    @cached_property
    def vocoder(self) -> Vocoder | None:
        """Turns spectrograms into waveforms; None is Griffin-Lim."""
        return self._load_vocoder()

    def read_sides(self, prepared: PreparedData) -> tuple[tuple[int, ...], int]:
        frames, bands, channels = self.mel.shape
        return ((frames,), bands) if self.recipe.model.axes == 1 else ((frames, bands), channels)

    def get_patch(self) -> tuple[int, ...]:
        return (self.recipe.model.patch_size,) * self.recipe.model.axes

    def from_values(self, x: np.ndarray, *, device: Any = "cpu") -> np.ndarray:
        x = x.reshape(len(x), *self.mel.shape)
        clips_at_once = max(1, MAX_SAMPLES_AT_ONCE // self.mel.num_samples)
        chunks = [x[start : start + clips_at_once] for start in range(0, len(x), clips_at_once)]
        return np.concatenate([self._to_waveform(chunk, device) for chunk in chunks])

    def _to_waveform(self, x: np.ndarray, device: Any) -> np.ndarray:
        if self.vocoder is None:
            return self.mel.decode(x)
        import torch

        log_mel = torch.from_numpy(self.mel.scale.undo(x[..., 0])).to(device)
        return self.vocoder(log_mel)[:, : self.mel.num_samples].cpu().numpy()

    def to_values(self, samples: np.ndarray) -> np.ndarray:
        return self.mel.encode(samples)

    def write(self, samples: np.ndarray, path: Path, captions: Sequence[str] | None) -> list[Path]:
        return write_audio_files(samples, self.mel.mel.sample_rate, path, captions=captions)


def open_audio(
    recipe: AudioRecipe, prepared: PreparedData, *, space: LatentSpace | None, code_tokenizer: CodeTokenizer | None
) -> AudioMedium:
    """Return the audio of a new run: spectrograms with the frequency band of the vocoder, and with the scale of the frozen
    autoencoder or tokenizer if there is one, else measured on the training data."""
    vocoder = _load_vocoder(recipe.model.vocoder) if recipe.model.vocoder is not None else None
    frequency_band: dict[str, Any] = {}
    if vocoder is not None:
        rate, data = int(prepared.metadata["sample_rate"]), recipe.data
        vocoder.check_spectrogram(sample_rate=rate, num_mels=data.num_mels, hop_size=data.hop_size)
        frequency_band = {"low": vocoder.low, "high": vocoder.high}
    if space is not None:
        mel = load_mel_processor(space.folder, recipe, prepared, **frequency_band)
    else:
        mel = fit_mel_processor(
            recipe, prepared, multiple=_choose_frame_multiple(recipe, code_tokenizer), **frequency_band
        )
        mel = mel if code_tokenizer is None else code_tokenizer.match_mel(mel)
    return AudioMedium(recipe, mel, lambda: vocoder)


def reopen_audio(recipe: AudioRecipe, processor: Path) -> AudioMedium:
    """Return the audio of a finished run, from its saved processor."""
    mel = MelProcessor.load(processor)
    return AudioMedium(recipe, mel, lambda: _load_saved_vocoder(recipe, mel, processor / VOCODER_FOLDER))


def _load_vocoder(folder: Path | str) -> Vocoder:
    from bottega.models.vocoder import load_vocoder  # imports torch

    return load_vocoder(folder)


def _load_saved_vocoder(recipe: AudioRecipe, processor: MelProcessor, folder: Path) -> Vocoder | None:
    if recipe.model.vocoder is None:
        return None
    try:
        vocoder, mel = _load_vocoder(folder), processor.mel
        vocoder.check_spectrogram(sample_rate=mel.sample_rate, num_mels=mel.num_mels, hop_size=mel.hop_size)
    except BottegaError as error:
        raise CheckpointError(f"the vocoder of this run: {error}; copy {recipe.model.vocoder} to {folder}") from error
    return vocoder


def _choose_frame_multiple(recipe: AudioRecipe, code_tokenizer: CodeTokenizer | None) -> int:
    """Return the number that the number of frames must be a multiple of."""
    if code_tokenizer is not None:
        return code_tokenizer.downsample
    model = recipe.model
    return model.patch_size if model.backbone == "dit" else 2 ** (model.stages - 1)
