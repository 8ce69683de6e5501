"""Compute of training in JAX: floating-point operations of a sample, and the rate of the device at multiplying matrices."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from bottega.core.batch import batch_length, slice_batch
from bottega.core.types import Batch
from bottega.engines.jax.devices import convert_batch, get_device_type
from bottega.engines.jax.inputs import make_dropout_key
from bottega.models.jax_noise import JaxNoise

if TYPE_CHECKING:
    from bottega.engines.jax.engine import JaxEngine

NUM_COUNTED_EXAMPLES = 2
"""Examples whose operations are counted; more than one, since some losses compare examples."""
MATRIX_SIZES = {"cuda": 4096, "cpu": 512}
"""Rows of the square matrices that the rate is measured with: large enough to reach it, and still milliseconds each."""
NUM_PRODUCTS = 8


def measure_compute(engine: JaxEngine, batch: Batch) -> dict[str, float]:
    """Return `flops_per_sample` and `matmul_rate` in FLOP/s; nothing is computed with the model, only traced."""
    flops, rate = count_flops(engine, batch), measure_matmul_rate(engine.device.jax_device, engine.dtype)
    return {"flops_per_sample": flops, "matmul_rate": rate} if flops and rate else {}


def count_flops(engine: JaxEngine, batch: Batch) -> float:
    """Return the operations of one forward and backward pass, divided by the number of examples.

    Counted are matrix products and convolutions, with what gradient checkpointing computes twice.
    """
    size = min(batch_length(batch), NUM_COUNTED_EXAMPLES)
    examples = slice_batch(batch, 0, size)
    counts = engine.task.counts(examples)
    arrays = convert_batch(engine.task.bucket(examples))
    state, frozen = engine.state, engine.frozen_weights
    trained = {name: state.parameters[name] for name in engine.assigned}

    def compute(trained: Any) -> Any:
        rng = JaxNoise.of_step(engine.seed, 0, np.arange(size), engine.task.noise_names)
        out = engine.builder.compute_loss(
            {**state.parameters, **trained}, frozen, arrays, rng, dropout_key=make_dropout_key()
        )
        return sum(weight * total / max(counts[name], 1e-12) for name, (total, weight) in out.terms.items())

    return _count_operations(jax.make_jaxpr(jax.grad(compute))(trained).jaxpr) / size


def _count_operations(jaxpr: Any) -> float:
    """Return the operations of the products in a program, with those of its loops."""
    total = 0.0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
        elif name == "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            out_axis = equation.params["dimension_numbers"].rhs_spec[0]
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) / kernel[out_axis]
        repeats = equation.params.get("length", 1) if name == "scan" else 1
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, tuple | list) else (parameter,):
                program = getattr(inner, "jaxpr", inner)
                if hasattr(program, "eqns"):
                    total += repeats * _count_operations(program)
    return total


def measure_matmul_rate(device: Any, dtype: Any) -> float:
    """Return the floating-point operations per second of large square matrix products, the best of a few."""
    device_type = get_device_type(device)
    size = MATRIX_SIZES.get(device_type, 1024)
    values = np.random.default_rng(0).random((2, size, size), np.float32)  # a GPU is faster on zeros
    a, b = (jax.device_put(jnp.asarray(value, dtype), device) for value in values)
    multiply = jax.jit(jnp.matmul)
    # A GPU raises its clock during the first products, and the launch of a single one would count.
    num_warmups, num_together = (NUM_PRODUCTS, 4) if device_type == "cuda" else (1, 1)
    seconds = []
    for _ in range(num_warmups + NUM_PRODUCTS):
        start = time.perf_counter()
        products = [multiply(a, b) for _ in range(num_together)]
        products[-1].block_until_ready()
        seconds.append((time.perf_counter() - start) / num_together)
    return 2.0 * size**3 / min(seconds[num_warmups:])
