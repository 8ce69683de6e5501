"""Classifiers in JAX have the parameter names, the initial weights and the logits of their torch twins."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from bottega.models.convnet.config import ConvNetShape
from bottega.models.jax_layers import forward_context
from bottega.models.text_classifier.config import EncoderShape, KimShape
from bottega.tasks.classify.task import Classification
from jax_twins import QUICK_TO_COMPILE, Twins, assert_close, build_perturbed_twins, build_twins


def kim(**changes: Any) -> KimShape:
    sizes = {"vocab_size": 40, "num_labels": 3, "embed_size": 8, "num_filters": 6, "dropout": 0.0}
    return KimShape(**{**sizes, **changes})


def encoder(**changes: Any) -> EncoderShape:
    sizes = {"vocab_size": 40, "num_labels": 3, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "dropout": 0.0}
    return EncoderShape(**{**sizes, "max_positions": 48, **changes})


def convnet(*grid: int, **changes: Any) -> ConvNetShape:
    return ConvNetShape(**{"grid": grid, "channels": 2, "num_labels": 3, "hidden_size": 8, "dropout": 0.0, **changes})


TEXT_SHAPES = {
    "kim": kim(),
    "kim, one short filter": kim(filter_sizes=(2,), num_filters=5),
    "encoder": encoder(),
    "encoder, one layer and head": encoder(num_layers=1, num_heads=1, attention_dropout=0.3),
}
MEDIA_SHAPES = {
    "image": convnet(10, 10, num_layers=2),
    "odd sides": convnet(9, 17, hidden_size=6),
    "large image, strided in the stem": convnet(35, 32, channels=3),
    "mel": convnet(20, 16, channels=1),
    "video": convnet(5, 12, 9),
    "long video": convnet(9, 8, 8, hidden_size=4),
    "a pixel high": convnet(1, 4),
}
SHAPES = {**TEXT_SHAPES, **MEDIA_SHAPES}


def build_task(shape: Any) -> Classification:
    is_media = isinstance(shape, ConvNetShape)
    return Classification(key=("video" if len(shape.grid) == 3 else "image") if is_media else "text", shape=shape)


def draw_inputs(shape: Any, *, length: int = 9) -> tuple[np.ndarray, ...]:
    """Return texts of all lengths up to `length`, one of them empty, or samples of a medium."""
    rng = np.random.default_rng(1)
    if isinstance(shape, ConvNetShape):
        return (rng.standard_normal((3, *shape.grid, shape.channels), dtype=np.float32),)
    mask = np.arange(length) < np.array([length, 0, 1, 4])[:, None]
    return np.where(mask, rng.integers(1, 40, mask.shape), 7).astype(np.int32), mask


def compute_torch_logits(twins: Twins, inputs: tuple[np.ndarray, ...]) -> np.ndarray:
    with torch.no_grad():
        return twins.torch.eval()(*(torch.from_numpy(array) for array in inputs)).numpy()


def compute_jax_logits(twins: Twins, inputs: tuple[np.ndarray, ...], *, dtype: Any = jnp.float32) -> np.ndarray:
    def compute(*arrays: Any) -> Any:
        with forward_context(dtype=dtype):
            return twins.jax(*arrays)

    return np.asarray(jax.jit(compute, compiler_options=QUICK_TO_COMPILE)(*inputs), np.float32)


@pytest.mark.parametrize("name", SHAPES)
def test_names_and_initial_weights_are_those_of_torch(name: str) -> None:
    twins = build_twins(build_task(SHAPES[name]), seed=5)
    expected = {key: tensor.numpy() for key, tensor in twins.torch.state_dict().items()}
    actual = twins.jax.state_dict()
    assert list(actual) == list(expected)
    for key, value in expected.items():
        assert actual[key].dtype == value.dtype
        np.testing.assert_array_equal(actual[key], value, err_msg=key)


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_torch(name: str) -> None:
    shape = SHAPES[name]
    twins, inputs = build_perturbed_twins(build_task(shape)), draw_inputs(shape)
    assert_close(compute_jax_logits(twins, inputs), compute_torch_logits(twins, inputs), rtol=1e-5)


@pytest.mark.parametrize(("name", "length"), [("kim", 1), ("encoder", 1), ("encoder", 48)])
def test_texts_may_be_shorter_than_a_filter_and_as_long_as_the_model(name: str, length: int) -> None:
    twins = build_perturbed_twins(build_task(TEXT_SHAPES[name]))
    inputs = draw_inputs(twins.task.shape, length=length)
    assert_close(compute_jax_logits(twins, inputs), compute_torch_logits(twins, inputs), rtol=1e-5)


@pytest.mark.parametrize("name", ["kim", "encoder"])
def test_padding_has_no_influence(name: str) -> None:
    twins = build_perturbed_twins(build_task(TEXT_SHAPES[name]))
    ids, mask = draw_inputs(twins.task.shape)
    padded = np.pad(ids, ((0, 0), (0, 20)), constant_values=3), np.pad(mask, ((0, 0), (0, 20)))
    assert_close(compute_jax_logits(twins, padded), compute_torch_logits(twins, (ids, mask)), rtol=1e-5)


@pytest.mark.parametrize(
    "shape", [kim(dropout=0.5), encoder(dropout=0.5), encoder(attention_dropout=0.5), convnet(8, 8, dropout=0.5)]
)
def test_dropout_acts_in_training_only(shape: Any) -> None:
    twins, inputs = build_twins(build_task(shape)), draw_inputs(shape)

    @partial(jax.jit, compiler_options=QUICK_TO_COMPILE)
    def compute(key: Any, *arrays: Any) -> Any:
        with forward_context(dropout_key=key):
            return twins.jax(*arrays)

    first, repeated, other = (np.asarray(compute(jax.random.key(seed), *inputs)) for seed in (0, 0, 1))
    expected = compute_torch_logits(twins, inputs)
    assert (first == repeated).all()
    assert not np.allclose(first, other)
    assert not np.allclose(first, expected)
    assert_close(compute_jax_logits(twins, inputs), expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["kim", "encoder", "image"])
def test_bfloat16_is_close(name: str) -> None:
    twins, inputs = build_perturbed_twins(build_task(SHAPES[name])), draw_inputs(SHAPES[name])
    logits, expected = compute_jax_logits(twins, inputs, dtype=jnp.bfloat16), compute_torch_logits(twins, inputs)
    assert not np.array_equal(logits, expected)
    assert_close(logits, expected, rtol=0.05)
