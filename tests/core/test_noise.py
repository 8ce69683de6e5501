"""Noise: the published cipher, the same bits in numpy and torch, one value for each position."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bottega.core.noise import Noise, derive_key, derive_seed, numpy_generator, threefry

# (counter, key, result) of threefry2x32 with 20 rounds, from the known-answer file of Random123.
KNOWN_ANSWERS = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
@pytest.mark.parametrize("array", [int, np.array, torch.tensor])
def test_threefry_matches_the_published_answers(counter: Any, key: Any, result: Any, array: Any) -> None:
    x, y = threefry(key, (array(counter[0]), array(counter[1])))
    assert (int(x), int(y)) == result


@given(
    seed=st.integers(0, 2**63 - 1),
    step=st.integers(0, 2**31),
    positions=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8),
    name=st.text(max_size=8),
    count=st.integers(1, 5),
)
def test_numpy_and_torch_agree_bit_for_bit(seed: int, step: int, positions: list[int], name: str, count: int) -> None:
    host = Noise(seed, step, np.array(positions))
    device = Noise(seed, step, torch.tensor(positions), torch)
    for a, b in zip(host.bits(name, count), device.bits(name, count), strict=True):
        np.testing.assert_array_equal(a, b.numpy())
    a, b = host.uniform(name, (count,)), device.uniform(name, (count,)).numpy()
    assert a.dtype == b.dtype == np.float32
    np.testing.assert_array_equal(a, b)
    assert ((a > 0) & (a < 1)).all()
    # Logarithm and cosine differ between the libraries.
    np.testing.assert_allclose(host.normal(name), device.normal(name).numpy(), rtol=1e-5, atol=1e-6)


@given(cuts=st.lists(st.integers(0, 12), max_size=4))
def test_noise_does_not_depend_on_the_split_of_positions(cuts: list[int]) -> None:
    expected = Noise(3, 7, np.arange(12)).normal("times", (2, 3))
    edges = [0, *sorted(cuts), 12]
    parts = [Noise(3, 7, np.arange(a, b)).normal("times", (2, 3)) for a, b in pairwise(edges)]
    np.testing.assert_array_equal(np.concatenate(parts), expected)
    order = np.random.default_rng(len(cuts)).permutation(12)
    np.testing.assert_array_equal(Noise(3, 7, order).normal("times", (2, 3)), expected[order])


def test_noise_is_uncorrelated_between_seeds_steps_names_and_positions() -> None:
    reference = Noise(0, 0, np.arange(64)).uniform("a", (64,))
    others = [
        Noise(1, 0, np.arange(64)).uniform("a", (64,)),
        Noise(0, 1, np.arange(64)).uniform("a", (64,)),
        Noise(0, 0, np.arange(64)).uniform("b", (64,)),
        Noise(0, 0, np.arange(64, 128)).uniform("a", (64,)),
    ]
    for other in others:
        assert abs(np.corrcoef(reference.ravel(), other.ravel())[0, 1]) < 0.06
        assert (reference == other).mean() < 0.001


def test_moments_of_uniform_and_normal_noise() -> None:
    """Over 2^20 draws a mean has a standard error of sigma / 1024; the tolerance is five standard errors."""
    noise = Noise(0, 0, np.arange(1024))
    uniform, normal = (draw("m", (1024,)).astype(np.float64) for draw in (noise.uniform, noise.normal))
    error = 5 / 1024
    assert abs(uniform.mean() - 1 / 2) < error * 0.289
    assert abs(uniform.var() - 1 / 12) < error * 0.0745
    assert abs(normal.mean()) < error
    assert abs(normal.var() - 1) < error * 2**0.5
    assert abs((normal**3).mean()) < error * 15**0.5
    assert abs((normal**4).mean() - 3) < error * 96**0.5
    assert abs(normal).max() > 4.2, "the tails are missing"
    assert abs(np.corrcoef(normal[:, ::2].ravel(), normal[:, 1::2].ravel())[0, 1]) < error * 2**0.5


def test_uniform_is_never_0_or_1() -> None:
    ends = Noise(0, 0, np.arange(1))._to_unit_interval(np.array([0, 0xFFFFFFFF]))
    assert 0 < ends[0] < 1e-6
    assert 1 - 1e-6 < ends[1] < 1


def test_shapes_follow_the_request() -> None:
    noise = Noise(0, 0, np.arange(3))
    assert noise.uniform("a").shape == (3,)
    assert noise.normal("a", (2, 5)).shape == (3, 2, 5)


def test_derived_keys_are_distinct_and_stable() -> None:
    assert derive_key(1, 23) != derive_key(12, 3)
    assert derive_key("a", "b") != derive_key("ab")
    assert derive_key(0, 0, "x") == (845391178, 1061793970), "every run ever saved depends on this"
    assert 0 <= derive_seed("any", 5) < 2**63
    assert numpy_generator(0, "w").standard_normal(3).tolist() == numpy_generator(0, "w").standard_normal(3).tolist()
    assert numpy_generator(0, "w").standard_normal() != numpy_generator(0, "v").standard_normal()


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_threefry_in_jax_matches_the_published_answers(counter: Any, key: Any, result: Any) -> None:
    """With 32-bit integers, which is all that JAX has by default."""
    import jax.numpy as jnp

    words = tuple(jnp.uint32(word) for word in key), tuple(jnp.uint32(word) for word in counter)
    x, y = threefry(*words, mask=np.uint32(0xFFFFFFFF))
    assert (int(x), int(y)) == result


def test_jax_draws_the_words_and_uniforms_of_numpy() -> None:
    from bottega.models.jax_noise import JaxNoise

    for seed, step, positions in ((0, 0, [0, 1, 5]), (2**62, 123_456, [2**32 - 1, 7])):
        host = Noise(seed, step, np.array(positions))
        device = JaxNoise.of_step(seed, step, np.array(positions, np.uint32), ["time"])
        for ours, theirs in zip(device.bits("time", 5), host.bits("time", 5), strict=True):
            np.testing.assert_array_equal(np.asarray(ours, np.int64), theirs)
        np.testing.assert_array_equal(device.uniform("time", (2, 3)), host.uniform("time", (2, 3)))
        np.testing.assert_allclose(device.normal("time", (400,)), host.normal("time", (400,)), rtol=0, atol=5e-6)


def test_keys_of_jax_noise_are_arguments_of_a_jitted_function() -> None:
    """A key that is computed while tracing would make the noise of all steps the same."""
    import jax

    from bottega.models.jax_noise import JaxNoise, derive_noise_keys

    @jax.jit
    def draw(positions: Any, keys: Any) -> Any:
        return JaxNoise(0, 0, positions, keys=keys).uniform("time", (3,))

    positions = np.arange(4, dtype=np.uint32)
    for step in (0, 1):
        expected = Noise(7, step, np.arange(4)).uniform("time", (3,))
        np.testing.assert_array_equal(draw(positions, derive_noise_keys(7, step, ["time"])), expected)
    with pytest.raises(AssertionError, match="noise_names of the task lacks other"):
        JaxNoise.of_step(0, 0, positions, ["time"]).uniform("other")
