"""The audio branch: sound as its mel spectrogram, and back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from bottega.config.recipe import Recipe
from bottega.core.errors import BottegaError, CheckpointError
from bottega.core.types import Batch, Models
from bottega.data.audio.mel import MelProcessor
from bottega.data.audio.write import WRITABLE_SUFFIXES, write_audio_files
from bottega.data.prepare.media import prepare_media
from bottega.data.sources.samples import fit_mel_processor
from bottega.models.vocoder import Vocoder, load_vocoder
from bottega.tasks.generation.config import AudioRecipe
from bottega.tasks.generation.latent_space import load_mel_processor
from bottega.tasks.generation.workload import GenerationWorkload, Say

VOCODER = "vocoder"
# Samples that become sound at once: 48 s at 22 kHz. With hops of a quarter window, each of Griffin-Lim's arrays has two
# complex numbers for a sample, and there are about six.
AT_ONCE = 1 << 20


def prepare(recipe: Recipe, *, say: Say) -> AudioWorkload:
    assert isinstance(recipe, AudioRecipe)
    return AudioWorkload(recipe, prepare_media(recipe, progress=say)).keep_latents(say)


def reopen(recipe: Recipe, processor: Path, fingerprint: str) -> AudioWorkload:
    assert isinstance(recipe, AudioRecipe)
    return AudioWorkload(recipe, None, processor=processor, expected=fingerprint)


@final
class AudioWorkload(GenerationWorkload):
    key, medium = "mel", "audio"
    recipe: AudioRecipe
    unit = "sounds"
    endings = WRITABLE_SUFFIXES
    _device: Any = "cpu"
    """Where samples were drawn last, and the vocoder works."""

    @cached_property
    def mel(self) -> MelProcessor:  # type: ignore[override]
        """Measured on the training data, or as the run has kept it; in the bands of the vocoder, where there is one."""
        if self._processor is not None:
            return MelProcessor.load(self._processor)
        vocoder, data = self.vocoder, self.recipe.data
        band: dict[str, Any] = {}
        if vocoder is not None:
            rate = int(self.prepared.metadata["sample_rate"])
            vocoder.check_spectrogram(sample_rate=rate, num_mels=data.num_mels, hop_size=data.hop_size)
            band = {"low": vocoder.low, "high": vocoder.high}
        if self.space is not None:
            return load_mel_processor(self.space.folder, self.recipe, self.prepared, **band)
        own = fit_mel_processor(self.recipe, self.prepared, multiple=self._multiple(), **band)
        return own if self.codes is None else self.codes.match_mel(own)

    @cached_property
    def vocoder(self) -> Vocoder | None:
        """That of the recipe; a run keeps a copy, so that it can be heard where the folder is not."""
        if self.recipe.model.vocoder is None:
            return None
        if self._processor is None:
            return load_vocoder(self.recipe.model.vocoder)
        folder = self._processor / VOCODER
        try:
            found = load_vocoder(folder)
            mel = self.mel.mel
            found.check_spectrogram(sample_rate=mel.sample_rate, num_mels=mel.num_mels, hop_size=mel.hop_size)
        except BottegaError as error:
            raise CheckpointError(
                f"the vocoder of this run: {error}; copy {self.recipe.model.vocoder} to {folder}"
            ) from error
        return found

    @property
    def sample_rate(self) -> int:
        return self.mel.mel.sample_rate

    def sides(self) -> tuple[tuple[int, ...], int]:
        frames, bands, channels = self.mel.shape
        return ((frames,), bands) if self.recipe.model.axes == 1 else ((frames, bands), channels)

    def patch(self) -> tuple[int, ...]:
        return (self.recipe.model.patch_size,) * self.recipe.model.axes

    def draw(self, models: Models, rows: Batch, *, device: Any, **options: Any) -> np.ndarray:
        self._device = device
        return super().draw(models, rows, device=device, **options)

    def to_medium(self, x: np.ndarray) -> np.ndarray:
        x = x.reshape(len(x), *self.mel.shape)
        step = max(1, AT_ONCE // self.mel.num_samples)
        return np.concatenate([self._heard(x[i : i + step]) for i in range(0, len(x), step)])

    def _heard(self, x: np.ndarray) -> np.ndarray:
        if self.vocoder is None:
            return self.mel.decode(x)
        log_mel = torch.from_numpy(self.mel.scale.undo(x[..., 0])).to(self._device)
        return self.vocoder(log_mel)[:, : self.mel.num_samples].cpu().numpy()

    def to_values(self, samples: np.ndarray) -> np.ndarray:
        values = self.mel.encode(samples)
        return values if self.facts.latents is not None else values.reshape(-1, *self.facts.shape.sample)

    def round_trip(self, models: Models, samples: np.ndarray, device: Any) -> np.ndarray:
        self._device = device
        if self.task.latents is not None:
            return super().round_trip(models, samples, device)
        return self.to_medium(self.to_values(samples))

    def write(self, made: np.ndarray, path: Path, captions: Sequence[str] | None) -> list[Path]:
        return write_audio_files(made, self.sample_rate, path, captions=captions)

    def has_processor(self, folder: Path) -> bool:
        return super().has_processor(folder) and (self.vocoder is None or (folder / VOCODER).is_dir())

    def write_processor(self, folder: Path) -> None:
        super().write_processor(folder)
        self.mel.save(folder)
        if self.vocoder is not None:
            self.vocoder.save(folder / VOCODER)

    def _multiple(self) -> int:
        """What the number of frames has to be divisible by."""
        if self.codes is not None:
            return self.codes.downsample
        model = self.recipe.model
        return model.patch_size if model.backbone == "dit" else 2 ** (model.stages - 1)
