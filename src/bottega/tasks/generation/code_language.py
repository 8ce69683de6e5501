"""A language of pictures and sounds: the codes of a frozen tokenizer in reading order, each predicted from those before.

b samples   n codes of a sample   K codes there are   C classes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from bottega.core.model_spec import Initial, ModelSpec
from bottega.core.noise import Noise
from bottega.core.task import Task
from bottega.core.types import Batch, Loss, Models
from bottega.models.decoder.torch import DecoderCache, Transformer
from bottega.models.generator.config import CodeGeneratorShape, CodesBackbone
from bottega.models.losses.token_loss import IGNORE_INDEX
from bottega.tasks.autoencode.vae_task import num_examples
from bottega.tasks.language.sampling import sample_tokens


class FrozenCodes(BaseModel):
    """The folder of a tokenizer that others have trained."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str

    def spec(self) -> ModelSpec:
        return ModelSpec("bottega.models.autoencoder.codes_folder:load_codes", Path(self.folder))

    @torch.no_grad()
    def encode(self, tokenizer: Any, x: Tensor) -> Tensor:
        """int64 [b, n]. In float32 whatever the precision around it: rounded latents would be other codes."""
        with torch.autocast(x.device.type, enabled=False):
            codes: Tensor = tokenizer.encode(x.float())
        return codes.flatten(1)

    @torch.no_grad()
    def decode(self, tokenizer: Any, codes: Tensor) -> Tensor:
        """[b, *grid of codes] to [b, *grid, channels]."""
        with torch.autocast(codes.device.type, enabled=False):
            x: Tensor = tokenizer.decode(codes)
        return x.float()

    @torch.no_grad()
    def round_trip(self, tokenizer: Any, x: Tensor) -> Tensor:
        return self.decode(tokenizer, tokenizer.encode(x))


class CodeLanguage(Task):
    """A batch holds `key` [b, g..., c], and with classes `label` [b]. Optional: `weight` [b], where 0 marks a row that
    counts nowhere.

    What is asked for is the first token: K + the number of a class, or K + C for none.
    """

    key: str
    shape: CodeGeneratorShape
    latents: FrozenCodes
    condition_dropout: float = 0.1
    pretrained: str | None = None
    """A folder with a transformer over the same codes whose weights the training starts from."""

    def specs(self) -> dict[str, ModelSpec]:
        shape = self.backbone.transformer
        model = ModelSpec(
            "bottega.models.decoder.torch:Transformer",
            shape,
            initial=Initial("bottega.models.initial:initialise", {"residual_layers": shape.num_layers}),
            pretrained=self.pretrained,
            is_filled=True,
        )
        return {"model": model, "tokenizer": self.latents.spec()}

    @property
    def backbone(self) -> CodesBackbone:
        return self.shape.backbone

    def counts(self, batch: Batch) -> Mapping[str, float]:
        return {"loss": num_examples(batch, self.key) * self.backbone.length}

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        codes = self.latents.encode(models["tokenizer"], batch[self.key])
        first = self.first_tokens(batch, drop=rng.uniform("drop") < self.condition_dropout)
        targets = codes
        if "weight" in batch:
            targets = codes.masked_fill((batch["weight"] <= 0)[:, None], IGNORE_INDEX)
        total = models["model"](torch.cat([first[:, None], codes[:, :-1]], dim=1), targets)
        bits = total.detach() / math.log(2.0)
        return Loss(terms={"loss": (total, 1.0)}, metrics={"bits_per_code": (bits, (targets != IGNORE_INDEX).sum())})

    def first_tokens(self, batch: Batch, *, drop: Tensor) -> Tensor:
        """The first token of each row, int64 [b]; that of no condition where `drop` says so."""
        condition, codes = self.shape.condition, self.backbone.num_codes
        none = torch.full(drop.shape, codes + condition.size, device=drop.device)
        return torch.where(drop, none, batch["label"].long() + codes) if condition.kind == "class" else none

    def draw(self, models: Models, batch: Batch, rng: Noise, **how: Any) -> Tensor:
        """One sample for each row of what is asked for; options as `draw_codes` has them."""
        codes = self.draw_codes(models["model"], batch, rng, **how)
        return self.latents.decode(models["tokenizer"], codes.view(-1, *self.backbone.codes))

    @torch.no_grad()
    def draw_codes(
        self,
        model: Transformer,
        batch: Batch,
        rng: Noise,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        guidance: float = 1.0,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Tensor:
        """int64 [b, n]. Guidance 1 is the model as it is, 0 asks for nothing.

        The noise of a code is f(seed, its index, number of the sample), so a sample does not depend on its batch.
        """
        none = torch.ones(len(rng.positions), dtype=torch.bool, device=rng.positions.device)
        first = self.first_tokens(batch, drop=~none if guidance != 0 else none)
        is_guided = guidance not in (0, 1) and self.shape.condition.kind != "none"
        if is_guided:
            # Both readings of a sample in one batch: its codes are the same, and only their first token differs.
            first = torch.cat([first, self.first_tokens(batch, drop=none)])
        length = self.backbone.length
        cache = DecoderCache.empty(
            model.shape, batch=len(first), length=length, device=first.device, dtype=_dtype(model)
        )
        token, made = first, []
        for index in range(length):
            hidden = model.hidden(token[:, None], cache=cache, position=index)[:, -1]
            # No code is a class, so what the model still gives to those is left out.
            logits = model.logits(hidden.to(model.head_weight.dtype)).float()[:, : self.backbone.num_codes]
            if is_guided:
                with_condition, without = logits.chunk(2)
                logits = without + guidance * (with_condition - without)
            noise = replace(rng, step=index)
            made.append(sample_tokens(logits, noise, temperature=temperature, top_k=top_k, top_p=top_p))
            token = made[-1].repeat(2) if is_guided else made[-1]
            progress(index + 1, length)
        return torch.stack(made, dim=1)


def _dtype(model: Transformer) -> torch.dtype:
    """Of keys and values."""
    kind = model.head_weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.head_weight.dtype
