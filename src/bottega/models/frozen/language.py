"""A language model that is only read: hidden states after a prompt, at learned tokens; or an answer in words.

Any causal model of transformers out of a folder, by safetensors and code of transformers alone.

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

from bottega.core.errors import CheckpointError, UsageError, first_line
from bottega.models.folders.resolve import resolve_model
from bottega.models.folders.transformers_loader import quiet_logging
from bottega.models.folders.untrusted import (
    check_loading_info,
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
    """What must be known of a language model before it is loaded."""

    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_positions: int | None
    """The most tokens it can read; None where there is no such number."""
    model_type: str
    supports_prefixes: bool
    """Whether learned keys and values can be put before each layer's own."""

    def require_prefixes(self, count: int) -> None:
        if count and not self.supports_prefixes:
            raise UsageError(
                f"model.num_prefix_tokens: a {self.model_type} has an attention of its own, where no prefix can be put; "
                f"set it to 0, or take another {KEY}"
            )


def read_language_model_metadata(folder: Path | str) -> LanguageModelMetadata:
    folder = resolve_model(folder, key=KEY).path
    config = _config(folder)
    text = config.get_text_config(decoder=True)
    hidden, layers = getattr(text, "hidden_size", None), getattr(text, "num_hidden_layers", None)
    vocab_size = getattr(text, "vocab_size", None)
    if not isinstance(hidden, int) or not isinstance(layers, int) or not isinstance(vocab_size, int):
        raise UsageError(f"{KEY}: {folder} holds a {config.model_type}, which is no language model")
    # A model without attention has no heads; it takes no prefixes either, so their shape matters to nobody.
    heads = getattr(text, "num_attention_heads", None) or 1
    positions = getattr(text, "max_position_embeddings", None)
    return LanguageModelMetadata(
        hidden_size=hidden,
        num_layers=layers,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_size=getattr(text, "head_dim", None) or hidden // heads,
        vocab_size=vocab_size,
        max_positions=positions if isinstance(positions, int) else None,
        model_type=config.model_type,
        supports_prefixes=_takes_prefixes(config),
    )


def load_language_model(
    folder: Path | str,
    *,
    precision: FrozenPrecision,
    checkpointing: bool,
    device: torch.device | str | None = None,
) -> FrozenLanguageModel:
    """On the CPU, or where quantised weights must be; frozen. `device` is where it will run, which `auto` goes by."""
    folder = resolve_model(folder, key=KEY).path
    config = _config(folder)
    import transformers

    takes_prefixes = _takes_prefixes(config)
    options: dict[str, Any] = {"dtype": frozen_dtype(precision, default_device() if device is None else device)}
    if takes_prefixes:
        options["attn_implementation"] = register_prefix_attention()
    quantised = build_quantization_config(precision, device=device)
    if quantised is not None:
        options["quantization_config"] = quantised
    model = _read(transformers, folder, options)
    width, hidden = model.get_input_embeddings().embedding_dim, config.get_text_config(decoder=True).hidden_size
    if width != hidden:
        raise UsageError(
            f"{KEY}: {folder} embeds tokens in {width} numbers and goes on in {hidden}; take another model"
        )
    return FrozenLanguageModel(model, takes_prefixes=takes_prefixes, checkpointing=checkpointing)


