"""Samples of every medium in TensorBoard and Weights & Biases, byte for byte."""

from __future__ import annotations

import io
import sys
import wave
from pathlib import Path
from typing import Any

import pytest

from bottega.callbacks.media_files import MAX_MEDIA_FILES, find_media
from bottega.callbacks.tensorboard import TensorBoard
from bottega.callbacks.tracker_guard import TrackerGuard
from bottega.core.callback import Progress


def encode_png(width: int = 3, height: int = 2) -> bytes:
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\x00\x00\x00"
    return b"\x89PNG\r\n\x1a\n" + b"\x00\x00\x00\x0dIHDR" + header + b"the rest"


def encode_gif(width: int = 300, height: int = 200) -> bytes:
    return b"GIF89a" + width.to_bytes(2, "little") + height.to_bytes(2, "little") + b"the rest"


def encode_wav(frames: int = 80) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, 8000, frames, "NONE", ""))
        out.writeframes(b"\x01\x02" * frames)
    return file.getvalue()


def write_folder(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def log_samples(events: Path, folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(events, pytest.fail)
    board.start(Progress())
    board.after_sample(Progress(step=7), folder)
    board.finish(Progress(), None)
    accumulator = EventAccumulator(str(events), size_guidance={"images": 0, "audio": 0})
    accumulator.Reload()
    return accumulator


def list_sample_tensors(accumulator: Any) -> list[str]:
    return [tag for tag in accumulator.Tags()["tensors"] if tag.startswith("samples/")]


def test_a_sheet_is_shown_in_place_of_single_files(tmp_path: Path) -> None:
    files = {f"{number:02d}{suffix}": b"" for number in range(20) for suffix in (".png", ".wav")}
    folder = write_folder(tmp_path / "a", {**files, ".tmp-1-a.png": b""})
    assert [path.name for path in find_media(folder, ".png")] == [
        f"{number:02d}.png" for number in range(MAX_MEDIA_FILES)
    ]
    assert len(find_media(folder, ".wav")) == MAX_MEDIA_FILES
    (folder / "spectrograms.png").touch()
    assert [path.name for path in find_media(folder, ".png")] == ["spectrograms.png"]
    assert find_media(tmp_path / "nothing", ".png") == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_stores_the_files_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)  # nothing is decoded
    files = {
        "00.png": encode_png(1, 1),
        "sheet.png": encode_png(),
        "sheet.gif": encode_gif(),
        "00.wav": encode_wav(80),
        "01.wav": encode_wav(40),
    }
    accumulator = log_samples(tmp_path / "events", write_folder(tmp_path / "samples", {**files, "00.txt": b"a sample"}))
    assert sorted(accumulator.Tags()["images"]) == ["samples/sheet.gif", "samples/sheet.png"]
    assert sorted(accumulator.Tags()["audio"]) == ["samples/00.wav", "samples/01.wav"]
    assert list_sample_tensors(accumulator) == ["samples/00.txt/text_summary"]
    for name, size in (("sheet.png", (3, 2)), ("sheet.gif", (300, 200))):
        [image] = accumulator.Images(f"samples/{name}")
        assert (image.step, image.width, image.height) == (7, *size)
        assert image.encoded_image_string == files[name]
    [clip] = accumulator.Audio("samples/01.wav")
    assert (clip.step, clip.sample_rate, clip.length_frames) == (7, 8000, 40)
    assert clip.encoded_audio_string == files["01.wav"]
    assert clip.content_type == "audio/wav"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_damaged_files_are_left_out(tmp_path: Path) -> None:
    files = {
        "00.png": b"",
        "01.png": b"no picture",
        "00.wav": b"RIFF",
        "01.wav": encode_wav()[:30],
        "02.wav": encode_wav(),
    }
    accumulator = log_samples(tmp_path / "events", write_folder(tmp_path / "samples", {**files, "00.txt": b"a sample"}))
    assert accumulator.Tags()["images"] == []
    assert accumulator.Tags()["audio"] == ["samples/02.wav"]
    assert list_sample_tensors(accumulator) == ["samples/00.txt/text_summary"]


def test_training_continues_on_a_full_disk(tmp_path: Path) -> None:
    class FullDiskWriter:
        def add(self, *_: Any) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            """Do nothing."""

    messages: list[str] = []
    board = TensorBoard(tmp_path, messages.append)
    board._events = FullDiskWriter()  # type: ignore[assignment]
    guard = TrackerGuard(board, messages.append)
    for step in (1, 2):
        guard.after_sample(Progress(step=step), write_folder(tmp_path / str(step), {"00.png": encode_png()}))
    assert len(messages) == 1
    assert "No space left on device; training continues" in messages[0]
