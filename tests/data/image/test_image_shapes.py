"""Resizing modes preserve what they document, and buckets have the documented areas and aspect ratios."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from bottega.data.image.buckets import assign_bucket, compute_bucket_shapes
from bottega.data.image.resize import ResizeMode, resize_image

sides = st.integers(1, 24)
modes = st.sampled_from(("crop", "pad", "stretch"))


def build_ramp(height: int, width: int) -> np.ndarray:
    """Return an image whose red grows to the right and green downwards, proportionally to the side."""
    down, right = np.mgrid[0:height, 0:width]
    red, green = (right + 0.5) * 255 / width, (down + 0.5) * 255 / height
    return np.stack([red, green, np.zeros_like(red)], axis=-1).astype(np.uint8)


@given(sides, sides, sides, sides, st.sampled_from((1, 3)), modes)
def test_resized_image_has_the_target_shape_and_keeps_flat_colour(
    height: int, width: int, tall: int, wide: int, channels: int, mode: ResizeMode
) -> None:
    resized = resize_image(np.full((height, width, channels), 77, np.uint8), (tall, wide), mode=mode)
    assert resized.shape == (tall, wide, channels)
    assert resized.dtype == np.uint8
    assert (resized == 77).all() if mode != "pad" else set(np.unique(resized)) <= {0, 77}


@given(arrays(np.uint8, st.tuples(sides, sides, st.sampled_from((1, 3)))), modes)
def test_image_of_the_target_size_is_returned_unchanged(pixels: np.ndarray, mode: ResizeMode) -> None:
    assert resize_image(pixels, pixels.shape[:2], mode=mode) is pixels


def test_crop_keeps_the_middle_of_the_longer_side() -> None:
    resized = resize_image(build_ramp(100, 200), (50, 50), mode="crop")
    # The middle half of the width: from 25 to 75 % of red; all of green.
    np.testing.assert_allclose(resized[25, [0, -1], 0] / 255, [0.255, 0.745], atol=0.01)
    np.testing.assert_allclose(resized[[0, -1], 25, 1] / 255, [0.01, 0.99], atol=0.01)


def test_pad_keeps_everything_between_black_bars() -> None:
    resized = resize_image(build_ramp(100, 200), (50, 50), mode="pad")
    assert (resized[:12] == 0).all()
    assert (resized[38:] == 0).all()
    np.testing.assert_allclose(resized[25, [0, -1], 0] / 255, [0.01, 0.99], atol=0.01)
    assert resize_image(build_ramp(10, 10), (10, 14), mode="pad")[:, 2:12].tolist() == build_ramp(10, 10).tolist()


def test_stretch_keeps_everything_but_the_aspect_ratio() -> None:
    resized = resize_image(build_ramp(100, 200), (50, 50), mode="stretch")
    np.testing.assert_allclose(resized[25, [0, -1], 0] / 255, [0.01, 0.99], atol=0.01)
    np.testing.assert_allclose(resized[[0, -1], 25, 1] / 255, [0.01, 0.99], atol=0.01)


def test_downscaling_is_antialiased() -> None:
    """Lines of one pixel become grey; taking every eighth pixel would give black or white."""
    lines = np.zeros((64, 64, 1), np.uint8)
    lines[:, ::2] = 255
    resized = resize_image(lines, (8, 8), mode="stretch")
    assert np.abs(resized[:, 1:-1].astype(int) - 127).max() <= 1
    assert np.abs(resized.astype(int) - 127).max() <= 8  # the outermost columns cover one more line of one colour


@given(st.integers(1, 24), st.sampled_from((64, 128, 256, 512)), st.sampled_from((8, 16)))
def test_buckets_have_about_equal_areas(count: int, image_size: int, multiple: int) -> None:
    shapes = compute_bucket_shapes(count, image_size, multiple=multiple)
    assert 1 <= len(shapes) <= count
    assert len(set(shapes)) == len(shapes)
    for height, width in shapes:
        assert height % multiple == width % multiple == 0
        # Both sides are rounded to the multiple, so the area may be off by that much on each.
        assert abs(height * width / image_size**2 - 1) < 1.5 * multiple / image_size * math.sqrt(2)
        assert abs(math.log(width / height)) <= math.log(2) + 2 * multiple / image_size
    assert [width / height for height, width in shapes] == sorted(width / height for height, width in shapes)
    if count % 2:
        assert (image_size, image_size) in shapes


def test_five_buckets_of_512() -> None:
    # Sides 512 * 2^(k/4) for k = -2 .. 2: 362.04, 430.54, 512, 608.87, 724.08, to the nearest multiple of 8.
    assert compute_bucket_shapes(5, 512) == ((728, 360), (608, 432), (512, 512), (432, 608), (360, 728))


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_image_is_assigned_to_the_nearest_aspect_ratio(height: int, width: int) -> None:
    shapes = compute_bucket_shapes(7, 256)
    bucket = assign_bucket(height, width, shapes)
    distance = [abs(math.log(wide / tall) - math.log(width / height)) for tall, wide in shapes]
    assert distance[bucket] == pytest.approx(min(distance), abs=1e-12)
    assert assign_bucket(*shapes[bucket], shapes) == bucket
