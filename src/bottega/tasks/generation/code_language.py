"""An autoregressive language model over the codes of a frozen image or audio tokenizer.

Shapes: b samples, n codes of a sample, K codes in the vocabulary, C classes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from bottega.core.model_spec import Initial, ModelSpec
from bottega.core.noise import Noise
from bottega.core.task import Task
from bottega.core.types import Batch, Loss, Models
from bottega.models.cuda_graph import report_failed_capture
from bottega.models.decoder.step import DecodeStep, supports_decode_step
from bottega.models.decoder.torch import DecoderCache, Transformer
from bottega.models.generator.config import CodeGeneratorShape, CodesBackbone
from bottega.models.losses import IGNORE_INDEX
from bottega.tasks.autoencode.vae_task import count_examples
from bottega.tasks.generation.code_decoding import CaptureFailed, CodeRequest, draw_by_graphs, draw_by_steps
from bottega.tasks.language.gumbel import GumbelNoise
from bottega.tasks.language.text_rows import choose_decoding_dtype, create_cache
from bottega.tasks.language.token_choice import TokenChoice

MIN_GRAPH_CODES = 8
"""Codes of a sample from which steps on a GPU are captured; a capture takes as long as a few steps."""


class FrozenCodes(BaseModel):
    """A frozen tokenizer in a folder, which encodes samples as codes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str

    def spec(self) -> ModelSpec:
        """Return how the frozen tokenizer is loaded."""
        return ModelSpec("bottega.models.autoencoder.codes_folder:load_codes", Path(self.folder))

    @torch.no_grad()
    def encode(self, tokenizer: Any, x: Tensor) -> Tensor:
        """Return codes, int64 (b, n), computed in float32 even under autocast: rounding would change them."""
        with torch.autocast(x.device.type, enabled=False):
            codes: Tensor = tokenizer.encode(x.float())
        return codes.flatten(1)

    @torch.no_grad()
    def decode(self, tokenizer: Any, codes: Tensor) -> Tensor:
        """Return samples (b, *grid, channels) for codes in the shape of their own grid, (b, *code grid)."""
        with torch.autocast(codes.device.type, enabled=False):
            x: Tensor = tokenizer.decode(codes)
        return x.float()

    @torch.no_grad()
    def round_trip(self, tokenizer: Any, x: Tensor) -> Tensor:
        """Return samples encoded and decoded again."""
        return self.decode(tokenizer, tokenizer.encode(x))


class CodeLanguage(Task):
    """Next-code prediction, optionally conditioned on a class.

    A batch holds `key` (b, *grid, channels), `label` (b,) if the condition is a class, and optionally `weight` (b,), where 0 marks
    padding rows. The first token is the condition: K + the class, or K + C for none.
    """

    key: str
    """Batch field with the samples: image or mel."""
    shape: CodeGeneratorShape
    latents: FrozenCodes
    """The code tokenizer of the samples; the field has the name of `Generation.latents`, because callers read both."""
    condition_dropout: float = 0.1
    pretrained: str | None = None
    """Folder of a transformer over the same codes whose weights training starts from."""

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
        """The language model's shape."""
        return self.shape.backbone

    def counts(self, batch: Batch) -> Mapping[str, float]:
        return {"loss": count_examples(batch, self.key) * self.backbone.length}

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        codes = self.latents.encode(models["tokenizer"], batch[self.key])
        first_tokens = self.build_first_tokens(batch, drop=rng.uniform("drop") < self.condition_dropout)
        targets = codes
        if "weight" in batch:
            targets = codes.masked_fill((batch["weight"] <= 0)[:, None], IGNORE_INDEX)
        total_loss = models["model"](torch.cat([first_tokens[:, None], codes[:, :-1]], dim=1), targets)
        bits = total_loss.detach() / math.log(2.0)
        return Loss(
            terms={"loss": (total_loss, 1.0)}, metrics={"bits_per_code": (bits, (targets != IGNORE_INDEX).sum())}
        )

    def build_first_tokens(self, batch: Batch, *, drop: Tensor) -> Tensor:
        """Return the first token of each row, int64 (b,); the token for no condition where `drop` is true."""
        condition, num_codes = self.shape.condition, self.backbone.num_codes
        no_condition = torch.full(drop.shape, num_codes + condition.size, device=drop.device)
        return (
            torch.where(drop, no_condition, batch["label"].long() + num_codes)
            if condition.kind == "class"
            else no_condition
        )

    def draw(self, models: Models, batch: Batch, rng: Noise, **options: Any) -> Tensor:
        """Return one sample for each row of conditions in `batch`; options are those of `draw_codes`."""
        codes = self.draw_codes(models["model"], batch, rng, **options)
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
        """Return sampled codes, int64 (b, n). Guidance 1 is the plain conditional model, 0 the unconditional one.

        The noise of a code is a function of the seed, its index and the number of the sample, so a sample does not depend
        on its batch.
        """
        drop_all = torch.ones(len(rng.positions), dtype=torch.bool, device=rng.positions.device)
        first_tokens = self.build_first_tokens(batch, drop=~drop_all if guidance != 0 else drop_all)
        is_guided = guidance not in (0, 1) and self.shape.condition.kind != "none"
        if is_guided:
            # Conditional and unconditional passes in one batch: they differ in the first token only.
            first_tokens = torch.cat([first_tokens, self.build_first_tokens(batch, drop=drop_all)])
        dtype, choice = choose_decoding_dtype(model, first_tokens.device), TokenChoice(temperature, top_k, top_p)
        length, num_codes = self.backbone.length, self.backbone.num_codes
        noise = GumbelNoise(rng.seed, rows=rng.positions, vocab_size=num_codes, device=first_tokens.device)
        request = CodeRequest(
            first_tokens,
            length=length,
            choice=choice,
            noise=None if choice.is_greedy else noise,
            num_codes=num_codes,
            guidance=guidance if is_guided else None,
            progress=progress,
        )
        cache = create_cache(
            model.shape,
            num_rows=len(first_tokens),
            length=length,
            device=first_tokens.device,
            dtype=dtype,
            noun="samples",
            advice="generate fewer samples at once (--count)",
        )
        if not supports_decode_step(model):
            return draw_by_steps(request, functools.partial(_compute_logits, model, cache))
        if first_tokens.is_cuda and length >= MIN_GRAPH_CODES:
            try:
                return draw_by_graphs(request, DecodeStep(model, cache, dtype=dtype, for_graph=True), cache)
            except CaptureFailed as failure:
                report_failed_capture("codes are drawn", failure.error)
                cache.reset()
        decode = DecodeStep(model, cache, dtype=dtype)
        return draw_by_steps(request, lambda tokens, position: decode(tokens, position, position + 1))


def _compute_logits(model: Transformer, cache: DecoderCache, tokens: Tensor, position: int) -> Tensor:
    """Return the float32 logits (R, V) after tokens (R), computed by the model."""
    hidden = model.hidden(tokens[:, None], cache=cache, position=position)[:, -1]
    return model.logits(hidden.to(model.head_weight.dtype)).float()
