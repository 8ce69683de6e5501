"""A sound file is decoded whole or refused, whatever its header claims."""

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
TRACKS = {
    "m4a": ("ipod", "aac", {}),
    "mp4 in fragments": ("mp4", "aac", {"movflags": "frag_keyframe+empty_moov"}),
    "aac": ("adts", "aac", {}),
    "mka": ("matroska", "aac", {}),
    "webm": ("webm", "libopus", {}),
    "mp3 without length": ("mp3", "libmp3lame", {"write_xing": "0"}),
}


def voice(seconds: float = 2.0, rate: int = RATE) -> np.ndarray:
    """Harmonics that come and go, with a little noise: codecs spend bits on all of it."""
    t = np.arange(int(seconds * rate)) / rate
    tones = sum(np.sin(2 * np.pi * 140 * k * t + k) / k for k in range(1, 12))
    noise = np.random.default_rng(0).standard_normal(len(t)) * 0.05
    return (0.2 * (tones * (1 + np.sin(2 * np.pi * 3 * t)) / 2 + noise)).astype(np.float32)


def written(name: str, samples: np.ndarray, rate: int = RATE) -> bytes:
    if name in FORMATS:
        file = io.BytesIO()
        soundfile.write(file, samples, rate, format=FORMATS[name][0], subtype=FORMATS[name][1])
        return file.getvalue()
    form, codec, options = TRACKS[name]
    file = io.BytesIO()
    with av.open(file, "w", format=form, options=options) as out:
        stream = out.add_stream(codec, rate=rate)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate, frame.pts = rate, 0
        convert = av.AudioResampler(format=stream.codec_context.format.name, layout="mono", rate=rate)
        for part in (*convert.resample(frame), *convert.resample(None)):
            out.mux(stream.encode(part))
        out.mux(stream.encode(None))
    return file.getvalue()


def rate_of(name: str) -> int:
    return 48000 if name == "webm" else RATE


@pytest.mark.parametrize("name", [*FORMATS, *TRACKS])
def test_every_format_comes_back_at_its_length_and_in_time(name: str) -> None:
    rate = rate_of(name)
    sound = voice(rate=rate)
    samples, found = decode_audio(written(name, sound, rate))
    assert (found, samples.dtype, samples.shape[1]) == (rate, np.float32, 1)
    exact = (name in FORMATS and name != "wav adpcm") or name in ("m4a", "webm")
    if exact:
        assert len(samples) == len(sound)
    else:  # bare frames have no header to say where the filling begins
        assert len(sound) <= len(samples) + 1024 <= len(sound) + 4096
    lossless = name in FORMATS and name not in ("ogg", "mp3", "wav adpcm")
    if lossless:
        np.testing.assert_allclose(samples[:, 0], sound, atol=2**-15)
    elif exact:
        # Priming that was not taken off would shift the sound by about a thousand samples.
        assert np.corrcoef(samples[:, 0], sound)[0, 1] > 0.97


@pytest.mark.parametrize("name", [*FORMATS, *TRACKS])
@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_a_file_that_is_cut_is_never_silently_short(name: str, share: float) -> None:
    data = written(name, voice(rate=rate_of(name)), rate_of(name))
    with pytest.raises(Unreadable):
        decode_audio(data[: int(len(data) * share)])


