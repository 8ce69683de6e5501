"""Images, audio and video through the command line: unusual files train, bad files are named in one line."""

from __future__ import annotations

import io
import json
import shutil
import struct
import zlib
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import small_media
from bottega import cli

av = pytest.importorskip("av", reason="av is not installed")
soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed")
Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

SMALL: dict[str, Any] = {
    **small_media.COMMON,
    "model.hidden_size": 16,
    "model.num_layers": 1,
    "training.max_steps": 2,
    "training.batch_size": 4,
    "evaluation.every": 2,
    "checkpoint.every": 2,
    "name": "x",
}
DATA_OPTIONS: dict[str, dict[str, Any]] = {
    "image": {"data.image_size": 8},
    "audio": {"data.num_mels": 8, "data.fft_size": 256, "data.hop_size": 64, "model.axes": 2},
    "video": {"data.image_size": 8, "data.num_frames": 4, "data.channels": 3, "model.temporal_patch_size": 1},
}
ALLOWED = {"data.max_bad": 0.2}
RANDOM = np.random.default_rng(0)


class CommandResult:
    """Exit code and output of a command that is run in this process."""

    def __init__(self, capfd: pytest.CaptureFixture[str], arguments: list[str]) -> None:
        capfd.readouterr()
        self.code = cli.main(arguments)
        self.out, self.err = capfd.readouterr()

    def assert_refused(self, code: int, *parts: Any) -> None:
        assert self.code == code, self.err
        assert self.err.startswith("bottega: ")
        assert self.err.count("\n") == 1, f"one line, not {self.err!r}"
        for part in map(str, parts):
            assert part in self.err, f"{part!r} is not in {self.err!r}"


@pytest.fixture
def run_cli(capfd: pytest.CaptureFixture[str]) -> Any:
    return lambda *arguments: CommandResult(capfd, [str(a) for a in arguments])


@pytest.fixture
def train(run_cli: Any, tmp_path: Path) -> Callable[..., CommandResult]:
    """`bottega train` with a tiny model."""

    def run_train(task: str, data: Path, **changes: Any) -> CommandResult:
        where = {"output_dir": str(tmp_path / "runs"), "data.train.kind": "auto", "data.train.path": str(data)}
        keys = {**SMALL, **DATA_OPTIONS[task], **where, **changes}.items()
        return run_cli(
            "train", task, "--quiet", *(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in keys)
        )

    return run_train


def read_log(tmp_path: Path) -> str:
    return (tmp_path / "runs" / "x" / "log.txt").read_text()


# Small files of each medium


