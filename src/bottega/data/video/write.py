"""Write videos as GIF or MP4 animations, and as filmstrips of still frames."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bottega.core.errors import EnvironmentProblem
from bottega.data.image.contact_sheet import write_contact_sheet
from bottega.data.image.decode import import_pillow
from bottega.data.image.write import render_contact_sheet
from bottega.data.output_files import build_numbered_paths, is_folder, require_suffix
from bottega.storage.durable import replacing_file

ANIMATION_SUFFIXES = (".gif", ".mp4")
# Smaller videos are enlarged by whole factors, to be visible on a screen.
MIN_SIDE = 128
# Encoders and their options, in order of preference. H.264 plays everywhere; MPEG-4 part 2 is in every build of FFmpeg.
ENCODERS: dict[str, dict[str, str]] = {"libx264": {"crf": "16"}, "libopenh264": {}, "mpeg4": {"qmin": "2", "qmax": "3"}}
# Shortest delay of a GIF frame. Browsers replace a shorter delay by a tenth of a second.
MIN_DELAY_CENTISECONDS = 2
# Pixels that the palette is computed from; four times as many lower the error by 1.5 % and take five times as long.
PALETTE_PIXELS = 1 << 16


def write_video(frames: np.ndarray, fps: float, path: Path) -> None:
    """Write uint8 `(frames, height, width, channels)` as .gif or .mp4, by the suffix.

    A GIF plays at most 50 frames per second, so a faster video lasts longer.
    """
    assert frames.ndim == 4, f"{frames.shape} is not a video"
    factor = max(1, math.ceil(MIN_SIDE / max(frames.shape[1:3])))
    _write_animation(frames.repeat(factor, axis=1).repeat(factor, axis=2), fps, path)


def write_videos(
    videos: np.ndarray, fps: float, path: Path, *, captions: Sequence[str] | None = None, columns: int | None = None
) -> list[Path]:
    """Write videos, uint8 `(videos, frames, height, width, channels)`, and return the paths of the files.

    A `path` ending in .gif or .mp4 gets all videos side by side, .png three frames of each. A `path` without a suffix is a
    folder and gets 00.mp4, ... (00.gif without PyAV), sheet.gif and sheet.png.
    """
    assert videos.ndim == 5, f"{videos.shape} is not a batch of videos"
    import_pillow()  # fail before the first file is written
    if not is_folder(path):
        if require_suffix(path, (*ANIMATION_SUFFIXES, ".png")) == ".png":
            _write_filmstrip(videos, fps, path, captions)
        elif len(videos) == 1 and captions is None:
            write_video(videos[0], fps, path)
        else:
            _write_animation(_render_sheets(videos, captions, columns), fps, path)
        return [path]
    paths = build_numbered_paths(path, len(videos), ".mp4" if find_spec("av") is not None else ".gif")
    for frames, video_path in zip(videos, paths, strict=True):
        write_video(frames, fps, video_path)
    _write_animation(_render_sheets(videos, captions, columns), fps, path / "sheet.gif")
    _write_filmstrip(videos, fps, path / "sheet.png", captions)
    return [*paths, path / "sheet.gif", path / "sheet.png"]


def _render_sheets(videos: np.ndarray, captions: Sequence[str] | None, columns: int | None) -> np.ndarray:
    """Return one contact sheet of all videos for each frame, uint8 `(frames, height, width, 3)`."""
    frames_of_videos = videos.swapaxes(0, 1)
    return np.stack(
        [render_contact_sheet(list(frames), captions=captions, columns=columns) for frames in frames_of_videos]
    )


def _write_filmstrip(videos: np.ndarray, fps: float, path: Path, captions: Sequence[str] | None) -> None:
    """Write a PNG with one row per video: its first, middle and last frame, with their times."""
    last_frame = videos.shape[1] - 1
    frame_numbers = sorted({0, last_frame // 2, last_frame})
    times = [f"{number / fps:.2f} s" for number in frame_numbers]
    names = captions if captions is not None else [f"{number:02d}" for number in range(len(videos))]
    with replacing_file(path) as temporary:
        write_contact_sheet(
            [frames[number] for frames in videos for number in frame_numbers],
            temporary,
            captions=[text for name in names for text in (name, *times[1:])],
            columns=len(frame_numbers),
        )


def _write_animation(frames: np.ndarray, fps: float, path: Path) -> None:
    assert frames.dtype == np.uint8, f"frames of {frames.dtype}"
    assert fps > 0, f"{fps} frames per second"
    suffix = require_suffix(path, ANIMATION_SUFFIXES)
    with replacing_file(path) as temporary:
        if suffix == ".gif":
            temporary.write_bytes(_encode_gif(frames, fps))
        else:
            _write_mp4(frames, fps, temporary)


def _encode_gif(frames: np.ndarray, fps: float) -> bytes:
    """Encode a GIF that loops forever. Pillow compresses single frames only, because it would merge equal neighbours."""
    height, width = frames.shape[1:3]
    images, palette = _quantize(frames)
    size = width.to_bytes(2, "little") + height.to_bytes(2, "little")
    # 0xF7: a global table of 256 colours. The NETSCAPE extension loops without end.
    parts = [b"GIF89a", size, b"\xf7\x00\x00", palette, b"\x21\xff\x0bNETSCAPE2.0\x03\x01\x00\x00\x00"]
    for image, delay in zip(images, _compute_frame_delays(len(frames), fps), strict=True):
        parts += [b"\x21\xf9\x04\x00", delay.to_bytes(2, "little"), b"\x00\x00", _encode_image_block(image)]
    return b"".join([*parts, b"\x3b"])


def _compute_frame_delays(count: int, fps: float) -> list[int]:
    """Return delays in hundredths of a second whose sum is the exact duration, such as 4 4 5 4 4 4 at 24 per second."""
    times = [round(100 * number / fps) for number in range(count + 1)]
    return [min(max(MIN_DELAY_CENTISECONDS, end - start), 0xFFFF) for start, end in pairwise(times)]


def _quantize(frames: np.ndarray) -> tuple[Iterator[Any], bytes]:
    """Return frames as palette images, and the palette: one for all frames, to avoid flicker."""
    Image = import_pillow()
    if frames.shape[3] == 1:
        greys = np.arange(256, dtype=np.uint8).repeat(3)
        return (Image.fromarray(np.ascontiguousarray(frame[:, :, 0])) for frame in frames), greys.tobytes()
    sampled_pixels = frames.reshape(-1, 3)[:: max(1, frames.size // 3 // PALETTE_PIXELS)]
    if len(np.unique(_pack_rgb(sampled_pixels))) <= 256 and len(colours := np.unique(_pack_rgb(frames))) <= 256:
        return _quantize_exactly(frames, colours)
    sample_image = Image.fromarray(np.ascontiguousarray(sampled_pixels)[None])
    palette_image = sample_image.quantize(256, method=Image.Quantize.MEDIANCUT, kmeans=1)
    quantized = (
        Image.fromarray(frame).quantize(palette=palette_image, dither=Image.Dither.FLOYDSTEINBERG) for frame in frames
    )
    return quantized, bytes(palette_image.getpalette()[:768]).ljust(768, b"\0")


def _quantize_exactly(frames: np.ndarray, colours: np.ndarray) -> tuple[Iterator[Any], bytes]:
    """Use an exact palette for at most 256 colours; Pillow's would be approximate."""
    palette_frames = (np.searchsorted(colours, _pack_rgb(frame)).astype(np.uint8) for frame in frames)
    palette = np.stack([colours >> 16, colours >> 8 & 255, colours & 255], axis=1).astype(np.uint8)
    return (import_pillow().fromarray(frame) for frame in palette_frames), palette.tobytes().ljust(768, b"\0")