@needs_data
def test_real_flac_is_read_whole_and_refused_cut(tmp_path: Path) -> None:
    assert DATA is not None
    files = sorted(Path(DATA, "audio-ljspeech-sample", "wavs").glob("*.flac"))
    seconds = 0.0
    for file in files:
        samples, rate = decode_audio(file)
        assert (rate, samples.shape[1]) == (22050, 1)
        assert read_audio_header(file).frames == len(samples)
        seconds += len(samples) / rate
    assert len(files) == 16
    assert seconds == pytest.approx(106.5, abs=0.05)  # as its SOURCE.txt says
    for file in files[:4]:
        raw = file.read_bytes()
        cut = tmp_path / file.name
        cut.write_bytes(raw[: len(raw) // 2])
        with pytest.raises(Unreadable):
            decode_audio(cut)


@needs_data
def test_real_wavs_are_read_whole_and_refused_cut() -> None:
    assert DATA is not None
    with tarfile.open(Path(DATA, "audio-fsdd", "recordings.tar.xz"), "r|xz") as archive:
        for member in islice((member for member in archive if member.isfile()), 20):
            file = archive.extractfile(member)
            assert file is not None
            raw = file.read()
            samples, rate = decode_audio(raw)
            assert rate == 8000
            # 16 bit and one channel: all that follows the header of 44 bytes is sound.
            assert len(samples) * 2 == len(raw) - 44
            with pytest.raises(Unreadable, match="truncated"):
                decode_audio(raw[: len(raw) // 2])


@needs_data
def test_the_sound_of_a_video_is_its_first_track() -> None:
    assert DATA is not None
    samples, rate = decode_audio(Path(DATA, "video-clips", "nasa_13013.mp4"))
    assert (samples.shape, rate) == ((104448, 2), 8000)
    with pytest.raises(Unreadable, match="contains no audio"):
        decode_audio(Path(DATA, "video-clips", "bikes.mp4"))


def wav_claiming(count: int) -> bytes:
    data = bytearray(encode_wav(voice(), RATE))
    at = data.index(b"data") + 4
    data[at : at + 4] = struct.pack("<I", count)
    return bytes(data)


@pytest.mark.parametrize(
    ("count", "message"),
    [(2_000_000_000, "states 2,000,000,000"), (1000, "states an end"), (0, "states an end"), (88_201, "states 88,201")],
)
def test_a_wav_header_that_lies_about_its_length_is_noticed(count: int, message: str) -> None:
    with pytest.raises(Unreadable, match=message):
        decode_audio(wav_claiming(count))


def test_a_wav_from_a_pipe_has_no_length_and_is_read_to_its_end() -> None:
    samples, _ = decode_audio(wav_claiming(0xFFFFFFFF))
    np.testing.assert_allclose(samples[:, 0], voice(), atol=2**-15)


def test_what_follows_the_sound_of_a_wav_may_be_chunks_or_padding() -> None:
    data = encode_wav(voice(), RATE)
    for rest in (b"\0" * 4000, b"TAG" + b"\1" * 125, b"LIST" + struct.pack("<I", 300) + b"\1" * 300):
        assert len(decode_audio(data + rest)[0]) == len(voice())


def flac_claiming(count: int) -> bytes:
    data = bytearray(encode_flac(voice(), RATE))
    data[21] = data[21] & 0xF0 | count >> 32
    data[22:26] = (count & 0xFFFFFFFF).to_bytes(4, "big")
    return bytes(data)


@pytest.mark.parametrize(
    ("count", "message"), [(10**9, "too long: 1,000,000,000"), (2**36 - 1, "too long"), (200_000_000, "truncated")]
)
def test_samples_that_a_header_claims_are_not_allocated(count: int, message: str) -> None:
    data = flac_claiming(count)
    tracemalloc.start()
    try:
        with pytest.raises(Unreadable, match=message):
            decode_audio(data)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_a_flac_from_a_pipe_claims_nothing_and_is_read() -> None:
    np.testing.assert_allclose(decode_audio(flac_claiming(0))[0][:, 0], voice(), atol=2**-15)


def test_the_limit_counts_the_samples_of_all_channels() -> None:
    stereo = encode_wav(np.stack([voice(), voice()], axis=1), RATE)
    decode_audio(stereo, limit_samples=2 * len(voice()))
    with pytest.raises(Unreadable, match="limit is 88,199"):
        decode_audio(stereo, limit_samples=2 * len(voice()) - 1)
    with pytest.raises(Unreadable, match="limit"):
        decode_audio(written("aac", voice()), limit_samples=len(voice()) // 2)


def test_what_is_no_sound_says_so_in_one_line(tmp_path: Path) -> None:
    floats = voice()
    floats[777] = np.nan
    play_list = b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n"
    cases: list[tuple[bytes | Path, str]] = [
        (b"", "empty"),
        (b"hello " * 1000, "not an audio file"),
        (play_list, "not an audio file"),
        (encode_wav(np.zeros(0, np.float32), RATE), "no samples"),
        (written("wav float", floats), "sample 777 is not finite"),
        (written("wav", voice(), rate=10), "sample rate is 10 Hz"),
        (tmp_path / "missing.wav", "No such file"),
        (tmp_path, "directory"),
    ]
    for data, message in cases:
        with pytest.raises(Unreadable, match=message) as caught:
            decode_audio(data)
        assert "\n" not in str(caught.value)


def test_a_wrong_suffix_does_not_matter(tmp_path: Path) -> None:
    file = tmp_path / "sound.wav"
    file.write_bytes(encode_flac(voice(), RATE))
    assert len(decode_audio(file)[0]) == len(voice())


def test_sixteen_bits_come_back_as_they_were() -> None:
    every = (np.arange(-32768, 32768) / 32768).astype(np.float32)
    for data in (encode_wav(every, RATE), encode_flac(every, RATE)):
        np.testing.assert_array_equal(decode_audio(data)[0][:, 0], every)
    loud = np.array([1.5, -2.0, 0.25], np.float32)
    np.testing.assert_allclose(decode_audio(encode_wav(loud, RATE))[0][:, 0], [32767 / 32768, -1, 0.25])


def test_mono_is_the_mean_of_the_channels() -> None:
    np.testing.assert_array_equal(to_mono(np.array([[1, 0], [0.5, -0.5]], np.float32)), [0.5, 0])


def test_without_pyav_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever libsndfile does not take goes to PyAV, which not everybody has."""
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'bottega\[video\]'"):
        decoding._decode_with_av(io.BytesIO(b"something"), 1000)
