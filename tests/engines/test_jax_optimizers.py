"""Updates and states of the optimizers in JAX equal those in torch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from bottega.config.optimizers import OPTIMIZER_SPECS
from bottega.config.parameter_groups import ParameterSetting
from bottega.config.training import Optimizer
from bottega.engines.jax import optimizers as jax_side
from bottega.engines.torch import optimizers as torch_side

SHAPES = {"w": (8, 12), "w2": (8, 12), "tall": (12, 5), "embed": (7, 3), "bias": (9,), "conv": (4, 3, 2, 2)}
NUM_STEPS = 10


@pytest.mark.parametrize(
    ("name", "nesterov"), [*((name, False) for name in OPTIMIZER_SPECS), ("sgd", True), ("muon", True)]
)
def test_ten_steps_equal_those_of_torch(name: str, nesterov: bool) -> None:
    rng = np.random.default_rng(0)
    options = Optimizer.model_validate({"name": name, "nesterov": nesterov})
    settings = {key: ParameterSetting(0.5 if key == "bias" else 1.0) for key in SHAPES}
    start = {key: rng.standard_normal(shape).astype(np.float32) for key, shape in SHAPES.items()}

    parameters = {key: torch.nn.Parameter(torch.tensor(value)) for key, value in start.items()}
    optimizers = torch_side.build_optimizers(parameters, settings, options, learning_rate=0.0, weight_decay=0.1)
    torch_side.initialise_state(optimizers)
    names = {id(parameter): key for key, parameter in parameters.items()}

    assigned = jax_side.assign_optimizers(SHAPES, settings, options, weight_decay=0.1)
    arrays = {key: jnp.asarray(value) for key, value in start.items()}
    states = jax_side.initialise_state(arrays, assigned, options)
    update = jax.jit(lambda g, s, p, rate: jax_side.compute_updates(g, s, p, assigned, options, rate))

    for step in range(NUM_STEPS):
        gradients = {key: rng.standard_normal(shape).astype(np.float32) for key, shape in SHAPES.items()}
        rate = 0.01 / (step + 1)
        torch_side.set_learning_rate(optimizers, rate)
        for key, parameter in parameters.items():
            parameter.grad = torch.tensor(gradients[key])
        torch_side.step_optimizers(optimizers, divisor=None, skip_update=None)
        arrays, states = update(gradients, states, arrays, np.float32(rate))

    for key, parameter in parameters.items():
        np.testing.assert_allclose(arrays[key], parameter.detach().numpy(), rtol=1e-5, atol=2e-6, err_msg=key)
    expected = torch_side.collect_state_tensors(optimizers, names)
    actual = {f"{key}/{state}": value for key, tensors in states.items() for state, value in tensors.items()}
    assert {k: (tuple(v.shape), str(v.dtype)) for k, v in actual.items()} == {
        k: (tuple(v.shape), str(v.dtype).removeprefix("torch.")) for k, v in expected.items()
    }
    for key, tensor in expected.items():
        np.testing.assert_allclose(actual[key], tensor.numpy(), rtol=1e-5, atol=1e-6, err_msg=key)


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    matrices = np.random.default_rng(0).standard_normal((2, 24, 40)).astype(np.float32)
    values = np.linalg.svd(np.asarray(jax_side.orthogonalise(jnp.asarray(matrices))), compute_uv=False)
    assert values.min() > 0.6
    assert values.max() < 1.3
