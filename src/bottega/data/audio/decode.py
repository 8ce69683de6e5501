"""From the bytes of a sound file to samples, whole or not at all, and from samples to a file."""

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
from bottega.data.audio import container as complete
from bottega.data.records.record import Unreadable

LIMIT_SAMPLES = 1 << 28
"""Of all channels together: 1 GiB in memory, 93 minutes of one channel at 48 kHz."""
VALID_SAMPLE_RATES = range(1000, 768_001)
"""Outside lies no sound; and one second at 1 Hz would be resampled to 48,000 times its size."""
BLOCK = 1 << 20
# What libsndfile says of a FLAC that was written to a pipe, and then cannot read.
UNKNOWN_FRAMES = 1 << 62
# PyAV would also follow play lists to other files and addresses; these demuxers read what they are given.
DEMUXERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,aac,flac,ogg,wav,aiff,caf,avi"


class AudioHeader(NamedTuple):
    sample_rate: int
    channels: int
    frames: int | None
    """As the header claims; None where it does not say."""


def decode_audio(data: bytes | Path, *, limit_samples: int = LIMIT_SAMPLES) -> tuple[np.ndarray, int]:
    """Samples, float32 [samples, channels], and how many of them are a second.

    Unreadable where anything is damaged, missing, not finite or above the limit, which is looked at before decoding.
    wav, aiff, au, caf, w64, flac, ogg and mp3 by libsndfile; m4a, aac, webm and the first sound of a video by PyAV.
    """
    with _opened(data) as file:
        kind = complete.detect_container(file)
        complete.check_complete(file, kind)
        exact = kind != "mp3" or complete.mp3_states_length(file)
        with _quiet(kind):
            opened = _soundfile(file, kind)
            if opened is None:
                samples, rate = _by_av(file, limit_samples)
            else:
                with opened:
                    samples, rate = _by_soundfile(opened, limit_samples, exact=exact)
    if not len(samples):
        raise Unreadable("a sound of no samples")
    if not np.isfinite(samples).all():
        at = int(np.flatnonzero(~np.isfinite(samples).all(1))[0])
        raise Unreadable(f"sample {at:,} is not finite")
    return samples, rate


def read_audio_header(data: bytes | Path) -> AudioHeader:
    """What a file says of itself, without decoding it."""
    with _opened(data) as file:
        kind = complete.detect_container(file)
        with _quiet(kind):
            opened = _soundfile(file, kind)
        if opened is not None:
            with opened:
                return AudioHeader(opened.samplerate, opened.channels, opened.frames)
        with _av_opened(file) as (container, stream):
            seconds = _seconds(container, stream)
            frames = None if seconds is None else round(seconds * stream.rate)
            return AudioHeader(stream.rate, stream.channels, frames)


def to_mono(samples: np.ndarray) -> np.ndarray:
    """[samples, channels] to [samples]: the mean of the channels."""
    return samples[:, 0] if samples.shape[1] == 1 else samples.mean(axis=1, dtype=np.float32)


def encode_wav(samples: np.ndarray, rate: int) -> bytes:
    """[samples] or [samples, channels] from -1 to 1 as 16 bit; what lies outside is cut off."""
    file = io.BytesIO()
    pcm = _pcm(samples)
    with wave.open(file, "wb") as out:
        out.setnchannels(1 if pcm.ndim == 1 else pcm.shape[1])
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(pcm.astype("<i2").tobytes())
    return file.getvalue()


def encode_flac(samples: np.ndarray, rate: int) -> bytes:
    """The same samples as `encode_wav`, in about half the bytes."""
    file = io.BytesIO()
    _library().write(file, _pcm(samples), rate, format="FLAC", subtype="PCM_16")
    return file.getvalue()


def _pcm(samples: np.ndarray) -> np.ndarray:
    # By 32,768, as decoders divide by it: 16-bit sound comes back as it was.
    return np.clip(np.rint(samples * np.float32(32768)), -32768, 32767).astype(np.int16)


def _library() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise EnvironmentProblem(f"sound needs soundfile: pip install 'bottega[audio]' ({error})") from error
    return soundfile


@contextmanager
def _opened(data: bytes | Path) -> Iterator[BinaryIO]:
    try:
        file: BinaryIO = io.BytesIO(data) if isinstance(data, bytes) else data.open("rb")
        with file:
            if not file.read(1):
                raise Unreadable("an empty file")
            file.seek(0)
            yield file
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror or error}") from error


