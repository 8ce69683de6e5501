"""Prefix tuning: learned keys and values before each layer's own, for models of transformers with pluggable attention.

Prefix tuning usually goes through the key-value cache, which gradient checkpointing drops. Here prefixes are an argument of
the forward, so that a recomputed layer has them again.

B batch   G key-value heads   S prefix tokens   Q queries   K keys
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bottega.core.errors import UsageError

ATTENTION_NAME = "bottega_prefix"
FLASH_DTYPES, MAX_FLASH_HEAD_SIZE = (torch.bfloat16, torch.float16), 256
"""Dtypes and largest head size that flash attention supports. torch's fallback kernel cannot be compiled in training (2.11)."""
flash: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention
_has_flash = False
"""Set once at registration, because a compiled layer cannot query the device."""


@dataclass(frozen=True)
class Prefixes:
    """The prefixes of all layers, for one forward."""

    by_layer: Sequence[tuple[Tensor, Tensor]]
    """Keys and values (S, G * head size) of each layer, without rotary positions."""
    used_layers: set[int] = field(default_factory=set)
    """Indices of the layers that applied their prefix, to detect models that silently drop the argument on the way."""


def register_prefix_attention() -> str:
    """Register the attention with transformers and return its name, for `attn_implementation`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    global _has_flash
    _has_flash = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8
    AttentionInterface.register(ATTENTION_NAME, prefix_attention_forward)
    # Without a mask function under the same name transformers would make no mask, and padding would be attended to.
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    return ATTENTION_NAME


def model_supports_prefixes(model_class: Any, config: Any) -> bool:
    """Return whether this model class has pluggable attention and supports torch's scaled dot-product attention."""
    if getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None:
        return False  # torch's attention has no such cap, and some versions of transformers silently left it out
    return bool(
        getattr(model_class, "_supports_attention_backend", False) and getattr(model_class, "_supports_sdpa", False)
    )


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
    """Scaled dot-product attention with the signature of transformers, over the prefix and the layer's own keys.

    `prefix` is the prefix of this layer alone, for layers that share one compiled function and cannot look up their index.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if prefixes is not None:
        prefix = prefixes.by_layer[module.layer_idx]
        prefixes.used_layers.add(module.layer_idx)
    if prefix is not None:
        prefix_key, prefix_value = [_split_heads(tensor, key) for tensor in prefix]
        use_flash = attention_mask is None and _has_flash and _supports_flash(key)
        if not use_flash:
            attention_mask = _extend_mask(prefix_key.shape[2], query, key, attention_mask)
        key, value = torch.cat([prefix_key, key], 2), torch.cat([prefix_value, value], 2)
        if use_flash:
            return causal_flash_attention(query, key, value, scale=options.get("scaling")), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def _supports_flash(key: Tensor) -> bool:
    """Return whether flash attention supports these keys."""
    return key.is_cuda and key.dtype in FLASH_DTYPES and key.shape[-1] <= MAX_FLASH_HEAD_SIZE and key.shape[-1] % 8 == 0


def causal_flash_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
    """Flash attention with a causal mask aligned to the last key, so that every query attends to the whole prefix.

    Without an explicit mask a GPU can use its fastest kernel. Returns (B, Q, heads, head size), as transformers expects.
    """
    group_size = query.shape[1] // key.shape[1]
    if group_size > 1:
        key, value = (tensor.repeat_interleave(group_size, 1) for tensor in (key, value))
    # The operator is called directly, since its mask is aligned to the last key; torch's CausalBias cannot be compiled.
    output = flash(query, key, value, 0.0, True, scale=scale)[0]
    return output.transpose(1, 2).contiguous()


def _split_heads(prefix: Tensor, reference: Tensor) -> Tensor:
    """Reshape a prefix (S, G * head size) to (B, G, S, head size)."""
    batch, num_heads, _, head_size = reference.shape
    if prefix.shape[-1] != num_heads * head_size:
        raise UsageError(
            f"model.num_prefix_tokens: layers of this language model have keys or values of {num_heads} x {head_size}, "
            f"but prefixes are {prefix.shape[-1]} wide; set it to 0"
        )
    return prefix.to(reference.dtype).view(-1, num_heads, head_size).transpose(0, 1).expand(batch, -1, -1, -1)


def _extend_mask(num_prefix: int, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """Return the layer's mask (causal or windowed) with a prefix that every query attends to."""
    if mask is None:  # transformers leaves a plain causal mask to the kernel
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=key.device)
        mask = mask.tril(key.shape[2] - query.shape[2])[None, None]
    new_visible = mask.new_ones if mask.dtype == torch.bool else mask.new_zeros
    return torch.cat([new_visible(*mask.shape[:-1], num_prefix), mask], -1)
