"""A frozen causal language model of transformers: hidden states at learned tokens after a prompt, or generated answers.

B batch   T prompt tokens   L image tokens   S prefix tokens   H hidden size
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bottega.core.errors import UsageError
from bottega.models.folders.resolve import resolve_model
from bottega.models.folders.transformers_loader import load_pretrained
from bottega.models.folders.untrusted import (
    load_transformers_config,
    read_config_without_code,
    require_safetensors,
)
from bottega.models.frozen.allowed_words import AllowedWords
from bottega.models.frozen.config import FrozenPrecision
from bottega.models.frozen.precision import build_quantization_config, default_device, frozen_dtype, is_worth_compiling
from bottega.models.frozen.prefix_attention import Prefixes, model_supports_prefixes, register_prefix_attention
from bottega.models.frozen.soft_prompts import SoftPrompts

KEY = "model.language_model"


class LanguageModelMetadata(NamedTuple):
    """Dimensions and abilities of a language model, read from its configuration without loading weights."""

    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_positions: int | None
    """Maximum number of tokens; None if there is no limit."""
    model_type: str
    supports_prefixes: bool
    """Whether learned keys and values can be added before each layer's own."""

    def require_prefixes(self, count: int) -> None:
        """Raise UsageError if `count` is not 0 and the model does not support prefix tokens."""
        if count and not self.supports_prefixes:
            raise UsageError(
                f"model.num_prefix_tokens: the attention of a {self.model_type} does not support prefixes; set it to 0, or "
                f"use another {KEY}"
            )


def read_language_model_metadata(folder: Path | str) -> LanguageModelMetadata:
    """Return the metadata of the language model that `folder` (a folder, run or hub name) refers to."""
    folder = resolve_model(folder, key=KEY).path
    config = _read_config(folder)
    text_config = config.get_text_config(decoder=True)
    hidden_size, num_layers = getattr(text_config, "hidden_size", None), getattr(text_config, "num_hidden_layers", None)
    vocab_size = getattr(text_config, "vocab_size", None)
    if not isinstance(hidden_size, int) or not isinstance(num_layers, int) or not isinstance(vocab_size, int):
        raise UsageError(
            f"{KEY}: {folder} contains a {config.model_type}, which is not a language model; use a causal language model"
        )
    # A model without attention has no heads; it takes no prefixes either, so their shape is never used.
    num_heads = getattr(text_config, "num_attention_heads", None) or 1
    max_positions = getattr(text_config, "max_position_embeddings", None)
    return LanguageModelMetadata(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_kv_heads=getattr(text_config, "num_key_value_heads", None) or num_heads,
        head_size=getattr(text_config, "head_dim", None) or hidden_size // num_heads,
        vocab_size=vocab_size,
        max_positions=max_positions if isinstance(max_positions, int) else None,
        model_type=config.model_type,
        supports_prefixes=_supports_prefixes(config),
    )


def load_language_model(
    folder: Path | str,
    *,
    precision: FrozenPrecision,
    checkpointing: bool,
    device: torch.device | str | None = None,
) -> FrozenLanguageModel:
    """Return the frozen model, on the CPU or, if quantized, on the device that quantization needs.

    `device` is where it will run, which decides the precision `auto`.
    """
    folder = resolve_model(folder, key=KEY).path
    config = _read_config(folder)
    import transformers

    supports_prefixes = _supports_prefixes(config)
    options: dict[str, Any] = {"dtype": frozen_dtype(precision, default_device() if device is None else device)}
    if supports_prefixes:
        options["attn_implementation"] = register_prefix_attention()
    quantization_config = build_quantization_config(precision, device=device)
    if quantization_config is not None:
        options["quantization_config"] = quantization_config
    require_safetensors(folder, key=KEY)
    model = load_pretrained(transformers.AutoModelForCausalLM, folder, description="a language model", **options)
    embedding_size, hidden_size = (
        model.get_input_embeddings().embedding_dim,
        config.get_text_config(decoder=True).hidden_size,
    )
    if embedding_size != hidden_size:
        raise UsageError(
            f"{KEY}: {folder} has embeddings of width {embedding_size} and hidden states of width {hidden_size}, "
            "which is not supported; use another model"
        )
    return FrozenLanguageModel(model, supports_prefixes=supports_prefixes, checkpointing=checkpointing)


