"""Waveforms as standardised log-mel spectrograms of one length, and back: the inputs and outputs of audio models."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any, final

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bottega.core.errors import CheckpointError, UsageError
from bottega.data.audio.source import AudioRows
from bottega.data.audio.spectrogram import MAGNITUDE_FLOOR, MelSpectrogram
from bottega.data.sources.source import Source

MEL_FILE = "mel.json"
REMEDY = "run the training command again to rewrite it"
MAX_MEASURED_CLIPS = 512
"""Number of clips that the scale is measured on; fewer if they are longer than 65,536 samples."""
MAX_MEASURED_SAMPLES = MAX_MEASURED_CLIPS << 16
MAX_CACHE_BYTES = 256 << 20
# Limits on the clips and samples whose spectra are in memory at once while the scale is measured.
MAX_CLIPS_AT_ONCE, MAX_SAMPLES_AT_ONCE = 32, 1 << 22


@final
class MelScale(BaseModel):
    """Standardisation x = (log_mel - mean) / (2 std), which puts most values between -1 and 1 as diffusion expects."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mean: float
    std: float = Field(gt=0)

    def apply(self, log_mel: np.ndarray) -> np.ndarray:
        """Standardise log-mel values."""
        return ((log_mel - self.mean) / (2 * self.std)).astype(np.float32)

    def undo(self, x: np.ndarray) -> np.ndarray:
        """Return the log-mel values of standardised values."""
        return (x.astype(np.float32) * (2 * self.std) + self.mean).astype(np.float32)


