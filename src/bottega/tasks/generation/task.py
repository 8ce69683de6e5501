"""Generation: learn the way from noise to data, and go it. One task for pictures, sounds, clips and their latents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path as Folder

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
from bottega.tasks.generation.text import FrozenText


class Generation(Task):
    """A batch holds `key` [b, g..., c] and what the model may be asked for: `label` [b], `condition` [b, d], or
    `input_ids` and `attention_mask` [b, L]. Optional: `weight` [b], where 0 marks a row that counts nowhere."""

    key: str
    shape: GeneratorShape
    path: NoisePath = NoisePath()
    condition_dropout: float = 0.1
    latents: Latents | None = None
    """Between the data and what is generated; None is the data themselves."""
    text: FrozenText | None = None
    """A text encoder from a folder; None is none, or our own inside the model."""
    empty_text: tuple[int, ...] = ()
    """The row of tokens [L] of the empty caption, which stands for no condition."""
    empty_length: int = 1
    """How many of them are text; the others fill it up."""
    pretrained: str | None = None

    def specs(self) -> dict[str, ModelSpec]:
        model = ModelSpec(
            "bottega.models.generator.torch:Generator",
            self.shape,
            initial=Initial("bottega.models.generator.torch:initialise_generator"),
            pretrained=self.pretrained,
            load="bottega.models.generator.torch:load_generator",
            starts_initial=True,  # a backbone alone will do: its condition then begins anew
        )
        specs = {"model": model}
        if self.latents is not None:
            specs["vae"] = self.latents.spec()
        if self.text is not None:
            specs["text_encoder"] = self.text.spec()
        return specs

    def new_modules(self) -> tuple[str, ...]:
        """The last layers begin at 0 and would pass no gradient on; a condition that a folder lacks begins at random."""
        from bottega.models.generator.torch import read_generator

        if self.pretrained is None:
            is_unet = isinstance(self.shape.backbone, UNetShape)
            last = ("backbone.unet.conv_out",) if is_unet else ("backbone.out", "backbone.modulation_out")
            return (*last, "condition")
        has_condition = any(name.startswith("condition.") for name in read_generator(Folder(self.pretrained)))
        return () if has_condition else ("condition",)

    def counts(self, batch: Batch) -> Mapping[str, float]:
        if "weight" in batch:
            return {"loss": float((np.asarray(batch["weight"]) > 0).sum())}
        return {"loss": float(len(batch[PRECOMPUTED if PRECOMPUTED in batch else self.key]))}

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        clean = self._clean(models, batch, rng)
        noise = rng.normal("noise", tuple(clean.shape[1:]))
        t = self.path.draw_times(rng)
        alpha, sigma = (_over(level.float(), clean) for level in self.path.levels(t))
        asked = self._asked(models, batch, drop=rng.uniform("drop") < self.condition_dropout)
        predicted = models["model"](alpha * clean + sigma * noise, self.path.model_time(t), **asked)
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
        """One sample for each row of what is asked for. Guidance 1 is the model as it is, 0 asks for nothing."""
        start = rng.normal("start", self.shape.sample)
        none = torch.ones(len(start), dtype=torch.bool, device=start.device)
        with_condition = self._asked(models, batch, drop=~none)
        without = self._asked(models, batch, drop=none) if self.shape.condition.kind != "none" else with_condition

        def predict(x: Tensor, time: Tensor) -> Tensor:
            if guidance == 1 or self.shape.condition.kind == "none":
                return models["model"](x, time, **with_condition)
            plain = models["model"](x, time, **without).float()
            if guidance == 0:
                return plain
            return plain + guidance * (models["model"](x, time, **with_condition).float() - plain)

        x = solvers.sample(predict, start, self.path, steps=steps, method=method, progress=progress)
        return x if self.latents is None else self.latents.decode(models["vae"], x)

    def _clean(self, models: Models, batch: Batch, rng: Noise) -> Tensor:
        if self.latents is None:
            # Sound may be generated as a row of frames, all bands in each, where the data have bands and one channel.
            return batch[self.key].reshape(-1, *self.shape.sample)
        return self.latents.encode(models["vae"], batch, self.key, rng)

    def _asked(self, models: Models, batch: Batch, *, drop: Tensor) -> dict[str, Tensor]:
        kind = self.shape.condition.kind
        if kind == "none":
            return {}
        if kind != "text":
            return {
                "label" if kind == "class" else "vector": batch["label" if kind == "class" else "condition"],
                "drop": drop,
            }
        ids, mask = batch["input_ids"].long(), batch["attention_mask"] > 0
        empty = _row(self.empty_text, ids.device)
        shown = torch.arange(len(empty), device=ids.device) < self.empty_length
        ids, mask = torch.where(drop[:, None], empty, ids), torch.where(drop[:, None], shown, mask)
        if self.text is None:
            return {"input_ids": ids, "mask": mask}
        return self.text.encode(models["text_encoder"], ids, mask)


def _over(level: Tensor, x: Tensor) -> Tensor:
    """[B] so that it multiplies [B, ...]."""
    return level.view(-1, *(1,) * (x.ndim - 1))


@lru_cache(maxsize=16)
def _row(tokens: tuple[int, ...], device: torch.device) -> Tensor:
    """Once for each device: the host would wait for the copy."""
    return torch.tensor(tokens, device=device)
