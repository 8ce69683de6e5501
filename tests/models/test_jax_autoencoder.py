"""The frozen autoencoder in JAX has the parameter names and the outputs of its torch twin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from bottega.core.errors import CheckpointError
from bottega.models import jax_build
from bottega.models.autoencoder.config import AutoencoderShape
from bottega.models.autoencoder.layout import export_autoencoder
from bottega.models.autoencoder.torch import Autoencoder
from bottega.models.jax_layers import forward_context
from bottega.tasks.generation.latents import Latents
from jax_twins import QUICK_TO_COMPILE, assert_close

SIZES: dict[str, Any] = {"latent_channels": 2, "widths": (4, 8), "layers_per_block": 1, "norm_groups": 2}
CASES: dict[str, tuple[AutoencoderShape, tuple[int, ...]]] = {
    "image": (AutoencoderShape(channels=3, **SIZES), (8, 12)),
    "image without quant_conv and attention": (
        AutoencoderShape(channels=1, quant_conv=False, mid_attention=False, **SIZES),
        (4, 4),
    ),
    "audio of one axis": (AutoencoderShape(dims=1, channels=5, **SIZES), (12,)),
    "video": (AutoencoderShape(dims=3, channels=1, **SIZES), (2, 8, 4)),
    "causal video": (
        AutoencoderShape(dims=3, channels=1, causal_time=True, temporal_downsample=2, **SIZES),
        (5, 8, 4),
    ),
}


def build_torch_model(shape: AutoencoderShape) -> Autoencoder:
    """Return a model with weights that no initial value has."""
    model, rng = Autoencoder(shape), np.random.default_rng(0)
    model.initialise(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.from_numpy(0.1 * rng.standard_normal(parameter.shape, dtype=np.float32))
    return model


@pytest.mark.parametrize("name", CASES)
def test_names_weights_and_outputs_are_those_of_torch(name: str, tmp_path: Path) -> None:
    shape, grid = CASES[name]
    expected_model = build_torch_model(shape)
    export_autoencoder(expected_model.state_dict(), shape, tmp_path)
    model = jax_build.build_model(Latents(folder=str(tmp_path)).spec(), 0)
    expected_weights = {name: tensor.numpy() for name, tensor in expected_model.state_dict().items()}
    assert list(model.state_dict()) == list(expected_weights)
    for parameter, value in model.state_dict().items():
        np.testing.assert_array_equal(value, expected_weights[parameter], err_msg=parameter)

    x = np.random.default_rng(1).standard_normal((2, *grid, shape.channels), dtype=np.float32)
    z = np.random.default_rng(2).standard_normal((2, *shape.latent_shape(grid)), dtype=np.float32)

    def compute(x: Any, z: Any) -> Any:
        with forward_context():
            return *model.encode(x), model.decode(z)

    with torch.no_grad():
        expected = (*expected_model.encode(torch.from_numpy(x)), expected_model.decode(torch.from_numpy(z)))
    actual = jax.jit(compute, compiler_options=QUICK_TO_COMPILE)(jnp.asarray(x), jnp.asarray(z))
    for ours, theirs, what in zip(actual, expected, ("mean", "log variance", "decoded"), strict=True):
        assert theirs.std() > 0.1
        assert_close(np.asarray(ours), theirs.numpy(), rtol=1e-5, what=what)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    shape = CASES["image"][0]
    state = build_torch_model(shape).state_dict()
    export_autoencoder({**state, "decoder.conv_out.bias": torch.zeros(4)}, shape, tmp_path)
    with pytest.raises(CheckpointError, match=r"decoder\.conv_out\.bias has shape \[4\]"):
        jax_build.build_model(Latents(folder=str(tmp_path)).spec(), 0)
    state.pop("decoder.conv_out.bias")
    export_autoencoder(state, shape, tmp_path)
    with pytest.raises(CheckpointError, match=r"lacks decoder\.conv_out\.bias"):
        jax_build.build_model(Latents(folder=str(tmp_path)).spec(), 0)
