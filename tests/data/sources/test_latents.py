"""Latents in the cache: computed once, of samples that are always the same, and served with what is said of them."""

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
from bottega.data.sources.latents import FIELD, LatentRows, check_deterministic, compute_latents
from bottega.data.sources.samples import open_media_source
from bottega.tasks.recipes import load_recipe

SHAPE = (2, 2, 1)


def rows_of(task: str, data: Path, *, is_training: bool = True, **changes: Any) -> Any:
    values = {"task": task, "data.train.path": str(data), "training.max_steps": 1, **changes}
    recipe: Any = load_recipe([values]).recipe
    prepared = prepare_media(recipe, progress=lambda stage, done, total: None)
    return open_media_source(recipe, prepared, "train", is_training=is_training)


class Encoder:
    """The mean of each quarter of a picture, with the number of the call in place of a variance."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, images: np.ndarray) -> np.ndarray:
        self.calls += 1
        mean = images.reshape(len(images), 2, 4, 2, 4).mean((2, 4))[..., None]
        return np.concatenate([mean, np.full_like(mean, self.calls)], axis=-1)


def make(rows: Any, encode: Any, cache: Path, **changes: Any) -> Any:
    seen: list[tuple[str, int, int]] = []
    options: dict[str, Any] = {"content": "one", "shape": SHAPE, **changes}
    table = compute_latents(
        rows, "image", encode=encode, progress=lambda *said: seen.append(said), cache=cache, **options
    )
    return table, seen


@pytest.fixture
def rows(tmp_path: Path) -> Any:
    return rows_of("image", small_media.pictures(tmp_path))


def test_they_are_made_once(rows: Any, tmp_path: Path) -> None:
    encode = Encoder()
    table, seen = make(rows, encode, tmp_path)
    assert seen == [("latents", 36, 36)]
    again, nothing = make(rows, encode, tmp_path)
    assert again.folder == table.folder
    assert nothing == []
    assert encode.calls == 1
    assert make(rows, encode, tmp_path, content="two")[0].folder != table.folder


def test_another_look_at_the_data_is_another_entry(tmp_path: Path) -> None:
    data, encode = small_media.pictures(tmp_path), Encoder()
    folders = {
        make(rows_of("image", data, **{"data.normalise": how}), encode, tmp_path)[0].folder
        for how in ("symmetric", "unit", "symmetric")
    }
    assert len(folders) == 2


def test_they_stand_in_place_of_the_pixels(rows: Any, tmp_path: Path) -> None:
    table, _ = make(rows, Encoder(), tmp_path)
    served = LatentRows(rows, table)
    index = np.array([5, 0, 35])
    plain, found = rows.rows(index, 0 * index), served.rows(index, 0 * index)
    assert "image" not in found
    assert found[FIELD].shape == (3, 2, 2, 2)
    assert found[FIELD].dtype == np.float32
    np.testing.assert_allclose(found[FIELD][..., 0], Encoder()(plain["image"])[..., 0], rtol=0, atol=1e-6)
    for name in ("label", "condition"):
        np.testing.assert_array_equal(found[name], plain[name])
    assert len(served) == len(rows)
    assert served.table is rows.table
    assert served.fingerprint != rows.fingerprint
    assert "as precomputed latents of 2 x 2" in served.describe(0, 0)


def test_a_worker_gets_a_small_copy(rows: Any, tmp_path: Path) -> None:
    served = LatentRows(rows, make(rows, Encoder(), tmp_path)[0])
    served.rows(np.arange(3), np.zeros(3, int))
    sent = bytes(multiprocessing.reduction.ForkingPickler.dumps(served))
    assert len(sent) < 8000
    copy = pickle.loads(sent)
    np.testing.assert_array_equal(copy.rows(np.arange(3), np.zeros(3, int))[FIELD], served.latents.values(FIELD)[:3])


def test_half_of_them_is_never_seen(rows: Any, tmp_path: Path) -> None:
    def broken(images: np.ndarray) -> np.ndarray:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        make(rows, broken, tmp_path)
    encode = Encoder()
    table, _ = make(rows, encode, tmp_path)
    assert (len(table), encode.calls) == (36, 1)


def test_samples_that_change_are_refused(tmp_path: Path) -> None:
    pictures, sounds, clips = (make(tmp_path) for make in (small_media.pictures, small_media.sounds, small_media.clips))
    with pytest.raises(UsageError, match=r"data\.augmentation"):
        check_deterministic(rows_of("image", pictures, **{"data.augmentation.flip": True}))
    check_deterministic(rows_of("image", pictures))
    check_deterministic(rows_of("audio", sounds))
    check_deterministic(rows_of("audio", sounds, **{"data.seconds": 0.05, "data.crop": "centre"}))
    with pytest.raises(UsageError, match=r"data\.crop=centre"):
        check_deterministic(rows_of("audio", sounds, **{"data.seconds": 0.05}))
    check_deterministic(rows_of("video", clips, **{"data.num_frames": 4}))
    check_deterministic(rows_of("video", clips, **{"data.num_frames": 2, "data.clip": "start"}))
    with pytest.raises(UsageError, match=r"data\.clip=centre"):
        check_deterministic(rows_of("video", clips, **{"data.num_frames": 2}))