@final
class FrozenLanguageModel(nn.Module):
    """A causal language model of transformers that stays in eval mode and has no trainable parameter."""

    def __init__(self, model: Any, *, supports_prefixes: bool, checkpointing: bool) -> None:
        super().__init__()
        import transformers

        self.model = model.eval().requires_grad_(False)
        self.supports_prefixes = supports_prefixes
        self.end_tokens = _read_end_tokens(model)
        """Token ids that end an answer."""
        # The folder's sampling settings (temperature, penalties) are dropped: answers must be deterministic.
        model.generation_config = transformers.GenerationConfig(eos_token_id=list(self.end_tokens), pad_token_id=0)
        self._is_recomputing = self._is_compiled = self._has_checked_prefixes = False
        self._checkpointing = checkpointing
        self._forwards: dict[int, Callable[..., Any]] = {}
        """The original forward of each layer, by the layer's id."""
        if checkpointing:
            self._wrap_layers()

    def train(self, mode: bool = True) -> FrozenLanguageModel:
        """Stay in eval mode, whatever `mode` is."""
        return super().train(False)

    @property
    def token_scale(self) -> float:
        """Standard deviation of its embeddings, rounded to two digits, for the initial values of image tokens."""
        return float(f"{self.model.get_input_embeddings().weight.float().std().item():.2g}")

    def encode_image_tokens(self, ids: Tensor, mask: Tensor, soft: SoftPrompts) -> Tensor:
        """Return the last hidden states (B, L, H) at the image tokens that follow each prompt `ids` (B, T).

        Prompts may be padded on either side; each row is computed as it would be alone. Gradients reach `soft`.
        """
        mask = mask.bool()
        lengths = mask.sum(1)
        max_length = int(lengths.max())  # batches are padded to the longest prompt of the data
        prefixes = soft.prefixes()
        assert not prefixes or self.supports_prefixes, "`require_prefixes` checks this before the model is loaded"
        if prefixes or not self.supports_prefixes:
            ids = ids.gather(1, mask.long().argsort(dim=1, descending=True, stable=True))[:, :max_length]
            hidden = self._encode_at_once(ids, lengths, soft.image_tokens, prefixes)
        else:
            order = mask.long().argsort(dim=1, stable=True)[:, -max_length:]
            hidden = self._encode_after_prompt(ids.gather(1, order), mask.gather(1, order), soft.image_tokens)
        return hidden.to(soft.image_tokens.dtype)

    def _encode_at_once(
        self, ids: Tensor, lengths: Tensor, tokens: Tensor, prefixes: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Encode prompts and image tokens in one forward, with padding last, which a causal model does not attend to.

        Layers with a sliding window always attend to the prefixes as well.
        """
        num_prefix = len(prefixes[0][0]) if prefixes else 0
        embeddings = self.model.get_input_embeddings()(ids)
        batch, _, size = embeddings.shape
        indices = (lengths[:, None] + torch.arange(len(tokens), device=ids.device))[..., None].expand(-1, -1, size)
        placeholders = embeddings.new_zeros(batch, len(tokens), size)
        rows = torch.cat([embeddings, placeholders], 1).scatter(
            1, indices, tokens.to(embeddings.dtype).expand(batch, -1, -1)
        )
        # Prefixes take the first positions, as in a cache of transformers, though learned keys are not rotated.
        positions = num_prefix + torch.arange(rows.shape[1], device=ids.device)[None]
        if self._is_compiled and prefixes and not self._has_checked_prefixes:
            with torch.no_grad():  # runs uncompiled: a compiled layer cannot report whether it used its prefix
                self._compute_hidden_states(rows[:1, :1].detach(), positions[:, :1], prefixes)
            self._has_checked_prefixes = True
        self._is_recomputing = torch.is_grad_enabled()
        try:
            return self._compute_hidden_states(rows, positions, prefixes).gather(1, indices)
        finally:
            self._is_recomputing = False

    def _compute_hidden_states(self, rows: Tensor, positions: Tensor, prefixes: list[tuple[Tensor, Tensor]]) -> Tensor:
        layer_prefixes = Prefixes(prefixes)
        options = {"prefixes": layer_prefixes} if prefixes else {}
        output = self.model.base_model(
            inputs_embeds=rows, use_cache=False, **self._build_position_options(positions), **options
        )
        if len(layer_prefixes.used_layers) != len(prefixes):
            raise UsageError(
                f"model.num_prefix_tokens: only {len(layer_prefixes.used_layers)} of the {len(prefixes)} layers of this "
                f"{self.model.config.model_type} use a prefix; set it to 0, or use another {KEY}"
            )
        return output.last_hidden_state

    def _encode_after_prompt(self, ids: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
        """Encode the prompts without gradients, then the image tokens with a cache.

        Only image tokens are trained, so activations are kept for them alone. Prompts are padded on the left, as transformers
        requires to continue a batch.
        """
        embed, base = self.model.get_input_embeddings(), self.model.base_model
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            prompt_output = base(
                inputs_embeds=embed(ids), attention_mask=mask.long(), position_ids=positions, use_cache=True
            )
        offsets = torch.arange(len(tokens), device=ids.device)
        rows = tokens.to(embed.weight.dtype).expand(len(ids), -1, -1)
        return base(
            inputs_embeds=rows,
            attention_mask=torch.cat([mask, mask.new_ones(len(ids), len(tokens))], 1).long(),
            position_ids=mask.sum(1, keepdim=True) + offsets,
            past_key_values=prompt_output.past_key_values,
            use_cache=True,
        ).last_hidden_state

    def _build_position_options(self, positions: Tensor) -> dict[str, Tensor]:
        """Return position ids for models with pluggable attention; others count positions, and some reject the ids."""
        return {"position_ids": positions} if self.supports_prefixes else {}

    @torch.no_grad()
    def decode(
        self,
        ids: Tensor,
        mask: Tensor,
        *,
        max_tokens: int,
        allowed: AllowedWords | None = None,
        stop_tokens: Iterable[int] = (),
    ) -> list[list[int]]:
        """Decode greedily after each prompt `ids` (B, T); return token ids without the end token.

        `stop_tokens` end an answer in addition to the end tokens of the model; they may not be the first token of an answer.
        """
        mask = mask.long()
        order = mask.argsort(dim=1, stable=True)[:, -int(mask.sum(1).max()) :]
        ids, mask = ids.gather(1, order), mask.gather(1, order)
        vocab_size = self.model.config.get_text_config(decoder=True).vocab_size
        stop_tokens = sorted({token for token in stop_tokens if token < vocab_size} - set(self.end_tokens))
        all_stop_tokens = [*self.end_tokens, *stop_tokens]
        start = ids.shape[1]
        options: dict[str, Any] = {"max_new_tokens": max_tokens, "eos_token_id": all_stop_tokens or None}
        if allowed is not None:
            assert all_stop_tokens, "constrained answers need a token that ends them"

            def next_tokens(_: int, row: Tensor) -> list[int]:
                tokens, may_end = allowed.allowed_next(row[start:].tolist())
                # A finished answer is padded until the other answers of its batch are finished.
                return [*tokens, *all_stop_tokens] if may_end or not tokens else tokens

            options["prefix_allowed_tokens_fn"] = next_tokens
        elif stop_tokens:
            options["begin_suppress_tokens"] = stop_tokens
        generated = self.model.generate(input_ids=ids, attention_mask=mask, do_sample=False, num_beams=1, **options)
        return [_cut_at_end(row, all_stop_tokens) for row in generated[:, start:].tolist()]

    def compile_parts(self, *, always: bool) -> None:
        """Compile the layers for forwards with trained prefixes; with `always` even if the model is small.

        Other calls stay uncompiled: they have many shapes, each of which would be compiled anew.
        """
        if self._is_compiled or getattr(self.model, "is_quantized", False) or not (always or is_worth_compiling(self)):
            return
        self._is_compiled = True
        self._wrap_layers()

    def uncompile_parts(self) -> None:
        """Undo `compile_parts`."""
        if self._is_compiled:
            self._is_compiled = False
            self._wrap_layers()

    def _wrap_layers(self) -> None:
        """Replace the layers' forwards by compiled forwards, by recomputing ones, or by both, as configured.

        Not with transformers' own gradient checkpointing: it needs training mode, which would enable dropout.
        """
        from transformers.modeling_layers import GradientCheckpointingLayer

        layers: list[Any] = [layer for layer in self.model.modules() if isinstance(layer, GradientCheckpointingLayer)]
        if not layers and self._checkpointing:
            raise UsageError(
                f"training.gradient_checkpointing: a {self.model.config.model_type} does not support it; set it to false"
            )
        for layer in layers:
            forward = self._forwards.setdefault(id(layer), layer.forward)
            forward = self._compile_layer(layer, forward) if self._is_compiled else forward
            layer.forward = self._recompute_layer(forward) if self._checkpointing else forward

    def _compile_layer(self, layer: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        modules = layer.modules()
        indices = {module.layer_idx for module in modules if isinstance(getattr(module, "layer_idx", None), int)}
        if len(indices) != 1:
            return forward
        # Dynamic shapes: prompts differ in length, and a batch's result must not depend on which length came first.
        (index,), compiled = indices, torch.compile(forward, dynamic=True)

        @wraps(forward)
        def compiled_forward(*inputs: Any, prefixes: Prefixes | None = None, **options: Any) -> Any:
            if prefixes is None:
                return forward(*inputs, **options)
            if not torch.is_grad_enabled():
                return forward(*inputs, prefixes=prefixes, **options)
            prefixes.used_layers.add(index)
            return compiled(*inputs, prefix=prefixes.by_layer[index], **options)

        return compiled_forward

    def _recompute_layer(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward that keeps only the layer's input and recomputes the layer in the backward pass."""

        @wraps(forward)
        def checkpointed_forward(*inputs: Any, **options: Any) -> Any:
            if not self._is_recomputing:  # with a cache, which recomputation would fill twice
                return forward(*inputs, **options)
            # A frozen layer draws no random numbers, so there is no generator state to restore.
            return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **options)

        return checkpointed_forward


