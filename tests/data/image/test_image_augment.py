"""Augmentation is a function of seed, epoch and index alone, and normalisation matches the published constants."""

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
IDENTITY = ImageTransform(0.0, 0.0, 0.0, False, 1.0, 1.0, 1.0)
NORMALISATIONS: tuple[Normalisation, ...] = ("symmetric", "unit", "standard")


def draw_batch(count: int = 8, side: int = 12, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, side, side, channels), dtype=np.uint8)


@given(st.permutations(range(8)), st.integers(1, 8), st.integers(0, 3))
def test_augmentation_of_a_sample_does_not_depend_on_its_batch(order: list[int], size: int, epoch: int) -> None:
    index = np.array(order[:size])
    epochs = np.full(size, epoch)
    expected = augment_images(draw_batch(), ALL, seed=1, epoch=np.full(8, epoch), index=np.arange(8))
    augmented = augment_images(draw_batch()[index], ALL, seed=1, epoch=epochs, index=index)
    np.testing.assert_array_equal(augmented, expected[index])


def test_augmentation_differs_between_epochs_seeds_and_samples() -> None:
    def sample(seed: int, epoch: int, index: int) -> ImageTransform:
        return sample_transform(ALL, seed=seed, epoch=epoch, index=index)

    assert len({sample(seed, epoch, index) for seed in range(3) for epoch in range(3) for index in range(3)}) == 27
    assert sample(1, 2, 3) == sample(1, 2, 3)


def test_draws_cover_the_configured_ranges() -> None:
    transforms = [sample_transform(ALL, seed=0, epoch=0, index=index) for index in range(1000)]
    removed = [transform.crop_fraction for transform in transforms]
    assert 0 <= min(removed) < 0.01
    assert 0.29 < max(removed) <= 0.3
    for name in ("brightness", "contrast", "saturation"):
        factors = [getattr(transform, name) for transform in transforms]
        assert 0.6 <= min(factors) < 0.61
        assert 1.39 < max(factors) <= 1.4
    # 1,000 coin flips: five standard deviations are 79.
    assert abs(sum(transform.is_flipped for transform in transforms) - 500) < 79


def test_options_have_independent_random_streams() -> None:
    alone = sample_transform(ImageAugmentation(flip=True), seed=0, epoch=1, index=5)
    assert alone.is_flipped == sample_transform(ALL, seed=0, epoch=1, index=5).is_flipped
    assert alone._replace(is_flipped=False) == IDENTITY._replace(top=alone.top, left=alone.left)


@pytest.mark.parametrize("options", [ImageAugmentation(), ImageAugmentation(enabled=False, crop=0.5, flip=True)])
def test_no_augmentation_changes_nothing(options: ImageAugmentation) -> None:
    augmented = augment_images(draw_batch(), options, seed=0, epoch=np.zeros(8, int), index=np.arange(8))
    np.testing.assert_array_equal(augmented, draw_batch())


def test_flip_mirrors_and_is_its_own_inverse() -> None:
    pixels = draw_batch(3)
    apply_transform(pixels, IDENTITY._replace(is_flipped=True))
    np.testing.assert_array_equal(pixels, draw_batch(3)[:, :, ::-1])
    apply_transform(pixels, IDENTITY._replace(is_flipped=True))
    np.testing.assert_array_equal(pixels, draw_batch(3))


def test_crop_shows_the_selected_part() -> None:
    ramp = np.broadcast_to((np.arange(100) * 2.55).astype(np.uint8)[:, None], (100, 100, 1))[None].copy()
    apply_transform(ramp, IDENTITY._replace(crop_fraction=0.5, left=1.0))
    assert ramp.shape == (1, 100, 100, 1)
    # The right half, stretched to the full width.
    np.testing.assert_allclose(ramp[0, 50, [0, -1], 0] / 255, [0.5, 0.99], atol=0.02)


@given(st.sampled_from(("brightness", "contrast", "saturation")), st.floats(0.0, 2.0), st.sampled_from((1, 3)))
def test_brightness_contrast_and_saturation_match_their_definitions(name: str, factor: float, channels: int) -> None:
    before = draw_batch(1, channels=channels)
    after = before.copy()
    apply_transform(after, IDENTITY._replace(**{name: factor}))
    values = before.astype(np.float64)
    grey = values @ [0.299, 0.587, 0.114] if channels == 3 else values[..., 0]
    centre = {"brightness": 0.0, "contrast": grey.mean(), "saturation": grey[..., None]}[name]
    expected = values if name == "saturation" and channels == 1 else centre + (values - centre) * factor
    assert np.abs(after - np.clip(expected, 0, 255)).max() <= 0.51


def test_colour_changes_are_applied_in_sequence() -> None:
    before = draw_batch(1) // 4 + 96  # intermediate values stay within the range
    after = before.copy()
    apply_transform(after, IDENTITY._replace(brightness=1.2, contrast=0.7, saturation=1.3))
    values = before * 1.2
    mean = (values @ [0.299, 0.587, 0.114]).mean()
    values = mean + (values - mean) * 0.7
    grey = (values @ [0.299, 0.587, 0.114])[..., None]
    assert np.abs(after - (grey + (values - grey) * 1.3)).max() <= 0.51


def test_all_frames_of_a_video_are_augmented_alike() -> None:
    still = np.repeat(draw_batch(2)[:, None], 5, axis=1)
    augmented = augment_images(still, ALL, seed=0, epoch=np.zeros(2, int), index=np.arange(2))
    assert augmented.shape == (2, 5, 12, 12, 3)
    for frame in range(1, 5):
        np.testing.assert_array_equal(augmented[:, frame], augmented[:, 0])


@given(arrays(np.uint8, st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.sampled_from((1, 3)))))
def test_normalisation_round_trips(pixels: np.ndarray) -> None:
    for mode in NORMALISATIONS:
        values = normalise_pixels(pixels, mode=mode)
        assert values.dtype == np.float32
        np.testing.assert_array_equal(denormalise_pixels(values, mode=mode), pixels)


def test_normalisation_matches_the_published_constants() -> None:
    ends = np.array([0, 255], np.uint8)[:, None]
    np.testing.assert_allclose(normalise_pixels(ends, mode="symmetric")[:, 0], [-1, 1], atol=1e-6)
    np.testing.assert_allclose(normalise_pixels(ends, mode="unit")[:, 0], [0, 1], atol=1e-6)
    # Black and white by ImageNet's mean (0.485, 0.456, 0.406) and deviation (0.229, 0.224, 0.225).
    colour = normalise_pixels(np.repeat(ends, 3, axis=1)[None], mode="standard")[0]
    np.testing.assert_allclose(colour[0], [-2.117904, -2.035714, -1.804444], atol=1e-5)
    np.testing.assert_allclose(colour[1], [2.248908, 2.428571, 2.640000], atol=1e-5)


def test_denormalisation_clips_to_the_pixel_range() -> None:
    assert denormalise_pixels(np.array([[-9.0], [9.0]]), mode="symmetric")[:, 0].tolist() == [0, 255]


def test_normalisation_writes_to_the_output_array() -> None:
    out = np.empty((8, 12, 12, 3), np.float32)
    assert normalise_pixels(draw_batch(), mode="standard", out=out) is out
    np.testing.assert_array_equal(out, normalise_pixels(draw_batch(), mode="standard"))
