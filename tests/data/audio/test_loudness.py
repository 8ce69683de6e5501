"""Resampling and loudness follow their published definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.data.audio.encoder import compute_resampled_length, resample_audio
from bottega.data.audio.loudness import (
    apply_k_weighting,
    compute_block_powers,
    design_k_weighting_filters,
    measure_loudness,
    normalise_level,
)

soxr = pytest.importorskip("soxr")
RATES = st.sampled_from([8000, 11025, 16000, 22050, 24000, 44100, 48000])


def build_sine(hertz: float, seconds: float, rate: int, amplitude: float = 1.0) -> np.ndarray:
    return (amplitude * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


@given(st.integers(1, 5000), RATES, RATES)
def test_resampled_length_follows_the_rate_ratio(length: int, rate: int, to: int) -> None:
    out = resample_audio(np.ones(length, np.float32), rate=rate, to=to)
    assert len(out) == compute_resampled_length(length, rate=rate, to=to)
    assert abs(len(out) - length * to / rate) <= 0.5
    assert out.dtype == np.float32


def test_equal_rates_return_the_same_array() -> None:
    audio = build_sine(440, 0.1, 8000)
    assert resample_audio(audio, rate=8000, to=8000) is audio


@pytest.mark.parametrize(("rate", "to"), [(22050, 16000), (8000, 48000), (48000, 16000)])
def test_resampling_preserves_a_tone(rate: int, to: int) -> None:
    out = resample_audio(build_sine(440, 1, rate), rate=rate, to=to)
    inside = slice(to // 10, -to // 10)
    np.testing.assert_allclose(out[inside], build_sine(440, 1, to)[inside], atol=1e-3)


def test_resampling_removes_aliases() -> None:
    out = resample_audio(build_sine(7000, 1, 16000), rate=16000, to=8000)
    assert np.abs(out[800:-800]).max() < 1e-3


def test_k_weighting_filters_match_the_standard_at_48_khz() -> None:
    """ITU-R BS.1770-4, tables 1 and 2."""
    shelf, high_pass = design_k_weighting_filters(48000)
    np.testing.assert_allclose(shelf[0], [1.53512485958697, -2.69169618940638, 1.19839281085285], atol=1e-8)
    np.testing.assert_allclose(shelf[1], [1, -1.69065929318241, 0.73248077421585], atol=1e-8)
    np.testing.assert_allclose(high_pass[0], [1, -2, 1])
    np.testing.assert_allclose(high_pass[1], [1, -1.99004745483398, 0.99007225036621], atol=1e-8)


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100, 48000])
def test_a_full_scale_tone_of_997_hz_reads_minus_3_01(rate: int) -> None:
    assert measure_loudness(build_sine(997, 5, rate), rate) == pytest.approx(-3.01, abs=0.02 if rate == 48000 else 0.1)


def test_k_weighting_equals_the_direct_recursion() -> None:
    rate = 16000
    audio = np.random.default_rng(0).standard_normal(6000)
    expected = audio
    for b, a in design_k_weighting_filters(rate):
        out = np.zeros_like(expected)
        for i in range(len(expected)):
            out[i] = sum(b[j] * expected[i - j] for j in range(3) if i >= j)
            out[i] -= sum(a[j] * out[i - j] for j in (1, 2) if i >= j)
        expected = out
    np.testing.assert_allclose(apply_k_weighting(audio[:, None], rate)[:, 0], expected, atol=1e-11)


def test_k_weighting_does_not_depend_on_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    audio = np.random.default_rng(1).standard_normal((50_000, 2))
    expected = apply_k_weighting(audio, 8000)
    monkeypatch.setattr("bottega.data.audio.loudness.CHUNK_SAMPLES", 7001)
    np.testing.assert_allclose(apply_k_weighting(audio, 8000), expected, atol=1e-11)


@given(st.floats(-30, 10), RATES)
def test_loudness_is_linear_in_gain(decibels: float, rate: int) -> None:
    audio = np.random.default_rng(2).standard_normal(rate).astype(np.float32) * np.float32(0.1)
    louder = audio * np.float32(10 ** (decibels / 20))
    assert measure_loudness(louder, rate) == pytest.approx(measure_loudness(audio, rate) + decibels, abs=1e-3)


def test_two_equal_channels_are_three_decibels_louder_than_one() -> None:
    tone = build_sine(997, 2, 48000, 0.1)
    both = np.stack([tone, tone], axis=1)
    assert measure_loudness(both, 48000) - measure_loudness(tone, 48000) == pytest.approx(3.01, abs=0.01)


def test_quiet_blocks_are_gated() -> None:
    tone = build_sine(997, 4, 48000, 0.1)
    padded = np.concatenate([tone, np.zeros(48000 * 20, np.float32)])
    # Without gates the mean would fall by 10 log10(24 / 4) = 7.8; blocks at the border contribute 0.15 at most.
    assert measure_loudness(padded, 48000) == pytest.approx(measure_loudness(tone, 48000), abs=0.2)
    whisper = np.concatenate([tone, build_sine(997, 20, 48000, 0.01)])
    assert measure_loudness(whisper, 48000) == pytest.approx(measure_loudness(tone, 48000), abs=0.2)
    assert measure_loudness(np.zeros(48000, np.float32), 48000) == -np.inf
    assert measure_loudness(np.zeros(0, np.float32), 48000) == -np.inf


def test_blocks_are_400_ms_every_100_ms_and_short_audio_is_one_block() -> None:
    assert len(compute_block_powers(np.ones((16000, 1)), 16000)) == 7
    assert len(compute_block_powers(np.ones((100, 1)), 16000)) == 1


@given(st.floats(0.001, 3.0), st.sampled_from(["peak", "loudness"]))
def test_normalisation_reaches_the_target_level(amplitude: float, by: str) -> None:
    audio = np.random.default_rng(3).standard_normal(16000).astype(np.float32)
    audio *= np.float32(amplitude) / np.abs(audio).max()
    out = normalise_level(audio, 16000, by=by)  # type: ignore[arg-type]
    assert out.dtype == np.float32
    if by == "peak":
        assert np.abs(out).max() == pytest.approx(0.95, abs=1e-6)
    else:
        assert measure_loudness(out, 16000) == pytest.approx(-23, abs=0.01)


def test_loudness_normalisation_is_limited_by_the_peak_and_keeps_silence() -> None:
    clicks = np.zeros(32000, np.float32)
    clicks[::4000] = 0.1
    assert np.abs(normalise_level(clicks, 16000, by="loudness")).max() == pytest.approx(0.95)
    silence = np.zeros(100, np.float32)
    for by in ("none", "peak", "loudness"):
        np.testing.assert_array_equal(normalise_level(silence, 16000, by=by), silence)
