"""Personalised image generation: trained soft prompts between a frozen language model and a frozen image generator.

Shapes: `width` is that of a text token of the generator, `length` the number of tokens of a condition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bottega.core.model_spec import ModelSpec
from bottega.core.noise import Noise
from bottega.core.task import Task
from bottega.core.types import Batch, Loss, Models
from bottega.models.frozen.config import FrozenPrecision, SoftPromptShape
from bottega.models.frozen.image import TextEmbeddings
from bottega.models.frozen.soft_prompts import SoftPrompts, initialise_soft_prompts
from bottega.tasks.generation import solvers
from bottega.tasks.generation.paths import NoisePath
from bottega.tasks.personalize.config import ConditionWeights

PREFERENCE, TARGET, NEGATIVE = "preference", "target", "negative"
"""Prefixes of batch fields, which the number of the text encoder follows, such as target_0: token ids, int64 (batch, length)."""


class Personalize(Task):
    """The denoising loss of the generator, with soft prompts that read a user's history through the language model.

    A batch has `image` (batch, height, width, 3), `prompt` and `prompt_mask` (batch, length) of the language model, and
    `preference_0`, ... and `target_0`, ... for each text encoder of the generator. Optional: `weight` (batch,), 0 for a padding
    row. Only the soft prompts are trained; the frozen models are read from their folders and never saved.
    """

    shape: SoftPromptShape
    path: NoisePath
    """The noise schedule and prediction type of the generator."""
    language_model: str
    """Folder of the frozen language model."""
    image_model: str
    """Folder of the frozen image generator."""
    precision: FrozenPrecision = "fp32"
    checkpointing: bool = False
    """Whether the frozen models use gradient checkpointing, since gradients pass through them."""
    image_size: int
    latent: tuple[int, int, int]
    """Height, width and channels of the generator's latents."""
    weights: ConditionWeights = ConditionWeights()
    keyword_dropout: float = 0.0
    start_tokens: tuple[int, ...] = ()
    """Tokens of the language model whose embeddings initialise the image tokens, in turn; () initialises at random. A known
    token, such as the colon before the first keyword, makes the model continue as it was trained to."""
    empty: tuple[tuple[int, ...], ...]
    """Token ids of the empty text, for each text encoder."""

    def specs(self) -> dict[str, ModelSpec]:
        options = {"precision": self.precision, "checkpointing": self.checkpointing}
        language, image = Path(self.language_model), Path(self.image_model)
        soft = ModelSpec("bottega.models.frozen.soft_prompts:SoftPrompts", self.shape)
        return {
            "model": soft.with_change(self._initialise_prompts),
            "language_model": ModelSpec("bottega.models.frozen.language:load_language_model", language, options),
            "image_model": ModelSpec("bottega.models.frozen.image:load_image_model", image, options),
        }

    def _initialise_prompts(self, models: Models, seed: int) -> None:
        """Initialise the soft prompts at the scale of the language model's embeddings, or with some of these."""
        soft, language = models["model"], models["language_model"]
        initialise_soft_prompts(soft, seed, token_scale=language.token_scale)
        if self.start_tokens:
            token_ids = [self.start_tokens[i % len(self.start_tokens)] for i in range(self.shape.num_image_tokens)]
            embeddings = language.model.get_input_embeddings()
            with torch.no_grad():  # quantised weights are already on their device
                soft.image_tokens.copy_(embeddings(torch.tensor(token_ids, device=embeddings.weight.device)))

    def counts(self, batch: Batch) -> Mapping[str, float]:
        if "weight" in batch:
            return {"loss": float((np.asarray(batch["weight"]) > 0).sum())}
        return {"loss": float(len(batch["image"]))}

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        image_model = models["image_model"]
        clean = image_model.encode(batch["image"], rng.normal("latent", self.latent)).float()
        noise = rng.normal("noise", self.latent)
        t = self.path.draw_times(rng)
        alpha, sigma = (level.float().view(-1, 1, 1, 1) for level in self.path.levels(t))
        drop = rng.uniform("drop") < self.keyword_dropout
        condition = self.build_condition(models, batch, self.weights, drop=drop)
        predicted = self._predict(image_model, alpha * clean + sigma * noise, self.path.model_time(t), condition)
        error = self.path.error(predicted, clean, noise, alpha, sigma)
        if "weight" in batch:
            error = error * (batch["weight"] > 0)
        return Loss(terms={"loss": (error.sum(), 1.0)})

    def build_condition(
        self, models: Models, batch: Batch, weights: ConditionWeights, *, drop: Tensor | None = None
    ) -> TextEmbeddings:
        """Return the condition, (batch, length, width): soft tokens, preference keywords and target keywords, each times its
        weight. Rows of `drop` (batch,) have the empty text in place of the preference keywords."""
        target = self.encode_text(models, batch, TARGET)
        parts = []
        if weights.soft:
            parts.append(weights.soft * self.compute_soft_tokens(models, batch))
        if weights.keywords:
            parts.append(weights.keywords * self.encode_text(models, batch, PREFERENCE, drop=drop).tokens)
        if weights.target:
            parts.append(weights.target * target.tokens)
        # The pooled embedding, for generators that use one, is that of the target.
        return TextEmbeddings(torch.cat([part.to(target.tokens.dtype) for part in parts], dim=1), target.pooled)

    def compute_soft_tokens(self, models: Models, batch: Batch) -> Tensor:
        """Return the trained tokens, (batch, image tokens, width).

        The language model runs inside the call of the trained model: DDP may wrap the trained model, and reduces the gradients
        of the parameters that are used in its call.
        """
        language, ids, mask = models["language_model"], batch["prompt"].long(), batch["prompt_mask"]

        def read_states(soft: SoftPrompts) -> Tensor:
            return language.encode_image_tokens(ids, mask, soft)

        return models["model"](read_states)

    @torch.no_grad()
    def encode_text(self, models: Models, batch: Batch, name: str, *, drop: Tensor | None = None) -> TextEmbeddings:
        """Return the embeddings of the texts `NAME_0`, ... by the generator's text encoders."""
        rows = []
        for number, empty in enumerate(self.empty):
            ids = batch[f"{name}_{number}"].long()
            rows.append(ids if drop is None else torch.where(drop[:, None], _to_device(empty, ids.device), ids))
        return models["image_model"].encode_text(rows)

    def sample(
        self,
        models: Models,
        batch: Batch,
        rng: Noise,
        *,
        weights: ConditionWeights,
        steps: int,
        method: solvers.Method = "heun",
        guidance: float = 1.0,
        drop_keywords: bool = False,
        zero_negative: bool = False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Tensor:
        """Return an image for each row, (batch, height, width, 3) from -1 to 1.

        Classifier-free guidance leads away from the texts `negative_0`, ...; 1 uses the condition alone, with one forward
        instead of two. `drop_keywords` replaces the preference keywords by the empty text. `zero_negative` leads away from
        zeros, with which some generators were trained in place of an empty text.
        """
        image_model = models["image_model"]
        start = rng.normal("start", self.latent)
        drop = torch.full((len(start),), drop_keywords, device=start.device)
        condition = self.build_condition(models, batch, weights, drop=drop)
        # Not in one batch with the condition: it may have another number of tokens.
        negative = self.encode_text(models, batch, NEGATIVE) if guidance != 1 else None
        if negative is not None and zero_negative:
            pooled = torch.zeros_like(negative.pooled) if negative.pooled is not None else None
            negative = TextEmbeddings(torch.zeros_like(negative.tokens), pooled)

        def predict(x: Tensor, time: Tensor) -> Tensor:
            if negative is None:
                return self._predict(image_model, x, time, condition)
            unconditional = self._predict(image_model, x, time, negative)
            return (
                unconditional + guidance * (self._predict(image_model, x, time, condition) - unconditional)
                if guidance
                else unconditional
            )

        x = solvers.sample(predict, start, self.path, steps=steps, method=method, progress=progress)
        return image_model.decode(x).float()

    def _predict(self, image_model: Any, x: Tensor, time: Tensor, condition: TextEmbeddings) -> Tensor:
        output = image_model.predict(x, time, condition.tokens, pooled=condition.pooled, image_size=self.image_size)
        return output.float()


@lru_cache(maxsize=16)
def _to_device(tokens: tuple[int, ...], device: torch.device) -> Tensor:
    """Return token ids on `device`, cached because copying them makes the host wait."""
    return torch.tensor(tokens, device=device)
