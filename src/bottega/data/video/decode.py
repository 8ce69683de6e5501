"""From a video file to its frames: the first video stream, in order, at the wanted rate, within limits, and all of it.

A file that was cut short often decodes without any error. So its length is compared with what its container states,
and the end of its last frame with the duration its header states.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bottega.core.errors import EnvironmentProblem
from bottega.data.image.decode import MAX_PIXELS
from bottega.data.records.record import Unreadable
from bottega.data.video.container import count_missing_bytes

Encoded = bytes | Path

# Demuxers as FFmpeg names them. Its others include playlists, which open further files, and single pictures.
CONTAINERS = frozenset(("mov", "mp4", "avi", "matroska", "webm", "mpegts", "mpeg", "mpegvideo", "flv", "ogg", "asf"))
# Of a stated duration, this share and so many frames may be missing at the end: sound is often longer than the film,
# the last frame is often shorter, and AVI counts frames that show nothing new.
TOLERANCE, TOLERANCE_FRAMES = 0.05, 3


@dataclass(frozen=True)
class Limits:
    """Of one video, before and while it is decoded."""

    frames: int = 50_000
    """Decoded ones: half an hour at 25 a second."""
    seconds: float = 3600.0
    pixels: int = MAX_PIXELS
    """Of one frame."""


LIMITS = Limits()


class DecodedVideo(NamedTuple):
    """`rate` is that of the frames given, in frames a second; `frames` are uint8 [h, w, 3], decoded as they are asked for."""

    rate: float
    frames: Iterator[np.ndarray]


def decode_frames(data: Encoded, *, fps: float | None = None, stride: int = 1, limit: Limits = LIMITS) -> DecodedVideo:
    """The frames of a video; with `fps`, those nearest in time to that rate, and every `stride`-th of them.

    Raises Unreadable here or while frames are taken. Turned as the file says; pixels that are not square stay so.
    """
    container, stream = _opened(data)
    try:
        own = stream.average_rate or stream.guessed_rate
        if not own or own <= 0:
            raise Unreadable("states no frame rate")
        _check(stream, _stated_seconds(container, stream), limit)
    except BaseException:
        container.close()
        raise
    rate = None if fps is None else Fraction(fps).limit_denominator(100_000)
    return DecodedVideo(float((rate or own) / stride), _wanted(container, stream, Fraction(own), rate, stride, limit))


def _av() -> Any:
    try:
        import av
    except ImportError as error:
        raise EnvironmentProblem("video needs PyAV, which is not installed: pip install 'bottega[video]'") from error
    return av


def _opened(data: Encoded) -> tuple[Any, Any]:
    av = _av()
    _whole(data)
    options = {"format_whitelist": ",".join(sorted(CONTAINERS)), "max_pixels": str(MAX_PIXELS)}
    # A path could look like an address; as a file it reads that file and nothing else.
    file = io.BytesIO(data) if isinstance(data, bytes) else f"file:{data}"
    if isinstance(data, Path):
        options["protocol_whitelist"] = "file"
    try:
        container = av.open(file, options=options, metadata_errors="ignore")
    except (av.FFmpegError, OSError, ValueError) as error:
        raise Unreadable(f"is no video of a known format, or its header is damaged ({_one_line(error)})") from error
    if not container.streams.video:
        container.close()
        raise Unreadable("has no video stream")
    stream = container.streams.video[0]
    if stream.codec_context is None:
        container.close()
        raise Unreadable("is of a codec that is not known, or its header is damaged")
    # Videos are prepared by one process a core. FFmpeg's own threads, one a core for each of them, would only wait for
    # each other, and frame threads keep as many frames in memory.
    stream.codec_context.thread_count = 1
    stream.codec_context.thread_type = "NONE"
    return container, stream


def _whole(data: Encoded) -> None:
    try:
        with io.BytesIO(data) if isinstance(data, bytes) else data.open("rb") as stream:
            if not stream.read(1):
                raise Unreadable("the file is empty")
            missing = count_missing_bytes(stream)
    except OSError as error:
        raise Unreadable(f"the file cannot be read: {error.strerror}") from error
    if missing:
        raise Unreadable(f"is cut short: {missing:,} bytes are missing at its end")


def _stated_seconds(container: Any, stream: Any) -> float | None:
    """Of the stream where it has a duration of its own, else of the whole file; None where nothing is said."""
    if stream.duration is not None:
        return float(stream.duration * stream.time_base)
    try:
        hours, minutes, seconds = str(stream.metadata.get("DURATION")).split(":")  # Matroska keeps it as text
        return int(hours) * 3600 + int(minutes) * 60 + float(seconds)
    except ValueError:
        return None if container.duration is None else container.duration / 1e6


def _check(stream: Any, seconds: float | None, limit: Limits) -> None:
    width, height = stream.codec_context.width, stream.codec_context.height
    if width * height > limit.pixels:
        raise Unreadable(f"frames of {width} x {height} have more pixels than one may have ({limit.pixels:,})")
    if stream.frames > limit.frames:
        raise Unreadable(f"{stream.frames:,} frames are more than a video may have ({limit.frames:,}); cut it")
    if seconds is not None and seconds > limit.seconds:
        raise Unreadable(f"{seconds:.0f} s are more than a video may last ({limit.seconds:.0f}); cut it")


def _wanted(
    container: Any, stream: Any, own: Fraction, rate: Fraction | None, stride: int, limit: Limits
) -> Iterator[np.ndarray]:
    """Only what is given is turned into RGB: that costs as much as decoding it."""
    given = 0
    with container:
        for frame, repeats in _resampled(_timed(container, stream, own, limit), rate, own):
            pixels = None
            for _ in range(repeats):
                if given % stride == 0:
                    pixels = _pixels(frame) if pixels is None else pixels
                    yield pixels
                given += 1


def _resampled(
    timed: Iterator[tuple[Any, Fraction]], rate: Fraction | None, own: Fraction
) -> Iterator[tuple[Any, int]]:
    """Each frame, and how many of the times 0, 1/rate, 2/rate, ... are nearer to it than to any other."""
    if rate is None:
        yield from ((frame, 1) for frame, _ in timed)
        return
    wanted = 0
    before: tuple[Any, Fraction] | None = None
    for frame, time in timed:
        if before is not None:
            # The border between two frames lies halfway; a time on it goes to the later one.
            border = (before[1] + time) / 2
            until = max(wanted, math.ceil(border * rate))
            yield before[0], until - wanted
            wanted = until
        before = frame, time
    if before is not None:
        end = before[1] + 1 / own
        yield before[0], max(0 if wanted else 1, math.ceil(end * rate) - wanted)


def _timed(container: Any, stream: Any, own: Fraction, limit: Limits) -> Iterator[tuple[Any, Fraction]]:
    """All frames with their times from the first on."""
    av = _av()
    # AVI has no times of its frames but a constant rate; what FFmpeg puts in their place goes back and forth.
    even = container.format.name == "avi"
    first, time, count = None, Fraction(-1), 0
    try:
        for frame in container.decode(stream):
            if frame.width * frame.height > limit.pixels:
                raise Unreadable(f"a frame of {frame.width} x {frame.height} is larger than {limit.pixels:,} pixels")
            if even or frame.pts is None:
                now = count / own
            else:
                first = frame.pts if first is None else first
                now = (frame.pts - first) * frame.time_base
            time = max(now, time)  # never back
            count += 1
            if count > limit.frames or time > limit.seconds:
                raise Unreadable(f"lasts longer than {limit.frames:,} frames or {limit.seconds:.0f} s; cut it")
            yield frame, time
    except (av.FFmpegError, OSError, ValueError) as error:
        raise Unreadable(f"frame {count} cannot be decoded ({_one_line(error)})") from error
    _check_end(container, stream, count, count / own if even else time + 1 / own, own)


def _check_end(container: Any, stream: Any, count: int, end: Fraction, own: Fraction) -> None:
    if count == 0:
        raise Unreadable("has no frames")
    stated = _stated_seconds(container, stream)
    if container.format.name == "avi" and stream.frames:
        stated = float(stream.frames / own)  # what FFmpeg calls the duration is what it found in the file
    if stated is not None and stated - float(end) > max(TOLERANCE * stated, float(TOLERANCE_FRAMES / own)):
        raise Unreadable(f"is cut short: {count} frames end at {float(end):.2f} s of {stated:.2f} s")


def _pixels(frame: Any) -> np.ndarray:
    pixels = frame.to_ndarray(format="rgb24")
    # Older releases of PyAV do not say how a frame is turned.
    turns = round(getattr(frame, "rotation", 0) / 90) % 4
    return np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels


def _one_line(error: Exception) -> str:
    # FFmpeg's errors carry the log as well; the first sentence is the reason.
    return " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
