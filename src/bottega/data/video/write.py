"""Videos as files for people: animations to watch, and filmstrips for where only still pictures can be shown."""

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

ANIMATIONS = (".gif", ".mp4")
# Smaller ones are enlarged by whole factors: a film of 28 pixels is a stamp on any screen.
SMALLEST_SIDE = 128
# H.264 plays everywhere; MPEG-4 part 2 is in every build of FFmpeg.
ENCODERS: dict[str, dict[str, str]] = {"libx264": {"crf": "16"}, "libopenh264": {}, "mpeg4": {"qmin": "2", "qmax": "3"}}
# Browsers take a shorter delay for a mistake and show the frame for a tenth of a second.
SHORTEST_DELAY = 2
# Pixels that colours are chosen from; four times as many lower the error by 1.5 % and take five times as long.
LOOKED_AT = 1 << 16


def write_video(frames: np.ndarray, fps: float, path: Path) -> None:
    """uint8 [f, h, w, c] as .gif or .mp4, by the ending; at most 50 frames a second in a GIF, which then lasts longer."""
    assert frames.ndim == 4, f"{frames.shape} is no video"
    factor = max(1, math.ceil(SMALLEST_SIDE / max(frames.shape[1:3])))
    _animate(frames.repeat(factor, axis=1).repeat(factor, axis=2), fps, path)


def write_videos(
    videos: np.ndarray, fps: float, path: Path, *, captions: Sequence[str] | None = None, columns: int | None = None
) -> list[Path]:
    """uint8 [b, f, h, w, c] side by side as one .gif or .mp4, or as .png with three frames of each. Returns the files.

    With a `path` without an ending 00.mp4, ... (00.gif where PyAV is missing), sheet.gif and sheet.png.
    """
    assert videos.ndim == 5, f"{videos.shape} are no videos"
    import_pillow()  # or how to get it, before the first file is written
    if not is_folder(path):
        if require_suffix(path, (*ANIMATIONS, ".png")) == ".png":
            _filmstrip(videos, fps, path, captions)
        elif len(videos) == 1 and captions is None:
            write_video(videos[0], fps, path)
        else:
            _animate(_pages(videos, captions, columns), fps, path)
        return [path]
    singles = build_numbered_paths(path, len(videos), ".mp4" if find_spec("av") is not None else ".gif")
    for frames, single in zip(videos, singles, strict=True):
        write_video(frames, fps, single)
    _animate(_pages(videos, captions, columns), fps, path / "sheet.gif")
    _filmstrip(videos, fps, path / "sheet.png", captions)
    return [*singles, path / "sheet.gif", path / "sheet.png"]


def _pages(videos: np.ndarray, captions: Sequence[str] | None, columns: int | None) -> np.ndarray:
    """All clips at one time on a page, for each time: uint8 [f, h, w, 3]."""
    moments = videos.swapaxes(0, 1)
    return np.stack([render_contact_sheet(list(moment), captions=captions, columns=columns) for moment in moments])