def _pack_rgb(pixels: np.ndarray) -> np.ndarray:
    """Pack RGB into one integer per pixel: np.unique over rows takes fifty times as long."""
    red, green, blue = (pixels[..., channel].astype(np.int32) for channel in range(3))
    return red << 16 | green << 8 | blue


def _encode_image_block(image: Any) -> bytes:
    """Return the image block of the GIF file that Pillow writes for a frame."""
    file = io.BytesIO()
    image.save(file, format="GIF", optimize=False, interlace=0)
    data = file.getvalue()
    at = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)
    while data[at] == 0x21:  # extensions: a label, then sub-blocks with their lengths, up to an empty one
        at += 2
        while data[at]:
            at += 1 + data[at]
        at += 1
    return data[at:-1]


def _write_mp4(frames: np.ndarray, fps: float, path: Path) -> None:
    av = _import_av()
    # yuv420p stores colour for 2 x 2 pixels, so sides must be even; repeat the last row or column.
    height, width = frames.shape[1:3]
    padded = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    rgb = padded.repeat(3, axis=3) if padded.shape[3] == 1 else padded
    name = next(name for name in ENCODERS if _can_encode(av, name))
    with av.open(str(path), "w", format="mp4", options={"movflags": "faststart"}) as container:
        stream = container.add_stream(name, rate=Fraction(float(fps)).limit_denominator(1001))
        stream.options = ENCODERS[name]
        stream.width, stream.height, stream.pix_fmt = rgb.shape[2], rgb.shape[1], "yuv420p"
        for frame in rgb:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())


def _can_encode(av: Any, name: str) -> bool:
    try:
        return bool(av.codec.Codec(name, "w").is_encoder)
    except ValueError:  # not in this build of FFmpeg
        return False


def _import_av() -> Any:
    try:
        import av
    except ImportError as error:
        raise EnvironmentProblem(".mp4 needs PyAV; pip install 'bottega[video]'; or use .gif") from error
    return av
