"""Changed copies are a function of seed, epoch and index alone; pixels become the numbers that were promised."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from bottega.data.image.augment import (
    ImageTransform,
    Normalisation,
    apply_transform,
    augment_images,
    denormalise_pixels,
    normalise_pixels,
    sample_transform,
)
from bottega.data.image.config import ImageAugmentation

ALL = ImageAugmentation(crop=0.3, flip=True, colour_jitter=0.4)
STILL = ImageTransform(0.0, 0.0, 0.0, False, 1.0, 1.0, 1.0)
HOW: tuple[Normalisation, ...] = ("symmetric", "unit", "standard")


def batch(count: int = 8, side: int = 12, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, side, side, channels), dtype=np.uint8)


@given(st.permutations(range(8)), st.integers(1, 8), st.integers(0, 3))
def test_a_sample_is_changed_alike_in_any_batch(order: list[int], size: int, epoch: int) -> None:
    index = np.array(order[:size])
    epochs = np.full(size, epoch)
    alone = augment_images(batch(), ALL, seed=1, epoch=np.full(8, epoch), index=np.arange(8))
    together = augment_images(batch()[index], ALL, seed=1, epoch=epochs, index=index)
    np.testing.assert_array_equal(together, alone[index])


def test_other_epochs_seeds_and_samples_are_changed_otherwise() -> None:
    def seen(seed: int, epoch: int, index: int) -> ImageTransform:
        return sample_transform(ALL, seed=seed, epoch=epoch, index=index)

    assert len({seen(seed, epoch, index) for seed in range(3) for epoch in range(3) for index in range(3)}) == 27
    assert seen(1, 2, 3) == seen(1, 2, 3)


def test_the_draws_fill_the_ranges_of_the_options() -> None:
    seen = [sample_transform(ALL, seed=0, epoch=0, index=index) for index in range(1000)]
    removed = [change.crop_fraction for change in seen]
    assert 0 <= min(removed) < 0.01
    assert 0.29 < max(removed) <= 0.3
    for name in ("brightness", "contrast", "saturation"):
        factors = [getattr(change, name) for change in seen]
        assert 0.6 <= min(factors) < 0.61
        assert 1.39 < max(factors) <= 1.4
    # 1,000 throws of a coin: five standard deviations are 79.
    assert abs(sum(change.is_flipped for change in seen) - 500) < 79


def test_an_option_leaves_what_the_others_draw() -> None:
    alone = sample_transform(ImageAugmentation(flip=True), seed=0, epoch=1, index=5)
    assert alone.is_flipped == sample_transform(ALL, seed=0, epoch=1, index=5).is_flipped
    assert alone._replace(is_flipped=False) == STILL._replace(top=alone.top, left=alone.left)


@pytest.mark.parametrize("options", [ImageAugmentation(), ImageAugmentation(enabled=False, crop=0.5, flip=True)])
def test_nothing_asked_for_changes_nothing(options: ImageAugmentation) -> None:
    done = augment_images(batch(), options, seed=0, epoch=np.zeros(8, int), index=np.arange(8))
    np.testing.assert_array_equal(done, batch())


def test_a_mirror_turns_left_to_right_and_twice_is_nothing() -> None:
    pixels = batch(3)
    apply_transform(pixels, STILL._replace(is_flipped=True))
    np.testing.assert_array_equal(pixels, batch(3)[:, :, ::-1])
    apply_transform(pixels, STILL._replace(is_flipped=True))
    np.testing.assert_array_equal(pixels, batch(3))


def test_a_crop_shows_the_part_it_says() -> None:
    right = np.broadcast_to((np.arange(100) * 2.55).astype(np.uint8)[:, None], (100, 100, 1))[None].copy()
    apply_transform(right, STILL._replace(crop_fraction=0.5, left=1.0))
    assert right.shape == (1, 100, 100, 1)
    # The right half, over the whole width.
    np.testing.assert_allclose(right[0, 50, [0, -1], 0] / 255, [0.5, 0.99], atol=0.02)


@given(st.sampled_from(("brightness", "contrast", "saturation")), st.floats(0.0, 2.0), st.sampled_from((1, 3)))
def test_colour_changes_are_what_their_names_say(name: str, factor: float, channels: int) -> None:
    before = batch(1, channels=channels)
    after = before.copy()
    apply_transform(after, STILL._replace(**{name: factor}))
    values = before.astype(np.float64)
    grey = values @ [0.299, 0.587, 0.114] if channels == 3 else values[..., 0]
    about = {"brightness": 0.0, "contrast": grey.mean(), "saturation": grey[..., None]}[name]
    expected = values if name == "saturation" and channels == 1 else about + (values - about) * factor
    assert np.abs(after - np.clip(expected, 0, 255)).max() <= 0.51


def test_several_colour_changes_are_one_after_the_other() -> None:
    before = batch(1) // 4 + 96  # nothing leaves the range on the way
    after = before.copy()
    apply_transform(after, STILL._replace(brightness=1.2, contrast=0.7, saturation=1.3))
    values = before * 1.2
    mean = (values @ [0.299, 0.587, 0.114]).mean()
    values = mean + (values - mean) * 0.7
    grey = (values @ [0.299, 0.587, 0.114])[..., None]
    assert np.abs(after - (grey + (values - grey) * 1.3)).max() <= 0.51


def test_the_frames_of_a_video_are_changed_alike() -> None:
    still = np.repeat(batch(2)[:, None], 5, axis=1)
    done = augment_images(still, ALL, seed=0, epoch=np.zeros(2, int), index=np.arange(2))
    assert done.shape == (2, 5, 12, 12, 3)
    for frame in range(1, 5):
        np.testing.assert_array_equal(done[:, frame], done[:, 0])


@given(arrays(np.uint8, st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.sampled_from((1, 3)))))
def test_pixels_survive_the_way_there_and_back(pixels: np.ndarray) -> None:
    for how in HOW:
        values = normalise_pixels(pixels, mode=how)
        assert values.dtype == np.float32
        np.testing.assert_array_equal(denormalise_pixels(values, mode=how), pixels)


def test_the_numbers_are_the_published_ones() -> None:
    ends = np.array([0, 255], np.uint8)[:, None]
    np.testing.assert_allclose(normalise_pixels(ends, mode="symmetric")[:, 0], [-1, 1], atol=1e-6)
    np.testing.assert_allclose(normalise_pixels(ends, mode="unit")[:, 0], [0, 1], atol=1e-6)
    # Black and white by ImageNet's mean (0.485, 0.456, 0.406) and deviation (0.229, 0.224, 0.225).
    colour = normalise_pixels(np.repeat(ends, 3, axis=1)[None], mode="standard")[0]
    np.testing.assert_allclose(colour[0], [-2.117904, -2.035714, -1.804444], atol=1e-5)
    np.testing.assert_allclose(colour[1], [2.248908, 2.428571, 2.640000], atol=1e-5)


def test_what_a_model_draws_outside_the_range_is_cut() -> None:
    assert denormalise_pixels(np.array([[-9.0], [9.0]]), mode="symmetric")[:, 0].tolist() == [0, 255]


def test_numbers_are_written_where_they_are_wanted() -> None:
    out = np.empty((8, 12, 12, 3), np.float32)
    assert normalise_pixels(batch(), mode="standard", out=out) is out
    np.testing.assert_array_equal(out, normalise_pixels(batch(), mode="standard"))
