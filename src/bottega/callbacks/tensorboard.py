"""TensorBoard event files: scalars, texts, images and audio of a run."""

from __future__ import annotations

import io
import itertools
import logging
import os
import socket
import time
import wave
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bottega.core.callback import Callback, Progress

CONTACT_SHEET_STEMS = ("sheet", "spectrograms")
MAX_MEDIA_FILES = 16
"""Files of each kind that are logged per step, to limit the size of event files."""
PNG_SIGNATURE, GIF_SIGNATURES = b"\x89PNG\r\n\x1a\n", (b"GIF87a", b"GIF89a")


def find_media(folder: Path, suffix: str) -> list[Path]:
    """Return the files of one kind to log: the contact sheet if there is one, else the first single files."""
    files = sorted(path for path in folder.glob(f"*{suffix}") if not path.name.startswith("."))
    return [path for path in files if path.stem in CONTACT_SHEET_STEMS] or files[:MAX_MEDIA_FILES]


def make_media_summary(path: Path, tag: str) -> Any:
    """Return the bytes of a .png, .gif or .wav as a `Summary`; None if the content is none of these.

    TensorBoard's `add_image` would decode and re-encode it, `add_audio` would rescale it, and neither keeps an animated GIF.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary

    data = path.read_bytes()
    if data[:8] == PNG_SIGNATURE:
        width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    elif data[:6] in GIF_SIGNATURES:
        width, height = (int.from_bytes(data[at : at + 2], "little") for at in (6, 8))
    else:
        return _make_audio_summary(data, tag)
    image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=data)
    return Summary(value=[Summary.Value(tag=tag, image=image)])


def _make_audio_summary(data: bytes, tag: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    try:
        with wave.open(io.BytesIO(data)) as file:
            parameters = file.getparams()
    except (wave.Error, EOFError):
        return None
    audio = Summary.Audio(
        sample_rate=parameters.framerate,
        num_channels=parameters.nchannels,
        length_frames=parameters.nframes,
        encoded_audio_string=data,
        content_type="audio/wav",
    )
    return Summary(value=[Summary.Value(tag=tag, audio=audio)])


def _wait_for_later_name(folder: Path) -> None:
    """Wait, at most a second, until the name of a new event file sorts after the existing ones.

    TensorBoard reads files in the order of their names, which are events.out.tfevents.SECONDS.HOST.PROCESS.NUMBER. Within one
    second the process and the number decide, and they have no leading zeros, so that 10 sorts before 9.
    """
    deadline = time.monotonic() + 1.1
    newest = max((path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")), default="")
    while str(int(time.time())) <= newest and time.monotonic() < deadline:
        time.sleep(0.02)


class EventFile:
    """An event file written in the calling thread; TensorBoard's own writer uses another thread, in which a full disk only prints a traceback.

    If a call cannot write all of its events, the events of that call are removed, so that the file ends with a complete event.
    """

    def __init__(self, folder: Path, *, purge_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        folder.mkdir(parents=True, exist_ok=True)
        stem = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        number = next(number for number in itertools.count() if not (folder / f"{stem}.{number}").exists())
        self._file = io.FileIO(folder / f"{stem}.{number}", "xb")
        # On a START event TensorBoard discards what it has read from `purge_step` on: those steps were rolled back, or run by a
        # process that was killed before it saved them.
        start = Event(wall_time=time.time(), step=purge_step, session_log=SessionLog(status=SessionLog.START))
        try:
            self._write([Event(wall_time=time.time(), file_version="brain.Event:2"), start])
        except OSError:
            self._file.close()
            raise

    def add(self, summaries: Iterable[Any], step: int) -> None:
        """Write an event for each `Summary` at `step`."""
        from tensorboard.compat.proto.event_pb2 import Event

        self._write([Event(wall_time=time.time(), step=step, summary=summary) for summary in summaries])

    def close(self) -> None:
        self._file.close()

    def _write(self, events: list[Any]) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        records = io.BytesIO()
        for event in events:
            RecordWriter(records).write(event.SerializeToString())
        complete_size, remaining = self._file.tell(), records.getbuffer()
        try:
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
        except OSError:
            self._file.truncate(complete_size)
            raise


def _make_scalar_summary(tag: str, value: float) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=tag, simple_value=value)])


def _make_text_summary(tag: str, text: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
    return Summary(value=[Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)])


class TensorBoard(Callback):
    """Writes metrics and samples as TensorBoard events.

    TensorBoard is imported on first use, because that takes a second. A failed write, as on a full disk, is reported once and
    ends the logging, not the run.
    """

    name = "tensorboard"

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self.folder, self.warn = folder, warn
        self._events: EventFile | None = None

    def start(self, progress: Progress) -> None:
        logging.getLogger("tensorboard").setLevel(logging.ERROR)
        with self._report_write_errors():
            _wait_for_later_name(self.folder)
            self._events = EventFile(self.folder, purge_step=progress.step + 1)

    def after_step(self, progress: Progress, metrics: dict[str, float]) -> None:
        self._add("train", progress, metrics)

    def after_eval(self, progress: Progress, metrics: dict[str, float]) -> None:
        self._add("validation", progress, metrics)

    def after_sample(self, progress: Progress, folder: Path) -> None:
        if self._events is None:
            return
        with self._report_write_errors():
            for path in sorted(folder.glob("*.txt")):
                text = "    " + path.read_text(encoding="utf-8").replace("\n", "\n    ")
                self._events.add([_make_text_summary(f"samples/{path.stem}", text)], progress.step)
            for path in [path for suffix in (".png", ".gif", ".wav") for path in find_media(folder, suffix)]:
                # The tag contains the suffix: TensorBoard allows one kind per tag, and there may be sheet.png and sheet.gif.
                sample = make_media_summary(path, f"samples/{path.name}")
                if sample is not None:
                    self._events.add([sample], progress.step)

    def rewind(self, progress: Progress) -> None:
        self.finish(progress, None)
        self.start(progress)

    def finish(self, progress: Progress, error: BaseException | None) -> None:
        if self._events is not None:
            with self._report_write_errors():
                self._events.close()
            self._events = None

    def _add(self, group: str, progress: Progress, metrics: dict[str, float]) -> None:
        if self._events is not None:
            with self._report_write_errors():
                self._events.add(
                    [_make_scalar_summary(f"{group}/{name}", value) for name, value in metrics.items()], progress.step
                )

    @contextmanager
    def _report_write_errors(self) -> Iterator[None]:
        """Warn and stop logging after the first write that fails."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            self.warn(f"cannot write TensorBoard events to {self.folder}: {reason}; training continues without them")
            if self._events is not None:
                with suppress(OSError):
                    self._events.close()
            self._events = None
