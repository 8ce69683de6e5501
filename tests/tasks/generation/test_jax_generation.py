"""Generation in JAX: losses, gradients and samples are those of torch, whatever the medium, condition, objective and latents."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

from bottega.core.noise import Noise
from bottega.models import jax_build
from bottega.models.autoencoder.config import AutoencoderShape
from bottega.models.autoencoder.layout import export_autoencoder
from bottega.models.autoencoder.torch import Autoencoder
from bottega.models.build import build_model
from bottega.models.jax_layers import bind, forward_context
from bottega.models.jax_noise import JaxNoise
from bottega.tasks.generation import jax as jax_generation
from bottega.tasks.generation import jax_latents, torch_latents
from bottega.tasks.generation import torch as torch_generation
from bottega.tasks.generation.latents import PRECOMPUTED, Latents
from bottega.tasks.generation.task import Generation
from jax_generators import SHAPES, build_task, draw_batch
from jax_twins import (
    QUICK_TO_COMPILE,
    Outputs,
    Twins,
    assert_close,
    assert_outputs_close,
    build_perturbed_twins,
    compute_in_jax,
    compute_in_torch,
)

OBJECTIVES: dict[str, dict[str, Any]] = {
    "uniform times": {"times": "uniform"},
    "shifted flow": {"shift": 3.0},
    "noise": {"objective": "noise"},
    "noise, linear, min-SNR": {"objective": "noise", "schedule": "linear", "min_snr": 5.0},
    "v, scaled linear": {"objective": "v", "schedule": "scaled_linear"},
    "v, min-SNR": {"objective": "v", "min_snr": 5.0},
}
VAE = AutoencoderShape(
    channels=1,
    latent_channels=2,
    widths=(4, 8),
    layers_per_block=1,
    norm_groups=2,
    scaling_factor=0.7,
    shift_factor=0.2,
)


@pytest.mark.parametrize("name", SHAPES)
def test_losses_and_gradients_equal_those_of_torch(name: str) -> None:
    twins = build_perturbed_twins(build_task(SHAPES[name]))
    batch = draw_batch(twins.task, has_weight=True)
    compare_gradients(compute_in_jax(twins, batch, is_training=True), compute_in_torch(twins, batch, is_training=True))


def compare_gradients(actual: Outputs, expected: Outputs) -> None:
    """Compare losses and gradients, but for those of the biases of keys: they are 0, because softmax ignores a common shift."""
    largest = max(np.abs(gradient).max() for gradient in expected.gradients.values())
    for outputs in (actual, expected):
        for name in [name for name in outputs.gradients if name.endswith("to_k.bias")]:
            assert np.abs(outputs.gradients.pop(name)).max() < 1e-6 * largest, name
    assert_outputs_close(actual, expected)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives_equal_those_of_torch(name: str) -> None:
    twins = build_perturbed_twins(build_task(SHAPES["image, class"], **OBJECTIVES[name]))
    batch = draw_batch(twins.task)
    assert_outputs_close(
        compute_in_jax(twins, batch, is_training=False), compute_in_torch(twins, batch, is_training=False)
    )


def test_recomputed_blocks_have_the_same_gradients() -> None:
    twins = build_perturbed_twins(build_task(SHAPES["image, class"]))
    batch = draw_batch(twins.task)
    recomputed = compute_in_jax(twins, batch, is_training=True, checkpoints_blocks=True)
    compare_gradients(recomputed, compute_in_torch(twins, batch, is_training=True))


def draw_rows(twins: Twins, models: dict[str, Any], count: int, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return samples of both frameworks for the same rows of conditions."""
    batch = draw_batch(twins.task, count=count)
    rows = {name: array for name, array in batch.items() if name != twins.task.key}
    rows["number"] = np.arange(10, 10 + count)
    common = {"seed": 4, "precision": "auto", "progress": lambda done, total: None, **options}
    with torch.no_grad():
        expected = torch_generation.draw_rows(
            twins.task, {"model": twins.torch.eval(), **models.get("torch", {})}, rows, device="cpu", **common
        )
    with forward_context():
        actual = jax_generation.draw_rows(
            twins.task, {"model": twins.jax, **models.get("jax", {})}, rows, device=jax.devices()[0], **common
        )
    return actual, expected


