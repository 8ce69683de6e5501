"""TensorBoard event files beside the metrics."""

from __future__ import annotations

import io
import logging
import time
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bottega.core.callback import Callback, Progress

SHEETS = ("sheet", "spectrograms")
MOST = 16
"""Single files of a kind that are shown of one step; an event file of a long run is large enough with them."""
PNG, GIF = b"\x89PNG\r\n\x1a\n", (b"GIF87a", b"GIF89a")


def media(folder: Path, suffix: str) -> list[Path]:
    """The files of one kind that are shown: the sheet of all where there is one, else the first single ones."""
    found = sorted(path for path in folder.glob(f"*{suffix}") if not path.name.startswith("."))
    return [path for path in found if path.stem in SHEETS] or found[:MOST]


def summary(path: Path, tag: str) -> Any:
    """A .png, .gif or .wav as it is, for the event file; None where it is not what its ending says.

    `add_image` would decode and compress it again, `add_audio` would rescale it, and neither keeps a GIF moving.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary

    data = path.read_bytes()
    if data[:8] == PNG:
        width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    elif data[:6] in GIF:
        width, height = (int.from_bytes(data[at : at + 2], "little") for at in (6, 8))
    else:
        return _sound(data, tag)
    image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=data)
    return Summary(value=[Summary.Value(tag=tag, image=image)])


def _sound(data: bytes, tag: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    try:
        with wave.open(io.BytesIO(data)) as file:
            about = file.getparams()
    except (wave.Error, EOFError):
        return None
    audio = Summary.Audio(
        sample_rate=about.framerate,
        num_channels=about.nchannels,
        length_frames=about.nframes,
        encoded_audio_string=data,
        content_type="audio/wav",
    )
    return Summary(value=[Summary.Value(tag=tag, audio=audio)])


def _after_the_others(folder: Path) -> None:
    """Wait, a second at most, until the name of a new file comes after all that are there: TensorBoard reads them by name, and
    what tells two of one second apart is a number without leading zeros, of which 10 comes before 9."""
    until = time.monotonic() + 1.1
    newest = max((path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")), default="")
    while str(int(time.time())) <= newest and time.monotonic() < until:
        time.sleep(0.02)


class TensorBoard(Callback):
    """The writer is imported on first use: it takes seconds, and nobody should wait for it before the first step.

    A full disk must not end a training, so a failed write is reported once and the run goes on.
    """

    name = "tensorboard"

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self.folder, self.warn = folder, warn
        self._writer: Any = None

    def start(self, progress: Progress) -> None:
        logging.getLogger("tensorboard").setLevel(logging.ERROR)
        from torch.utils.tensorboard import SummaryWriter

        def begin() -> None:
            _after_the_others(self.folder)
            # Events after this step belong to a process that was killed, or were taken back; TensorBoard drops them.
            self._writer = SummaryWriter(str(self.folder), purge_step=progress.step + 1)

        self._try(begin)

    def after_step(self, progress: Progress, metrics: dict[str, float]) -> None:
        self._add("train", progress, metrics)

    def after_eval(self, progress: Progress, metrics: dict[str, float]) -> None:
        self._add("validation", progress, metrics)

    def after_sample(self, progress: Progress, folder: Path) -> None:
        def add() -> None:
            for path in sorted(folder.glob("*.txt")):
                text = "    " + path.read_text(encoding="utf-8").replace("\n", "\n    ")
                self._writer.add_text(f"samples/{path.stem}", text, progress.step)
            for path in [path for suffix in (".png", ".gif", ".wav") for path in media(folder, suffix)]:
                # With the ending: TensorBoard shows one kind under a name, and there may be sheet.png and sheet.gif.
                made = summary(path, f"samples/{path.name}")
                if made is not None:
                    self._writer.file_writer.add_summary(made, progress.step)

        if self._writer is not None:
            self._try(add)

    def rewind(self, progress: Progress) -> None:
        self.finish(progress, None)
        self.start(progress)

    def finish(self, progress: Progress, error: BaseException | None) -> None:
        if self._writer is not None:
            self._try(self._writer.close)

    def _add(self, group: str, progress: Progress, metrics: dict[str, float]) -> None:
        def add() -> None:
            for name, value in metrics.items():
                self._writer.add_scalar(f"{group}/{name}", value, progress.step)

        if self._writer is not None:
            self._try(add)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self.warn(
                f"no TensorBoard events in {self.folder}: {error.strerror or error}; training goes on without them"
            )
            self._writer = None
