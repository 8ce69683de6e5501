"""The loss and the samples of generation in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bottega.core.noise import Noise
from bottega.core.types import Batch, Loss, Models
from bottega.models.device import uses_bfloat16
from bottega.tasks.generation import solvers
from bottega.tasks.generation.guidance import MAX_JOINED_ROWS, guide
from bottega.tasks.generation.prediction import captured_prediction, count_evaluations, use_cast_weights
from bottega.tasks.generation.task import Generation
from bottega.tasks.generation.torch_latents import decode_latents, encode_latents, reconstruct


def compute_loss(task: Generation, models: Models, batch: Batch, rng: Noise) -> Loss:
    """Return the weighted squared error of the prediction at a random time of each example, as a sum."""
    clean = _encode_clean(task, models, batch, rng)
    noise = rng.normal("noise", tuple(clean.shape[1:]))
    t = task.path.draw_times(rng)
    alpha, sigma = (_broadcast(level.float(), clean) for level in task.path.levels(t))
    condition = encode_condition(task, models, batch, drop=rng.uniform("drop") < task.condition_dropout)
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
) -> Tensor:
    """Return one sample for each row of conditions."""
    start = rng.normal("start", task.shape.sample)
    drop_all = torch.ones(len(start), dtype=torch.bool, device=start.device)
    with_condition = encode_condition(task, models, batch, drop=~drop_all)
    dropped = with_condition if guidance == 1 else encode_condition(task, models, batch, drop=drop_all)
    joins_passes = start.is_cuda and len(start) <= MAX_JOINED_ROWS
    model = use_cast_weights(models["model"])
    predict = guide(model, with_condition, dropped, guidance=guidance, joins_passes=joins_passes)
    num_evaluations = count_evaluations(method, steps)
    with captured_prediction(predict, start, num_evaluations=num_evaluations) as captured:
        x = solvers.sample(captured, start, task.path, steps=steps, method=method, progress=progress)
    return x if task.latents is None else decode_latents(task.latents, models["vae"], x)


def draw_rows(
    task: Any, models: Models, rows: Batch, *, seed: int, device: Any, precision: str, **options: Any
) -> np.ndarray:
    """Return the model's values for host rows of conditions, each with the `number` of its sample."""
    batch = {name: torch.from_numpy(np.ascontiguousarray(value)).to(device) for name, value in rows.items()}
    rng = Noise(seed, 0, batch.pop("number"), torch)
    # In bfloat16 if the run was trained in it, which takes half the time on a GPU. Not float16, which could overflow.
    with torch.autocast("cuda", torch.bfloat16, enabled=uses_bfloat16(device, precision)):
        x = task.draw(models, batch, rng, **options)
    values: np.ndarray = x.float().cpu().numpy()
    return values


def round_trip(task: Any, models: Models, values: np.ndarray, *, device: Any) -> np.ndarray:
    """Return the values of samples after encoding and decoding by the frozen autoencoder or tokenizer."""
    x = torch.from_numpy(values).to(device)
    x = reconstruct(models["vae"], x) if "vae" in models else task.latents.round_trip(models["tokenizer"], x)
    decoded: np.ndarray = x.cpu().numpy()
    return decoded


def encode_condition(task: Generation, models: Models, batch: Batch, *, drop: Tensor) -> dict[str, Tensor]:
    """Return the condition of each row as keyword arguments of the model; rows with `drop` have none."""
    kind = task.shape.condition.kind
    if kind == "none":
        return {}
    if kind != "text":
        name, key = ("label", "label") if kind == "class" else ("vector", "condition")
        return {name: batch[key], "drop": drop}
    ids, mask = batch["input_ids"].long(), batch["attention_mask"] > 0
    empty = _copy_tokens(task.empty_text, ids.device)
    is_text = torch.arange(len(empty), device=ids.device) < task.empty_length
    ids, mask = torch.where(drop[:, None], empty, ids), torch.where(drop[:, None], is_text, mask)
    if task.text is None:
        return {"input_ids": ids, "mask": mask}
    return _encode_text(models["text_encoder"], ids, mask, is_masked=task.text.is_masked)


@torch.no_grad()
def _encode_text(encoder: Any, ids: Tensor, mask: Tensor, *, is_masked: bool) -> dict[str, Tensor]:
    """Return keyword arguments of the model: the last hidden states, and their mask if padding is masked."""
    if not is_masked:
        return {"context": encoder(input_ids=ids).last_hidden_state}
    hidden = encoder(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    return {"context": hidden, "mask": mask}


def _encode_clean(task: Generation, models: Mapping[str, Any], batch: Batch, rng: Noise) -> Tensor:
    if task.latents is None:
        # Audio with one axis is generated as frames with all bands as channels; the data has bands and one channel.
        clean: Tensor = batch[task.key].reshape(-1, *task.shape.sample)
        return clean
    return encode_latents(task.latents, models["vae"], batch, task.key, rng)


def _broadcast(level: Tensor, x: Tensor) -> Tensor:
    """Reshape (batch,) to broadcast against (batch, ...)."""
    return level.view(-1, *(1,) * (x.ndim - 1))


@lru_cache(maxsize=16)
def _copy_tokens(tokens: tuple[int, ...], device: torch.device) -> Tensor:
    """Return tokens as a tensor, cached for each device: a copy would make the host wait."""
    return torch.tensor(tokens, device=device)