@pytest.mark.parametrize(
    ("name", "options", "request_"),
    [
        ("image, class", {}, {"method": "heun", "guidance": 2.0}),
        ("image, class", {"objective": "v"}, {"method": "dpm", "guidance": 0.0}),
        ("image, text", {"objective": "noise", "schedule": "linear"}, {"method": "euler", "guidance": 1.5}),
        ("audio of one axis, vector", {"shift": 2.0}, {"method": "dpm", "guidance": 1.0}),
        ("audio of two axes, no condition", {}, {"method": "heun", "guidance": 1.0}),
        ("video, factorised", {}, {"method": "dpm", "guidance": 3.0}),
    ],
)
def test_samples_equal_those_of_torch(name: str, options: dict[str, Any], request_: dict[str, Any]) -> None:
    twins = build_perturbed_twins(build_task(SHAPES[name], **options))
    actual, expected = draw_rows(twins, {}, 3, steps=4, **request_)
    assert expected.std() > 0.1
    assert_close(actual, expected, rtol=1e-4)


def test_few_programs_are_compiled() -> None:
    """Counts of samples up to a power of two, guidances and later weights share one program for each kind of step."""
    twins = build_perturbed_twins(build_task(SHAPES["image, class"], condition_dropout=0.25))
    compiled = jax_generation._take_step
    sizes = [compiled._cache_size()]
    draw_rows(twins, {}, 5, steps=3, method="heun", guidance=2.0)
    sizes.append(compiled._cache_size())
    assert sizes[1] == sizes[0] + 2, "Heun, and Euler for the last step"
    weights = {name: 0.5 * value for name, value in twins.jax.named_parameters().items()}
    other = twins._replace(jax=bind(twins.jax, weights))
    draw_rows(other, {}, 8, steps=5, method="heun", guidance=1.5)
    assert compiled._cache_size() == sizes[1]


def test_a_sample_depends_on_its_number_alone() -> None:
    twins = build_perturbed_twins(build_task(SHAPES["image, class"]))
    many, few = (draw_rows(twins, {}, count, steps=2, method="euler", guidance=1.0)[0] for count in (7, 2))
    np.testing.assert_allclose(many[:2], few, rtol=0, atol=1e-5)


SEVERAL_DEVICES = """
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bottega.models.jax_layers import bind, forward_context
from bottega.tasks.generation.jax import draw_rows
from jax_generators import SHAPES, build_task, draw_batch
from jax_twins import build_perturbed_twins

twins = build_perturbed_twins(build_task(SHAPES["image, class"]))
rows = {"label": draw_batch(twins.task, count=3)["label"], "number": np.arange(3)}
options = {"steps": 2, "method": "heun", "guidance": 2.0, "progress": lambda done, total: None}
mesh, samples = Mesh(np.array(jax.devices()), ("devices",)), []


def shard(value):
    is_even = value.ndim and value.shape[0] % 2 == 0
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec("devices") if is_even else PartitionSpec()))


for place in (lambda value: jax.device_put(value, jax.devices()[1]), shard):
    model = bind(twins.jax, {name: place(value) for name, value in twins.jax.named_parameters().items()})
    with forward_context():
        samples.append(draw_rows(twins.task, {"model": model}, rows, seed=0, device=None, precision="", **options))
print(np.abs(samples[0] - samples[1]).max() < 1e-5 * np.abs(samples[0]).max())
"""


