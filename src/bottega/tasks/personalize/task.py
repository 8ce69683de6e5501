"""Personalised pictures: a few trained tokens between a frozen language model and a frozen image generator.

B examples, L image tokens, W width of a text token of the generator, T tokens of a condition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path as Folder
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
from bottega.tasks.generation import samplers
from bottega.tasks.generation.paths import NoisePath
from bottega.tasks.personalize.config import ConditionWeights

PREFERENCE, TARGET, NEGATIVE = "preference", "target", "negative"
"""Fields of a batch are these with the number of the text encoder: int64 [b, K]."""


class Personalize(Task):
    """A batch holds `image` [b, h, w, 3], `prompt` and `prompt_mask` [b, t] of the language model, `preference_0`, ... and
    `target_0`, ... of each text encoder of the generator. Optional: `weight` [b], where 0 marks a row that counts nowhere.

    Only the soft prompts learn; the frozen models are read from their folders and never saved."""

    shape: SoftPromptShape
    path: NoisePath
    """The generator's own: what it predicts, and at which levels of noise."""
    language_model: str
    image_model: str
    """Folders."""
    precision: FrozenPrecision = "fp32"
    checkpointing: bool = False
    """Whether the frozen models, which gradients pass through, recompute what they would keep."""
    image_size: int
    latent: tuple[int, int, int]
    """Height, width and channels of what the generator works in."""
    weights: ConditionWeights = ConditionWeights()
    keyword_dropout: float = 0.0
    start_tokens: tuple[int, ...] = ()
    """Of the language model, which the image tokens begin as, in turn; none are drawn at random. What a model has learnt to
    do at a colon, asking for the first keyword, it does not do at a token that it never met."""
    empty: tuple[tuple[int, ...], ...]
    """The row of tokens of the empty text, for each text encoder."""

    def specs(self) -> dict[str, ModelSpec]:
        how = {"precision": self.precision, "checkpointing": self.checkpointing}
        language, image = Folder(self.language_model), Folder(self.image_model)
        soft = ModelSpec("bottega.models.frozen.soft_prompts:SoftPrompts", self.shape)
        return {
            "model": soft.changed(self._start_prompts),
            "language_model": ModelSpec("bottega.models.frozen.language:load_language_model", language, how),
            "image_model": ModelSpec("bottega.models.frozen.image:load_image_model", image, how),
        }

    def _start_prompts(self, models: Models, seed: int) -> None:
        """Their initial values are of the size of the language model's embeddings, or some of those themselves."""
        soft, language = models["model"], models["language_model"]
        initialise_soft_prompts(soft, seed, token_scale=language.token_scale)
        if self.start_tokens:
            numbers = [self.start_tokens[i % len(self.start_tokens)] for i in range(self.shape.num_image_tokens)]
            words = language.model.get_input_embeddings()
            with torch.no_grad():  # quantised weights are where they will be used
                soft.image_tokens.copy_(words(torch.tensor(numbers, device=words.weight.device)))

    def counts(self, batch: Batch) -> Mapping[str, float]:
        if "weight" in batch:
            return {"loss": float((np.asarray(batch["weight"]) > 0).sum())}
        return {"loss": float(len(batch["image"]))}

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        image = models["image_model"]
        clean = image.encode(batch["image"], rng.normal("latent", self.latent)).float()
        noise = rng.normal("noise", self.latent)
        t = self.path.draw_times(rng)
        alpha, sigma = (level.float().view(-1, 1, 1, 1) for level in self.path.levels(t))
        drop = rng.uniform("drop") < self.keyword_dropout
        asked = self.build_condition(models, batch, self.weights, drop=drop)
        predicted = self._predicted(image, alpha * clean + sigma * noise, self.path.model_time(t), asked)
        error = self.path.error(predicted, clean, noise, alpha, sigma)
        if "weight" in batch:
            error = error * (batch["weight"] > 0)
        return Loss(terms={"loss": (error.sum(), 1.0)})

    def build_condition(
        self, models: Models, batch: Batch, weights: ConditionWeights, *, drop: Tensor | None = None
    ) -> TextEmbeddings:
        """What the generator is asked for, [B, T, W]: soft tokens, keywords of preference and keywords of the target, each
        times its weight. Rows of `drop` [B] have the empty text in place of the keywords of preference."""
        target = self.encode_text(models, batch, TARGET)
        parts = []
        if weights.soft:
            parts.append(weights.soft * self.soft_tokens(models, batch))
        if weights.keywords:
            parts.append(weights.keywords * self.encode_text(models, batch, PREFERENCE, drop=drop).tokens)
        if weights.target:
            parts.append(weights.target * target.tokens)
        # One vector beside the tokens, where a generator wants it, says what the picture is of.
        return TextEmbeddings(torch.cat([part.to(target.tokens.dtype) for part in parts], dim=1), target.pooled)

    def soft_tokens(self, models: Models, batch: Batch) -> Tensor:
        """[B, L, W]. The language model runs inside the call of the trained model, which may be wrapped: gradients are
        then joined over ranks for all that was used in it."""
        language, ids, mask = models["language_model"], batch["prompt"].long(), batch["prompt_mask"]

        def read(soft: SoftPrompts) -> Tensor:
            return language.states(ids, mask, soft)

        return models["model"](read)

    @torch.no_grad()
    def encode_text(self, models: Models, batch: Batch, what: str, *, drop: Tensor | None = None) -> TextEmbeddings:
        """Words as the generator's own text encoders see them."""
        rows = []
        for number, empty in enumerate(self.empty):
            ids = batch[f"{what}_{number}"].long()
            rows.append(ids if drop is None else torch.where(drop[:, None], _row(empty, ids.device), ids))
        return models["image_model"].encode_text(rows)

    def sample(
        self,
        models: Models,
        batch: Batch,
        rng: Noise,
        *,
        weights: ConditionWeights,
        steps: int,
        method: samplers.Method = "heun",
        guidance: float = 1.0,
        drop_keywords: bool = False,
        without_text: bool = False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Tensor:
        """A picture for each row, [B, h, w, 3] from -1 to 1. Guidance leads away from what `negative_0`, ... say; 1 is the
        generator as it is, without a second look. `drop_keywords` has the empty text in place of those of preference;
        `without_text` leads away from zeros, which some generators learnt in place of an empty text."""
        image = models["image_model"]
        start = rng.normal("start", self.latent)
        drop = torch.full((len(start),), drop_keywords, device=start.device)
        asked = self.build_condition(models, batch, weights, drop=drop)
        # By itself and not in one batch with the other: it may have another number of tokens.
        against = self.encode_text(models, batch, NEGATIVE) if guidance != 1 else None
        if against is not None and without_text:
            pooled = torch.zeros_like(against.pooled) if against.pooled is not None else None
            against = TextEmbeddings(torch.zeros_like(against.tokens), pooled)

        def predict(x: Tensor, time: Tensor) -> Tensor:
            if against is None:
                return self._predicted(image, x, time, asked)
            plain = self._predicted(image, x, time, against)
            return plain + guidance * (self._predicted(image, x, time, asked) - plain) if guidance else plain

        x = samplers.sample(predict, start, self.path, steps=steps, method=method, progress=progress)
        return image.decode(x).float()

    def _predicted(self, image: Any, x: Tensor, time: Tensor, asked: TextEmbeddings) -> Tensor:
        found = image.predict(x, time, asked.tokens, pooled=asked.pooled, image_size=self.image_size)
        return found.float()


@lru_cache(maxsize=16)
def _row(tokens: tuple[int, ...], device: torch.device) -> Tensor:
    """Once for each device: the host would wait for the copy."""
    return torch.tensor(tokens, device=device)