@final
class FrozenLanguageModel(nn.Module):
    """In eval mode, whoever asks: nothing in it learns or drops out."""

    def __init__(self, model: Any, *, takes_prefixes: bool, checkpointing: bool) -> None:
        super().__init__()
        import transformers

        self.model = model.eval().requires_grad_(False)
        self.supports_prefixes = takes_prefixes
        self.end_tokens = _ends(model)
        """Tokens that end an answer."""
        # What a folder says about sampling (temperatures, penalties) is not for answers that must come out the same.
        model.generation_config = transformers.GenerationConfig(eos_token_id=list(self.end_tokens), pad_token_id=0)
        self._computes_twice = self._is_compiled = self._is_proven = False
        self._recomputes = checkpointing
        self._forwards: dict[int, Callable[..., Any]] = {}
        """Of each layer, as it came."""
        if checkpointing:
            self._arrange()

    def train(self, mode: bool = True) -> FrozenLanguageModel:
        return super().train(False)

    @property
    def token_scale(self) -> float:
        """Deviation of its embeddings, in two digits: what image tokens should begin with."""
        return float(f"{self.model.get_input_embeddings().weight.float().std().item():.2g}")

    def states(self, ids: Tensor, mask: Tensor, soft: SoftPrompts) -> Tensor:
        """The last hidden states [B, L, H] at image tokens that follow each prompt [B, T], wherever that has its padding.

        Every prompt may be of another length, and each row is what it would be by itself. Gradients reach `soft`.
        """
        mask = mask.bool()
        lengths = mask.sum(1)
        longest = int(lengths.max())  # batches are filled up to the longest prompt of all
        prefixes = soft.prefixes()
        assert not prefixes or self.supports_prefixes, (
            "it was asked before it was loaded (LanguageFacts.require_prefixes)"
        )
        if prefixes or not self.supports_prefixes:
            ids = ids.gather(1, mask.long().argsort(dim=1, descending=True, stable=True))[:, :longest]
            hidden = self._at_once(ids, lengths, soft.image_tokens, prefixes)
        else:
            order = mask.long().argsort(dim=1, stable=True)[:, -longest:]
            hidden = self._after_prompt(ids.gather(1, order), mask.gather(1, order), soft.image_tokens)
        return hidden.to(soft.image_tokens.dtype)

    def _at_once(self, ids: Tensor, lengths: Tensor, tokens: Tensor, prefixes: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Image tokens stand right after each prompt, and padding comes last, where a causal model never looks.

        Where layers see a window only, prefixes are always in it.
        """
        num_prefix = len(prefixes[0][0]) if prefixes else 0
        words = self.model.get_input_embeddings()(ids)
        batch, _, size = words.shape
        at = (lengths[:, None] + torch.arange(len(tokens), device=ids.device))[..., None].expand(-1, -1, size)
        room = words.new_zeros(batch, len(tokens), size)
        rows = torch.cat([words, room], 1).scatter(1, at, tokens.to(words.dtype).expand(batch, -1, -1))
        # Prefixes take the first positions, as in a cache of transformers, though learned keys are not rotated.
        positions = num_prefix + torch.arange(rows.shape[1], device=ids.device)[None]
        if self._is_compiled and prefixes and not self._is_proven:
            with torch.no_grad():  # as it is: a compiled layer could not tell whether it used its prefix
                self._hidden(rows[:1, :1].detach(), positions[:, :1], prefixes)
            self._is_proven = True
        self._computes_twice = torch.is_grad_enabled()
        try:
            return self._hidden(rows, positions, prefixes).gather(1, at)
        finally:
            self._computes_twice = False

    def _hidden(self, rows: Tensor, positions: Tensor, prefixes: list[tuple[Tensor, Tensor]]) -> Tensor:
        given = Prefixes(prefixes)
        added = {"prefixes": given} if prefixes else {}
        found = self.model.base_model(inputs_embeds=rows, use_cache=False, **self._positions(positions), **added)
        if len(given.used) != len(prefixes):
            raise UsageError(
                f"model.num_prefix_tokens: {len(given.used)} of the {len(prefixes)} layers of this "
                f"{self.model.config.model_type} take a prefix; set it to 0, or take another {KEY}"
            )
        return found.last_hidden_state

    def _after_prompt(self, ids: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
        """Nothing that learns comes before the prompt's end, so only image tokens keep what a gradient needs. Prompts end
        together, padding first, which is how transformers continues a batch."""
        embed, base = self.model.get_input_embeddings(), self.model.base_model
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            past = base(inputs_embeds=embed(ids), attention_mask=mask.long(), position_ids=positions, use_cache=True)
        count = torch.arange(len(tokens), device=ids.device)
        rows = tokens.to(embed.weight.dtype).expand(len(ids), -1, -1)
        return base(
            inputs_embeds=rows,
            attention_mask=torch.cat([mask, mask.new_ones(len(ids), len(tokens))], 1).long(),
            position_ids=mask.sum(1, keepdim=True) + count,
            past_key_values=past.past_key_values,
            use_cache=True,
        ).last_hidden_state

    def _positions(self, positions: Tensor) -> dict[str, Tensor]:
        """Models without the attention interface count by themselves, and some do not take positions."""
        return {"position_ids": positions} if self.supports_prefixes else {}

    @torch.no_grad()
    def decode(
        self,
        ids: Tensor,
        mask: Tensor,
        *,
        max_tokens: int,
        allowed: AllowedWords | None = None,
        ends: Iterable[int] = (),
    ) -> list[list[int]]:
        """The likeliest next tokens after each prompt [B, T], one by one, without the one that ends the answer.

        `ends` are more tokens that end it, such as line breaks, though no answer begins with one.
        """
        mask = mask.long()
        order = mask.argsort(dim=1, stable=True)[:, -int(mask.sum(1).max()) :]
        ids, mask = ids.gather(1, order), mask.gather(1, order)
        size = self.model.config.get_text_config(decoder=True).vocab_size
        ends = sorted({token for token in ends if token < size} - set(self.end_tokens))
        stops = [*self.end_tokens, *ends]
        start = ids.shape[1]
        options: dict[str, Any] = {"max_new_tokens": max_tokens, "eos_token_id": stops or None}
        if allowed is not None:
            assert stops, "constrained answers need a token that ends them"

            def following(_: int, row: Tensor) -> list[int]:
                said, may_end = allowed.allowed_next(row[start:].tolist())
                # An answer that has ended waits for the others, and nothing follows it.
                return [*said, *stops] if may_end or not said else said

            options["prefix_allowed_tokens_fn"] = following
        elif ends:
            options["begin_suppress_tokens"] = ends
        found = self.model.generate(input_ids=ids, attention_mask=mask, do_sample=False, num_beams=1, **options)
        return [_until(row, stops) for row in found[:, start:].tolist()]

    def compile_parts(self, *, always: bool) -> None:
        """Layers as one compiled function, where prefixes learn and so gradients pass: what else is asked comes in many
        shapes, each of which would be compiled anew. `always`, or where it is large enough to be worth the wait."""
        if self._is_compiled or getattr(self.model, "is_quantized", False) or not (always or is_worth_compiling(self)):
            return
        self._is_compiled = True
        self._arrange()

    def _arrange(self) -> None:
        """How layers are called: compiled or as they are, and twice where activations are not kept.

        Not by transformers' own switch: that works in training mode only, which would let frozen models drop out.
        """
        from transformers.modeling_layers import GradientCheckpointingLayer

        layers: list[Any] = [one for one in self.model.modules() if isinstance(one, GradientCheckpointingLayer)]
        if not layers and self._recomputes:
            raise UsageError(
                f"training.gradient_checkpointing: a {self.model.config.model_type} does not offer it; switch it off"
            )
        for layer in layers:
            forward = self._forwards.setdefault(id(layer), layer.forward)
            forward = self._compiled(layer, forward) if self._is_compiled else forward
            layer.forward = self._recomputed(forward) if self._recomputes else forward

    def _compiled(self, layer: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        numbers = {one.layer_idx for one in layer.modules() if isinstance(getattr(one, "layer_idx", None), int)}
        if len(numbers) != 1:
            return forward
        # For any length at once: prompts differ, and what a batch gives must not depend on which came first.
        (number,), fused = numbers, torch.compile(forward, dynamic=True)

        @wraps(forward)
        def faster(*inputs: Any, prefixes: Prefixes | None = None, **options: Any) -> Any:
            if prefixes is None:
                return forward(*inputs, **options)
            if not torch.is_grad_enabled():
                return forward(*inputs, prefixes=prefixes, **options)
            prefixes.used.add(number)
            return fused(*inputs, prefix=prefixes.by_layer[number], **options)

        return faster

    def _recomputed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Keep only what enters the layer, and compute it again when its gradient is asked for."""

        @wraps(forward)
        def twice(*inputs: Any, **options: Any) -> Any:
            if not self._computes_twice:  # with a cache, which a second time would fill twice
                return forward(*inputs, **options)
            # Nothing is drawn in a frozen layer, so there is no state of a generator to bring back.
            return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **options)

        return twice