def write_file(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def random_pixels(*shape: int) -> np.ndarray:
    return RANDOM.integers(0, 256, shape, np.uint8)


def encode_image(image: Image.Image | None = None, *, form: str = "PNG") -> bytes:
    out = io.BytesIO()
    (image or Image.fromarray(random_pixels(8, 8, 3))).save(out, form)
    return out.getvalue()


def bomb_png() -> bytes:
    """Return a PNG with a header of 900 million pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


def random_tone(samples: int = 800) -> np.ndarray:
    turns = RANDOM.uniform(200, 900) * np.arange(samples) / 8000
    return (0.3 * np.sin(2 * np.pi * turns)).astype(np.float32)


def encode_audio(audio: np.ndarray | None = None, *, rate: int = 8000, subtype: str = "PCM_16") -> bytes:
    out = io.BytesIO()
    soundfile.write(out, random_tone() if audio is None else audio, rate, subtype=subtype, format="WAV")
    return out.getvalue()


def encode_video(
    count: int = 4, *, times: list[int] | None = None, form: str = "matroska", size: tuple[int, int] = (16, 24)
) -> bytes:
    """Return a video of noise frames at `times`, in tenths of a second."""
    out = io.BytesIO()
    with av.open(out, "w", format=form) as container:
        stream = container.add_stream("ffv1" if form == "matroska" else "mpeg4", rate=10)
        stream.height, stream.width = size
        stream.pix_fmt = "bgr0" if form == "matroska" else "yuv420p"
        stream.codec_context.time_base = Fraction(1, 10)
        for time in times or range(count):
            frame = av.VideoFrame.from_ndarray(random_pixels(*size, 3), format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 10)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


def rotated_clip() -> bytes:
    """Return a clip with a rotation of 90 degrees in its header, as phones write it."""
    data = bytearray(encode_video(form="mp4", size=(32, 48)))
    at = data.index(b"tkhd") + 44
    data[at : at + 36] = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
    return bytes(data)


def audio_only_container() -> bytes:
    """Return a video container without a video stream."""
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


ENCODERS: dict[str, tuple[Callable[[], bytes], str]] = {
    "image": (encode_image, "png"),
    "audio": (encode_audio, "wav"),
    "video": (encode_video, "mkv"),
}


def write_media_folder(tmp_path: Path, task: str, count: int = 12) -> Path:
    """Write good files into a folder for each of three classes."""
    encode, suffix = ENCODERS[task]
    for number in range(count):
        write_file(tmp_path / "data" / f"c{number % 3}" / f"{number:02}.{suffix}", encode())
    return tmp_path / "data"


# Unusual but valid files


def unusual_files(task: str) -> dict[str, bytes]:
    if task == "image":
        colour = Image.fromarray(random_pixels(9, 7, 3))
        return {
            "cmyk.jpg": encode_image(colour.convert("CMYK"), form="JPEG"),
            "16-bit.png": encode_image(Image.fromarray(RANDOM.integers(0, 1 << 16, (9, 7)).astype(np.uint16))),
            "alpha.png": encode_image(Image.fromarray(random_pixels(9, 7, 4))),
            "palette.png": encode_image(colour.convert("P")),
            "black-and-white.png": encode_image(colour.convert("1")),
            "a-jpeg-in-truth.png": encode_image(colour, form="JPEG"),
        }
    if task == "audio":
        return {
            "silent.wav": encode_audio(np.zeros(800, np.float32)),
            "stereo.wav": encode_audio(np.stack([random_tone(), random_tone()], axis=1)),
            "8-bit.wav": encode_audio(subtype="PCM_U8"),
            "96-khz.wav": encode_audio(np.repeat(random_tone(), 12), rate=96_000),
            "shorter-than-a-window.wav": encode_audio(random_tone(20)),
            "one-sample.wav": encode_audio(random_tone(1)),
        }
    return {
        "uneven.mkv": encode_video(times=[0, 1, 5, 6, 20]),
        "turned.mp4": rotated_clip(),
        "still.mkv": encode_video(1),
        "long.mkv": encode_video(40),
    }


@pytest.mark.parametrize(
    ("task", "changes"),
    [
        ("image", {}),
        ("image", {"data.channels": 1, "data.store": "encoded"}),
        ("audio", {}),
        ("audio", {"data.normalise": "loudness", "data.sample_rate": 16_000}),
        ("video", {}),
        ("video", {"data.fps": 5, "data.stride": 2}),
    ],
)
def test_unusual_files_are_trained_on(train: Any, tmp_path: Path, task: str, changes: dict[str, Any]) -> None:
    data = write_media_folder(tmp_path, task)
    for name, content in unusual_files(task).items():
        write_file(data / "c0" / name, content)
    result = train(task, data, **changes)
    assert (result.code, result.err) == (0, "")
    assert "left out" not in read_log(tmp_path), "no file is dropped"


@pytest.mark.parametrize("samples", [1, 20])
def test_audio_shorter_than_a_window_is_padded(train: Any, tmp_path: Path, samples: int) -> None:
    for number in range(8):
        write_file(tmp_path / "data" / f"c{number % 2}" / f"{number}.wav", encode_audio(random_tone(samples)))
    assert train("audio", tmp_path / "data").code == 0


def test_silent_audio_trains_with_finite_numbers(train: Any, tmp_path: Path) -> None:
    for number in range(8):
        write_file(tmp_path / "data" / f"c{number % 2}" / f"{number}.wav", encode_audio(np.zeros(800, np.float32)))
    result = train("audio", tmp_path / "data", **{"data.normalise": "loudness", "samples.every": 2, "samples.count": 1})
    assert (result.code, result.err) == (0, "")


def test_videos_of_one_frame_are_trained_on(train: Any, tmp_path: Path) -> None:
    for number in range(8):
        write_file(tmp_path / "data" / f"c{number % 2}" / f"{number}.mkv", encode_video(1))
    assert train("video", tmp_path / "data").code == 0


@pytest.mark.parametrize("by", ["fraction", "stratified"])
def test_class_with_one_image(train: Any, tmp_path: Path, by: str) -> None:
    data = write_media_folder(tmp_path, "image")
    write_file(data / "lonely" / "a.png", encode_image())
    assert train("image", data, **{"data.split.by": by}).code == 0


def test_three_images_leave_one_for_validation(train: Any, tmp_path: Path) -> None:
    few = {"data.validation.split": 0.05, "training.batch_size": 2}
    assert train("image", write_media_folder(tmp_path, "image", 3), **few).code == 0
    assert "validation" in read_log(tmp_path)


# Bad files


def truncate(content: bytes) -> bytes:
    return content[: len(content) // 2]


BAD: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "picture cut": ("image", lambda: truncate(encode_image()), "truncated"),
    "picture empty": ("image", lambda: b"", "empty"),
    "picture bomb": ("image", bomb_png, "more than 67,108,864 pixels"),
    "text named png": ("image", lambda: b"hello " * 40, "not an image of a known format"),
    "sound cut": ("audio", lambda: truncate(encode_audio()), "truncated: the header states 1,600 bytes"),
    "sound empty": ("audio", lambda: b"", "empty"),
    "sound of nothing": ("audio", lambda: encode_audio(random_tone(0)), "no samples"),
    "sound not finite": (
        "audio",
        lambda: encode_audio(random_tone() + np.float32("nan"), subtype="FLOAT"),
        "sample 0 is not finite",
    ),
    "text named wav": ("audio", lambda: b"hello " * 40, "not an audio file"),
    "clip cut": ("video", lambda: truncate(encode_video()), "truncated"),
    "clip empty": ("video", lambda: b"", "empty"),
    "sound alone": ("video", audio_only_container, "no video stream"),
    "picture named mkv": ("video", encode_image, "not a video of a known format"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_file_is_named_and_the_others_are_used(train: Any, tmp_path: Path, case: str) -> None:
    task, content, part = BAD[case]
    data = write_media_folder(tmp_path, task)
    file = write_file(data / "c0" / f"00.{ENCODERS[task][1]}", content())
    train(task, data).assert_refused(3, file, part, "1 of 12 records are bad", "data.max_bad=0.001")
    train(task, data, **ALLOWED, **{"data.bad_records": "stop"}).assert_refused(3, file, part)
    assert not list((tmp_path / "runs").rglob("step-*"))
    result = train(task, data, **ALLOWED)
    assert (result.code, result.err) == (0, "")
    assert f"1 of 12 records dropped as bad; the first is {file}" in read_log(tmp_path)


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_nan_pixel_is_a_bad_record(train: Any, tmp_path: Path, suffix: str) -> None:
    image = RANDOM.random((20, 8, 8)).astype(np.float32)
    image[3, 0, 0] = np.nan
    file = tmp_path / f"pictures.{suffix}"
    if suffix == "npy":
        np.save(file, image)
    else:
        np.savez(file, image=image)
    plain = {"model.condition": "none"}
    train("image", file, **plain).assert_refused(3, f"{file}, row 3", "1 pixel values are not finite")
    assert train("image", file, **plain, **ALLOWED, **{"data.bad_records": "skip"}).code == 0
    assert "1 of 20 records dropped" in read_log(tmp_path)


@pytest.mark.parametrize("task", ["image", "audio", "video"])
def test_data_of_another_medium_is_refused(train: Any, tmp_path: Path, task: str) -> None:
    text = write_file(tmp_path / "a.txt", b"hello world\n" * 50)
    train(task, text).assert_refused(3, f"{text} contains text", f"the task needs {task}", "data.train.kind")
    other = "audio" if task != "audio" else "image"
    data = write_media_folder(tmp_path, other)
    train(task, data).assert_refused(3, data, f"the task needs {task}")
    (tmp_path / "nothing").mkdir()
    train(task, tmp_path / "nothing").assert_refused(3, "no file of a supported kind")


def test_fewer_samples_than_a_batch_are_refused(train: Any, tmp_path: Path) -> None:
    train("image", write_media_folder(tmp_path, "image", 3)).assert_refused(3, "2 samples, fewer than one batch of 4")


# Labels


def test_labels_outside_num_classes_are_refused(train: Any, tmp_path: Path) -> None:
    data = write_media_folder(tmp_path, "image")
    train("image", data, **{"model.num_classes": 2}).assert_refused(3, "3 classes", "num_classes=2")
    train("image", data, **{"model.num_classes": 9}).assert_refused(3, "model.num_classes: 9", "the data has 3")
    for number, name in enumerate(("0", "1", "7")):
        (data / f"c{number}").rename(data / name)
    train("image", data, **{"model.num_classes": 3}).assert_refused(3, "7/", "label 7", "0 to 2")
    assert train("image", data, **{"model.num_classes": 8}).code == 0, "not every number has to occur"


def test_missing_labels_are_refused(train: Any, tmp_path: Path) -> None:
    for number in range(8):
        write_file(tmp_path / "flat" / f"{number}.png", encode_image())
    train("image", tmp_path / "flat").assert_refused(
        3, "the samples have none (the first is", ".png)", "model.condition=none"
    )
    data = write_media_folder(tmp_path, "image")
    write_file(data / "unsorted.png", encode_image())
    train("image", data).assert_refused(3, "unsorted.png", "has no label, unlike other records", "model.condition=none")
    for path in (tmp_path / "flat", data):
        result = train("image", path, **{"model.condition": "none", "name": path.name})
        assert (result.code, result.err) == (0, "")


# Sizes


@pytest.mark.parametrize(
    ("task", "changes", "parts"),
    [
        ("image", {"data.image_size": 0}, ["data.image_size", "above 0"]),
        ("image", {"data.image_size": 9000}, ["data.image_size", "at most 8192"]),
        ("image", {"data.image_size": 9}, ["model.patch_size", "2 do not divide a side of 9", "1, 3, 9 do"]),
        ("image", {"model.condition_dropout": 0, "samples.guidance": 3}, ["samples.guidance 3", "condition_dropout"]),
        ("audio", {"data.hop_size": 200}, ["hop_size", "200 is more than half of fft_size 256", "usually 64"]),
        ("audio", {"data.hop_size": 0}, ["data.hop_size", "above 0"]),
        ("audio", {"data.fft_size": 1}, ["data.fft_size", "at least 2"]),
        ("audio", {"data.fft_size": 10**8}, ["data.fft_size", "at most 65536"]),
        ("audio", {"data.num_mels": 500}, ["num_mels=500 is too many for fft_size=256"]),
        ("audio", {"data.sample_rate": 10}, ["data.sample_rate", "at least 1000"]),
        ("audio", {"data.seconds": 1100}, ["model.patch_size", "275,004 patches", "limit of 262,144"]),
        ("audio", {"model.patch_size": 3}, ["model.patch_size", "3 do not divide a side of 8"]),
        ("audio", {"model.vocoder": "/nowhere"}, ["model.vocoder", "no config.json in /nowhere"]),
        ("video", {"data.image_size": 0}, ["data.image_size", "above 0"]),
        ("video", {"data.num_frames": 20_000}, ["data.num_frames", "at most 10000"]),
        ("video", {"data.num_frames": 10_000, "data.image_size": 16}, ["model.patch_size", "640,000 patches"]),
        ("video", {"model.temporal_patch_size": 3}, ["model.temporal_patch_size", "3 do not divide a side of 4"]),
        ("video", {"model.backbone": "unet"}, ["model.backbone", "use dit for video"]),
    ],
    ids=lambda value: " ".join(map(str, value.items())) if isinstance(value, dict) else "",
)  # fmt: skip
def test_invalid_sizes_are_refused(
    train: Any, tmp_path: Path, task: str, changes: dict[str, Any], parts: list[str]
) -> None:
    train(task, write_media_folder(tmp_path, task, 8), **changes).assert_refused(2, *parts)
    assert not list((tmp_path / "runs").rglob("step-*"))


# Damaged runs


@pytest.mark.parametrize(
    ("task", "file"),
    [("image", "generator.json"), ("audio", "generator.json"), ("audio", "mel.json"), ("video", "generator.json")],
)
def test_damaged_processor_is_named_and_rewritten_by_training(
    run_cli: Any, train: Any, tmp_path: Path, task: str, file: str
) -> None:
    data, run = write_media_folder(tmp_path, task, 8), tmp_path / "runs" / "x"
    assert train(task, data).code == 0
    path = run / "processor" / file
    original = path.read_bytes()
    for content in (b"{", b"", b"[]", b"\x80\x04."):
        path.write_bytes(content)
        run_cli("generate", run, "--count", 1, "--steps", 1).assert_refused(4, path, "run the training command again")
    assert train(task, data).code == 0
    assert path.read_bytes() == original
    path.unlink()
    run_cli("generate", run, "--count", 1, "--steps", 1).assert_refused(4, path, "run the training command again")
    assert train(task, data).code == 0
    assert path.read_bytes() == original
    assert run_cli("generate", run, "--count", 1, "--steps", 1).code == 0


def test_damaged_or_deleted_judge(run_cli: Any, train: Any, tmp_path: Path) -> None:
    judge = {"training.max_steps": 2, "training.batch_size": 4, "model.hidden_size": 8}
    assert train("image", write_media_folder(tmp_path, "image"), **{"needs.judge.settings": judge}).code == 0
    runs = tmp_path / "runs"
    arguments = ("evaluate", runs / "x", "--count", 4, "--json")
    first = run_cli(*arguments)
    assert first.code == 0, first.err
    [part] = (path for path in (runs / "parts").iterdir() if not path.name.startswith("."))
    for weights in part.glob("checkpoints/step-*/model.safetensors"):
        weights.write_bytes(b"")
    run_cli(*arguments).assert_refused(4, f"needs.judge: {part}", "model.safetensors has 0 of", "delete it")
    shutil.rmtree(part)
    again = run_cli(*arguments)
    assert again.code == 0, again.err
    assert json.loads(again.out) == json.loads(first.out), "the judge is trained again and is the same"


def test_invalid_evaluate_arguments_are_refused(run_cli: Any, train: Any, tmp_path: Path) -> None:
    data, run = write_media_folder(tmp_path, "image"), tmp_path / "runs" / "x"
    assert train("image", data, **{"model.condition_dropout": 0}).code == 0
    pickled = write_file(tmp_path / "weights.pth", b"\x80\x04\x95.")
    run_cli("evaluate", run, "--inception", pickled).assert_refused(
        4, pickled, "only safetensors", "pickle can run code"
    )
    assert not (tmp_path / "runs" / "parts").exists(), "refused before a judge is trained"
    damaged = write_file(tmp_path / "weights.safetensors", bytes(50))
    run_cli("evaluate", run, "--inception", damaged).assert_refused(4, damaged, "damaged")
    run_cli("evaluate", run, "--count", -1).assert_refused(2, "--count -1")
    write_file(data / "c9" / "new.png", encode_image())
    run_cli("evaluate", run, "--data", data, "--count", 0).assert_refused(
        3, str(data), "has changed since this run was trained on it"
    )
    other = write_file(tmp_path / "other" / "c9" / "new.png", encode_image(Image.new("RGB", (8, 8), "red"))).parents[1]
    write_file(other / "c1" / "new.png", encode_image(Image.new("RGB", (8, 8), "blue")))
    run_cli("evaluate", run, "--data", other, "--count", 0).assert_refused(3, "c9/new.png", "not one of the 3 classes")
    run_cli("evaluate", run, "--data", write_file(tmp_path / "a.txt", b"hello\n" * 50)).assert_refused(
        3, "contains text"
    )
    run_cli("generate", run, "--guidance", 3).assert_refused(2, "--guidance 3", "condition_dropout is 0")
    run_cli("generate", run, "--class", 9).assert_refused(2, "--class 9", "3 classes")


# Warnings


def test_file_names_with_a_class_suggest_a_pattern(train: Any, tmp_path: Path) -> None:
    for number in range(12):
        write_file(tmp_path / "flat" / f"c{number % 3}_{number:02d}.png", encode_image())
    result = train("image", tmp_path / "flat")
    result.assert_refused(3, "needs labels", "data.train.pattern", '"(?P<label>[^/_]+)_"')
    assert train("image", tmp_path / "flat", **{"data.train.pattern": "(?P<label>[^/_]+)_"}).code == 0


def test_silent_clips_are_reported(train: Any, tmp_path: Path) -> None:
    for number in range(8):
        write_file(tmp_path / "quiet" / f"c{number % 2}" / f"{number}.wav", encode_audio(np.zeros(800, np.int16)))
    assert train("audio", tmp_path / "quiet").code == 0
    assert "are silent" in read_log(tmp_path)
    assert train("audio", write_media_folder(tmp_path, "audio", 8), name="loud").code == 0
    assert "are silent" not in (tmp_path / "runs" / "loud" / "log.txt").read_text()


def test_short_clips_are_counted(train: Any, tmp_path: Path) -> None:
    data = write_media_folder(tmp_path, "video", 8)
    assert train("video", data).code == 0
    assert "shorter than" not in read_log(tmp_path)
    assert train("video", data, name="longer", **{"data.num_frames": 40}).code == 0
    text = (tmp_path / "runs" / "longer" / "log.txt").read_text()
    assert "6 of 6 clips are shorter than data.num_frames 40 and repeat their last frame" in text
