"""Latents of a frozen autoencoder in JAX: the twin of `torch_latents.py`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bottega.core.noise import Noise
from bottega.core.types import Batch
from bottega.engines.backend import open_backend
from bottega.models.autoencoder.jax import Autoencoder
from bottega.models.jax_build import build_model
from bottega.models.jax_layers import ModelGraph, forward_context, join_model, split_model
from bottega.tasks.generation.latents import PRECOMPUTED, Latents, count_positions, split_rows

Array = Any


def encode_latents(latents: Latents, vae: Autoencoder, batch: Batch, key: str, rng: Noise) -> Array:
    """Return sampled latents of a batch, scaled as the generator reads them."""
    moments = batch[PRECOMPUTED] if PRECOMPUTED in batch else encode_moments(vae, batch[key])
    mean, log_variance = jnp.split(jax.lax.stop_gradient(moments.astype(jnp.float32)), 2, axis=-1)
    noise = rng.normal("latent", mean.shape[1:])
    return (mean + jnp.exp(log_variance / 2) * noise - latents.shift) * latents.scale


def decode_latents(latents: Latents, vae: Autoencoder, latent: Array) -> Array:
    """Return samples for scaled latents, by one jitted function for each chunk."""
    return _decode(vae, latent / latents.scale + latents.shift)


def reconstruct(vae: Autoencoder, x: Array) -> Array:
    """Return the reconstruction of `x` from the means of its latents, without sampling noise."""
    graph, parameters = split_model(vae)
    return _decode(vae, jnp.split(_encode_jitted(graph, parameters, x), 2, axis=-1)[0])


def open_encoder(latents: Latents, device: str) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function from samples of the host to moments, on the device that a recipe names."""
    kind = open_backend("jax").device_type(device)
    chosen = jax.local_devices(backend=kind)[int(device.partition(":")[2] or 0)]
    # The spec loads the autoencoder's weights, so the seed has no effect.
    graph, parameters = split_model(build_model(latents.spec(), seed=0))
    parameters = jax.device_put(parameters, chosen)

    def encode(values: np.ndarray) -> np.ndarray:
        return np.asarray(_encode_jitted(graph, parameters, jax.device_put(values, chosen)))

    return encode


def encode_moments(vae: Autoencoder, x: Array) -> Array:
    """Return mean and log variance of latents, concatenated (b, *grid, 2 * channels).

    Always in float32, so that precomputed latents equal those computed during training.
    """
    x = x.reshape(*x.shape[: 1 + vae.shape.dims], -1).astype(jnp.float32)
    chunks = split_rows(len(x), math.prod(x.shape[1:-1]))
    with forward_context():
        return jnp.concatenate([jnp.concatenate(vae.encode(x[rows]), axis=-1) for rows in chunks])


def _decode(vae: Autoencoder, latent: Array) -> Array:
    chunks = split_rows(len(latent), count_positions(vae.shape, latent.shape[1:-1]))
    graph, parameters = split_model(vae)
    return jnp.concatenate([_decode_jitted(graph, parameters, latent[rows]) for rows in chunks])


@functools.partial(jax.jit, static_argnums=0)
def _encode_jitted(graph: ModelGraph, parameters: Any, x: Array) -> Array:
    return encode_moments(join_model(graph, parameters), x)


@functools.partial(jax.jit, static_argnums=0)
def _decode_jitted(graph: ModelGraph, parameters: Any, latent: Array) -> Array:
    with forward_context():
        return join_model(graph, parameters).decode(latent).astype(jnp.float32)
