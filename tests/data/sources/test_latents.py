"""Cached latents: computed once from deterministic samples, and loaded with their labels."""

from __future__ import annotations

import multiprocessing.reduction
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import small_media
from bottega.core.errors import UsageError
from bottega.data.prepare.media import prepare_media
from bottega.data.sources.latents import LATENT_FIELD, LatentRows, check_deterministic, compute_latents
from bottega.data.sources.samples import open_media_source
from bottega.tasks.recipes import load_recipe

SHAPE = (2, 2, 1)


def open_rows(task: str, data: Path, *, is_training: bool = True, **changes: Any) -> Any:
    values = {"task": task, "data.train.path": str(data), "training.max_steps": 1, **changes}
    recipe: Any = load_recipe([values]).recipe
    prepared = prepare_media(recipe, progress=lambda stage, done, total: None)
    return open_media_source(recipe, prepared, "train", is_training=is_training)


class CountingEncoder:
    """Returns the mean of each quarter of an image, and the number of the call as its variance."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, images: np.ndarray) -> np.ndarray:
        self.calls += 1
        mean = images.reshape(len(images), 2, 4, 2, 4).mean((2, 4))[..., None]
        return np.concatenate([mean, np.full_like(mean, self.calls)], axis=-1)


def compute(source: Any, encode: Any, cache: Path, **changes: Any) -> Any:
    reports: list[tuple[str, int, int]] = []
    options: dict[str, Any] = {"model_hash": "first", "shape": SHAPE, **changes}
    table = compute_latents(
        source, "image", encode=encode, progress=lambda *report: reports.append(report), cache=cache, **options
    )
    return table, reports


@pytest.fixture
def rows(tmp_path: Path) -> Any:
    return open_rows("image", small_media.write_images(tmp_path))


def test_latents_are_computed_once(rows: Any, tmp_path: Path) -> None:
    encode = CountingEncoder()
    table, reports = compute(rows, encode, tmp_path)
    assert reports == [("latents", 36, 36)]
    cached, no_reports = compute(rows, encode, tmp_path)
    assert cached.folder == table.folder
    assert no_reports == []
    assert encode.calls == 1
    assert compute(rows, encode, tmp_path, model_hash="second")[0].folder != table.folder


def test_latents_of_different_preprocessing_are_separate_entries(tmp_path: Path) -> None:
    data, encode = small_media.write_images(tmp_path), CountingEncoder()
    folders = {
        compute(open_rows("image", data, **{"data.normalise": normalisation}), encode, tmp_path)[0].folder
        for normalisation in ("symmetric", "unit", "symmetric")
    }
    assert len(folders) == 2


def test_latents_replace_the_pixels(rows: Any, tmp_path: Path) -> None:
    table, _ = compute(rows, CountingEncoder(), tmp_path)
    latents = LatentRows(rows, table)
    index = np.array([5, 0, 35])
    plain, batch = rows.rows(index, 0 * index), latents.rows(index, 0 * index)
    assert "image" not in batch
    assert batch[LATENT_FIELD].shape == (3, 2, 2, 2)
    assert batch[LATENT_FIELD].dtype == np.float32
    np.testing.assert_allclose(
        batch[LATENT_FIELD][..., 0], CountingEncoder()(plain["image"])[..., 0], rtol=0, atol=1e-6
    )
    for name in ("label", "condition"):
        np.testing.assert_array_equal(batch[name], plain[name])
    assert len(latents) == len(rows)
    assert latents.table is rows.table
    assert latents.fingerprint != rows.fingerprint
    assert "as precomputed latents of 2 x 2" in latents.describe(0, 0)


def test_latent_rows_pickle_small(rows: Any, tmp_path: Path) -> None:
    latents = LatentRows(rows, compute(rows, CountingEncoder(), tmp_path)[0])
    latents.rows(np.arange(3), np.zeros(3, int))
    pickled = bytes(multiprocessing.reduction.ForkingPickler.dumps(latents))
    assert len(pickled) < 8000
    copy = pickle.loads(pickled)
    np.testing.assert_array_equal(
        copy.rows(np.arange(3), np.zeros(3, int))[LATENT_FIELD], latents.latents.values(LATENT_FIELD)[:3]
    )


def test_failed_computation_leaves_no_entry(rows: Any, tmp_path: Path) -> None:
    def broken(images: np.ndarray) -> np.ndarray:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        compute(rows, broken, tmp_path)
    encode = CountingEncoder()
    table, _ = compute(rows, encode, tmp_path)
    assert (len(table), encode.calls) == (36, 1)


def test_random_augmentation_and_crops_are_refused(tmp_path: Path) -> None:
    images, audio, video = (
        write(tmp_path) for write in (small_media.write_images, small_media.write_audio, small_media.write_videos)
    )
    with pytest.raises(UsageError, match=r"data\.augmentation"):
        check_deterministic(open_rows("image", images, **{"data.augmentation.flip": True}))
    check_deterministic(open_rows("image", images))
    check_deterministic(open_rows("audio", audio))
    check_deterministic(open_rows("audio", audio, **{"data.seconds": 0.05, "data.crop": "centre"}))
    with pytest.raises(UsageError, match=r"data\.crop=centre"):
        check_deterministic(open_rows("audio", audio, **{"data.seconds": 0.05}))
    check_deterministic(open_rows("video", video, **{"data.num_frames": 4}))
    check_deterministic(open_rows("video", video, **{"data.num_frames": 2, "data.clip": "start"}))
    with pytest.raises(UsageError, match=r"data\.clip=centre"):
        check_deterministic(open_rows("video", video, **{"data.num_frames": 2}))
