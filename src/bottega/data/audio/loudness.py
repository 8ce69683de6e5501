"""How loud a sound is to people (ITU-R BS.1770-4), and bringing sounds to one level."""

from __future__ import annotations

from typing import Literal

import numpy as np

TARGET_PEAK = 0.95
TARGET_LUFS = -23.0
"""LUFS, of EBU R 128."""
ABSOLUTE_GATE = -70.0
RELATIVE_GATE = -10.0
BLOCK_SECONDS = 0.4
OVERLAP = 4
# The slowest pole of the weighting falls by e^-240 a second (38 Hz), so after 0.15 s its response is below 1e-14.
RESPONSE_SECONDS = 0.15
CHUNK = 1 << 18


def normalise_level(audio: np.ndarray, rate: int, *, by: Literal["none", "peak", "loudness"]) -> np.ndarray:
    """[samples], scaled: its largest value 0.95, or its loudness -23 LUFS unless a value would then pass 0.95.

    Silence, which for loudness is all below -70 LUFS, stays as it is.
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
    """Integrated loudness in LUFS of [samples] or [samples, channels]; -inf where all of it is below -70.

    Channels count alike, as left, right and centre do. The standard knows no sound under 400 ms; such a one is taken
    as a single block.
    """
    power = compute_block_powers(audio[:, None] if audio.ndim == 1 else audio, rate)
    loud = power[_lufs(power) > ABSOLUTE_GATE]
    if not len(loud):
        return -np.inf
    loud = loud[_lufs(loud) > _lufs(loud.mean()) + RELATIVE_GATE]
    return float(_lufs(loud.mean()))


def compute_block_powers(audio: np.ndarray, rate: int) -> np.ndarray:
    """The weighted mean square, over all channels, of each 400 ms, begun every 100 ms."""
    squares = (apply_k_weighting(audio, rate) ** 2).sum(1)
    hop = round(rate * BLOCK_SECONDS / OVERLAP)
    if len(squares) < hop * OVERLAP:
        return squares.mean(keepdims=True) if len(squares) else np.zeros(0)
    whole = len(squares) // hop
    hops = squares[: whole * hop].reshape(whole, hop).mean(1)
    return np.lib.stride_tricks.sliding_window_view(hops, OVERLAP).mean(1)


def apply_k_weighting(audio: np.ndarray, rate: int) -> np.ndarray:
    """[samples, channels] as the ear weights it, float64.

    The two recursive filters are applied at once as their transfer function at the frequencies of an FFT. That is
    convolution with their response wrapped round at the FFT's length; with 0.15 s of room behind the sound, what wraps
    is below 1e-14 of the sound, less than a recursion in float64 would lose by rounding.
    """
    room = int(rate * RESPONSE_SECONDS) + 1
    out = np.empty(audio.shape, np.float64)
    for start in range(0, len(audio), CHUNK):
        # A chunk hears the room before it and nothing earlier, so that an hour needs no more memory than a minute.
        first = max(0, start - room)
        part = audio[first : start + CHUNK].astype(np.float64)
        size = _smooth(len(part) + room)
        spectrum = np.fft.rfft(part, size, axis=0) * k_weighting_response(np.fft.rfftfreq(size), rate)[:, None]
        out[start : start + CHUNK] = np.fft.irfft(spectrum, size, axis=0)[start - first : len(part)]
    return out


def k_weighting_response(frequency: np.ndarray, rate: int) -> np.ndarray:
    """The transfer function at `frequency`, in cycles a sample."""
    z = np.exp(-2j * np.pi * frequency)
    response = np.ones_like(z)
    for above, below in k_weighting_filters(rate):
        response *= (above[0] + z * (above[1] + z * above[2])) / (below[0] + z * (below[1] + z * below[2]))
    return response


def k_weighting_filters(rate: int) -> tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]:
    """The high shelf (the head) and the high pass, each (b, a), for any rate.

    The standard prints coefficients for 48 kHz alone. These are the analogue filters that give them under the bilinear
    transform: a shelf of 4 dB at 1,682 Hz and a pass at 38 Hz. A rate too low to hold the shelf goes without it.
    """
    k, q, gain = np.tan(np.pi * 1681.974450955533 / rate), 0.7071752369554196, 10 ** (3.999843853973347 / 20)
    middle = gain**0.4996667741545416
    scale = 1 + k / q + k * k
    shelf = (
        ((gain + middle * k / q + k * k) / scale, 2 * (k * k - gain) / scale, (gain - middle * k / q + k * k) / scale),
        (1.0, 2 * (k * k - 1) / scale, (1 - k / q + k * k) / scale),
    )
    k, q = np.tan(np.pi * 38.13547087602444 / rate), 0.5003270373238773
    scale = 1 + k / q + k * k
    high_pass = ((1.0, -2.0, 1.0), (1.0, 2 * (k * k - 1) / scale, (1 - k / q + k * k) / scale))
    return (shelf, high_pass) if rate > 4000 else (high_pass,)


def _lufs(power: np.ndarray) -> np.ndarray:
    return -0.691 + 10 * np.log10(np.maximum(power, 1e-30))


def _smooth(size: int) -> int:
    """The next length of factors 2, 3 and 5, which an FFT likes."""
    while True:
        left = size
        for prime in (2, 3, 5):
            while left % prime == 0:
                left //= prime
        if left == 1:
            return size
        size += 1
