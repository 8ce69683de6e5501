"""Generated images, audio and videos written to files read back as generated."""

from __future__ import annotations

import sys
import wave
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("PIL")
from PIL import Image

from bottega.core.errors import EnvironmentProblem, UsageError
from bottega.core.noise import numpy_generator
from bottega.data.audio.write import SILENCE_SECONDS, write_audio, write_audio_files
from bottega.data.image.decode import decode_image
from bottega.data.image.write import write_images
from bottega.data.output_files import build_numbered_paths
from bottega.data.video import write as video_write
from bottega.data.video.write import write_video, write_videos
from bottega.storage.durable import replacing_file


def draw_pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return numpy_generator(seed, "pixels").integers(0, 256, shape, dtype=np.uint8)


def file_names(files: list[Path]) -> list[str]:
    assert all(file.is_file() for file in files)
    return [file.name for file in files]


def read_gif(path: Path) -> tuple[np.ndarray, list[int]]:
    """Return the frames of a GIF [f, h, w, 3] and their durations in milliseconds."""
    frames, times = [], []
    with Image.open(path) as image:
        assert image.info["loop"] == 0
        for number in range(image.n_frames):
            image.seek(number)
            frames.append(np.asarray(image.convert("RGB")))
            times.append(image.info["duration"])
    return np.stack(frames), times


