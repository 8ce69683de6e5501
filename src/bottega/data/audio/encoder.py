"""Encode a record as a table row with its audio: decoded, mixed to one channel, resampled, with its level normalised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

import numpy as np

from bottega.core.errors import EnvironmentProblem
from bottega.data.audio import decode
from bottega.data.audio.loudness import normalise_level
from bottega.data.prepare.encoder import Encoder
from bottega.data.records.fields import read_annotations, read_condition
from bottega.data.records.record import Record, Unreadable
from bottega.data.tables.shards import TEXT, Column

ENCODED_AUDIO_FIELDS = ("wav", "flac", "mp3", "ogg", "opus", "m4a", "aac", "aiff", "webm", "mp4")
AUDIO_FIELDS = ("audio", *ENCODED_AUDIO_FIELDS, "sound", "file", "video")
SAMPLE_RATE_FIELDS = ("sample_rate", "sampling_rate", "samplerate", "rate", "sr")
# The integer that stands for an amplitude of 1, by the type code of numpy.
FULL_SCALE = {"u1": 128, "i2": 1 << 15, "i4": 1 << 31}


class Waveform(NamedTuple):
    """Samples of one channel with their sample rate."""

    samples: np.ndarray
    """Float32 `(samples,)`."""
    rate: int


@final
@dataclass(frozen=True)
class AudioEncoder(Encoder):
    """Encode each record as one row with the columns audio, key, label and caption.

    No label is guessed from a file name: 7_jackson_32.wav may be of class 7 or of class jackson.
    """

    sample_rate: int
    normalise: Literal["none", "peak", "loudness"] = "none"
    field: str | None = None
    label_field: str | None = None
    condition_field: str | None = None
    has_condition: bool = False
    """Whether rows have a condition vector, from `condition_field` or the field `condition`."""
    limit_samples: int = decode.LIMIT_SAMPLES

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
        waveform = self.load_waveform(record)
        audio = normalise_level(self._resample(waveform), self.sample_rate, by=self.normalise)
        row = {"audio": audio, **read_annotations(record, label_field=self.label_field)}
        if self.has_condition:
            row["condition"] = read_condition(record, self.condition_field)
        yield row

    def load_waveform(self, record: Record) -> Waveform:
        """Return the audio of a record at its own sample rate, mixed to one channel."""
        value, rate = _read_content(record, self.field)
        if isinstance(value, bytes | Path):
            samples, rate = decode.decode_audio(value, limit_samples=self.limit_samples)
            return Waveform(decode.to_mono(samples), rate)
        return Waveform(_to_samples(value), _parse_sample_rate(rate))

    def _resample(self, waveform: Waveform) -> np.ndarray:
        length = compute_resampled_length(len(waveform.samples), rate=waveform.rate, to=self.sample_rate)
        if not 0 < length <= self.limit_samples:
            raise Unreadable(
                f"has {length:,} samples at {self.sample_rate} Hz; there must be 1 to {self.limit_samples:,}"
            )
        return resample_audio(waveform.samples, rate=waveform.rate, to=self.sample_rate)


def read_sample_rate(record: Record, *, field: str | None = None) -> int:
    """Return the sample rate of a record without decoding it, for recipes that set none."""
    value, rate = _read_content(record, field)
    return decode.read_audio_header(value).sample_rate if isinstance(value, bytes | Path) else _parse_sample_rate(rate)


def _find_audio_field(record: Record, field: str | None) -> str:
    """Return the name of the field that holds the audio."""
    if field is not None:
        if record.fields.get(field) is None:
            raise Unreadable(f"has no field {field!r}; it has {', '.join(record.fields) or 'none'}")
        return field
    for name in AUDIO_FIELDS:
        # Not text: rows often have a column `file` or `audio` with a file name beside the content.
        if record.fields.get(name) is not None and not isinstance(record.fields[name], str):
            return name
    names = ", ".join(record.fields) or "none"
    raise Unreadable(f"no field contains audio ({names}); set data.train.field to the one that does")


def _read_content(record: Record, field: str | None) -> tuple[Any, Any]:
    """Return the encoded audio or its array, and the sample rate that the record states for an array."""
    fields: Mapping[str, Any] = record.fields
    value = fields[_find_audio_field(record, field)]
    if isinstance(value, Mapping):
        # The audio column of a Hugging Face dataset. Its path is not followed: it could name any file of this machine.
        fields = value
        value = fields.get("bytes") if fields.get("bytes") is not None else fields.get("array")
        if value is None:
            raise Unreadable(f"the audio field has neither bytes nor array, only {', '.join(fields) or 'none'}")
    if isinstance(value, bytearray | memoryview):
        value = bytes(value)
    return value, next((fields[name] for name in SAMPLE_RATE_FIELDS if fields.get(name) is not None), None)


def _to_samples(value: Any) -> np.ndarray:
    """Return float32 samples of one channel from floats in -1 to 1 or full-scale integers."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise Unreadable(f"not an array of samples: {error}") from error
    type_code = array.dtype.str[1:]
    if array.ndim not in (1, 2) or array.size == 0 or (array.dtype.kind != "f" and type_code not in FULL_SCALE):
        raise Unreadable(
            f"an array of {array.dtype} with shape {array.shape} is not audio; expected floats from -1 to 1, int16, int32 or uint8, "
            "of shape (samples,), (samples, channels) or (channels, samples)"
        )
    if type_code in FULL_SCALE:
        array = (array.astype(np.float64) - (128 if type_code == "u1" else 0)) / FULL_SCALE[type_code]
    if array.ndim == 2:
        # Both (channels, samples) and (samples, channels) are common; there are always more samples.
        array = array.mean(axis=int(np.argmin(array.shape)))
    if not np.isfinite(array).all():
        raise Unreadable(f"sample {int(np.flatnonzero(~np.isfinite(array))[0]):,} is not finite")
    return array.astype(np.float32)


