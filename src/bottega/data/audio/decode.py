"""Decode audio files to samples, and encode samples as wav or flac.

A damaged file raises `Unreadable`, and is never decoded in part.
"""

from __future__ import annotations

import io
import os
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, final

import numpy as np

from bottega.core.errors import EnvironmentProblem
from bottega.data.audio.container import Container, check_complete, detect_container, mp3_states_length
from bottega.data.records.record import Unreadable

LIMIT_SAMPLES = 1 << 28
"""Limit on the number of samples over all channels: 1 GiB in memory, 93 minutes of one channel at 48 kHz."""
VALID_SAMPLE_RATES = range(1000, 768_001)
"""Rates outside this range are treated as damage: one second at 1 Hz would be resampled to 48,000 times its size."""
BLOCK_FRAMES = 1 << 20
# libsndfile reports this for a FLAC that was written to a pipe, and then cannot read it.
UNKNOWN_FRAMES = 1 << 62
# Other demuxers of PyAV follow playlists to further files and URLs; these read only the file itself.
DEMUXERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,aac,flac,ogg,wav,aiff,caf,avi"


class AudioHeader(NamedTuple):
    """Sample rate, channels and length of an audio file, without decoding it."""

    sample_rate: int
    channels: int
    frames: int | None
    """Samples per channel as the header states them; None if it states no length."""


def decode_audio(data: bytes | Path, *, limit_samples: int = LIMIT_SAMPLES) -> tuple[np.ndarray, int]:
    """Return the samples, float32 `(samples, channels)`, and the sample rate in hertz.

    Raise `Unreadable` if anything is damaged, missing, not finite or above the limit, which is checked before decoding.
    libsndfile reads wav, aiff, au, caf, w64, flac, ogg and mp3; PyAV reads m4a, aac, webm and the audio track of a video.
    """
    with _open_file(data) as file:
        kind = detect_container(file)
        check_complete(file, kind)
        has_exact_length = kind != "mp3" or mp3_states_length(file)
        with _silence_stderr(kind):
            sound_file = _open_with_soundfile(file, kind)
            if sound_file is None:
                samples, rate = _decode_with_av(file, limit_samples)
            else:
                with sound_file:
                    samples, rate = _decode_with_soundfile(sound_file, limit_samples, has_exact_length=has_exact_length)
    if not len(samples):
        raise Unreadable("contains no samples")
    if not np.isfinite(samples).all():
        position = int(np.flatnonzero(~np.isfinite(samples).all(1))[0])
        raise Unreadable(f"sample {position:,} is not finite")
    return samples, rate


def read_audio_header(data: bytes | Path) -> AudioHeader:
    """Return what the header of a file states, without decoding it."""
    with _open_file(data) as file:
        kind = detect_container(file)
        with _silence_stderr(kind):
            sound_file = _open_with_soundfile(file, kind)
        if sound_file is not None:
            with sound_file:
                return AudioHeader(sound_file.samplerate, sound_file.channels, sound_file.frames)
        with _open_with_av(file) as (container, stream):
            seconds = _read_stated_seconds(container, stream)
            frames = None if seconds is None else round(seconds * stream.rate)
            return AudioHeader(stream.rate, stream.channels, frames)


def to_mono(samples: np.ndarray) -> np.ndarray:
    """Average the channels: `(samples, channels)` to `(samples,)`."""
    return samples[:, 0] if samples.shape[1] == 1 else samples.mean(axis=1, dtype=np.float32)


def encode_wav(samples: np.ndarray, rate: int) -> bytes:
    """Encode `(samples,)` or `(samples, channels)` from -1 to 1 as 16-bit wav; values outside are clipped."""
    file = io.BytesIO()
    pcm = _to_pcm16(samples)
    with wave.open(file, "wb") as out:
        out.setnchannels(1 if pcm.ndim == 1 else pcm.shape[1])
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(pcm.astype("<i2").tobytes())
    return file.getvalue()