def _until(row: list[int], ends: list[int]) -> list[int]:
    return row[: next((at for at, token in enumerate(row) if token in ends), len(row))]


def _ends(model: Any) -> tuple[int, ...]:
    """What its folder says of generation, or else its configuration: one token or several."""
    text = model.config.get_text_config(decoder=True)
    said = getattr(model.generation_config, "eos_token_id", None)
    said = getattr(text, "eos_token_id", None) if said is None else said
    named = said if isinstance(said, list | tuple) else [said]
    return tuple(token for token in named if token is not None and token < text.vocab_size)


def _config(folder: Path) -> Any:
    path = folder / "config.json"
    if not path.is_file():
        raise UsageError(f"{KEY}: {folder} has no config.json; give the folder of a saved language model")
    for file in (path, folder / "tokenizer_config.json"):
        if file.is_file():
            read_config_without_code(file, key=KEY)
    config = load_transformers_config(folder, key=KEY, what="language model")
    import transformers

    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise UsageError(
            f"{KEY}: {folder} holds a {config.model_type}, which says nothing; give a causal language model"
        )
    return config


def _takes_prefixes(config: Any) -> bool:
    import transformers

    return model_supports_prefixes(transformers.AutoModelForCausalLM._model_mapping[type(config)], config)


def _read(transformers: Any, folder: Path, options: dict[str, Any]) -> Any:
    """A weight that is not there is an error, because transformers would draw it at random."""
    require_safetensors(folder, key=KEY)
    try:
        with quiet_logging(transformers):
            model, seen = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **options,
            )
    except Exception as error:  # OSError, ValueError, RuntimeError, and SafetensorError of the library that reads
        raise CheckpointError(f"{folder}: cannot be loaded as a language model: {first_line(error)}") from error
    check_loading_info(folder, seen)
    return model
