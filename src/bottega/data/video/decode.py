"""Decode the frames of a video file at a given frame rate, within limits; truncated files are refused.

A truncated file often decodes without an error. So its size is compared with the size that its container states, and the
end of its last frame with the duration that its header states.
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

# Demuxers by FFmpeg's names. Others include playlists, which open further files, and single images.
CONTAINERS = frozenset(("mov", "mp4", "avi", "matroska", "webm", "mpegts", "mpeg", "mpegvideo", "flv", "ogg", "asf"))
# Fraction of the stated duration and number of frames that may be missing at the end: audio is often longer than video,
# the last frame is often shorter, and AVI counts empty frames.
MAX_MISSING_FRACTION, MAX_MISSING_FRAMES = 0.05, 3


@dataclass(frozen=True)
class Limits:
    """Limits on one video, checked before and during decoding."""

    frames: int = 50_000
    """Decoded frames: half an hour at 25 per second."""
    seconds: float = 3600.0
    pixels: int = MAX_PIXELS
    """Width times height of a frame."""


LIMITS = Limits()


class DecodedVideo(NamedTuple):
    """The frame rate in frames per second, and an iterator that decodes frames, uint8 `(height, width, 3)`."""

    rate: float
    frames: Iterator[np.ndarray]


def decode_frames(data: Encoded, *, fps: float | None = None, stride: int = 1, limit: Limits = LIMITS) -> DecodedVideo:
    """Decode the frames of a video, resampled to `fps` by nearest frame if given, and every `stride`-th of them.

    Raises `Unreadable` here or during iteration. Rotation metadata is applied; the pixel aspect ratio is not.
    """
    container, stream = _open_video(data)
    try:
        native_rate = stream.average_rate or stream.guessed_rate
        if not native_rate or native_rate <= 0:
            raise Unreadable("the header states no frame rate")
        _check_limits(stream, _read_stated_seconds(container, stream), limit)
    except BaseException:
        container.close()
        raise
    rate = None if fps is None else Fraction(fps).limit_denominator(100_000)
    return DecodedVideo(
        float((rate or native_rate) / stride),
        _select_frames(container, stream, Fraction(native_rate), rate, stride, limit),
    )


def _import_av() -> Any:
    try:
        import av
    except ImportError as error:
        raise EnvironmentProblem("video needs PyAV; pip install 'bottega[video]'") from error
    return av


def _open_video(data: Encoded) -> tuple[Any, Any]:
    """Open a file with PyAV and return the container and its first video stream."""
    av = _import_av()
    _check_complete(data)
    options = {"format_whitelist": ",".join(sorted(CONTAINERS)), "max_pixels": str(MAX_PIXELS)}
    # Without the prefix, a path that looks like a URL would be opened as one.
    file = io.BytesIO(data) if isinstance(data, bytes) else f"file:{data}"
    if isinstance(data, Path):
        options["protocol_whitelist"] = "file"
    try:
        container = av.open(file, options=options, metadata_errors="ignore")
    except (av.FFmpegError, OSError, ValueError) as error:
        raise Unreadable(
            f"is not a video of a known format, or its header is damaged ({_format_error(error)})"
        ) from error
    if not container.streams.video:
        container.close()
        raise Unreadable("has no video stream")
    stream = container.streams.video[0]
    if stream.codec_context is None:
        container.close()
        raise Unreadable("the video codec is unknown, or the header is damaged")
    # Videos are prepared by one process per core. FFmpeg's own threads would compete for the cores, and frame threads keep
    # more frames in memory.
    stream.codec_context.thread_count = 1
    stream.codec_context.thread_type = "NONE"
    return container, stream


def _check_complete(data: Encoded) -> None:
    try:
        with io.BytesIO(data) if isinstance(data, bytes) else data.open("rb") as stream:
            if not stream.read(1):
                raise Unreadable("the file is empty")
            num_missing = count_missing_bytes(stream)
    except OSError as error:
        raise Unreadable(f"the file cannot be read: {error.strerror}") from error
    if num_missing:
        raise Unreadable(f"is truncated: {num_missing:,} bytes are missing at its end")


def _read_stated_seconds(container: Any, stream: Any) -> float | None:
    """Return the duration of the stream, else of the file; None if neither is stated."""
    if stream.duration is not None:
        return float(stream.duration * stream.time_base)
    try:
        hours, minutes, seconds = str(stream.metadata.get("DURATION")).split(":")  # Matroska stores it as text
        return int(hours) * 3600 + int(minutes) * 60 + float(seconds)
    except ValueError:
        return None if container.duration is None else container.duration / 1e6


def _check_limits(stream: Any, seconds: float | None, limit: Limits) -> None:
    width, height = stream.codec_context.width, stream.codec_context.height
    if width * height > limit.pixels:
        raise Unreadable(f"a frame of {width} x {height} has more than {limit.pixels:,} pixels; make the video smaller")
    if stream.frames > limit.frames:
        raise Unreadable(f"has {stream.frames:,} frames; the limit is {limit.frames:,}; split it")
    if seconds is not None and seconds > limit.seconds:
        raise Unreadable(f"lasts {seconds:.0f} s; the limit is {limit.seconds:.0f} s; split it")


def _select_frames(
    container: Any, stream: Any, native_rate: Fraction, rate: Fraction | None, stride: int, limit: Limits
) -> Iterator[np.ndarray]:
    """Yield the selected frames as RGB. Other frames are not converted, because that takes as long as decoding."""
    num_frames = 0
    with container:
        for frame, repeats in _count_repeats(
            _decode_timed_frames(container, stream, native_rate, limit), rate, native_rate
        ):
            pixels = None
            for _ in range(repeats):
                if num_frames % stride == 0:
                    pixels = _to_pixels(frame) if pixels is None else pixels
                    yield pixels
                num_frames += 1


def _count_repeats(
    timed_frames: Iterator[tuple[Any, Fraction]], rate: Fraction | None, native_rate: Fraction
) -> Iterator[tuple[Any, int]]:
    """Yield each frame with the number of output times (0, 1/rate, 2/rate, ... seconds) to which it is the nearest."""
    if rate is None:
        yield from ((frame, 1) for frame, _ in timed_frames)
        return
    num_output_times = 0
    previous: tuple[Any, Fraction] | None = None
    for frame, time in timed_frames:
        if previous is not None:
            # The boundary between two frames is halfway; a time on it belongs to the later one.
            boundary = (previous[1] + time) / 2
            num_output_times_until = max(num_output_times, math.ceil(boundary * rate))
            yield previous[0], num_output_times_until - num_output_times
            num_output_times = num_output_times_until
        previous = frame, time
    if previous is not None:
        end = previous[1] + 1 / native_rate
        yield previous[0], max(0 if num_output_times else 1, math.ceil(end * rate) - num_output_times)


def _decode_timed_frames(
    container: Any, stream: Any, native_rate: Fraction, limit: Limits
) -> Iterator[tuple[Any, Fraction]]:
    """Yield all frames with their times in seconds after the first."""
    av = _import_av()
    # AVI has a constant rate and no timestamps; the timestamps that FFmpeg computes for it are not monotonic.
    has_constant_rate = container.format.name == "avi"
    first_pts, time, num_frames = None, Fraction(-1), 0
    try:
        for frame in container.decode(stream):
            if frame.width * frame.height > limit.pixels:
                raise Unreadable(
                    f"a frame of {frame.width} x {frame.height} has more than {limit.pixels:,} pixels; make the video smaller"
                )
            if has_constant_rate or frame.pts is None:
                frame_time = num_frames / native_rate
            else:
                first_pts = frame.pts if first_pts is None else first_pts
                frame_time = (frame.pts - first_pts) * frame.time_base
            time = max(frame_time, time)  # monotonic
            num_frames += 1
            if num_frames > limit.frames or time > limit.seconds:
                raise Unreadable(f"lasts longer than {limit.frames:,} frames or {limit.seconds:.0f} s; split it")
            yield frame, time
    except (av.FFmpegError, OSError, ValueError) as error:
        raise Unreadable(f"frame {num_frames} cannot be decoded ({_format_error(error)})") from error
    _check_end(
        container,
        stream,
        num_frames,
        num_frames / native_rate if has_constant_rate else time + 1 / native_rate,
        native_rate,
    )


def _check_end(container: Any, stream: Any, num_frames: int, end_seconds: Fraction, native_rate: Fraction) -> None:
    """Raise `Unreadable` if the decoded frames end too long before the stated duration."""
    if num_frames == 0:
        raise Unreadable("has no frames")
    stated_seconds = _read_stated_seconds(container, stream)
    if container.format.name == "avi" and stream.frames:
        # FFmpeg's duration covers only the data that the file still has.
        stated_seconds = float(stream.frames / native_rate)
    if stated_seconds is not None and stated_seconds - float(end_seconds) > max(
        MAX_MISSING_FRACTION * stated_seconds, float(MAX_MISSING_FRAMES / native_rate)
    ):
        raise Unreadable(
            f"is truncated: its {num_frames} frames end at {float(end_seconds):.2f} s of {stated_seconds:.2f} s"
        )


def _to_pixels(frame: Any) -> np.ndarray:
    pixels = frame.to_ndarray(format="rgb24")
    # Frames of older releases of PyAV have no attribute `rotation`.
    quarter_turns = round(getattr(frame, "rotation", 0) / 90) % 4
    return np.ascontiguousarray(np.rot90(pixels, quarter_turns)) if quarter_turns else pixels


def _format_error(error: Exception) -> str:
    # FFmpeg's errors also contain the log; `strerror` is the reason.
    return " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
