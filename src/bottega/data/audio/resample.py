"""Another sample rate, with the length known beforehand."""

from __future__ import annotations

import numpy as np

from bottega.core.errors import EnvironmentProblem


def resampled_length(num_samples: int, *, rate: int, to: int) -> int:
    """num_samples * to / rate, rounded, halves up."""
    return (2 * num_samples * to + rate) // (2 * rate)


def resample_audio(audio: np.ndarray, *, rate: int, to: int) -> np.ndarray:
    """[samples] or [samples, channels] at `rate` to float32 at `to`, `resampled_length` samples, in time with the old.

    By soxr's HQ: what lies below 0.92 of the lower half rate stays as it was, what lies above all of it is 130 dB down
    (measured, 48 to 16 kHz). Equal rates return the sound itself.
    """
    audio = audio.astype(np.float32, copy=False)
    if rate == to:
        return audio
    try:
        import soxr
    except ImportError as error:
        raise EnvironmentProblem(f"resampling needs soxr: pip install 'bottega[audio]' ({error})") from error
    wanted = resampled_length(len(audio), rate=rate, to=to)
    out: np.ndarray = soxr.resample(audio, rate, to, quality="HQ")
    # soxr follows the same rule; where its version rounds otherwise, a sample is cut or a silent one added.
    if len(out) < wanted:
        out = np.concatenate((out, np.zeros((wanted - len(out), *out.shape[1:]), np.float32)))
    return out[:wanted]
