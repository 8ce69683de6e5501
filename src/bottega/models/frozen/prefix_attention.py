"""Learned keys and values before each layer's own, inside any model of transformers that looks its attention up by name.

Not through a cache of past keys, as prefix tuning is usually done: gradient checkpointing drops the cache, and the prefix
with it. Here they travel as an argument of the forward, so that a layer that is computed again finds them again.

B batch   G heads of keys   S prefix tokens   Q queries   K keys
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bottega.core.errors import UsageError

NAME = "bottega_prefix"
HALF, WIDEST = (torch.bfloat16, torch.float16), 256
"""What flash attention takes. The kernel that torch falls back to cannot be compiled in training (torch 2.11)."""
flash: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention
_has_flash = False
"""Found out once, because a compiled layer cannot ask."""


@dataclass(frozen=True)
class Prefixes:
    """Of all layers, for one forward."""

    by_layer: Sequence[tuple[Tensor, Tensor]]
    """Keys and values [S, G * head size]. Learned ones carry no position of their own."""
    used: set[int] = field(default_factory=set)
    """The layers that put theirs in. A model that loses the argument on its way would answer without a word."""


def register_prefix_attention() -> str:
    """Make the attention known to transformers; its name is what a model is loaded with."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    global _has_flash
    _has_flash = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8
    AttentionInterface.register(NAME, prefix_attention_forward)
    # Without a maker of masks under the same name transformers would make none, and padding would be read.
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def model_supports_prefixes(kind: Any, config: Any) -> bool:
    """Whether this class of model looks its attention up by name, and could use torch's own."""
    if getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None:
        return False  # torch's has no such cap, and versions of transformers left it out without a word
    return bool(getattr(kind, "_supports_attention_backend", False) and getattr(kind, "_supports_sdpa", False))


def prefix_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    prefixes: Prefixes | None = None,
    prefix: tuple[Tensor, Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """torch's scaled dot-product attention as transformers calls it, over the prefix and the layer's own keys. `prefix` is
    this layer's alone: layers that share one compiled function may not ask for their number."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if prefixes is not None:
        prefix = prefixes.by_layer[module.layer_idx]
        prefixes.used.add(module.layer_idx)
    if prefix is not None:
        added = [_as_heads(one, key) for one in prefix]
        is_fast = attention_mask is None and _has_flash and _fits(key)
        if not is_fast:
            attention_mask = _seeing_all(added[0].shape[2], query, key, attention_mask)
        key, value = torch.cat([added[0], key], 2), torch.cat([added[1], value], 2)
        if is_fast:
            return causal_flash_attention(query, key, value, scale=options.get("scaling")), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def _fits(key: Tensor) -> bool:
    return key.is_cuda and key.dtype in HALF and key.shape[-1] <= WIDEST and key.shape[-1] % 8 == 0


def causal_flash_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
    """The last query sees all keys, the one before it all but one: a prefix is seen by everybody. Said so, and not as a mask,
    a GPU takes its fastest kernel. Gives [B, Q, heads, head size], as transformers wants it."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
    # The operation itself, which counts from the last key: torch's name for that mask (CausalBias) cannot be compiled.
    found = flash(query, key, value, 0.0, True, scale=scale)[0]
    return found.transpose(1, 2).contiguous()


def _as_heads(one: Tensor, like: Tensor) -> Tensor:
    """[S, G * head size] as keys or values [B, G, S, head size]."""
    batch, heads, _, size = like.shape
    if one.shape[-1] != heads * size:
        raise UsageError(
            f"model.num_prefix_tokens: layers of this language model have keys or values of {heads} x {size}, and prefixes "
            f"are {one.shape[-1]} wide; set it to 0"
        )
    return one.to(like.dtype).view(-1, heads, size).transpose(0, 1).expand(batch, -1, -1, -1)


def _seeing_all(num_prefix: int, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """The layer's own mask, whatever it is (causal, or a window of it), with a prefix that every query sees."""
    if mask is None:  # transformers leaves a plain causal mask to the kernel
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=key.device)
        mask = mask.tril(key.shape[2] - query.shape[2])[None, None]
    seen = mask.new_ones if mask.dtype == torch.bool else mask.new_zeros
    return torch.cat([seen(*mask.shape[:-1], num_prefix), mask], -1)
