"""Resample audio, with a length that is known beforehand."""

from __future__ import annotations

import numpy as np

from bottega.core.errors import EnvironmentProblem


def resampled_length(num_samples: int, *, rate: int, to: int) -> int:
    """Return num_samples * to / rate, rounded half up."""
    return (2 * num_samples * to + rate) // (2 * rate)


def resample_audio(audio: np.ndarray, *, rate: int, to: int) -> np.ndarray:
    """Resample `(samples,)` or `(samples, channels)` from `rate` to `to`, as float32 of `resampled_length` samples.

    Uses soxr's HQ: flat up to 0.92 of the lower Nyquist frequency, and 130 dB of attenuation above it (measured from 48 to
    16 kHz). Equal rates return the input itself.
    """
    audio = audio.astype(np.float32, copy=False)
    if rate == to:
        return audio
    try:
        import soxr
    except ImportError as error:
        raise EnvironmentProblem(f"resampling needs soxr; pip install 'bottega[audio]' ({error})") from error
    length = resampled_length(len(audio), rate=rate, to=to)
    out: np.ndarray = soxr.resample(audio, rate, to, quality="HQ")
    # soxr rounds alike; in case a version does not, cut a sample or add a silent one.
    if len(out) < length:
        out = np.concatenate((out, np.zeros((length - len(out), *out.shape[1:]), np.float32)))
    return out[:length]
