"""The loss and the samples of generation in JAX: the twin of `torch.py`, for diffusion transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bottega.core.noise import Noise
from bottega.core.types import Batch, Loss, Models
from bottega.models.jax_layers import ModelGraph, forward_context, get_compute_dtype, join_model, split_model
from bottega.models.jax_noise import JaxNoise, derive_noise_keys
from bottega.tasks.generation import solvers
from bottega.tasks.generation.guidance import MAX_JOINED_ROWS, extrapolate, guide
from bottega.tasks.generation.jax_latents import decode_latents, encode_latents, reconstruct
from bottega.tasks.generation.task import Generation

Array = Any
START = "start"
"""Name of the draw of the initial noise."""


def compute_loss(task: Generation, models: Models, batch: Batch, rng: Noise) -> Loss:
    """Return the weighted squared error of the prediction at a random time of each example, as a sum."""
    clean = _encode_clean(task, models, batch, rng)
    noise = rng.normal("noise", clean.shape[1:])
    t = task.path.draw_times(rng)
    columns = (-1, *(1,) * (clean.ndim - 1))
    alpha, sigma = (level.reshape(columns) for level in task.path.levels(t))
    condition = encode_condition(task, batch, drop=rng.uniform("drop") < task.condition_dropout)
    predicted = models["model"](alpha * clean + sigma * noise, task.path.model_time(t), **condition)
    error = task.path.error(predicted, clean, noise, alpha, sigma)
    if "weight" in batch:
        error = error * (batch["weight"] > 0)
    return Loss(terms={"loss": (error.sum(), 1.0)})


def draw_samples(
    task: Generation,
    models: Models,
    batch: Batch,
    rng: Noise,
    *,
    steps: int,
    method: solvers.Method,
    guidance: float,
    progress: Callable[[int, int], None],
) -> Array:
    """Return one sample for each row of conditions; each step of the solver is one jitted function."""
    assert isinstance(rng, JaxNoise)
    x = previous = _draw_start(task.shape.sample, rng.positions, rng.keys[START])
    graph, parameters = split_model(models["model"])
    program = _Program(
        task,
        graph,
        dtype=get_compute_dtype(),
        single_guidance=guidance if guidance in (0, 1) else None,
        joins_passes=len(x) <= MAX_JOINED_ROWS,
    )
    for number, (step_method, step) in enumerate(solvers.plan_steps(task.path, steps=steps, method=method), start=1):
        x, previous = _take_step(program, step_method, parameters, x, previous, dict(batch), step, guidance)
        progress(number, steps)
    return x if task.latents is None else decode_latents(task.latents, models["vae"], x)


def draw_rows(
    task: Generation, models: Models, rows: Batch, *, seed: int, device: Any, precision: str, **options: Any
) -> np.ndarray:
    """Return the model's values for host rows of conditions, each with the `number` of its sample.

    It is computed where the weights are, on one device or several, in the precision of the forward context; so `device` and
    `precision` are those of torch alone. The number of rows is padded to a power of two, so that few programs are compiled.
    """
    total = len(rows["number"])
    batch = {name: jnp.asarray(_pad_rows(np.asarray(value))) for name, value in rows.items()}
    rng = JaxNoise(seed, 0, batch.pop("number"), keys=derive_noise_keys(seed, 0, (START,)))
    return np.asarray(task.draw(models, batch, rng, **options), np.float32)[:total]


def round_trip(task: Generation, models: Models, values: np.ndarray, *, device: Any) -> np.ndarray:
    """Return the values of samples after encoding and decoding by the frozen autoencoder, computed where its weights are."""
    return np.asarray(reconstruct(models["vae"], jnp.asarray(values)))


def encode_condition(task: Generation, batch: Batch, *, drop: Array) -> dict[str, Array]:
    """Return the condition of each row as keyword arguments of the model; rows with `drop` have none."""
    kind = task.shape.condition.kind
    if kind == "none":
        return {}
    if kind != "text":
        name, key = ("label", "label") if kind == "class" else ("vector", "condition")
        return {name: batch[key], "drop": drop}
    empty = np.array(task.empty_text, np.int32)
    is_text = np.arange(len(empty)) < task.empty_length
    ids, mask = batch["input_ids"].astype(jnp.int32), batch["attention_mask"] > 0
    return {
        "input_ids": jnp.where(drop[:, None], empty, ids),
        "mask": jnp.where(drop[:, None], is_text, mask),
    }


@dataclass(frozen=True)
class _Program:
    """What the jitted step of a sampler is compiled for."""

    task: Generation
    graph: ModelGraph
    dtype: Any
    single_guidance: float | None
    """1 or 0, the conditional or unconditional model alone; None for both passes, whose guidance is an argument."""
    joins_passes: bool


@functools.partial(jax.jit, static_argnums=0)
def _draw_start(shape: tuple[int, ...], positions: Array, key: Array) -> Array:
    return JaxNoise(0, 0, positions, keys={START: key}).normal(START, shape)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _take_step(
    program: _Program,
    method: solvers.Method,
    parameters: Any,
    x: Array,
    previous: Array,
    batch: Mapping[str, Array],
    step: solvers.Step,
    guidance: Array,
) -> tuple[Array, Array]:
    """Return the samples after one step, and their predicted clean samples before it."""
    task, model = program.task, join_model(program.graph, parameters)
    with forward_context(dtype=program.dtype):
        drop_all = jnp.ones(len(x), bool)
        conditions = [encode_condition(task, batch, drop=drop) for drop in (~drop_all, drop_all)]
        if program.single_guidance is None:
            predict = extrapolate(model, *conditions, guidance=guidance, joins_passes=program.joins_passes)
        else:
            predict = guide(model, *conditions, guidance=program.single_guidance, joins_passes=False)
        split = solvers.build_split(predict, task.path)
        return solvers.take_step(split, x, previous, step, method=method)


def _encode_clean(task: Generation, models: Models, batch: Batch, rng: Noise) -> Array:
    if task.latents is None:
        # Audio with one axis is generated as frames with all bands as channels; the data has bands and one channel.
        return batch[task.key].reshape(-1, *task.shape.sample)
    return encode_latents(task.latents, models["vae"], batch, task.key, rng)


def _pad_rows(values: np.ndarray) -> np.ndarray:
    """Repeat the last row up to the next power of two, in 32 bits."""
    narrow = {np.dtype(np.int64): np.int32, np.dtype(np.uint64): np.uint32, np.dtype(np.float64): np.float32}
    size = 1 << (len(values) - 1).bit_length()
    rows = np.minimum(np.arange(size), len(values) - 1)
    return values[rows].astype(narrow.get(values.dtype, values.dtype))