@pytest.mark.slow
def test_samples_are_computed_where_the_weights_are() -> None:
    """On the second of two devices, and with weights that are split over both."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    process = subprocess.run([sys.executable, "-c", SEVERAL_DEVICES], env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1] == "True"


@pytest.fixture
def latent_twins(tmp_path: Path) -> tuple[Twins, dict[str, Any]]:
    """Generators in the latents of an autoencoder, and the autoencoder in both frameworks."""
    model, rng = Autoencoder(VAE), np.random.default_rng(0)
    model.initialise(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.from_numpy(0.1 * rng.standard_normal(parameter.shape, dtype=np.float32))
    export_autoencoder(model.state_dict(), VAE, tmp_path)
    latents = Latents(folder=str(tmp_path), scale=VAE.scaling_factor, shift=VAE.shift_factor)
    twins = build_perturbed_twins(build_task(SHAPES["image, class"], latents=latents))
    spec = twins.task.specs()["vae"]
    return twins, {"torch": {"vae": build_model(spec, 0)}, "jax": {"vae": jax_build.build_model(spec, 0)}}


def compute_latent_losses(task: Generation, twins: Twins, models: Any, batch: Any) -> tuple[np.ndarray, np.ndarray]:
    positions = np.arange(len(batch["label"]))

    def compute(batch: Any) -> Any:
        rng = JaxNoise.of_step(0, 1, positions, task.noise_names)
        with forward_context(dtype=jax.numpy.float32):
            return task.loss({"model": twins.jax, **models["jax"]}, batch, rng).terms["loss"][0]

    actual = np.asarray(jax.jit(compute, compiler_options=QUICK_TO_COMPILE)(batch))
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    rng = Noise(0, 1, torch.from_numpy(positions), torch)
    with torch.no_grad():
        expected = task.loss({"model": twins.torch.eval(), **models["torch"]}, tensors, rng).terms["loss"][0].numpy()
    return actual, expected


def test_losses_and_samples_in_latents_equal_those_of_torch(
    latent_twins: tuple[Twins, dict[str, Any]],
) -> None:
    twins, models = latent_twins
    task = twins.task
    assert isinstance(task, Generation)
    pixels = np.random.default_rng(3).standard_normal((4, 8, 12, 1), dtype=np.float32)
    batch = {"image": pixels, "label": np.array([0, 1, 2, 0], np.int32)}
    actual, expected = compute_latent_losses(task, twins, models, batch)
    assert_close(actual, expected, rtol=1e-5)

    encode = jax_latents.open_encoder(task.latents, "cpu")  # type: ignore[arg-type]
    moments = encode(pixels).copy()
    assert_close(moments, torch_latents.open_encoder(task.latents, "cpu")(pixels), rtol=1e-5)  # type: ignore[arg-type]
    precomputed = {PRECOMPUTED: moments, "label": batch["label"]}
    assert_close(compute_latent_losses(task, twins, models, precomputed)[0], actual, rtol=1e-5)

    drawn, expected_samples = draw_rows(twins, models, 3, steps=3, method="dpm", guidance=2.0)
    assert drawn.shape == (3, 8, 12, 1)
    assert_close(drawn, expected_samples, rtol=1e-4)
    round_trips = (
        jax_generation.round_trip(task, models["jax"], pixels, device=jax.devices()[0]),
        torch_generation.round_trip(task, models["torch"], pixels, device="cpu"),
    )
    assert_close(*round_trips, rtol=1e-5)


def test_no_gradient_flows_into_the_autoencoder(latent_twins: tuple[Twins, dict[str, Any]]) -> None:
    twins, models = latent_twins
    task, vae = twins.task, models["jax"]["vae"]
    batch = {"image": np.ones((2, 8, 12, 1), np.float32), "label": np.zeros(2, np.int32)}
    rng = JaxNoise.of_step(0, 1, np.arange(2), task.noise_names)

    def compute(weights: Any) -> Any:
        with forward_context():
            return task.loss({"model": twins.jax, "vae": bind(vae, weights)}, batch, rng).terms["loss"][0]

    gradients = jax.jit(jax.grad(compute), compiler_options=QUICK_TO_COMPILE)(vae.named_parameters())
    assert all(not np.asarray(gradient).any() for gradient in gradients.values())
