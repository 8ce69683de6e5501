"""Sounds as standardised mel spectrograms of one length, and back: what a model of sound reads and writes.

b sounds   n samples   T frames   M mel bands
"""

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

FILE = "mel.json"
REMEDY = "start the same training again to have it written"
NUM_MEASURED = 512
"""Sounds that the scale is measured on, of three seconds; fewer where they are longer."""
MAX_MEASURED_SAMPLES = NUM_MEASURED << 16
MAX_CACHE_BYTES = 256 << 20
# Spectra of so many sounds are in memory at once while the scale is measured, and of so many samples.
CHUNK, CHUNK_SAMPLES = 32, 1 << 22


@final
class MelScale(BaseModel):
    """x = (log_mel - mean) / (2 std): most values are then between -1 and 1, where noise of deviation 1 covers them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mean: float
    std: float = Field(gt=0)

    def apply(self, log_mel: np.ndarray) -> np.ndarray:
        return ((log_mel - self.mean) / (2 * self.std)).astype(np.float32)

    def undo(self, x: np.ndarray) -> np.ndarray:
        return (x.astype(np.float32) * (2 * self.std) + self.mean).astype(np.float32)


@final
class MelProcessor(BaseModel):
    """Between sounds [b, num_samples] and [b, T, M, 1]. Saved with a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mel: MelSpectrogram
    scale: MelScale
    frames: int = Field(gt=0)
    """T, and at least as many as the samples need; the rest is silence."""
    num_samples: int = Field(gt=0)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.frames, self.mel.num_mels, 1

    def encode(self, audio: np.ndarray) -> np.ndarray:
        """Sounds [b, n] of any length, cut or filled up with silence, to float32 [b, T, M, 1]."""
        return self.scale.apply(self.log_mel(audio))[..., None]

    def decode(self, x: np.ndarray, *, num_samples: int | None = None, seed: int = 0) -> np.ndarray:
        """[b, T, M, 1] to float32 [b, n], with n as encoded unless given; the phase is looked for by Griffin-Lim."""
        wanted = self.num_samples if num_samples is None else num_samples
        return self.mel.decode(self.scale.undo(x[..., 0]), num_samples=self._whole, seed=seed)[:, :wanted]

    def log_mel(self, audio: np.ndarray) -> np.ndarray:
        """[b, T, M] before it is scaled. The silence is added to the sound, so that each frame is one of a sound."""
        whole = np.zeros((len(audio), self._whole), np.float32)
        length = min(audio.shape[1], self.num_samples)
        whole[:, :length] = audio[:, :length]
        return self.mel.encode(whole)

    @property
    def _whole(self) -> int:
        """Samples that give exactly T frames."""
        return max(1, (self.frames - 1) * self.mel.hop_size)

    def notes(self) -> list[str]:
        """What a person should know of the sounds it was measured on."""
        mel, lines = self.mel, []
        if self.scale.mean <= math.log(MAGNITUDE_FLOOR) + 1e-3:
            lines.append("all sounds that were listened to are silent; is this the right data, and data.train.field?")
        if mel.num_empty_bands:
            lines.append(
                f"{mel.num_empty_bands} of {mel.num_mels} mel bands lie between two frequencies of fft_size {mel.fft_size} and "
                "hear next to nothing; lower data.num_mels or raise data.fft_size"
            )
        return lines

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> MelProcessor:
        path = folder / FILE
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}; {REMEDY}") from error
        except (ValidationError, UsageError) as error:
            reason = str(error)
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                reason = f"{'.'.join(map(str, first['loc'])) or 'its content'}: {first['msg']}"
            raise CheckpointError(f"{path} holds no mel codec: {reason}; {REMEDY}") from error


def fit_mel_processor(source: Source, mel: MelSpectrogram, *, num_samples: int, multiple: int = 1) -> MelProcessor:
    """The codec of these sounds; `multiple` is what T has to be one of, such as the side of a patch."""
    frames = -(-mel.num_frames(num_samples) // multiple) * multiple
    plain = MelProcessor(mel=mel, scale=MelScale(mean=0, std=0.5), frames=frames, num_samples=num_samples)
    return plain.model_copy(update={"scale": measure_mel_scale(source, plain)})


def measure_mel_scale(source: Source, processor: MelProcessor) -> MelScale:
    """Mean and deviation over the first time that up to 512 sounds are heard, evenly spaced; a function of the data."""
    count = min(NUM_MEASURED, max(2, MAX_MEASURED_SAMPLES // processor.num_samples), len(source))
    chunk = min(CHUNK, max(1, CHUNK_SAMPLES // processor.num_samples))
    index = np.unique(np.linspace(0, len(source) - 1, count).astype(np.int64))
    number, total, squares = 0, 0.0, 0.0
    for first in range(0, len(index), chunk):
        part = index[first : first + chunk]
        values = processor.log_mel(source.rows(part, np.zeros_like(part))["audio"]).astype(np.float64)
        number += values.size
        total += float(values.sum())
        squares += float((values**2).sum())
    mean = total / number
    deviation = max(squares / number - mean**2, 0.0) ** 0.5
    # Rounded, so that a processor that adds in another order measures the same; silence alone has no deviation.
    return MelScale(mean=round(mean, 4), std=max(round(deviation, 4), 1e-3))


@final
class MelRows(Source):
    """mel float32 [b, T, M, 1] in place of the audio of the rows it is made from; all their other fields stay.

    Of sounds that every epoch hears in the same way the spectrogram is made only once, where all of them fit into 256 MB.
    """

    def __init__(self, source: AudioRows, processor: MelProcessor) -> None:
        self.source, self.processor = source, processor
        size = len(source) * 4 * processor.frames * processor.mel.num_mels
        self.is_deterministic = (
            find_deterministic_samples(source) if size <= MAX_CACHE_BYTES else np.zeros(len(source), np.bool_)
        )
        self._mels: np.ndarray | None = None
        self._has = np.zeros(len(source), np.bool_)

    def __len__(self) -> int:
        return len(self.source)

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        rows = self.source.rows(index, epoch)
        audio = rows.pop("audio")
        new = ~self._has[index]
        mel = np.empty((len(index), *self.processor.shape), np.float32)
        if not new.all():
            assert self._mels is not None, "what is kept is kept there"
            mel[~new] = self._mels[index[~new]]
        if new.any():
            mel[new] = self.processor.encode(audio[new])
        self._keep(index, mel, new & self.is_deterministic[index])
        return {"mel": mel, **rows}

    def _keep(self, index: np.ndarray, mel: np.ndarray, fixed: np.ndarray) -> None:
        if not fixed.any():
            return
        if self._mels is None:
            self._mels = np.empty((len(self), *self.processor.shape), np.float32)
        self._mels[index[fixed]] = mel[fixed]
        self._has[index[fixed]] = True

    def __getstate__(self) -> dict[str, Any]:
        # A worker process makes its own rather than being sent these.
        return {**self.__dict__, "_mels": None, "_has": np.zeros_like(self._has)}

    @property
    def fingerprint(self) -> str:
        parts = (self.source.fingerprint, self.processor.model_dump_json())
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        frames, bands, _ = self.processor.shape
        return f"{self.source.describe(index, epoch)}\nseen as {frames} frames of {bands} mel bands"


def find_deterministic_samples(source: AudioRows) -> np.ndarray:
    """Which sounds are the same in every epoch: nothing is added to them, and no part of them is chosen at random."""
    if source.augmentation is not None:
        return np.zeros(len(source), np.bool_)
    return (source.crop != "random") | (source.table.lengths("audio") <= source.num_samples)