def encode_flac(samples: np.ndarray, rate: int) -> bytes:
    """Encode the same 16-bit samples as `encode_wav` as flac, in about half the bytes."""
    file = io.BytesIO()
    _import_soundfile().write(file, _to_pcm16(samples), rate, format="FLAC", subtype="PCM_16")
    return file.getvalue()


def _to_pcm16(samples: np.ndarray) -> np.ndarray:
    # Decoders divide by 32,768, so that 16-bit audio survives a round trip exactly.
    return np.clip(np.rint(samples * np.float32(32768)), -32768, 32767).astype(np.int16)


def _import_soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise EnvironmentProblem(f"audio needs soundfile; pip install 'bottega[audio]' ({error})") from error
    return soundfile


@contextmanager
def _open_file(data: bytes | Path) -> Iterator[BinaryIO]:
    try:
        file: BinaryIO = io.BytesIO(data) if isinstance(data, bytes) else data.open("rb")
        with file:
            if not file.read(1):
                raise Unreadable("the file is empty")
            file.seek(0)
            yield file
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror or error}") from error


@contextmanager
def _silence_stderr(kind: Container) -> Iterator[None]:
    """Silence libmpg123, which writes warnings to standard error directly, not through Python."""
    if kind != "mp3":
        yield
        return
    try:
        stderr = os.dup(2)
    except OSError:  # standard error is closed, so nothing can be written to it
        yield
        return
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


