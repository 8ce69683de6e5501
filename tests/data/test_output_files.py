"""Generated images, sounds and videos as files: read back, they are what was generated."""

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


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return numpy_generator(seed, "pixels").integers(0, 256, shape, dtype=np.uint8)


def names(files: list[Path]) -> list[str]:
    assert all(file.is_file() for file in files)
    return [file.name for file in files]


def animation(path: Path) -> tuple[np.ndarray, list[int]]:
    """The frames of a GIF [f, h, w, 3] and how long each is shown, in milliseconds."""
    frames, times = [], []
    with Image.open(path) as opened:
        assert opened.info["loop"] == 0
        for number in range(opened.n_frames):
            opened.seek(number)
            frames.append(np.asarray(opened.convert("RGB")))
            times.append(opened.info["duration"])
    return np.stack(frames), times


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    with replacing_file(path) as temporary:
        temporary.write_text("first")
        assert not path.exists()

    def die() -> None:
        with replacing_file(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        die()
    assert path.read_text() == "first"
    assert list(path.parent.iterdir()) == [path]


def test_numbers_are_listed_in_order() -> None:
    for count in (1, 10, 11, 100, 101, 1001):
        files = build_numbered_paths(Path("x"), count, ".png")
        assert sorted(files) == files
        assert len(set(files)) == count
    assert build_numbered_paths(Path("x"), 2, ".wav") == [Path("x/00.wav"), Path("x/01.wav")]


@pytest.mark.parametrize("channels", [1, 3])
def test_a_folder_of_images_has_them_as_they_are_and_a_sheet(tmp_path: Path, channels: int) -> None:
    images = pixels(5, 12, 20, channels)
    files = write_images(images, tmp_path / "out", captions=[f"number {i}" for i in range(5)])
    assert names(files) == ["00.png", "01.png", "02.png", "03.png", "04.png", "sheet.png"]
    for image, file in zip(images, files[:-1], strict=True):
        np.testing.assert_array_equal(decode_image(file, channels=channels), image)
    assert len(list((tmp_path / "out").iterdir())) == 6


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".JPEG", ".webp"])
def test_one_file_is_a_sheet_in_the_format_of_its_ending(tmp_path: Path, suffix: str) -> None:
    images = np.stack([np.full((48, 48, 3), shade, np.uint8) for shade in (0, 80, 160, 240)])
    [file] = write_images(images, tmp_path / f"a{suffix}", columns=4)
    with Image.open(file) as opened:
        assert opened.format == {".png": "PNG", ".webp": "WEBP"}.get(suffix, "JPEG")
    drawn = decode_image(file, channels=3)
    wide, tall = 4 * (96 + 8) + 8, 96 + 2 * 8  # enlarged twice, gaps of 8
    assert drawn.shape == (tall, wide, 3)
    for number, shade in enumerate((0, 80, 160, 240)):
        middle = drawn[tall // 2, 8 + 48 + number * 104]
        assert np.abs(middle.astype(int) - shade).max() <= 2


def test_one_image_without_a_caption_needs_no_page_around_it(tmp_path: Path) -> None:
    images = pixels(1, 30, 17, 3)
    [file] = write_images(images, tmp_path / "one.png")
    np.testing.assert_array_equal(decode_image(file, channels=3), images[0])


def test_an_unknown_ending_is_named_with_those_that_work(tmp_path: Path) -> None:
    sound, film = np.zeros((2, 80), np.float32), pixels(2, 3, 8, 8, 1)
    with pytest.raises(UsageError, match=r"a\.tga: cannot write \.tga; use \.png, \.jpg, \.jpeg, \.webp$"):
        write_images(film[0], tmp_path / "a.tga")
    with pytest.raises(UsageError, match=r"\.mp3; use \.wav, \.flac, \.ogg$"):
        write_audio_files(sound, 8000, tmp_path / "a.mp3")
    with pytest.raises(UsageError, match=r"\.avi; use \.gif, \.mp4, \.png$"):
        write_videos(film, 8, tmp_path / "a.avi")
    assert not list(tmp_path.iterdir())
    (tmp_path / "run.v2").mkdir()
    assert names(write_images(film[0], tmp_path / "run.v2"))[-1] == "sheet.png"


def tone(seconds: float, *, rate: int = 8000, peak: float = 0.5) -> np.ndarray:
    return (peak * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def read(path: Path) -> tuple[np.ndarray, int]:
    with wave.open(str(path)) as file:
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768, file.getframerate()


def test_a_sound_comes_back_within_half_a_step(tmp_path: Path) -> None:
    sound = numpy_generator(0, "sound").uniform(-1, 1, 5000).astype(np.float32)
    assert write_audio(sound, 22_050, tmp_path / "a.wav") == 1.0
    back, rate = read(tmp_path / "a.wav")
    assert rate == 22_050
    assert np.abs(back - sound).max() <= 1 / 32768


def test_what_is_too_loud_is_made_quieter_and_what_is_not_stays(tmp_path: Path) -> None:
    loud = tone(0.5, peak=4.0)
    factor = write_audio(loud, 8000, tmp_path / "loud.wav")
    assert factor == pytest.approx(1 / np.abs(loud).max())
    np.testing.assert_allclose(read(tmp_path / "loud.wav")[0], loud * factor, atol=1 / 32768)
    loud[7], loud[9] = np.nan, np.inf
    write_audio(loud, 8000, tmp_path / "broken.wav")
    back = read(tmp_path / "broken.wav")[0]
    assert (back[7], back[9]) == (0, 0)
    assert back.max() > 0.99


@pytest.mark.parametrize(("suffix", "close"), [(".flac", 1 / 32768), (".ogg", 0.05)])
def test_other_formats_where_soundfile_is_installed(tmp_path: Path, suffix: str, close: float) -> None:
    soundfile = pytest.importorskip("soundfile")
    # A minute at 48 kHz in one write ends the process of libsndfile's Vorbis encoder.
    sound = tone(60 if suffix == ".ogg" else 1, rate=48_000)
    write_audio(sound, 48_000, tmp_path / f"a{suffix}")
    back, rate = soundfile.read(tmp_path / f"a{suffix}")
    assert (rate, len(back)) == (48_000, len(sound))
    assert np.abs(back - sound)[1000:-1000].max() <= close


def test_a_folder_of_sounds_has_their_spectrograms(tmp_path: Path) -> None:
    sounds = np.stack([tone(0.3), tone(0.3, peak=2.0)])
    files = write_audio_files(sounds, 8000, tmp_path / "out", captions=["one", "two"])
    assert names(files) == ["00.wav", "01.wav", "spectrograms.png"]
    assert decode_image(files[-1], channels=3).max() > 0
    np.testing.assert_allclose(read(files[0])[0], sounds[0], atol=1 / 32768)


def test_several_sounds_in_one_file_have_silence_between(tmp_path: Path) -> None:
    sounds = [tone(0.3), tone(0.1, peak=3.0), tone(0.2)]
    assert names(write_audio_files(sounds, 8000, tmp_path / "all.wav")) == ["all.wav", "all.png"]
    back, _ = read(tmp_path / "all.wav")
    gap = round(SILENCE_SECONDS * 8000)
    assert len(back) == sum(map(len, sounds)) + 2 * gap
    np.testing.assert_allclose(back[:2400], sounds[0], atol=1 / 32768)  # a loud neighbour does not make it quieter
    assert not back[2400 : 2400 + gap].any()
    assert not back[-1600 - gap : -1600].any()


def test_sounds_are_written_without_any_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIL", "soundfile"):
        monkeypatch.setitem(sys.modules, name, None)
    assert names(write_audio_files([tone(0.1)] * 2, 8000, tmp_path / "out")) == ["00.wav", "01.wav"]
    assert len(list((tmp_path / "out").iterdir())) == 2
    with pytest.raises(EnvironmentProblem, match=r"bottega\[audio\]"):
        write_audio(tone(0.1), 8000, tmp_path / "a.ogg")


@pytest.mark.parametrize("channels", [1, 3])
def test_a_gif_has_every_frame_even_where_nothing_moves(tmp_path: Path, channels: int) -> None:
    frames = pixels(4, 140, 150, channels)
    if channels == 3:  # 256 colours, few enough to be kept, and near enough to be taken for each other
        frames = np.stack([frames[..., 0], 255 - frames[..., 0], frames[..., 0] // 2], axis=-1)
    frames = frames[[0, 0, 0, 1, 2, 2, 3, 3]]
    write_video(frames, 12.5, tmp_path / "a.gif")
    back, times = animation(tmp_path / "a.gif")
    np.testing.assert_array_equal(back, frames.repeat(3, axis=3) if channels == 1 else frames)
    assert times == [80] * 8
    write_video(frames[:1], 1, tmp_path / "still.gif")
    assert animation(tmp_path / "still.gif")[1] == [1000]


@pytest.mark.parametrize(("fps", "seconds"), [(24, 2.0), (30, 1.6), (7, 48 / 7), (0.5, 96.0), (120, 0.96)])
def test_a_gif_lasts_as_long_as_it_should(tmp_path: Path, fps: float, seconds: float) -> None:
    write_video(np.zeros((48, 128, 2, 1), np.uint8), fps, tmp_path / "a.gif")
    _, times = animation(tmp_path / "a.gif")
    assert sum(times) == pytest.approx(1000 * seconds, abs=5)  # half of GIF's step; 50 a second is its limit
    assert max(times) - min(times) <= 10


def test_many_colours_become_near_ones(tmp_path: Path) -> None:
    slope = np.linspace(0, 255, 160).astype(np.uint8)
    frames = np.zeros((3, 160, 160, 3), np.uint8)
    frames[..., 0], frames[..., 1], frames[1, ..., 2] = slope, slope[:, None], 200
    write_video(frames, 8, tmp_path / "a.gif")
    back, _ = animation(tmp_path / "a.gif")
    error = back.astype(float) - frames
    near = np.sqrt((error**2).mean())
    assert near < 10
    # What dithering is for: over 4 x 4 pixels errors cancel (a quarter is left; without it four fifths).
    far = np.sqrt((error.reshape(3, 40, 4, 40, 4, 3).mean((2, 4)) ** 2).mean())
    assert far < 0.4 * near


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_small_videos_are_enlarged_by_a_whole_factor(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("av")
    from bottega.data.video.decode import decode_frames as read_frames

    frames = np.where(pixels(6, 25, 21, 1) < 128, 0, 255).astype(np.uint8)
    write_video(frames, 10, tmp_path / f"a{suffix}")
    large = frames.repeat(6, axis=1).repeat(6, axis=2).repeat(3, axis=3)
    if suffix == ".gif":
        back = animation(tmp_path / "a.gif")[0]
    else:
        rate, shown = read_frames(tmp_path / "a.mp4")
        back = np.stack(list(shown))
        assert rate == 10
    assert back.shape == large.shape
    assert ((back > 127) == (large > 127)).mean() > 0.999


@pytest.mark.parametrize("encoder", ["libx264", "mpeg4"])
def test_a_film_with_odd_sides_comes_back_in_colour(
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
    rate, shown = read_frames(tmp_path / "a.mp4")
    back = np.stack(list(shown))
    assert rate == pytest.approx(23.976, abs=1e-3)
    assert back.shape == (9, 132, 156, 3)
    assert np.abs(back[:, :131, :155].astype(float) - frames).mean() < 4


def test_an_encoder_that_is_missing_is_passed_over() -> None:
    av = pytest.importorskip("av")
    assert video_write._can_encode(av, "mpeg4")
    assert not video_write._can_encode(av, "none_such")


@pytest.mark.parametrize("has_av", [True, False])
def test_a_folder_of_videos_moves_and_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_av: bool
) -> None:
    monkeypatch.setattr(video_write, "find_spec", lambda name: object() if has_av else None)
    if has_av:
        pytest.importorskip("av")
    videos = np.stack([np.full((7, 32, 32, 1), 10 * number, np.uint8) for number in range(3)])
    videos += 30 * np.arange(7, dtype=np.uint8)[None, :, None, None, None]
    files = write_videos(videos, 8, tmp_path / "out", captions=["a", "b", "c"])
    single = "mp4" if has_av else "gif"
    assert names(files) == [f"00.{single}", f"01.{single}", f"02.{single}", "sheet.gif", "sheet.png"]
    moving, _ = animation(files[-2])
    assert len(moving) == 7
    for number in range(3):
        row, column = divmod(number, 2)
        at = 8 + 48 + row * (96 + 18 + 8), 8 + 48 + column * (96 + 8)
        assert np.abs(moving[:, at[0], at[1]].astype(int) - videos[number, :, 0, 0]).max() <= 3
    strip = decode_image(files[-1], channels=3)
    assert strip.shape == (8 + 3 * (96 + 18 + 8), 8 + 3 * (96 + 8), 3)
    for number in range(3):
        shown = strip[8 + 48 + number * 122, 56 :: 96 + 8, 0]
        np.testing.assert_array_equal(shown, videos[number, [0, 3, 6], 0, 0, 0])


def test_videos_in_one_file(tmp_path: Path) -> None:
    videos = pixels(4, 2, 20, 20, 3)
    assert names(write_videos(videos, 8, tmp_path / "a.gif")) == ["a.gif"]
    assert animation(tmp_path / "a.gif")[0].shape == (2, 224, 224, 3)  # 20 x 5 and gaps of 8
    assert names(write_videos(videos, 8, tmp_path / "a.png", captions=list("abcd"))) == ["a.png"]
    assert decode_image(tmp_path / "a.png", channels=3).shape == (8 + 4 * 126, 8 + 2 * 108, 3)
    write_videos(videos[:1], 8, tmp_path / "one.gif")
    assert animation(tmp_path / "one.gif")[0].shape == (2, 140, 140, 3)


def test_a_filmstrip_says_what_and_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[list[str]] = []

    def drawn(images: list[np.ndarray], path: Path, *, captions: list[str], columns: int) -> None:
        path.touch()
        assert len(images) == len(captions) == 2 * columns
        said.append(captions)

    monkeypatch.setattr(video_write, "write_contact_sheet", drawn)
    write_videos(pixels(2, 9, 8, 8, 1), 4, tmp_path / "a.png", captions=["cat", "dog"])
    write_videos(pixels(2, 2, 8, 8, 1), 4, tmp_path / "b.png")
    write_videos(pixels(2, 1, 8, 8, 1), 4, tmp_path / "c.png")
    assert said == [
        ["cat", "1.00 s", "2.00 s", "dog", "1.00 s", "2.00 s"],
        ["00", "0.25 s", "01", "0.25 s"],
        ["00", "01"],
    ]


@pytest.mark.parametrize("name", ["out", "a.png"])
def test_without_pillow_nothing_is_written_but_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    for write in (
        lambda: write_images(pixels(2, 8, 8, 1), tmp_path / name),
        lambda: write_videos(pixels(2, 3, 8, 8, 1), 8, tmp_path / name),
    ):
        with pytest.raises(EnvironmentProblem, match=r"bottega\[data\]"):
            write()
    assert not list(tmp_path.iterdir())


def test_a_film_without_pyav_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(EnvironmentProblem, match=r"bottega\[video\]'; or use \.gif"):
        write_video(pixels(2, 8, 8, 1), 8, tmp_path / "a.mp4")
    assert not list(tmp_path.iterdir())
