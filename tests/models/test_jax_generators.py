"""Diffusion transformers in JAX have the parameter names, the initial weights and the outputs of their torch twins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from bottega.core.errors import UsageError
from bottega.core.model_spec import ModelSpec
from bottega.models import jax_build
from bottega.models.build import build_model
from bottega.models.dit import jax as jax_dit
from bottega.models.dit import torch as torch_dit
from bottega.models.generator.config import UNetShape
from bottega.models.generator.layout import WEIGHTS
from bottega.models.jax_layers import dropout, forward_context
from bottega.models.pipeline.component import write_safetensors
from jax_generators import SHAPES, build_shape, build_task, draw_batch
from jax_twins import QUICK_TO_COMPILE, Twins, assert_close, build_perturbed_twins, build_twins

TIMES = np.array([0.0, 3.5, 500.25, 999.0], np.float32)


def compute_outputs(twins: Twins, *, dtype: Any = jnp.float32) -> tuple[np.ndarray, np.ndarray]:
    """Return the predictions of both models for the same inputs, every other row without its condition."""
    batch, shape = draw_batch(twins.task), twins.task.shape
    drop = np.arange(len(TIMES)) % 2 == 1
    named = {
        "none": {},
        "class": {"label": batch["label"], "drop": drop},
        "vector": {"vector": batch["condition"], "drop": drop},
        "text": {"input_ids": batch["input_ids"], "mask": batch["attention_mask"] > 0},
    }[shape.condition.kind]
    x = batch[twins.task.key]

    def compute(x: Any, named: Any) -> Any:
        with forward_context(dtype=dtype):
            return twins.jax(x, TIMES, **named)

    actual = jax.jit(compute, compiler_options=QUICK_TO_COMPILE)(x, named)
    is_half = dtype == jnp.bfloat16
    tensors = {name: torch.from_numpy(array) for name, array in named.items()}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_half):
        expected = twins.torch.eval()(torch.from_numpy(x), torch.from_numpy(TIMES), **tensors).float().numpy()
    assert actual.dtype == dtype
    return np.asarray(actual, np.float32), expected


@pytest.mark.parametrize("name", SHAPES)
def test_names_and_initial_weights_are_those_of_torch(name: str) -> None:
    twins = build_twins(build_task(SHAPES[name]), seed=3)
    expected = {name: tensor.numpy() for name, tensor in twins.torch.state_dict().items()}
    actual = twins.jax.state_dict()
    assert list(actual) == list(expected) == [name for name, _ in twins.torch.named_parameters()]
    for parameter, value in actual.items():
        np.testing.assert_array_equal(value, expected[parameter], err_msg=parameter)


@pytest.mark.parametrize("name", SHAPES)
def test_predictions_equal_those_of_torch(name: str) -> None:
    actual, expected = compute_outputs(build_perturbed_twins(build_task(SHAPES[name])))
    assert expected.std() > 0.1
    assert_close(actual, expected, rtol=1e-5)


def test_predictions_in_bfloat16_are_those_of_autocast() -> None:
    """bfloat16 has eight bits, so that sums in another order differ by a percent of the largest value."""
    actual, expected = compute_outputs(build_perturbed_twins(build_task(SHAPES["image, class"])), dtype=jnp.bfloat16)
    assert_close(actual, expected, rtol=2e-2)


@pytest.mark.parametrize(("counts", "width"), [((5,), 24), ((4, 6), 24), ((2, 3, 4), 32)])
def test_positions_and_times_are_embedded_as_in_torch(counts: tuple[int, ...], width: int) -> None:
    expected = torch_dit.sinusoidal_positions(counts, width).numpy()
    np.testing.assert_allclose(jax_dit.sinusoidal_positions(counts, width), expected, rtol=0, atol=1e-7)
    times = np.linspace(0, 1000, 301, dtype=np.float32)
    embedded = torch_dit.embed_times(torch.from_numpy(times)).numpy()
    # One rate of 128 is rounded otherwise, so that angles above 512 may differ by their last place, 2^-14.
    np.testing.assert_allclose(jax_dit.embed_times(jnp.asarray(times)), embedded, rtol=0, atol=2**-14 + 1e-6)


@pytest.mark.parametrize("patch", [(2,), (2, 3), (1, 2, 2)])
def test_patches_are_cut_as_in_torch(patch: tuple[int, ...]) -> None:
    grid = tuple(side * (axis + 2) for axis, side in enumerate(patch))
    x = np.random.default_rng(0).standard_normal((2, *grid, 3), dtype=np.float32)
    tokens = np.asarray(jax_dit.patchify(jnp.asarray(x), patch))
    np.testing.assert_array_equal(tokens, torch_dit.patchify(torch.from_numpy(x), patch).numpy())
    np.testing.assert_array_equal(jax_dit.unpatchify(jnp.asarray(tokens), patch, grid), x)


def test_dropout_and_checkpointing_are_those_of_training() -> None:
    """Recomputed blocks give the same output with the same dropout, which an evaluation has not."""
    model = build_perturbed_twins(build_task(build_shape("class", (4, 4), (2, 2), dropout=0.4))).jax
    x, label = jnp.ones((2, 4, 4, 2)), jnp.zeros(2, jnp.int32)

    def compute(key: Any, checkpoints_blocks: bool) -> Any:
        def compute_model(x: Any) -> Any:
            with forward_context(dropout_key=key, checkpoints_blocks=checkpoints_blocks):
                return model(x, jnp.full(2, 3.0), label=label)

        return jax.jit(compute_model, compiler_options=QUICK_TO_COMPILE)(x)

    key = jax.random.key(0)
    plain, recomputed, evaluated = compute(key, False), compute(key, True), compute(None, True)
    np.testing.assert_allclose(plain, recomputed, rtol=1e-5, atol=1e-6)
    assert np.abs(plain - evaluated).max() > 0.01
    with forward_context(dropout_key=key):
        assert (dropout(jnp.ones(1000), 0.4) == 0).mean() == pytest.approx(0.4, abs=0.06)


def test_shared_embeddings_fold_into_one_table() -> None:
    twins = build_perturbed_twins(build_task(SHAPES["image, shared attributes"]))
    expected = twins.torch.condition.fold_shared().numpy()
    np.testing.assert_allclose(twins.jax.condition.fold_shared(), expected, rtol=0, atol=1e-6)


def test_weights_to_start_from_are_read_from_a_folder(tmp_path: Path) -> None:
    """All of an export, or a backbone alone, whose condition keeps its initial values."""
    twins = build_perturbed_twins(build_task(SHAPES["image, class"]))
    weights = twins.jax.state_dict()
    backbone = {name: value for name, value in weights.items() if name.startswith("backbone.")}
    spec = build_task(SHAPES["image, class"], pretrained=str(tmp_path)).specs()["model"]
    for saved in (weights, backbone):
        write_safetensors(tmp_path / WEIGHTS, saved)
        loaded = jax_build.build_model(spec, 5).state_dict()
        expected = {name: tensor.numpy() for name, tensor in build_model(spec, 5).state_dict().items()}
        for name, value in loaded.items():
            np.testing.assert_array_equal(value, expected[name], err_msg=name)
        np.testing.assert_array_equal(loaded["backbone.embed.bias"], weights["backbone.embed.bias"])
    write_safetensors(tmp_path / WEIGHTS, {**weights, "backbone.embed.bias": np.zeros(3, np.float32)})
    with pytest.raises(UsageError, match=r"backbone\.embed\.bias of shape \[3\]"):
        jax_build.build_model(spec, 5)


def test_a_unet_has_no_form_in_jax() -> None:
    unet = UNetShape(grid=(8, 8), channels=1, hidden_size=8, num_layers=1, num_heads=1, stages=2)
    shape = SHAPES["image, class"].model_copy(update={"backbone": unet})

    def get_references(spec: ModelSpec) -> set[str]:
        assert spec.initial is not None
        return {str(spec.architecture), str(spec.initial.rule), str(spec.load)}

    assert not any("{framework}" in name for name in get_references(build_task(shape).specs()["model"]))
    assert all("{framework}" in name for name in get_references(build_task(SHAPES["image, text"]).specs()["model"]))