def test_file_is_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    with replacing_file(path) as temporary:
        temporary.write_text("first")
        assert not path.exists()

    def write_and_interrupt() -> None:
        with replacing_file(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_interrupt()
    assert path.read_text() == "first"
    assert list(path.parent.iterdir()) == [path]


def test_numbered_paths_sort_in_order() -> None:
    for count in (1, 10, 11, 100, 101, 1001):
        files = build_numbered_paths(Path("x"), count, ".png")
        assert sorted(files) == files
        assert len(set(files)) == count
    assert build_numbered_paths(Path("x"), 2, ".wav") == [Path("x/00.wav"), Path("x/01.wav")]


@pytest.mark.parametrize("channels", [1, 3])
def test_image_folder_holds_lossless_images_and_a_contact_sheet(tmp_path: Path, channels: int) -> None:
    images = draw_pixels(5, 12, 20, channels)
    files = write_images(images, tmp_path / "out", captions=[f"number {i}" for i in range(5)])
    assert file_names(files) == ["00.png", "01.png", "02.png", "03.png", "04.png", "sheet.png"]
    for image, file in zip(images, files[:-1], strict=True):
        np.testing.assert_array_equal(decode_image(file, channels=channels), image)
    assert len(list((tmp_path / "out").iterdir())) == 6


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".JPEG", ".webp"])
def test_single_file_is_a_contact_sheet_in_the_format_of_its_suffix(tmp_path: Path, suffix: str) -> None:
    images = np.stack([np.full((48, 48, 3), shade, np.uint8) for shade in (0, 80, 160, 240)])
    [file] = write_images(images, tmp_path / f"a{suffix}", columns=4)
    with Image.open(file) as image:
        assert image.format == {".png": "PNG", ".webp": "WEBP"}.get(suffix, "JPEG")
    drawn = decode_image(file, channels=3)
    width, height = 4 * (96 + 8) + 8, 96 + 2 * 8  # enlarged twice, gaps of 8
    assert drawn.shape == (height, width, 3)
    for number, shade in enumerate((0, 80, 160, 240)):
        middle = drawn[height // 2, 8 + 48 + number * 104]
        assert np.abs(middle.astype(int) - shade).max() <= 2


def test_single_image_without_a_caption_has_no_margin(tmp_path: Path) -> None:
    images = draw_pixels(1, 30, 17, 3)
    [file] = write_images(images, tmp_path / "one.png")
    np.testing.assert_array_equal(decode_image(file, channels=3), images[0])


def test_unknown_suffix_is_refused_with_the_supported_ones(tmp_path: Path) -> None:
    audio, video = np.zeros((2, 80), np.float32), draw_pixels(2, 3, 8, 8, 1)
    with pytest.raises(UsageError, match=r"a\.tga: cannot write \.tga; use \.png, \.jpg, \.jpeg, \.webp$"):
        write_images(video[0], tmp_path / "a.tga")
    with pytest.raises(UsageError, match=r"\.mp3; use \.wav, \.flac, \.ogg$"):
        write_audio_files(audio, 8000, tmp_path / "a.mp3")
    with pytest.raises(UsageError, match=r"\.avi; use \.gif, \.mp4, \.png$"):
        write_videos(video, 8, tmp_path / "a.avi")
    assert not list(tmp_path.iterdir())
    (tmp_path / "run.v2").mkdir()
    assert file_names(write_images(video[0], tmp_path / "run.v2"))[-1] == "sheet.png"


def build_tone(seconds: float, *, rate: int = 8000, peak: float = 0.5) -> np.ndarray:
    return (peak * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def read_wav(path: Path) -> tuple[np.ndarray, int]:
    with wave.open(str(path)) as file:
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768, file.getframerate()


def test_wav_round_trip_is_within_one_quantisation_step(tmp_path: Path) -> None:
    audio = numpy_generator(0, "sound").uniform(-1, 1, 5000).astype(np.float32)
    assert write_audio(audio, 22_050, tmp_path / "a.wav") == 1.0
    back, rate = read_wav(tmp_path / "a.wav")
    assert rate == 22_050
    assert np.abs(back - audio).max() <= 1 / 32768


def test_clipping_audio_is_scaled_and_non_finite_samples_are_zero(tmp_path: Path) -> None:
    loud = build_tone(0.5, peak=4.0)
    factor = write_audio(loud, 8000, tmp_path / "loud.wav")
    assert factor == pytest.approx(1 / np.abs(loud).max())
    np.testing.assert_allclose(read_wav(tmp_path / "loud.wav")[0], loud * factor, atol=1 / 32768)
    loud[7], loud[9] = np.nan, np.inf
    write_audio(loud, 8000, tmp_path / "broken.wav")
    back = read_wav(tmp_path / "broken.wav")[0]
    assert (back[7], back[9]) == (0, 0)
    assert back.max() > 0.99


@pytest.mark.parametrize(("suffix", "tolerance"), [(".flac", 1 / 32768), (".ogg", 0.05)])
def test_other_audio_formats_round_trip(tmp_path: Path, suffix: str, tolerance: float) -> None:
    soundfile = pytest.importorskip("soundfile")
    # Writing a minute at 48 kHz in one call crashes libsndfile's Vorbis encoder.
    audio = build_tone(60 if suffix == ".ogg" else 1, rate=48_000)
    write_audio(audio, 48_000, tmp_path / f"a{suffix}")
    back, rate = soundfile.read(tmp_path / f"a{suffix}")
    assert (rate, len(back)) == (48_000, len(audio))
    assert np.abs(back - audio)[1000:-1000].max() <= tolerance


def test_audio_folder_has_spectrograms(tmp_path: Path) -> None:
    clips = np.stack([build_tone(0.3), build_tone(0.3, peak=2.0)])
    files = write_audio_files(clips, 8000, tmp_path / "out", captions=["one", "two"])
    assert file_names(files) == ["00.wav", "01.wav", "spectrograms.png"]
    assert decode_image(files[-1], channels=3).max() > 0
    np.testing.assert_allclose(read_wav(files[0])[0], clips[0], atol=1 / 32768)


def test_clips_in_one_file_are_separated_by_silence(tmp_path: Path) -> None:
    clips = [build_tone(0.3), build_tone(0.1, peak=3.0), build_tone(0.2)]
    assert file_names(write_audio_files(clips, 8000, tmp_path / "all.wav")) == ["all.wav", "all.png"]
    back, _ = read_wav(tmp_path / "all.wav")
    gap = round(SILENCE_SECONDS * 8000)
    assert len(back) == sum(map(len, clips)) + 2 * gap
    np.testing.assert_allclose(back[:2400], clips[0], atol=1 / 32768)  # scaling a loud clip leaves the others unchanged
    assert not back[2400 : 2400 + gap].any()
    assert not back[-1600 - gap : -1600].any()


def test_wav_is_written_without_optional_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIL", "soundfile"):
        monkeypatch.setitem(sys.modules, name, None)
    assert file_names(write_audio_files([build_tone(0.1)] * 2, 8000, tmp_path / "out")) == ["00.wav", "01.wav"]
    assert len(list((tmp_path / "out").iterdir())) == 2
    with pytest.raises(EnvironmentProblem, match=r"bottega\[audio\]"):
        write_audio(build_tone(0.1), 8000, tmp_path / "a.ogg")


@pytest.mark.parametrize("channels", [1, 3])
def test_gif_keeps_every_frame_even_if_identical(tmp_path: Path, channels: int) -> None:
    frames = draw_pixels(4, 140, 150, channels)
    if channels == 3:  # 256 colours, which fit the palette exactly but are close to each other
        frames = np.stack([frames[..., 0], 255 - frames[..., 0], frames[..., 0] // 2], axis=-1)
    frames = frames[[0, 0, 0, 1, 2, 2, 3, 3]]
    write_video(frames, 12.5, tmp_path / "a.gif")
    back, times = read_gif(tmp_path / "a.gif")
    np.testing.assert_array_equal(back, frames.repeat(3, axis=3) if channels == 1 else frames)
    assert times == [80] * 8
    write_video(frames[:1], 1, tmp_path / "still.gif")
    assert read_gif(tmp_path / "still.gif")[1] == [1000]


@pytest.mark.parametrize(("fps", "seconds"), [(24, 2.0), (30, 1.6), (7, 48 / 7), (0.5, 96.0), (120, 0.96)])
def test_gif_has_the_duration_of_the_video(tmp_path: Path, fps: float, seconds: float) -> None:
    write_video(np.zeros((48, 128, 2, 1), np.uint8), fps, tmp_path / "a.gif")
    _, times = read_gif(tmp_path / "a.gif")
    assert sum(times) == pytest.approx(
        1000 * seconds, abs=5
    )  # half of GIF's time step; its limit is 50 frames per second
    assert max(times) - min(times) <= 10


def test_gif_colours_are_dithered(tmp_path: Path) -> None:
    slope = np.linspace(0, 255, 160).astype(np.uint8)
    frames = np.zeros((3, 160, 160, 3), np.uint8)
    frames[..., 0], frames[..., 1], frames[1, ..., 2] = slope, slope[:, None], 200
    write_video(frames, 8, tmp_path / "a.gif")
    back, _ = read_gif(tmp_path / "a.gif")
    error = back.astype(float) - frames
    pixel_error = np.sqrt((error**2).mean())
    assert pixel_error < 10
    # With dithering, errors cancel over 4 x 4 pixels (a quarter remains; without it four fifths).
    block_error = np.sqrt((error.reshape(3, 40, 4, 40, 4, 3).mean((2, 4)) ** 2).mean())
    assert block_error < 0.4 * pixel_error


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_small_videos_are_enlarged_by_an_integer_factor(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("av")
    from bottega.data.video.decode import decode_frames as read_frames

    frames = np.where(draw_pixels(6, 25, 21, 1) < 128, 0, 255).astype(np.uint8)
    write_video(frames, 10, tmp_path / f"a{suffix}")
    large = frames.repeat(6, axis=1).repeat(6, axis=2).repeat(3, axis=3)
    if suffix == ".gif":
        back = read_gif(tmp_path / "a.gif")[0]
    else:
        rate, decoded = read_frames(tmp_path / "a.mp4")
        back = np.stack(list(decoded))
        assert rate == 10
    assert back.shape == large.shape
    assert ((back > 127) == (large > 127)).mean() > 0.999


@pytest.mark.parametrize("encoder", ["libx264", "mpeg4"])
def test_mp4_with_odd_sides_round_trips_in_colour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoder: str
) -> None:
    av = pytest.importorskip("av")
    from bottega.data.video.decode import decode_frames as read_frames

    if not video_write._can_encode(av, encoder):
        pytest.skip(f"this build of FFmpeg has no {encoder}")
    monkeypatch.setattr(video_write, "ENCODERS", {encoder: video_write.ENCODERS[encoder]})
    frames = np.zeros((9, 131, 155, 3), np.uint8)
    for number, frame in enumerate(frames):
        frame[:, : 12 * (number + 1)] = (220, 40, 90)
    write_video(frames, 23.976, tmp_path / "a.mp4")
    rate, decoded = read_frames(tmp_path / "a.mp4")
    back = np.stack(list(decoded))
    assert rate == pytest.approx(23.976, abs=1e-3)
    assert back.shape == (9, 132, 156, 3)
    assert np.abs(back[:, :131, :155].astype(float) - frames).mean() < 4


def test_missing_encoder_is_detected() -> None:
    av = pytest.importorskip("av")
    assert video_write._can_encode(av, "mpeg4")
    assert not video_write._can_encode(av, "none_such")


@pytest.mark.parametrize("has_av", [True, False])
def test_video_folder_has_an_animated_and_a_still_sheet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_av: bool
) -> None:
    monkeypatch.setattr(video_write, "find_spec", lambda name: object() if has_av else None)
    if has_av:
        pytest.importorskip("av")
    videos = np.stack([np.full((7, 32, 32, 1), 10 * number, np.uint8) for number in range(3)])
    videos += 30 * np.arange(7, dtype=np.uint8)[None, :, None, None, None]
    files = write_videos(videos, 8, tmp_path / "out", captions=["a", "b", "c"])
    single = "mp4" if has_av else "gif"
    assert file_names(files) == [f"00.{single}", f"01.{single}", f"02.{single}", "sheet.gif", "sheet.png"]
    moving, _ = read_gif(files[-2])
    assert len(moving) == 7
    for number in range(3):
        row, column = divmod(number, 2)
        y, x = 8 + 48 + row * (96 + 18 + 8), 8 + 48 + column * (96 + 8)
        assert np.abs(moving[:, y, x].astype(int) - videos[number, :, 0, 0]).max() <= 3
    strip = decode_image(files[-1], channels=3)
    assert strip.shape == (8 + 3 * (96 + 18 + 8), 8 + 3 * (96 + 8), 3)
    for number in range(3):
        shown = strip[8 + 48 + number * 122, 56 :: 96 + 8, 0]
        np.testing.assert_array_equal(shown, videos[number, [0, 3, 6], 0, 0, 0])


def test_several_videos_in_one_file_are_a_sheet(tmp_path: Path) -> None:
    videos = draw_pixels(4, 2, 20, 20, 3)
    assert file_names(write_videos(videos, 8, tmp_path / "a.gif")) == ["a.gif"]
    assert read_gif(tmp_path / "a.gif")[0].shape == (2, 224, 224, 3)  # 20 x 5 and gaps of 8
    assert file_names(write_videos(videos, 8, tmp_path / "a.png", captions=list("abcd"))) == ["a.png"]
    assert decode_image(tmp_path / "a.png", channels=3).shape == (8 + 4 * 126, 8 + 2 * 108, 3)
    write_videos(videos[:1], 8, tmp_path / "one.gif")
    assert read_gif(tmp_path / "one.gif")[0].shape == (2, 140, 140, 3)


def test_filmstrip_captions_hold_name_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sheet_captions: list[list[str]] = []

    def record_captions(images: list[np.ndarray], path: Path, *, captions: list[str], columns: int) -> None:
        path.touch()
        assert len(images) == len(captions) == 2 * columns
        sheet_captions.append(captions)

    monkeypatch.setattr(video_write, "write_contact_sheet", record_captions)
    write_videos(draw_pixels(2, 9, 8, 8, 1), 4, tmp_path / "a.png", captions=["cat", "dog"])
    write_videos(draw_pixels(2, 2, 8, 8, 1), 4, tmp_path / "b.png")
    write_videos(draw_pixels(2, 1, 8, 8, 1), 4, tmp_path / "c.png")
    assert sheet_captions == [
        ["cat", "1.00 s", "2.00 s", "dog", "1.00 s", "2.00 s"],
        ["00", "0.25 s", "01", "0.25 s"],
        ["00", "01"],
    ]


@pytest.mark.parametrize("name", ["out", "a.png"])
def test_missing_pillow_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    for write in (
        lambda: write_images(draw_pixels(2, 8, 8, 1), tmp_path / name),
        lambda: write_videos(draw_pixels(2, 3, 8, 8, 1), 8, tmp_path / name),
    ):
        with pytest.raises(EnvironmentProblem, match=r"bottega\[data\]"):
            write()
    assert not list(tmp_path.iterdir())


def test_missing_pyav_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(EnvironmentProblem, match=r"bottega\[video\]'; or use \.gif"):
        write_video(draw_pixels(2, 8, 8, 1), 8, tmp_path / "a.mp4")
    assert not list(tmp_path.iterdir())
