"""An audio file is decoded completely or refused, whatever its header states."""

from __future__ import annotations

import io
import os
import struct
import sys
import tarfile
import tracemalloc
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from bottega.core.errors import EnvironmentProblem
from bottega.data.audio import decode as decoding
from bottega.data.audio.decode import decode_audio, encode_flac, encode_wav, read_audio_header, to_mono
from bottega.data.records.record import Unreadable

soundfile = pytest.importorskip("soundfile")
av = pytest.importorskip("av")

RATE = 22050
DATA = os.environ.get("BOTTEGA_DATA")
needs_data = pytest.mark.skipif(DATA is None, reason="BOTTEGA_DATA is not set")
# Name -> format and subtype of soundfile.
FORMATS = {
    "wav": ("WAV", "PCM_16"),
    "wav float": ("WAV", "FLOAT"),
    "wav adpcm": ("WAV", "IMA_ADPCM"),
    "rf64": ("RF64", "PCM_16"),
    "aiff": ("AIFF", "PCM_16"),
    "caf": ("CAF", "PCM_16"),
    "w64": ("W64", "PCM_16"),
    "au": ("AU", "PCM_16"),
    "flac": ("FLAC", "PCM_16"),
    "ogg": ("OGG", "VORBIS"),
    "mp3": ("MP3", "MPEG_LAYER_III"),
}
# Name -> container, codec and muxer options of PyAV.
TRACKS = {
    "m4a": ("ipod", "aac", {}),
    "mp4 in fragments": ("mp4", "aac", {"movflags": "frag_keyframe+empty_moov"}),
    "aac": ("adts", "aac", {}),
    "mka": ("matroska", "aac", {}),
    "webm": ("webm", "libopus", {}),
    "mp3 without length": ("mp3", "libmp3lame", {"write_xing": "0"}),
}


def build_voice(seconds: float = 2.0, rate: int = RATE) -> np.ndarray:
    """Amplitude-modulated harmonics with a little noise, which encoders spend bits on."""
    t = np.arange(int(seconds * rate)) / rate
    tones = sum(np.sin(2 * np.pi * 140 * k * t + k) / k for k in range(1, 12))
    noise = np.random.default_rng(0).standard_normal(len(t)) * 0.05
    return (0.2 * (tones * (1 + np.sin(2 * np.pi * 3 * t)) / 2 + noise)).astype(np.float32)


def encode_audio(name: str, samples: np.ndarray, rate: int = RATE) -> bytes:
    if name in FORMATS:
        file = io.BytesIO()
        soundfile.write(file, samples, rate, format=FORMATS[name][0], subtype=FORMATS[name][1])
        return file.getvalue()
    container, encoder, options = TRACKS[name]
    file = io.BytesIO()
    with av.open(file, "w", format=container, options=options) as out:
        stream = out.add_stream(encoder, rate=rate)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate, frame.pts = rate, 0
        convert = av.AudioResampler(format=stream.codec_context.format.name, layout="mono", rate=rate)
        for resampled in (*convert.resample(frame), *convert.resample(None)):
            out.mux(stream.encode(resampled))
        out.mux(stream.encode(None))
    return file.getvalue()


def get_rate(name: str) -> int:
    return 48000 if name == "webm" else RATE


@pytest.mark.parametrize("name", [*FORMATS, *TRACKS])
def test_every_format_decodes_with_the_right_length_and_timing(name: str) -> None:
    rate = get_rate(name)
    audio = build_voice(rate=rate)
    samples, decoded_rate = decode_audio(encode_audio(name, audio, rate))
    assert (decoded_rate, samples.dtype, samples.shape[1]) == (rate, np.float32, 1)
    exact = (name in FORMATS and name != "wav adpcm") or name in ("m4a", "webm")
    if exact:
        assert len(samples) == len(audio)
    else:  # raw frames have no header that states where the padding begins
        assert len(audio) <= len(samples) + 1024 <= len(audio) + 4096
    lossless = name in FORMATS and name not in ("ogg", "mp3", "wav adpcm")
    if lossless:
        np.testing.assert_allclose(samples[:, 0], audio, atol=2**-15)
    elif exact:
        # Encoder delay that was not removed would shift the audio by about a thousand samples.
        assert np.corrcoef(samples[:, 0], audio)[0, 1] > 0.97


@pytest.mark.parametrize("name", [*FORMATS, *TRACKS])
@pytest.mark.parametrize("fraction", [0.5, 0.9, 0.99])
def test_truncated_file_is_refused(name: str, fraction: float) -> None:
    data = encode_audio(name, build_voice(rate=get_rate(name)), get_rate(name))
    with pytest.raises(Unreadable):
        decode_audio(data[: int(len(data) * fraction)])