def _cut_at_end(row: list[int], stop_tokens: list[int]) -> list[int]:
    return row[: next((index for index, token in enumerate(row) if token in stop_tokens), len(row))]


def _read_end_tokens(model: Any) -> tuple[int, ...]:
    """Return the end tokens of the model's generation config, or else of its configuration."""
    text_config = model.config.get_text_config(decoder=True)
    eos = getattr(model.generation_config, "eos_token_id", None)
    eos = getattr(text_config, "eos_token_id", None) if eos is None else eos
    tokens = eos if isinstance(eos, list | tuple) else [eos]
    return tuple(token for token in tokens if token is not None and token < text_config.vocab_size)


def _read_config(folder: Path) -> Any:
    path = folder / "config.json"
    if not path.is_file():
        raise UsageError(f"{KEY}: {folder} has no config.json; use the folder of a saved language model")
    for file in (path, folder / "tokenizer_config.json"):
        if file.is_file():
            read_config_without_code(file, key=KEY)
    config = load_transformers_config(folder, key=KEY, description="language model")
    import transformers

    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise UsageError(
            f"{KEY}: {folder} contains a {config.model_type}, which does not generate text; use a causal language model"
        )
    return config


def _supports_prefixes(config: Any) -> bool:
    import transformers

    return model_supports_prefixes(transformers.AutoModelForCausalLM._model_mapping[type(config)], config)