def _filmstrip(videos: np.ndarray, fps: float, path: Path, captions: Sequence[str] | None) -> None:
    """A row for each clip: its first, middle and last frame, with their times."""
    last = videos.shape[1] - 1
    chosen = sorted({0, last // 2, last})
    times = [f"{number / fps:.2f} s" for number in chosen]
    names = captions if captions is not None else [f"{number:02d}" for number in range(len(videos))]
    with replacing_file(path) as temporary:
        write_contact_sheet(
            [frames[number] for frames in videos for number in chosen],
            temporary,
            captions=[words for name in names for words in (name, *times[1:])],
            columns=len(chosen),
        )


def _animate(frames: np.ndarray, fps: float, path: Path) -> None:
    assert frames.dtype == np.uint8, f"frames of {frames.dtype}"
    assert fps > 0, f"{fps} frames a second"
    kind = require_suffix(path, ANIMATIONS)
    with replacing_file(path) as temporary:
        if kind == ".gif":
            temporary.write_bytes(_gif(frames, fps))
        else:
            _write_mp4(frames, fps, temporary)


def _gif(frames: np.ndarray, fps: float) -> bytes:
    """Frames that repeat for ever. Pillow compresses each; it would also join equal neighbours, so we put them together."""
    height, width = frames.shape[1:3]
    pictures, palette = _with_palette(frames)
    size = width.to_bytes(2, "little") + height.to_bytes(2, "little")
    # 0xF7: one table of 256 colours for all. The second block says: again, without end.
    parts = [b"GIF89a", size, b"\xf7\x00\x00", palette, b"\x21\xff\x0bNETSCAPE2.0\x03\x01\x00\x00\x00"]
    for picture, delay in zip(pictures, _delays(len(frames), fps), strict=True):
        parts += [b"\x21\xf9\x04\x00", delay.to_bytes(2, "little"), b"\x00\x00", _image_block(picture)]
    return b"".join([*parts, b"\x3b"])


def _delays(count: int, fps: float) -> list[int]:
    """Hundredths of a second, rounded so that the whole lasts as long as it should: 4 4 5 4 4 4 at 24 a second."""
    times = [round(100 * number / fps) for number in range(count + 1)]
    return [min(max(SHORTEST_DELAY, end - start), 0xFFFF) for start, end in pairwise(times)]


def _with_palette(frames: np.ndarray) -> tuple[Iterator[Any], bytes]:
    """Pictures whose pixels are numbers of colours, and the 256 colours: the same for all frames, or they would flicker."""
    Image = import_pillow()
    if frames.shape[3] == 1:
        greys = np.arange(256, dtype=np.uint8).repeat(3)
        return (Image.fromarray(np.ascontiguousarray(frame[:, :, 0])) for frame in frames), greys.tobytes()
    some = frames.reshape(-1, 3)[:: max(1, frames.size // 3 // LOOKED_AT)]
    if len(np.unique(_packed(some))) <= 256 and len(colours := np.unique(_packed(frames))) <= 256:
        return _exact(frames, colours)
    seen = Image.fromarray(np.ascontiguousarray(some)[None])
    common = seen.quantize(256, method=Image.Quantize.MEDIANCUT, kmeans=1)
    near = (Image.fromarray(frame).quantize(palette=common, dither=Image.Dither.FLOYDSTEINBERG) for frame in frames)
    return near, bytes(common.getpalette()[:768]).ljust(768, b"\0")


def _exact(frames: np.ndarray, colours: np.ndarray) -> tuple[Iterator[Any], bytes]:
    """Few colours stay as they are; Pillow would take neighbours of them."""
    numbers = (np.searchsorted(colours, _packed(frame)).astype(np.uint8) for frame in frames)
    table = np.stack([colours >> 16, colours >> 8 & 255, colours & 255], axis=1).astype(np.uint8)
    return (import_pillow().fromarray(frame) for frame in numbers), table.tobytes().ljust(768, b"\0")


def _packed(pixels: np.ndarray) -> np.ndarray:
    """[..., 3] as one number each: np.unique of rows takes fifty times as long."""
    red, green, blue = (pixels[..., channel].astype(np.int32) for channel in range(3))
    return red << 16 | green << 8 | blue


def _image_block(picture: Any) -> bytes:
    """The picture alone, of the GIF file that Pillow makes of it."""
    file = io.BytesIO()
    picture.save(file, format="GIF", optimize=False, interlace=0)
    data = file.getvalue()
    at = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)
    while data[at] == 0x21:  # extensions: a label, then pieces with their lengths, up to one of none
        at += 2
        while data[at]:
            at += 1 + data[at]
        at += 1
    return data[at:-1]


def _write_mp4(frames: np.ndarray, fps: float, path: Path) -> None:
    av = _av()
    # Colours are kept for squares of four pixels, so that sides are even; the last row or column is repeated.
    height, width = frames.shape[1:3]
    even = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    colour = even.repeat(3, axis=3) if even.shape[3] == 1 else even
    name = next(name for name in ENCODERS if _can_encode(av, name))
    with av.open(str(path), "w", format="mp4", options={"movflags": "faststart"}) as container:
        stream = container.add_stream(name, rate=Fraction(float(fps)).limit_denominator(1001))
        stream.options = ENCODERS[name]
        stream.width, stream.height, stream.pix_fmt = colour.shape[2], colour.shape[1], "yuv420p"
        for frame in colour:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())


def _can_encode(av: Any, name: str) -> bool:
    try:
        return bool(av.codec.Codec(name, "w").is_encoder)
    except ValueError:  # unknown to this build
        return False


def _av() -> Any:
    try:
        import av
    except ImportError as error:
        raise EnvironmentProblem(".mp4 needs PyAV: pip install 'bottega[video]'; or use .gif") from error
    return av