@final
class _SafeSeekFile:
    """A file object for libsndfile that ignores seeks to invalid positions, which damaged headers cause.

    An error raised in the callback would be printed with its traceback and not reach the caller.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.read, self.tell = file.read, file.tell

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        try:
            return self._file.seek(offset, whence)
        except (OSError, ValueError, OverflowError):
            return self._file.tell()


def _open_with_soundfile(file: BinaryIO, kind: Container) -> Any:
    """Open the file with libsndfile; return None if PyAV should try."""
    if kind in ("mp4", "matroska", "other"):
        return None
    soundfile = _import_soundfile()
    file.seek(0)
    try:
        sound_file = soundfile.SoundFile(_SafeSeekFile(file))
    except soundfile.LibsndfileError as error:
        if kind in ("wav", "aiff", "caf", "ogg"):
            # The container may hold any codec; libsndfile does not have this one.
            file.seek(0)
            return None
        raise Unreadable(f"cannot be read as {kind}: {_format_reason(error)}") from error
    if sound_file.frames < UNKNOWN_FRAMES:
        return sound_file
    sound_file.close()
    file.seek(0)
    return None


def _decode_with_soundfile(sound_file: Any, limit: int, *, has_exact_length: bool) -> tuple[np.ndarray, int]:
    soundfile = _import_soundfile()
    stated_frames = sound_file.frames
    _check_limits(sound_file.samplerate, sound_file.channels, stated_frames, limit)
    blocks, num_decoded = [], 0
    try:
        # In blocks: a wrong length in the header must not allocate memory for samples that do not exist.
        while len(block := sound_file.read(BLOCK_FRAMES, dtype="float32", always_2d=True)):
            blocks.append(block)
            num_decoded += len(block)
            _check_limits(sound_file.samplerate, sound_file.channels, num_decoded, limit)
    except soundfile.LibsndfileError as error:
        raise Unreadable(f"damaged or truncated after {num_decoded:,} samples: {_format_reason(error)}") from error
    if has_exact_length and num_decoded < stated_frames:
        raise Unreadable(f"truncated: the header states {stated_frames:,} samples, {num_decoded:,} could be decoded")
    return _concatenate(blocks, sound_file.channels), sound_file.samplerate


def _check_limits(rate: int, channels: int, frames: int, limit: int) -> None:
    if rate not in VALID_SAMPLE_RATES:
        raise Unreadable(
            f"the sample rate is {rate:,} Hz; it must be between {VALID_SAMPLE_RATES.start:,} and {VALID_SAMPLE_RATES.stop - 1:,}"
        )
    if frames * channels > limit:
        raise Unreadable(
            f"too long: {frames:,} samples per channel, {channels} channels; the limit over all channels is {limit:,}; "
            "split the file"
        )


def _concatenate(blocks: list[np.ndarray], channels: int) -> np.ndarray:
    if len(blocks) == 1:
        return blocks[0]
    return np.concatenate(blocks) if blocks else np.empty((0, channels), np.float32)


def _format_reason(error: Exception) -> str:
    return str(getattr(error, "error_string", error)).removeprefix("Error :").strip().rstrip(".")


def _import_av() -> Any:
    try:
        import av
    except ImportError as error:
        raise EnvironmentProblem(f"m4a, webm and video need PyAV; pip install 'bottega[video]' ({error})") from error
    return av


@contextmanager
def _open_with_av(file: BinaryIO) -> Iterator[tuple[Any, Any]]:
    """Open a file with PyAV and yield the container and its first audio stream."""
    av = _import_av()
    try:
        with av.open(file, options={"format_whitelist": DEMUXERS}, metadata_errors="replace") as container:
            if not container.streams.audio:
                raise Unreadable("contains no audio")
            if container.streams.audio[0].codec_context is None:
                raise Unreadable("the audio codec is unknown, or the header is damaged")
            yield container, container.streams.audio[0]
    except (av.FFmpegError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise Unreadable(f"damaged, truncated or not an audio file: {reason}") from error


def _read_stated_seconds(container: Any, stream: Any) -> float | None:
    """Return the duration that the container states; None for raw AAC, whose duration is an estimate."""
    if container.format.name == "aac":
        return None
    if stream.duration is not None:
        return float(stream.duration * stream.time_base)
    return None if container.duration is None else container.duration / 1e6


def _decode_with_av(file: BinaryIO, limit: int) -> tuple[np.ndarray, int]:
    with _open_with_av(file) as (container, stream):
        seconds = _read_stated_seconds(container, stream)
        _check_limits(stream.rate, stream.channels, round((seconds or 0) * stream.rate), limit)
        resampler = _import_av().AudioResampler(format="fltp")
        blocks: list[np.ndarray] = []
        rate, num_decoded, end_seconds = stream.rate, 0, 0.0
        for packet in container.demux():
            if packet.pts is not None:
                end_seconds = max(end_seconds, float((packet.pts + (packet.duration or 0)) * packet.time_base))
            if packet.stream.index != stream.index:
                continue
            for frame in packet.decode():
                # HE-AAC decodes to twice the rate that its container states.
                rate = frame.sample_rate
                blocks += [resampled.to_ndarray().T for resampled in resampler.resample(frame)]
                num_decoded += frame.samples
                _check_limits(rate, stream.channels, num_decoded, limit)
        samples = _concatenate(blocks, stream.channels)
        if container.format.name.startswith("mov") and stream.duration is not None and seconds is not None:
            return _trim_padding(samples, round(seconds * rate), rate), rate
        # The container states the length of its longest stream, so the packets of all streams count.
        if seconds is not None and end_seconds < seconds - 0.25:
            raise Unreadable(
                f"truncated: the header states {seconds:.2f} s, the last packet ends at {end_seconds:.2f} s"
            )
        return samples, rate


def _trim_padding(samples: np.ndarray, num_samples: int, rate: int) -> np.ndarray:
    """Remove the padding that AAC adds after the last sample; the decoder removes the padding before the first."""
    # Writers round to their clock and to frames, so up to two frames of 2,048 samples may be missing.
    if len(samples) < num_samples - 4096:
        raise Unreadable(
            f"truncated: the header states {num_samples:,} samples at {rate} Hz, {len(samples):,} were decoded"
        )
    return samples[:num_samples]