def _parse_sample_rate(value: Any) -> int:
    """Return the sample rate in hertz from a number or an array with one; raise `Unreadable` for other values."""
    if value is None:
        raise Unreadable("an array of samples needs its sample rate in hertz, in a field such as sample_rate")
    values, valid_rates = np.asarray(value).reshape(-1), decode.VALID_SAMPLE_RATES
    if values.dtype.kind not in "iuf" or len(values) != 1 or float(values[0]) not in valid_rates:
        raise Unreadable(
            f"the sample rate is {value!r}; it must be a whole number of hertz between {valid_rates.start:,} and "
            f"{valid_rates.stop - 1:,}"
        )
    return int(values[0])


def compute_resampled_length(num_samples: int, *, rate: int, to: int) -> int:
    """Return num_samples * to / rate, rounded half up; both rates are in hertz."""
    return (2 * num_samples * to + rate) // (2 * rate)


def resample_audio(audio: np.ndarray, *, rate: int, to: int) -> np.ndarray:
    """Resample `(samples,)` or `(samples, channels)` from `rate` to `to` hertz, as float32 of `compute_resampled_length` samples.

    Uses the quality HQ of soxr: flat up to 0.92 of the lower Nyquist frequency, and 130 dB of attenuation above that
    Nyquist frequency (measured from 48 to 16 kHz). Equal rates return the input itself.
    """
    audio = audio.astype(np.float32, copy=False)
    if rate == to:
        return audio
    try:
        import soxr
    except ImportError as error:
        raise EnvironmentProblem(f"resampling needs soxr; pip install 'bottega[audio]' ({error})") from error
    length = compute_resampled_length(len(audio), rate=rate, to=to)
    resampled: np.ndarray = soxr.resample(audio, rate, to, quality="HQ")
    # soxr rounds in the same way; in case a version does not, cut a sample or add a silent one.
    if len(resampled) < length:
        resampled = np.concatenate((resampled, np.zeros((length - len(resampled), *resampled.shape[1:]), np.float32)))
    return resampled[:length]
