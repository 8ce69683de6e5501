"""Measure loudness by ITU-R BS.1770-4, and normalise audio to a peak or a loudness."""

from __future__ import annotations

from typing import Literal

import numpy as np

TARGET_PEAK = 0.95
TARGET_LUFS = -23.0
"""The target of EBU R 128."""
ABSOLUTE_GATE_LUFS = -70.0
RELATIVE_GATE_DECIBELS = -10.0
BLOCK_SECONDS = 0.4
HOPS_PER_BLOCK = 4
# The slowest pole of the weighting decays by e^-240 a second (38 Hz), so after 0.15 s its response is below 1e-14.
RESPONSE_SECONDS = 0.15
CHUNK_SAMPLES = 1 << 18


def normalise_level(audio: np.ndarray, rate: int, *, by: Literal["none", "peak", "loudness"]) -> np.ndarray:
    """Scale `(samples,)` to a peak of 0.95, or to -23 LUFS or less, such that no value exceeds 0.95.

    Silence (for loudness: everything below -70 LUFS) is returned unchanged.
    """
    if by == "none":
        return audio
    peak = float(np.abs(audio).max(initial=0))
    if peak == 0:
        return audio
    gain = TARGET_PEAK / peak
    if by == "loudness":
        level = measure_loudness(audio, rate)
        gain = min(gain, 10 ** ((TARGET_LUFS - level) / 20)) if np.isfinite(level) else 1.0
    return (audio * np.float32(gain)).astype(np.float32)


def measure_loudness(audio: np.ndarray, rate: int) -> float:
    """Return the integrated loudness in LUFS of `(samples,)` or `(samples, channels)`; -inf if all is below -70.

    All channels have the weight 1, which the standard gives to left, right and centre. It does not define the loudness of
    audio under 400 ms, which is measured as a single block here.
    """
    powers = compute_block_powers(audio[:, None] if audio.ndim == 1 else audio, rate)
    gated_powers = powers[_to_lufs(powers) > ABSOLUTE_GATE_LUFS]
    if not len(gated_powers):
        return -np.inf
    gated_powers = gated_powers[_to_lufs(gated_powers) > _to_lufs(gated_powers.mean()) + RELATIVE_GATE_DECIBELS]
    return float(_to_lufs(gated_powers.mean()))


def compute_block_powers(audio: np.ndarray, rate: int) -> np.ndarray:
    """Return the K-weighted mean square, summed over channels, of 400 ms blocks at a stride of 100 ms."""
    squares = (apply_k_weighting(audio, rate) ** 2).sum(1)
    hop = round(rate * BLOCK_SECONDS / HOPS_PER_BLOCK)
    if len(squares) < hop * HOPS_PER_BLOCK:
        return squares.mean(keepdims=True) if len(squares) else np.zeros(0)
    num_hops = len(squares) // hop
    hops = squares[: num_hops * hop].reshape(num_hops, hop).mean(1)
    return np.lib.stride_tricks.sliding_window_view(hops, HOPS_PER_BLOCK).mean(1)


def apply_k_weighting(audio: np.ndarray, rate: int) -> np.ndarray:
    """Apply the K-weighting filters to `(samples, channels)`; returns float64.

    Both recursive filters are applied at once, as their transfer function at the frequencies of an FFT. That is a circular
    convolution with their impulse response; with 0.15 s of zero padding, what wraps around is below 1e-14 of the signal,
    less than the rounding error of a recursion in float64.
    """
    padding = int(rate * RESPONSE_SECONDS) + 1
    weighted = np.empty(audio.shape, np.float64)
    for start in range(0, len(audio), CHUNK_SAMPLES):
        # In chunks, each with the samples before it that its response reaches: an hour needs no more memory than a minute.
        first_sample = max(0, start - padding)
        chunk = audio[first_sample : start + CHUNK_SAMPLES].astype(np.float64)
        size = _next_fast_size(len(chunk) + padding)
        spectrum = np.fft.rfft(chunk, size, axis=0) * compute_k_weighting_response(np.fft.rfftfreq(size), rate)[:, None]
        weighted[start : start + CHUNK_SAMPLES] = np.fft.irfft(spectrum, size, axis=0)[
            start - first_sample : len(chunk)
        ]
    return weighted


def compute_k_weighting_response(frequency: np.ndarray, rate: int) -> np.ndarray:
    """Return the transfer function of the K-weighting at `frequency`, in cycles per sample."""
    z = np.exp(-2j * np.pi * frequency)
    response = np.ones_like(z)
    for b, a in design_k_weighting_filters(rate):
        response *= (b[0] + z * (b[1] + z * b[2])) / (a[0] + z * (a[1] + z * a[2]))
    return response


def design_k_weighting_filters(rate: int) -> tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]:
    """Return the coefficients (b, a) of the high shelf and of the high pass at any sample rate.

    The standard prints coefficients for 48 kHz only. They are the bilinear transform of two analogue filters, which is
    applied here at any rate: a shelf of 4 dB at 1,682 Hz and a high pass at 38 Hz. At rates up to 4 kHz, too low for the shelf, there is only the high pass.
    """
    k, q, gain = np.tan(np.pi * 1681.974450955533 / rate), 0.7071752369554196, 10 ** (3.999843853973347 / 20)
    middle_gain = gain**0.4996667741545416
    scale = 1 + k / q + k * k
    shelf = (
        (
            (gain + middle_gain * k / q + k * k) / scale,
            2 * (k * k - gain) / scale,
            (gain - middle_gain * k / q + k * k) / scale,
        ),
        (1.0, 2 * (k * k - 1) / scale, (1 - k / q + k * k) / scale),
    )
    k, q = np.tan(np.pi * 38.13547087602444 / rate), 0.5003270373238773
    scale = 1 + k / q + k * k
    high_pass = ((1.0, -2.0, 1.0), (1.0, 2 * (k * k - 1) / scale, (1 - k / q + k * k) / scale))
    return (shelf, high_pass) if rate > 4000 else (high_pass,)


def _to_lufs(power: np.ndarray) -> np.ndarray:
    return -0.691 + 10 * np.log10(np.maximum(power, 1e-30))


def _next_fast_size(size: int) -> int:
    """Return the next length with factors 2, 3 and 5 only, for which an FFT is fast."""
    while True:
        remainder = size
        for prime in (2, 3, 5):
            while remainder % prime == 0:
                remainder //= prime
        if remainder == 1:
            return size
        size += 1
