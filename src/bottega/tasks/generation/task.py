"""Diffusion and flow matching: one generation task for images, audio, video and their latents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bottega.core.model_spec import Initial, ModelSpec
from bottega.core.noise import Noise
from bottega.core.task import Task
from bottega.core.types import Batch, Loss, Models
from bottega.models.generator.config import GeneratorShape, UNetShape
from bottega.tasks.generation import solvers
from bottega.tasks.generation.latents import PRECOMPUTED, Latents
from bottega.tasks.generation.paths import NoisePath
from bottega.tasks.generation.prediction import (
    MAX_JOINED_ROWS,
    captured_prediction,
    count_evaluations,
    guide,
    use_cast_weights,
)
from bottega.tasks.generation.text import FrozenText


class Generation(Task):
    """A diffusion or flow matching loss, and sampling from noise.

    A batch holds `key` (b, *grid, channels) and the condition: `label` (b,), `condition` (b, d), or `input_ids` and
    `attention_mask` (b, length). Optional: `weight` (b,), where 0 marks padding rows.
    """

    key: str
    """Batch field with the data: image, mel or video."""
    shape: GeneratorShape
    path: NoisePath = NoisePath()
    condition_dropout: float = 0.1
    latents: Latents | None = None
    """The autoencoder whose latents are generated; None generates values directly."""
    text: FrozenText | None = None
    """A frozen text encoder; None if there is no text, or if the encoder is trained inside the model."""
    empty_text: tuple[int, ...] = ()
    """Tokens (length,) of the empty caption, which stands for no condition."""
    empty_length: int = 1
    """Number of these tokens that are text; the others are padding."""
    pretrained: str | None = None
    """Folder of a generator whose weights training starts from."""

    def specs(self) -> dict[str, ModelSpec]:
        model = ModelSpec(
            "bottega.models.generator.torch:Generator",
            self.shape,
            initial=Initial("bottega.models.generator.torch:initialise_generator"),
            pretrained=self.pretrained,
            load="bottega.models.generator.torch:load_generator",
            starts_initial=True,  # weights of a backbone alone suffice: the condition is then initialised
        )
        specs = {"model": model}
        if self.latents is not None:
            specs["vae"] = self.latents.spec()
        if self.text is not None:
            specs["text_encoder"] = self.text.spec()
        return specs

    def new_modules(self) -> tuple[str, ...]:
        """Return the names of modules that start untrained: last layers, which start at zero, and a condition that the
        pretrained weights lack."""
        from bottega.models.generator.torch import read_generator

        if self.pretrained is None:
            is_unet = isinstance(self.shape.backbone, UNetShape)
            last_layers = ("backbone.unet.conv_out",) if is_unet else ("backbone.out", "backbone.modulation_out")
            return (*last_layers, "condition")
        has_condition = any(name.startswith("condition.") for name in read_generator(Path(self.pretrained)))
        return () if has_condition else ("condition",)

    def counts(self, batch: Batch) -> Mapping[str, float]:
        if "weight" in batch:
            return {"loss": float((np.asarray(batch["weight"]) > 0).sum())}
        return {"loss": float(len(batch[PRECOMPUTED if PRECOMPUTED in batch else self.key]))}

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        clean = self._encode_clean(models, batch, rng)
        noise = rng.normal("noise", tuple(clean.shape[1:]))
        t = self.path.draw_times(rng)
        alpha, sigma = (_broadcast(level.float(), clean) for level in self.path.levels(t))
        condition = self._encode_condition(models, batch, drop=rng.uniform("drop") < self.condition_dropout)
        predicted = models["model"](alpha * clean + sigma * noise, self.path.model_time(t), **condition)
        error = self.path.error(predicted, clean, noise, alpha, sigma)
        if "weight" in batch:
            error = error * (batch["weight"] > 0)
        return Loss(terms={"loss": (error.sum(), 1.0)})

    def draw(
        self,
        models: Models,
        batch: Batch,
        rng: Noise,
        *,
        steps: int,
        method: solvers.Method = "heun",
        guidance: float = 1.0,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Tensor:
        """Return one sample for each row of conditions; guidance 1 is the conditional model, 0 the unconditional one."""
        start = rng.normal("start", self.shape.sample)
        drop_all = torch.ones(len(start), dtype=torch.bool, device=start.device)
        with_condition = self._encode_condition(models, batch, drop=~drop_all)
        if self.shape.condition.kind == "none":
            guidance = 1.0
        dropped = with_condition if guidance == 1 else self._encode_condition(models, batch, drop=drop_all)
        joins_passes = start.is_cuda and len(start) <= MAX_JOINED_ROWS
        model = use_cast_weights(models["model"])
        predict = guide(model, with_condition, dropped, guidance=guidance, joins_passes=joins_passes)
        num_evaluations = count_evaluations(method, steps)
        with captured_prediction(predict, start, num_evaluations=num_evaluations) as captured:
            x = solvers.sample(captured, start, self.path, steps=steps, method=method, progress=progress)
        return x if self.latents is None else self.latents.decode(models["vae"], x)

    def _encode_clean(self, models: Models, batch: Batch, rng: Noise) -> Tensor:
        if self.latents is None:
            # Audio with one axis is generated as frames with all bands as channels; the data has bands and one channel.
            return batch[self.key].reshape(-1, *self.shape.sample)
        return self.latents.encode(models["vae"], batch, self.key, rng)

    def _encode_condition(self, models: Models, batch: Batch, *, drop: Tensor) -> dict[str, Tensor]:
        kind = self.shape.condition.kind
        if kind == "none":
            return {}
        if kind != "text":
            return {
                "label" if kind == "class" else "vector": batch["label" if kind == "class" else "condition"],
                "drop": drop,
            }
        ids, mask = batch["input_ids"].long(), batch["attention_mask"] > 0
        empty = _copy_tokens(self.empty_text, ids.device)
        is_text = torch.arange(len(empty), device=ids.device) < self.empty_length
        ids, mask = torch.where(drop[:, None], empty, ids), torch.where(drop[:, None], is_text, mask)
        if self.text is None:
            return {"input_ids": ids, "mask": mask}
        return self.text.encode(models["text_encoder"], ids, mask)


def _broadcast(level: Tensor, x: Tensor) -> Tensor:
    """Reshape (batch,) to broadcast against (batch, ...)."""
    return level.view(-1, *(1,) * (x.ndim - 1))


@lru_cache(maxsize=16)
def _copy_tokens(tokens: tuple[int, ...], device: torch.device) -> Tensor:
    """Return tokens as a tensor, cached for each device: a copy would make the host wait."""
    return torch.tensor(tokens, device=device)
