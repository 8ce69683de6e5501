"""From a record to one prepared sound: found, decoded, mixed to one channel, brought to one rate and level."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

import numpy as np

from bottega.data.audio import decode as files
from bottega.data.audio.loudness import normalise_level
from bottega.data.audio.resample import resample_audio, resampled_length
from bottega.data.prepare.encoder import Encoder
from bottega.data.records.fields import read_annotations, read_condition
from bottega.data.records.record import Record, Unreadable
from bottega.data.tables.shards import TEXT, Column

ENCODED = ("wav", "flac", "mp3", "ogg", "opus", "m4a", "aac", "aiff", "webm", "mp4")
AUDIO_FIELDS = ("audio", *ENCODED, "sound", "file", "video")
SAMPLE_RATE_FIELDS = ("sample_rate", "sampling_rate", "samplerate", "rate", "sr")
FULL_SCALE = {"u1": 128, "i2": 1 << 15, "i4": 1 << 31}


class Waveform(NamedTuple):
    samples: np.ndarray
    """Float32 [samples]."""
    rate: int


@final
@dataclass(frozen=True)
class AudioEncoder(Encoder):
    """One row for each record. No label is read out of a file's name: 7_jackson_32.wav may be of class 7 or jackson."""

    sample_rate: int
    normalise: Literal["none", "peak", "loudness"] = "none"
    field: str | None = None
    label_field: str | None = None
    condition_field: str | None = None
    has_condition: bool = False
    """Whether rows have a numeric vector, from `condition_field` or the field `condition`."""
    limit_samples: int = files.LIMIT_SAMPLES

    @property
    def columns(self) -> dict[str, Column]:
        columns = {"audio": Column("<f4", varying=True), "key": TEXT, "label": TEXT, "caption": TEXT}
        if self.has_condition:
            columns["condition"] = Column("<f4", varying=True)
        return columns

    @property
    def metadata(self) -> dict[str, Any]:
        return {"sample_rate": self.sample_rate}

    def rows(self, record: Record) -> Iterator[dict[str, Any]]:
        sound = self.load_waveform(record)
        audio = normalise_level(self._resampled(sound), self.sample_rate, by=self.normalise)
        row = {"audio": audio, **read_annotations(record, label_field=self.label_field)}
        if self.has_condition:
            row["condition"] = read_condition(record, self.condition_field)
        yield row

    def load_waveform(self, record: Record) -> Waveform:
        """As it is in the record, in one channel."""
        value, rate = _content(record, self.field)
        if isinstance(value, bytes | Path):
            samples, rate = files.decode_audio(value, limit_samples=self.limit_samples)
            return Waveform(files.to_mono(samples), rate)
        return Waveform(_samples(value), _rate(rate))

    def _resampled(self, sound: Waveform) -> np.ndarray:
        length = resampled_length(len(sound.samples), rate=sound.rate, to=self.sample_rate)
        if not 0 < length <= self.limit_samples:
            raise Unreadable(f"{length:,} samples at {self.sample_rate} Hz; there must be 1 to {self.limit_samples:,}")
        return resample_audio(sound.samples, rate=sound.rate, to=self.sample_rate)


def read_sample_rate(record: Record, *, field: str | None = None) -> int:
    """The sample rate a record has by itself, for a recipe that asks for none; nothing is decoded."""
    value, rate = _content(record, field)
    return files.read_audio_header(value).sample_rate if isinstance(value, bytes | Path) else _rate(rate)


def _found(record: Record, field: str | None) -> str:
    """The name of the field with the sound."""
    if field is not None:
        if record.fields.get(field) is None:
            raise Unreadable(f"no field {field!r}; the record has {', '.join(record.fields) or 'none'}")
        return field
    for name in AUDIO_FIELDS:
        # A text is no sound: rows often have a column `file` or `audio` with a name beside the content.
        if record.fields.get(name) is not None and not isinstance(record.fields[name], str):
            return name
    listed = ", ".join(record.fields) or "none"
    raise Unreadable(f"no sound among its fields ({listed}); name the field of the source, such as field: audio")


def _content(record: Record, field: str | None) -> tuple[Any, Any]:
    """The encoded sound or its array, and for an array the rate that the record names."""
    fields: Mapping[str, Any] = record.fields
    value = fields[_found(record, field)]
    if isinstance(value, Mapping):
        # As Hugging Face data sets hold a sound. Its path is not followed: it could name any file of this machine.
        fields, value = value, value.get("bytes") if value.get("bytes") is not None else value.get("array")
        if value is None:
            raise Unreadable(f"a sound with neither bytes nor array, only {', '.join(fields) or 'nothing'}")
    if isinstance(value, bytearray | memoryview):
        value = bytes(value)
    return value, next((fields[name] for name in SAMPLE_RATE_FIELDS if fields.get(name) is not None), None)


def _samples(value: Any) -> np.ndarray:
    """An array from -1 to 1, or of whole numbers at full scale, in one channel."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise Unreadable(f"no array of samples: {error}") from error
    kind = array.dtype.str[1:]
    if array.ndim not in (1, 2) or array.size == 0 or (array.dtype.kind != "f" and kind not in FULL_SCALE):
        raise Unreadable(
            f"{array.dtype} {list(array.shape)} is no sound; expected floats from -1 to 1, int16, int32 or uint8, "
            "[samples] or [samples, channels]"
        )
    if kind in FULL_SCALE:
        array = (array.astype(np.float64) - (128 if kind == "u1" else 0)) / FULL_SCALE[kind]
    if array.ndim == 2:
        # [channels, samples] is as usual as the other way round, and there are always more samples.
        array = array.mean(axis=int(np.argmin(array.shape)))
    if not np.isfinite(array).all():
        raise Unreadable(f"sample {int(np.flatnonzero(~np.isfinite(array))[0]):,} is not finite")
    return array.astype(np.float32)


def _rate(value: Any) -> int:
    scalar = np.asarray(value).reshape(-1)
    if scalar.dtype.kind not in "iuf" or len(scalar) != 1 or float(scalar[0]) not in files.VALID_SAMPLE_RATES:
        raise Unreadable(f"samples need their rate in a field such as sample_rate, in hertz; got {value!r}")
    return int(scalar[0])