@contextmanager
def _quiet(kind: complete.Container) -> Iterator[None]:
    """libmpg123 writes what it thinks of a file to standard error, past Python, where our one line is expected."""
    if kind != "mp3":
        yield
        return
    try:
        kept = os.dup(2)
    except OSError:  # closed: then nothing can be written
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@final
class _Steady:
    """A file for libsndfile, which a damaged header sends to places before the beginning: it then stays where it is.

    An error raised here would be printed with its traceback and not reach us.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.read, self.tell = file.read, file.tell

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        try:
            return self._file.seek(offset, whence)
        except (OSError, ValueError, OverflowError):
            return self._file.tell()


def _soundfile(file: BinaryIO, kind: complete.Container) -> Any:
    """The file opened by libsndfile, or None where PyAV is to try."""
    if kind in ("mp4", "matroska", "other"):
        return None
    soundfile = _library()
    file.seek(0)
    try:
        opened = soundfile.SoundFile(_Steady(file))
    except soundfile.LibsndfileError as error:
        if kind in ("wav", "aiff", "caf", "ogg"):
            # A container for any codec, and this one is not of libsndfile.
            file.seek(0)
            return None
        raise Unreadable(f"not a {kind} that can be read: {_reason(error)}") from error
    if opened.frames < UNKNOWN_FRAMES:
        return opened
    opened.close()
    file.seek(0)
    return None


def _by_soundfile(opened: Any, limit: int, *, exact: bool) -> tuple[np.ndarray, int]:
    soundfile = _library()
    claimed = opened.frames
    _check_limits(opened.samplerate, opened.channels, claimed, limit)
    blocks, total = [], 0
    try:
        # In blocks, because a header that lies within the limit must not allocate what the file does not have.
        while len(block := opened.read(BLOCK, dtype="float32", always_2d=True)):
            blocks.append(block)
            total += len(block)
            _check_limits(opened.samplerate, opened.channels, total, limit)
    except soundfile.LibsndfileError as error:
        raise Unreadable(f"damaged or cut off after {total:,} samples: {_reason(error)}") from error
    if exact and total < claimed:
        raise Unreadable(f"cut off: the header promises {claimed:,} samples, {total:,} could be decoded")
    return _joined(blocks, opened.channels), opened.samplerate


def _check_limits(rate: int, channels: int, frames: int, limit: int) -> None:
    if rate not in VALID_SAMPLE_RATES:
        raise Unreadable(
            f"a sample rate of {rate:,} Hz; it must lie between {VALID_SAMPLE_RATES.start:,} and {VALID_SAMPLE_RATES.stop - 1:,}"
        )
    if frames * channels > limit:
        raise Unreadable(f"too long: {frames:,} samples of {channels} channels, and the limit is {limit:,} in all")


def _joined(blocks: list[np.ndarray], channels: int) -> np.ndarray:
    if len(blocks) == 1:
        return blocks[0]
    return np.concatenate(blocks) if blocks else np.empty((0, channels), np.float32)


def _reason(error: Exception) -> str:
    return str(getattr(error, "error_string", error)).removeprefix("Error :").strip().rstrip(".")


def _pyav() -> Any:
    try:
        import av
    except ImportError as error:
        raise EnvironmentProblem(f"m4a, webm and video need PyAV: pip install 'bottega[video]' ({error})") from error
    return av


@contextmanager
def _av_opened(file: BinaryIO) -> Iterator[tuple[Any, Any]]:
    """The container and its first sound track."""
    av = _pyav()
    try:
        with av.open(file, options={"format_whitelist": DEMUXERS}, metadata_errors="replace") as container:
            if not container.streams.audio:
                raise Unreadable("there is no sound in it")
            if container.streams.audio[0].codec_context is None:
                raise Unreadable("of a codec that is not known, or its header is damaged")
            yield container, container.streams.audio[0]
    except (av.FFmpegError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise Unreadable(f"damaged, cut off or no sound file: {reason}") from error


def _seconds(container: Any, stream: Any) -> float | None:
    """As the container claims. Bare AAC has no header, so that what is named there is an estimate."""
    if container.format.name == "aac":
        return None
    if stream.duration is not None:
        return float(stream.duration * stream.time_base)
    return None if container.duration is None else container.duration / 1e6


def _by_av(file: BinaryIO, limit: int) -> tuple[np.ndarray, int]:
    with _av_opened(file) as (container, stream):
        seconds = _seconds(container, stream)
        _check_limits(stream.rate, stream.channels, round((seconds or 0) * stream.rate), limit)
        planar = _pyav().AudioResampler(format="fltp")
        blocks: list[np.ndarray] = []
        rate, total, end = stream.rate, 0, 0.0
        for packet in container.demux():
            if packet.pts is not None:
                end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
            if packet.stream.index != stream.index:
                continue
            for frame in packet.decode():
                # HE-AAC has twice the rate that its container names.
                rate = frame.sample_rate
                blocks += [part.to_ndarray().T for part in planar.resample(frame)]
                total += frame.samples
                _check_limits(rate, stream.channels, total, limit)
        samples = _joined(blocks, stream.channels)
        if container.format.name.startswith("mov") and stream.duration is not None and seconds is not None:
            return _trimmed(samples, round(seconds * rate), rate), rate
        # Only the longest track reaches the end of the others, so all of them are looked at.
        if seconds is not None and end < seconds - 0.25:
            raise Unreadable(f"cut off: the header promises {seconds:.2f} s, the last packet ends at {end:.2f} s")
        return samples, rate


def _trimmed(samples: np.ndarray, wanted: int, rate: int) -> np.ndarray:
    """Without what AAC adds at the end to fill its last frame; what it adds in front is left out by the decoder."""
    # Writers round to their clock and to frames: up to two frames of 2,048 samples are no damage.
    if len(samples) < wanted - 4096:
        raise Unreadable(f"cut off: the header promises {wanted:,} samples at {rate} Hz, {len(samples):,} were decoded")
    return samples[:wanted]