@needs_data
def test_real_flac_is_decoded_completely_and_refused_if_truncated(tmp_path: Path) -> None:
    assert DATA is not None
    files = sorted(Path(DATA, "audio-ljspeech-sample", "wavs").glob("*.flac"))
    seconds = 0.0
    for file in files:
        samples, rate = decode_audio(file)
        assert (rate, samples.shape[1]) == (22050, 1)
        assert read_audio_header(file).frames == len(samples)
        seconds += len(samples) / rate
    assert len(files) == 16
    assert seconds == pytest.approx(106.5, abs=0.05)  # as stated in its SOURCE.txt
    for file in files[:4]:
        raw = file.read_bytes()
        cut = tmp_path / file.name
        cut.write_bytes(raw[: len(raw) // 2])
        with pytest.raises(Unreadable):
            decode_audio(cut)


@needs_data
def test_real_wavs_are_decoded_completely_and_refused_if_truncated() -> None:
    assert DATA is not None
    with tarfile.open(Path(DATA, "audio-fsdd", "recordings.tar.xz"), "r|xz") as archive:
        for member in islice((member for member in archive if member.isfile()), 20):
            file = archive.extractfile(member)
            assert file is not None
            raw = file.read()
            samples, rate = decode_audio(raw)
            assert rate == 8000
            # 16 bit and one channel: everything after the header of 44 bytes is audio.
            assert len(samples) * 2 == len(raw) - 44
            with pytest.raises(Unreadable, match="truncated"):
                decode_audio(raw[: len(raw) // 2])


@needs_data
def test_audio_of_a_video_is_its_first_track() -> None:
    assert DATA is not None
    samples, rate = decode_audio(Path(DATA, "video-clips", "nasa_13013.mp4"))
    assert (samples.shape, rate) == ((104448, 2), 8000)
    with pytest.raises(Unreadable, match="contains no audio"):
        decode_audio(Path(DATA, "video-clips", "bikes.mp4"))


def encode_wav_stating_bytes(count: int) -> bytes:
    data = bytearray(encode_wav(build_voice(), RATE))
    offset = data.index(b"data") + 4
    data[offset : offset + 4] = struct.pack("<I", count)
    return bytes(data)


@pytest.mark.parametrize(
    ("count", "message"),
    [(2_000_000_000, "states 2,000,000,000"), (1000, "states an end"), (0, "states an end"), (88_201, "states 88,201")],
)
def test_wav_header_with_a_false_length_is_refused(count: int, message: str) -> None:
    with pytest.raises(Unreadable, match=message):
        decode_audio(encode_wav_stating_bytes(count))


def test_wav_of_unknown_length_is_read_to_its_end() -> None:
    samples, _ = decode_audio(encode_wav_stating_bytes(0xFFFFFFFF))
    np.testing.assert_allclose(samples[:, 0], build_voice(), atol=2**-15)


def test_wav_may_end_with_chunks_or_padding() -> None:
    data = encode_wav(build_voice(), RATE)
    for trailing_data in (b"\0" * 4000, b"TAG" + b"\1" * 125, b"LIST" + struct.pack("<I", 300) + b"\1" * 300):
        assert len(decode_audio(data + trailing_data)[0]) == len(build_voice())


def encode_flac_stating_samples(count: int) -> bytes:
    data = bytearray(encode_flac(build_voice(), RATE))
    data[21] = data[21] & 0xF0 | count >> 32
    data[22:26] = (count & 0xFFFFFFFF).to_bytes(4, "big")
    return bytes(data)


@pytest.mark.parametrize(
    ("count", "message"), [(10**9, "too long: 1,000,000,000"), (2**36 - 1, "too long"), (200_000_000, "truncated")]
)
def test_stated_length_is_not_allocated(count: int, message: str) -> None:
    data = encode_flac_stating_samples(count)
    tracemalloc.start()
    try:
        with pytest.raises(Unreadable, match=message):
            decode_audio(data)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_flac_of_unknown_length_is_read() -> None:
    np.testing.assert_allclose(decode_audio(encode_flac_stating_samples(0))[0][:, 0], build_voice(), atol=2**-15)


def test_the_limit_counts_the_samples_of_all_channels() -> None:
    stereo = encode_wav(np.stack([build_voice(), build_voice()], axis=1), RATE)
    decode_audio(stereo, limit_samples=2 * len(build_voice()))
    with pytest.raises(Unreadable, match="limit over all channels is 88,199"):
        decode_audio(stereo, limit_samples=2 * len(build_voice()) - 1)
    with pytest.raises(Unreadable, match="limit"):
        decode_audio(encode_audio("aac", build_voice()), limit_samples=len(build_voice()) // 2)


def test_invalid_audio_is_refused_in_one_line(tmp_path: Path) -> None:
    floats = build_voice()
    floats[777] = np.nan
    play_list = b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n"
    cases: list[tuple[bytes | Path, str]] = [
        (b"", "empty"),
        (b"hello " * 1000, "not an audio file"),
        (play_list, "not an audio file"),
        (encode_wav(np.zeros(0, np.float32), RATE), "no samples"),
        (encode_audio("wav float", floats), "sample 777 is not finite"),
        (encode_audio("wav", build_voice(), rate=10), "sample rate is 10 Hz"),
        (tmp_path / "missing.wav", "No such file"),
        (tmp_path, "directory"),
    ]
    for data, message in cases:
        with pytest.raises(Unreadable, match=message) as caught:
            decode_audio(data)
        assert "\n" not in str(caught.value)


def test_format_is_detected_from_content_not_suffix(tmp_path: Path) -> None:
    file = tmp_path / "sound.wav"
    file.write_bytes(encode_flac(build_voice(), RATE))
    assert len(decode_audio(file)[0]) == len(build_voice())


def test_16_bit_samples_round_trip_exactly() -> None:
    all_levels = (np.arange(-32768, 32768) / 32768).astype(np.float32)
    for data in (encode_wav(all_levels, RATE), encode_flac(all_levels, RATE)):
        np.testing.assert_array_equal(decode_audio(data)[0][:, 0], all_levels)
    loud = np.array([1.5, -2.0, 0.25], np.float32)
    np.testing.assert_allclose(decode_audio(encode_wav(loud, RATE))[0][:, 0], [32767 / 32768, -1, 0.25])


def test_mono_is_the_mean_of_the_channels() -> None:
    np.testing.assert_array_equal(to_mono(np.array([[1, 0], [0.5, -0.5]], np.float32)), [0.5, 0])


def test_missing_pyav_is_refused_with_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats that libsndfile does not read are decoded by PyAV, an optional package."""
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'bottega\[video\]'"):
        decoding._decode_with_av(io.BytesIO(b"something"), 1000)
