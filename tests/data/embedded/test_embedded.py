"""Embedded datasets: their content checked against its origin and by measurement, and that recipes read them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from bottega.config.data import HeldOut, Replay, Source, Splitting
from bottega.core.errors import UsageError
from bottega.core.noise import numpy_generator
from bottega.data.embedded import CACHE_NAMES, Medium, digits, materialise_embedded, moving_digits, tones
from bottega.data.prepare.media import prepare_media, prepare_vectors
from bottega.data.prepare.prepared import PreparedData
from bottega.data.sources.samples import open_media_source
from bottega.tasks.autoencode import config as autoencode
from bottega.tasks.dependencies import build_dependency_recipe
from bottega.tasks.generation import config as media
from bottega.tasks.recipes import check_recipe
from bottega.tasks.routing.config import RoutingData

SORTED_DIRECTIONS = ("down", "left", "right", "up")
EMBEDDED = Source(kind="embedded")
TENTH = HeldOut(split=0.1)


def quiet(stage: str, done: int, total: int) -> None:
    """Show no progress bar."""


def build_recipe(medium: str, **data: Any) -> media.MediaRecipe:
    data = {"train": EMBEDDED, "validation": TENTH, **data}
    if medium == "audio":
        return media.AudioRecipe(data=media.AudioData(**data))
    if medium == "video":
        return media.VideoRecipe(data=media.VideoData(**{"num_frames": 5, "channels": 1, **data}))
    return media.ImageRecipe(data=media.ImageData(**data))


def prepare_data(medium: str, cache: Path, **data: Any) -> PreparedData:
    return prepare_media(build_recipe(medium, **data), progress=quiet, cache=cache)


def load_embedded(medium: Medium) -> dict[str, np.ndarray]:
    return {file.stem: np.load(file) for file in materialise_embedded(medium).iterdir()}


@pytest.fixture(scope="module")
def audio_arrays() -> dict[str, np.ndarray]:
    return load_embedded("audio")


@pytest.fixture(scope="module")
def clips() -> dict[str, np.ndarray]:
    return load_embedded("video")


def test_digits_equal_those_of_scikit_learn() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    reference = datasets.load_digits()
    pixels, labels = digits.load_digits()
    assert pixels.shape == (1797, 8, 8)
    np.testing.assert_array_equal(labels, reference.target)
    np.testing.assert_array_equal(pixels, np.rint(reference.images * 255 / 16))
    np.testing.assert_array_equal(np.rint(pixels * (16 / 255)), reference.images)


@pytest.mark.parametrize("medium", get_args(Medium))
def test_embedded_files_match_the_hash_in_their_cache_name(medium: Medium) -> None:
    """The cache name holds the hash of the content, so changed content needs a new name."""
    folder = materialise_embedded(medium)
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    assert CACHE_NAMES[medium] == f"{folder.name}-{digest.hexdigest()[:16]}"
    assert folder.parent.name == CACHE_NAMES[medium]


@pytest.mark.parametrize("medium", get_args(Medium))
def test_fingerprint_does_not_depend_on_the_cache_path(
    medium: Medium, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = prepare_data(medium, tmp_path / "a")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    there = prepare_data(medium, tmp_path / "b")
    assert (tmp_path / "elsewhere/bottega/embedded").is_dir()
    assert here.fingerprint == there.fingerprint
    assert here.metadata == there.metadata


@pytest.mark.parametrize(
    ("medium", "shape", "rows", "names"),
    [
        ("image", (8, 8, 1), (1618, 179), list("0123456789")),
        ("audio", (8064,), (1755, 195), sorted(tones.NOTES)),
        (
            "video",
            (5, 12, 12, 1),
            (3600, 400),
            [f"digit={n} direction={d}" for n in range(10) for d in SORTED_DIRECTIONS],
        ),
    ],
)
def test_recipe_reads_embedded_data_with_classes(
    medium: Medium, shape: tuple[int, ...], rows: tuple[int, int], names: list[str], tmp_path: Path
) -> None:
    prepared = prepare_data(medium, tmp_path)
    assert list(prepared.classes.names) == names
    assert (prepared.metadata["bad"], prepared.metadata["dropped"]) == (0, {})
    for table, count in zip(("train", "validation"), rows, strict=True):
        source = open_media_source(build_recipe(medium), prepared, table, is_training=False)
        assert len(source) == count
        index = np.arange(count)
        batch = source.rows(index, np.zeros(count, dtype=int))
        assert batch[medium].shape == (count, *shape)
        assert set(batch["label"].tolist()) == set(range(len(names)))
        np.testing.assert_array_equal(batch["condition"].argmax(1), batch["label"])
    assert batch.get("sample_rate", 8000) == 8000
    assert batch.get("fps", 5) == 5


@pytest.mark.parametrize("medium", get_args(Medium))
def test_samples_are_unique(medium: Medium) -> None:
    """Otherwise duplicates could be on both sides of a split."""
    values = load_embedded(medium)[medium]
    assert len(np.unique(values.reshape(len(values), -1), axis=0)) == len(values)


@pytest.mark.parametrize("target", ["video", "judge of video", "classify/video"])
def test_held_out_clips_show_digit_images_not_used_in_training(
    target: str, clips: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """An image moves in up to four directions; a random split would train on images of 363 of 400 held-out clips."""
    recipe = check_recipe([target.removeprefix("judge of ")]).recipe
    recipe = build_dependency_recipe(recipe, "judge") if target.startswith("judge") else recipe
    assert isinstance(recipe, media.MediaRecipe)
    prepared = prepare_media(recipe, progress=quiet, cache=tmp_path)

    def image_numbers(table: str) -> set[int]:
        rows = prepared.table(table)
        keys = [str(rows.row("key", number)) for number in range(len(rows))]
        return set(clips["picture"][[int(key.rpartition(":")[2]) for key in keys]].tolist())

    fraction = 0.2 if target == "classify/video" else 0.1
    assert len(prepared.table("validation")) == pytest.approx(fraction * moving_digits.NUM_CLIPS, abs=4)
    assert not image_numbers("validation") & image_numbers("train")
    assert len(image_numbers("validation") | image_numbers("train")) == len(np.unique(clips["picture"]))
    for table in ("train", "validation"):
        rows = open_media_source(recipe, prepared, table, is_training=False)
        assert len(set(rows.rows(np.arange(len(rows)), np.zeros(len(rows), int))["label"].tolist())) == 40


def test_clip_records_the_number_of_its_digit_image(clips: dict[str, np.ndarray]) -> None:
    pixels, _ = digits.load_digits()
    for video, number in zip(clips["video"][::13], clips["picture"][::13], strict=True):
        np.testing.assert_array_equal(crop_to_ink(video[0]), crop_to_ink(pixels[number]))


def test_default_split_applies_to_embedded_data_only() -> None:
    own_data = {"data.train.path": "mine.npz"}
    for name in ("video", "classify/video"):
        assert check_recipe([name]).recipe.data.split is not None
        assert check_recipe([name, own_data]).recipe.data.split is None
        assert check_recipe([name, {"data.sources": [{"path": "mine.npz"}]}]).recipe.data.split is None
        changed = check_recipe([name, {**own_data, "data.split.by": "stratified"}]).recipe.data.split
        assert changed == Splitting(by="stratified")
    unchanged = check_recipe(["image", {"data.split.by": "stratified"}, own_data]).recipe.data.split
    assert unchanged == Splitting(by="stratified"), "a split that needs no field fits any data"
    assert build_dependency_recipe(check_recipe(["video", own_data]).recipe, "judge").data.split is None


@pytest.mark.parametrize("key", ["sources", "validation", "test", "replay"])
def test_every_source_of_a_recipe_may_be_embedded(key: str, tmp_path: Path) -> None:
    np.savez(
        tmp_path / "own.npz", image=np.arange(40 * 64).reshape(40, 8, 8).astype(np.uint8), label=np.arange(40) % 10
    )
    own = Source(path=str(tmp_path / "own.npz"))
    options: dict[str, dict[str, Any]] = {
        "sources": {"train": Source(), "sources": (own, EMBEDDED), "validation": None},
        "validation": {"train": own, "validation": HeldOut(kind="embedded")},
        "test": {"train": own, "test": HeldOut(kind="embedded")},
        "replay": {"train": own, "replay": Replay(kind="embedded")},
    }
    prepared = prepare_data("image", tmp_path / "cache", **options[key])
    table = {"sources": "train.1"}.get(key, key)
    assert len(prepared.table(table)) == 1797
    assert prepared.table(table).row("key", 5) == "digits:5"


def test_unavailable_embedded_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="synthetic is for the task routing only"):
        prepare_data("image", tmp_path, train=Source(kind="synthetic"))
    with pytest.raises(UsageError, match="there is no built-in dataset of numbers; use synthetic"):
        prepare_vectors(RoutingData(train=EMBEDDED), progress=quiet, cache=tmp_path)


def test_image_tasks_share_the_digits(tmp_path: Path) -> None:
    data = autoencode.ImageVaeData(train=EMBEDDED, validation=TENTH)
    prepared = prepare_media(autoencode.ImageVaeRecipe(data=data), progress=quiet, cache=tmp_path)
    assert [len(prepared.table(name)) for name in ("train", "validation")] == [1618, 179]


def test_tones_are_in_tune(audio_arrays: dict[str, np.ndarray]) -> None:
    """The peak near the note, measured to 0.03 Hz; an integer number of samples per period would be 33 cents off."""
    detuned = tones.compute_pitches(np.array([numpy_generator("tones", i).random() for i in range(tones.NUM_CLIPS)]))
    semitones = np.arange(tones.NUM_CLIPS) % 13
    equal = 440 * 2 ** ((semitones - 9) / 12)
    np.testing.assert_allclose(1200 * np.log2(detuned / equal), 0, atol=10)
    assert np.ptp(1200 * np.log2(detuned / equal)) > 19.9
    np.testing.assert_array_equal(audio_arrays["label"], np.array(tones.NOTES)[semitones])

    indices = np.arange(0, tones.NUM_CLIPS, 7)  # every note, both kinds
    size = 1 << 18
    for i in indices.tolist():
        windowed = audio_arrays["audio"][i] / 32768 * np.hanning(tones.NUM_SAMPLES)
        low, high = (np.array([0.95, 1.05]) * detuned[i] * size / tones.RATE).astype(int)
        pitch = (low + np.abs(np.fft.rfft(windowed, size))[low:high].argmax()) * tones.RATE / size
        assert abs(1200 * np.log2(pitch / detuned[i])) < 0.5, i


def test_tones_vary_in_loudness_and_decay(audio_arrays: dict[str, np.ndarray]) -> None:
    audio = audio_arrays["audio"] / 32768
    peak = np.abs(audio).max(axis=1)
    assert 0.09 < peak.min() < 0.12
    assert 0.78 < peak.max() < 0.81
    assert (audio[:, -1000:].std(axis=1) < 0.5 * audio[:, :1000].std(axis=1)).all()
    assert np.abs(audio.mean(axis=1)).max() < 1e-3


def test_sine_approximation_is_accurate() -> None:
    turns = np.linspace(-3, 3, 10_001)
    np.testing.assert_allclose(tones._sine(turns), np.sin(2 * np.pi * turns), rtol=0, atol=1e-13)


def test_digits_move_in_the_labelled_direction(clips: dict[str, np.ndarray]) -> None:
    """The centre of a digit moves one pixel per frame along a straight line."""
    video = clips["video"].astype(float)
    rows, columns = (np.arange(12) @ video.sum(axis).transpose(0, 2, 1) / video.sum((2, 3)) for axis in (3, 2))
    for direction, (down, right) in moving_digits.DIRECTIONS.items():
        selected = np.char.endswith(clips["label"], f" direction={direction}")
        along, across = (rows, columns) if down else (columns, rows)
        steps = (down + right) * np.diff(along[selected], axis=1)
        assert selected.sum() == 1000
        assert set(np.round(steps, 6).ravel().tolist()) == {1.0}
        assert np.abs(np.diff(across[selected], axis=1)).max() < 1e-9


def test_moving_digits_match_their_labels(clips: dict[str, np.ndarray]) -> None:
    """Every frame shows one complete digit on black."""
    pixels, labels = digits.load_digits()
    label_by_pixels = {crop_to_ink(image).tobytes(): str(label) for image, label in zip(pixels, labels, strict=True)}
    for video, label in zip(clips["video"][::9], clips["label"][::9], strict=True):
        for frame in video:
            assert label.startswith(f"digit={label_by_pixels[crop_to_ink(frame).tobytes()]} ")


def crop_to_ink(image: np.ndarray) -> np.ndarray:
    return image[image.any(1)][:, image.any(0)]