@final
class MelProcessor(BaseModel):
    """Converts waveforms `(batch, samples)` to spectrograms `(batch, frames, mels, 1)` and back. Saved with a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mel: MelSpectrogram
    scale: MelScale
    frames: int = Field(gt=0)
    """Number of frames, at least as many as `num_samples` need; further frames are silence."""
    num_samples: int = Field(gt=0)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of one spectrogram, `(frames, mels, 1)`."""
        return self.frames, self.mel.num_mels, 1

    def encode(self, audio: np.ndarray) -> np.ndarray:
        """Encode waveforms `(batch, samples)`, cropped or padded with silence, as float32 `(batch, frames, mels, 1)`."""
        return self.scale.apply(self.log_mel(audio))[..., None]

    def decode(self, x: np.ndarray, *, num_samples: int | None = None, seed: int = 0) -> np.ndarray:
        """Reconstruct float32 waveforms `(batch, num_samples)` from spectrograms, by Griffin-Lim."""
        length = self.num_samples if num_samples is None else num_samples
        return self.mel.decode(self.scale.undo(x[..., 0]), num_samples=self._padded_samples, seed=seed)[:, :length]

    def log_mel(self, audio: np.ndarray) -> np.ndarray:
        """Return the unscaled log-mel spectrograms `(batch, frames, mels)` of cropped or padded waveforms."""
        padded = np.zeros((len(audio), self._padded_samples), np.float32)
        length = min(audio.shape[1], self.num_samples)
        padded[:, :length] = audio[:, :length]
        return self.mel.encode(padded)

    @property
    def _padded_samples(self) -> int:
        """The number of samples that gives exactly `frames` frames."""
        return max(1, (self.frames - 1) * self.mel.hop_size)

    def notes(self) -> list[str]:
        """Return warnings about the data: silence, or mel bands that contain no frequency."""
        mel, notes = self.mel, []
        if self.scale.mean <= math.log(MAGNITUDE_FLOOR) + 1e-3:
            notes.append("all clips that were measured are silent; check data.train.path and data.train.field")
        if mel.num_empty_bands:
            notes.append(
                f"{mel.num_empty_bands} of {mel.num_mels} mel bands are narrower than the frequency resolution of fft_size "
                f"{mel.fft_size} and stay nearly empty; lower data.num_mels or raise data.fft_size"
            )
        return notes

    def save(self, folder: Path) -> None:
        """Write `mel.json` into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MEL_FILE).write_text(self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> MelProcessor:
        """Read `mel.json` from `folder`; raise `CheckpointError` if it is missing or invalid."""
        path = folder / MEL_FILE
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}; {REMEDY}") from error
        except (ValidationError, UsageError) as error:
            reason = str(error)
            if isinstance(error, ValidationError):
                first_error = error.errors()[0]
                reason = f"{'.'.join(map(str, first_error['loc'])) or 'its content'}: {first_error['msg']}"
            raise CheckpointError(f"{path} is not a valid mel processor: {reason}; {REMEDY}") from error


def fit_mel_processor(source: Source, mel: MelSpectrogram, *, num_samples: int, multiple: int = 1) -> MelProcessor:
    """Return a processor scaled to the audio of `source`; `frames` becomes a multiple of `multiple`, such as a patch size."""
    frames = -(-mel.num_frames(num_samples) // multiple) * multiple
    unscaled = MelProcessor(mel=mel, scale=MelScale(mean=0, std=0.5), frames=frames, num_samples=num_samples)
    return unscaled.model_copy(update={"scale": measure_mel_scale(source, unscaled)})


def measure_mel_scale(source: Source, processor: MelProcessor) -> MelScale:
    """Return mean and standard deviation of the log-mel values of up to 512 evenly spaced clips, as epoch 0 crops them."""
    num_clips = min(MAX_MEASURED_CLIPS, max(2, MAX_MEASURED_SAMPLES // processor.num_samples), len(source))
    clips_at_once = min(MAX_CLIPS_AT_ONCE, max(1, MAX_SAMPLES_AT_ONCE // processor.num_samples))
    index = np.unique(np.linspace(0, len(source) - 1, num_clips).astype(np.int64))
    count, total, total_squares = 0, 0.0, 0.0
    for start in range(0, len(index), clips_at_once):
        clip_index = index[start : start + clips_at_once]
        values = processor.log_mel(source.rows(clip_index, np.zeros_like(clip_index))["audio"]).astype(np.float64)
        count += values.size
        total += float(values.sum())
        total_squares += float((values**2).sum())
    mean = total / count
    deviation = max(total_squares / count - mean**2, 0.0) ** 0.5
    # Rounded, so that a CPU that sums in a different order gets the same values. Silence has a deviation of 0, hence the
    # minimum.
    return MelScale(mean=round(mean, 4), std=max(round(deviation, 4), 1e-3))


@final
class MelRows(Source):
    """Samples with `mel`, float32 `(batch, frames, mels, 1)`, in place of `audio`; other fields are passed on.

    Spectrograms of clips that are the same in every epoch are cached if all of them fit into 256 MB.
    """

    def __init__(self, source: AudioRows, processor: MelProcessor) -> None:
        self.source, self.processor = source, processor
        num_bytes = len(source) * 4 * processor.frames * processor.mel.num_mels
        self.is_deterministic = (
            find_deterministic_samples(source) if num_bytes <= MAX_CACHE_BYTES else np.zeros(len(source), np.bool_)
        )
        self._mels: np.ndarray | None = None
        self._is_cached = np.zeros(len(source), np.bool_)

    def __len__(self) -> int:
        return len(self.source)

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        rows = self.source.rows(index, epoch)
        audio = rows.pop("audio")
        is_new = ~self._is_cached[index]
        mel = np.empty((len(index), *self.processor.shape), np.float32)
        if not is_new.all():
            assert self._mels is not None, "a sample is cached only in `_mels`"
            mel[~is_new] = self._mels[index[~is_new]]
        if is_new.any():
            mel[is_new] = self.processor.encode(audio[is_new])
        self._cache(index, mel, is_new & self.is_deterministic[index])
        return {"mel": mel, **rows}

    def _cache(self, index: np.ndarray, mel: np.ndarray, is_selected: np.ndarray) -> None:
        """Store the spectrograms of the selected samples of a batch."""
        if not is_selected.any():
            return
        if self._mels is None:
            self._mels = np.empty((len(self), *self.processor.shape), np.float32)
        self._mels[index[is_selected]] = mel[is_selected]
        self._is_cached[index[is_selected]] = True

    def __getstate__(self) -> dict[str, Any]:
        # Worker processes fill caches of their own.
        return {**self.__dict__, "_mels": None, "_is_cached": np.zeros_like(self._is_cached)}

    @property
    def fingerprint(self) -> str:
        parts = (self.source.fingerprint, self.processor.model_dump_json())
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        frames, bands, _ = self.processor.shape
        return f"{self.source.describe(index, epoch)}\nas {frames} frames of {bands} mel bands"


def find_deterministic_samples(source: AudioRows) -> np.ndarray:
    """Return bool `(samples,)`: which clips are the same in every epoch, without augmentation or random crop."""
    if source.augmentation is not None:
        return np.zeros(len(source), np.bool_)
    return (source.crop != "random") | (source.table.lengths("audio") <= source.num_samples)
