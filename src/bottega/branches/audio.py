"""The audio branch: sound as its mel spectrogram, and back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np

from bottega.branches.generation import GenerationBranch, Say
from bottega.core.types import Models
from bottega.data.audio.write import write_sounds
from bottega.data.mel import MelCodec
from bottega.data.prepare.media import prepare_media
from bottega.data.samples import mel_codec
from bottega.schema.media import AudioRecipe
from bottega.schema.recipe import Recipe


def prepare(recipe: Recipe, *, say: Say) -> AudioBranch:
    assert isinstance(recipe, AudioRecipe)
    return AudioBranch(recipe, prepare_media(recipe, progress=say))


def reopen(recipe: Recipe, codec: Path, fingerprint: str) -> AudioBranch:
    assert isinstance(recipe, AudioRecipe)
    return AudioBranch(recipe, None, codec=codec, expected=fingerprint)


@final
class AudioBranch(GenerationBranch):
    key, medium = "mel", "audio"
    recipe: AudioRecipe
    unit = "sounds"

    @cached_property
    def mel(self) -> MelCodec:  # type: ignore[override]
        """Measured on the training data, or as the run has kept it."""
        if self._codec is not None:
            return MelCodec.load(self._codec)
        return mel_codec(self.recipe, self.prepared, multiple=self._multiple())

    @property
    def sample_rate(self) -> int:
        return self.mel.mel.sample_rate

    def form(self) -> dict[str, Any]:
        return {"sample_rate": self.sample_rate}

    def sides(self) -> tuple[tuple[int, ...], int]:
        frames, bands, channels = self.mel.shape
        return ((frames,), bands) if self.recipe.model.axes == 1 else ((frames, bands), channels)

    def patch(self) -> tuple[int, ...]:
        return (self.recipe.model.patch_size,) * self.recipe.model.axes

    def medium_of(self, x: np.ndarray) -> np.ndarray:
        return self.mel.decode(x.reshape(len(x), *self.mel.shape))

    def values_of(self, samples: np.ndarray) -> np.ndarray:
        return self.mel.encode(samples).reshape(len(samples), *self.facts.shape.sample)

    def round_trip(self, models: Models, samples: np.ndarray, device: Any) -> np.ndarray:
        if self.task.latents is not None:
            return super().round_trip(models, samples, device)
        return self.medium_of(self.values_of(samples))

    def write(self, made: np.ndarray, path: Path, captions: Sequence[str] | None) -> list[Path]:
        return write_sounds(made, self.sample_rate, path, captions=captions)

    def write_codec(self, folder: Path) -> None:
        super().write_codec(folder)
        self.mel.save(folder)

    def _multiple(self) -> int:
        """What the number of frames has to be divisible by."""
        model = self.recipe.model
        return model.patch_size if model.backbone == "dit" else 2 ** (model.stages - 1)
